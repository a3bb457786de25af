"""What the package declares, and what its probe answers."""

from __future__ import annotations

from pathlib import Path

import pytest

import attn_triton
from attn_core.manifest import load_toml, parse_manifests
from attn_core.platform import parse_platform

SOURCE = Path(attn_triton.__file__).parent


def manifests():
    return parse_manifests(load_toml((SOURCE / "attn_manifest.toml").read_text(encoding="utf-8")))


def test_both_backends_are_implemented():
    assert [(m.id, m.status) for m in manifests()] == [("mha/triton", "implemented"), ("mm/triton", "implemented")]


@pytest.mark.needs_triton
@pytest.mark.parametrize(
    ("platform", "interpret", "ok"), [("cuda:sm90", "0", True), ("cpu", "0", False), ("cpu", "1", True)]
)
def test_the_probe_wants_a_gpu_or_the_interpreter(monkeypatch, platform, interpret, ok):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    for manifest in manifests():
        answer = attn_triton.attn_probe(manifest, parse_platform(platform))
        assert {name: a.ok for name, a in answer.items()} == {"default": ok}
        assert ok or answer["default"].reasons[0].fix


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = attn_triton.attn_probe(manifests()[0], parse_platform("cuda:sm90"))
    assert "pip install triton" in answer["default"].needs


def test_launch_data_covers_every_declared_architecture_and_head_dim():
    from attn_triton.launch import find_launch

    for manifest in manifests():
        for row in manifest.variants[0].allow:
            dims = row.when["head_dims"]
            for arch in row.when["arch"]:
                for split in (True, False):
                    for bits in (4, 8, 16, 32):
                        for dim in (dims["min"], dims["max"]):
                            assert find_launch(arch, split, bits, dim).warps in (2, 4, 8)


def test_decode_of_four_bits_has_launch_data_of_its_own_where_it_was_measured():
    from attn_triton.launch import find_launch

    assert find_launch("sm90", True, 4, 80).ahead
    assert find_launch("sm90", True, 4, 256).ahead
    assert find_launch("sm120", True, 4, 128) == find_launch("sm120", True, 8, 128)
    assert find_launch("sm90", False, 4, 128) == find_launch("sm90", False, 8, 128)
