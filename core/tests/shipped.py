"""What this repository ships, as tests read it: the manifests of all plugins, and the model configs under ``data/models``."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

from attn_core.geometry import Model
from attn_core.manifest import Manifest, load_toml, parse_manifests
from attn_core.model import parse_model

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parent / "data" / "models"


@lru_cache(maxsize=1)
def shipped() -> tuple[Manifest, ...]:
    """The manifests of every plugin, read from their files: nothing needs to be installed."""
    found: list[Manifest] = []
    for path in sorted(ROOT.glob("plugins/*/src/*/attn_manifest.toml")):
        document = load_toml(path.read_text(encoding="utf-8"), str(path))
        found += parse_manifests(document, package=path.relative_to(ROOT).parts[1], version="0.1.0", where=str(path))
    return tuple(found)


@cache
def model_of(name: str) -> Model:
    """The model of ``data/models/NAME.json``."""
    return parse_model(MODELS / f"{name}.json")
