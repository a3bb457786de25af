"""Offline, and the modules beside this file on the path (tests are imported by file, not by name)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    import torch

    for name in ("ATTN_SGLANG_OPTIONS", "ATTN_SGLANG_PREFIX", "ATTN_SGLANG_OVERRIDE", "ATTN_SGLANG_STATS"):
        monkeypatch.delenv(name, raising=False)
    with torch.no_grad():
        yield
