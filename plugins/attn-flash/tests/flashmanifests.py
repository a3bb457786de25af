"""The package's manifests as they are, and as a machine without a GPU would have to declare them to run the kit on fakes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from attn_core.manifest import Manifest, load_toml, parse_manifests

MANIFEST = Path(__file__).parents[1] / "src" / "attn_flash" / "attn_manifest.toml"


def document() -> dict[str, Any]:
    return load_toml(MANIFEST.read_text(encoding="utf-8"))


def on_cpu(kind: str, name: str, variant: str) -> Manifest:
    """The manifest of one variant with its hardware conditions replaced: what is declared is otherwise the same."""
    table = copy.deepcopy(document())
    backend = next(b for b in table["backend"] if (b["kind"], b["name"]) == (kind, name))
    chosen = next(v for v in backend["variant"] if v["name"] == variant)
    chosen["jit"] = False
    for row in chosen["allow"]:
        when = row["when"]
        for axis in ("arch", "cuda"):
            when.pop(axis, None)
        when["vendor"] = "cpu"
        if "head_dims" in when and isinstance(when["head_dims"], dict):
            when["head_dims"]["max"] = 64  # float64 on two cores
    backend["variant"] = [chosen]
    return parse_manifests({"api": table["api"], "backend": [backend]}, package="attn-flash", version="0")[0]
