"""The package declares its backends, and says honestly that they cannot run yet."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from attn_core.manifest import load_toml, parse_manifests

SOURCE = Path(__file__).parents[1] / "src" / "attn_flash"


def test_planned_backends_are_declared_and_probe_says_not_available():
    manifests = parse_manifests(load_toml((SOURCE / "attn_manifest.toml").read_text(encoding="utf-8")))
    spec = importlib.util.spec_from_file_location("attn_flash", SOURCE / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [manifest.id for manifest in manifests] == [
        "mha/fa3",
        "mha/fa4",
        "mha/dual_chunk_flash_attn",
        "mm/fa3",
        "mm/fa4",
    ]
    for manifest in manifests:
        answer = module.attn_probe(manifest)
        assert not answer.ok
        assert [reason.code for reason in answer.reasons] == ["planned"]
