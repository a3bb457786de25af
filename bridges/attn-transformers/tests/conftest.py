"""Offline, one thread, and the helpers beside this file on the path (tests are imported by file, not by name)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_grad():
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def llama():
    from tiny_models import make

    return make("llama")
