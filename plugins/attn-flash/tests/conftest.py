"""Fixtures; the modules beside this file are found by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attn_core.manifest import Manifest, parse_manifests

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def manifests() -> dict[str, Manifest]:
    from flashmanifests import document

    return {manifest.id: manifest for manifest in parse_manifests(document())}
