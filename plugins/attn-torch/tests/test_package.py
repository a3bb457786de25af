"""The package: what importing it costs, what it declares, what its probe says, and a quick run of the conformance kit."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_torch
from attn_core.capabilities import PHASES
from attn_core.context import Context
from attn_core.errors import ManifestError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.manifest import Manifest, load_toml, parse_manifests
from attn_core.platform import parse_platform
from attn_core.testing.cells import list_cells, run_cell
from attn_core.testing.harness import BackendUnderTest

MANIFEST = Path(attn_torch.__file__).with_name("attn_manifest.toml")


def manifests() -> dict[str, Manifest]:
    found = parse_manifests(load_toml(MANIFEST.read_text(encoding="utf-8")), package="attn-torch", version="0.1.0")
    return {manifest.id: manifest for manifest in found}


def test_what_is_declared() -> None:
    found = manifests()
    assert set(found) == {"mha/torch_native", "mha/flex_attention", "mm/torch_native"}
    assert {manifest.status for manifest in found.values()} == {"implemented"}
    (sdpa,) = found["mha/torch_native"].variants
    for vendor in ("cpu", "nvidia", "amd", "intel", "ascend"):
        rows = [row for row in sdpa.allow if vendor in row.when["vendor"]]
        assert {phase for row in rows for phase in row.when["phase"]} == set(PHASES)
        assert {"fp8_e4m3", "fp8_e5m2", "fp4"} <= {pair["kv"] for row in rows for pair in row.when["dtypes"]}
    assert {row.graph for row in sdpa.allow} == {"none"}
    lse = {v.name: "lse" in v.allow[0].features for v in found["mha/flex_attention"].variants}
    assert lse == {"compiled": False, "eager": True}


def test_the_matrix_never_falls_short() -> None:
    """Cells of the published support table that these two backends must fill."""
    found = manifests()
    (native,) = found["mha/torch_native"].variants
    kv = {pair["kv"] for row in native.allow for pair in row.when["dtypes"]}
    assert {"fp8_e4m3", "fp8_e5m2", "fp4"} <= kv
    assert "mm_spans" in native.allow[0].features
    assert any(pair["kv"] == "fp4" for v in found["mha/flex_attention"].variants for pair in v.allow[0].when["dtypes"])


@pytest.mark.parametrize("module", ["attn_torch", "attn_core"])
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, json, {module}; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False


def test_the_probe_loads_no_torch_either() -> None:
    code = (
        "import sys, attn_torch\n"
        "from attn_core.manifest import load_toml, parse_manifests\n"
        "from attn_core.platform import parse_platform\n"
        f"found = parse_manifests(load_toml(open({str(MANIFEST)!r}).read()))\n"
        "print([a.ok for m in found for a in attn_torch.attn_probe(m, parse_platform('cpu')).values()])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "True" in done.stdout


@pytest.mark.parametrize(("found", "ok"), [(None, False), ("2.5.1+cpu", False), ("2.6.0", True), ("3.0.0a0", True)])
def test_the_probe_reads_the_version(monkeypatch: pytest.MonkeyPatch, found: str | None, ok: bool) -> None:
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(attn_torch.metadata, "version", version)
    answer = attn_torch.attn_probe(manifests()["mha/torch_native"], parse_platform("cpu"))
    assert answer["sdpa"].ok is ok
    assert ok or "torch>=2.6" in answer["sdpa"].needs


def test_without_a_compiler_flex_attention_is_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_torch.shutil, "which", lambda name: None)
    answer = attn_torch.attn_probe(manifests()["mha/flex_attention"], parse_platform("cpu"))
    assert answer["eager"].ok
    assert not answer["compiled"].ok
    assert "C++ compiler" in str(answer["compiled"].reasons[0])


def test_create_makes_what_was_asked_for() -> None:
    group = LayerGroup("target", "full", "full", (0,), MhaGeometry(2, 1, 16, 16, 0.25))
    context = Context(torch.device("cpu"), torch.float32, group)
    names = {
        name: type(attn_torch.attn_create(m, m.variants[0].name, context)).__name__ for name, m in manifests().items()
    }
    assert names == {
        "mha/torch_native": "TorchNative", "mha/flex_attention": "FlexAttention", "mm/torch_native": "TorchVision",
    }  # fmt: skip
    with pytest.raises(ManifestError):
        attn_torch.attn_create(manifests()["mha/torch_native"], "nonsense", context)


# --- the kit -----------------------------------------------------------------------------------------------------------------


def _cells(kind: str, name: str, variant: str, every: int = 1) -> list[Any]:
    backend = BackendUnderTest.installed(kind, name)
    cells = [
        cell for cell in list_cells(backend, "cpu", quick=True) if cell.variant == variant and "-p256-" not in cell.id
    ]
    return [pytest.param(backend, cell, id=cell.id) for cell in cells[::every]]


@pytest.mark.parametrize(
    ("backend", "cell"),
    [
        *_cells("mha", "torch_native", "sdpa", every=5),
        *_cells("mha", "flex_attention", "eager", every=8),
        *_cells("mm", "torch_native", "sdpa"),
    ],
)
def test_conformance(backend: BackendUnderTest, cell: Any) -> None:
    """A part of the quick run; all of it is ``attn verify mha/torch_native``."""
    result = run_cell(backend, cell, minimise=False)
    assert result.outcome in ("passed", "refused", "skipped"), "\n".join(result.problems)
