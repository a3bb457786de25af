"""Fake distributions are found like real ones; the recording backend answers every hook."""

from __future__ import annotations

import csv
import hashlib
import subprocess
import sys
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from attn_core.binding import bind_backend
from attn_core.errors import ManifestError
from attn_core.geometry import MhaGeometry
from attn_core.hookspecs import BACKEND_HOOKS
from attn_core.manifest import load_toml, parse_manifests
from attn_core.testing.batches import make_case
from attn_core.testing.fake import RecordingBackend, make_distribution, make_manifest, manifest_text
from attn_core.testing.harness import BackendUnderTest

LIST = """
from attn_core.discovery import discover
registry = discover()
for manifest in registry.manifests:
    print(manifest.id, manifest.package, manifest.version)
print("problems", len([p for p in registry.problems if p.distribution.startswith("attn-vendor")]))
"""


def run(site: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(site), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_fake_distribution_is_discovered(tmp_path: Path) -> None:
    make_distribution(tmp_path, "attn-vendor", "1.2.3", manifest_toml=manifest_text("vendor"))
    out = run(tmp_path, LIST)
    assert "mha/vendor attn-vendor 1.2.3" in out
    assert "problems 0" in out


def test_its_backend_is_created_and_records(tmp_path: Path) -> None:
    make_distribution(tmp_path, "attn-vendor", manifest_toml=manifest_text("vendor"))
    code = """
from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import make_case
from attn_core.testing.harness import BackendUnderTest
case = make_case(MhaGeometry(4, 2, 64, 64, 0.1), "decode", kv_lens=(3,), page_size=16)
session = BackendUnderTest.installed("mha", "vendor").open(case)
session.run(case)
print(session.bound.backend.hooks())
"""
    assert run(tmp_path, code).strip() == str(["attn_metadata", "attn_metadata_in_graph", "attn_store", "attn_decode"])


def test_record_holds_the_hash_of_every_file(tmp_path: Path) -> None:
    make_distribution(tmp_path, "attn-vendor", manifest_toml=manifest_text("vendor"), files={"more.py": "x = 1\n"})
    rows = list(csv.reader((tmp_path / "attn_vendor-1.0.0.dist-info" / "RECORD").read_text().splitlines()))
    assert {"attn_vendor/__init__.py", "attn_vendor/more.py"} <= {row[0] for row in rows}
    for path, stated, size in rows[:-1]:
        data = (tmp_path / path).read_bytes()
        assert len(data) == int(size)
        assert stated == "sha256=" + urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.mark.parametrize("kind", ["mha"])
def test_manifest_text_is_valid_for_its_choices(kind: str) -> None:
    text = manifest_text("one", kind, features=("lse", "sinks"), rank=7, graph="uniform_decode")
    manifest = parse_manifests(load_toml(text))[0]
    assert manifest.variants[0].allow[0].features == {"lse", "sinks"}
    assert manifest.order[0].rank == 7
    with pytest.raises(ManifestError):
        make_manifest(features=("no_such_feature",))


def test_recording_backend_answers_every_hook() -> None:
    bound = bind_backend(RecordingBackend(), make_manifest(), "default", ("prefill", "decode"))
    assert bound.own == set(BACKEND_HOOKS)


def test_recording_backend_returns_zeros_of_the_right_shape() -> None:
    case = make_case(MhaGeometry(4, 2, 64, 32, 0.1), "prefill", query_lens=(3,), kv_lens=(5,), needs_lse=True)
    backend = BackendUnderTest(make_manifest(), lambda manifest, variant, context: RecordingBackend(context))
    result = backend.open(case).run(case, give_out=False)
    assert result.out.shape == (3, 4, 32)
    assert result.lse is not None
    assert result.lse.shape == (3, 4)
