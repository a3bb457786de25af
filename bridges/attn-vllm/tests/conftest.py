"""Offline, one thread, and the fakes beside this file on the path. vLLM is not installed here: nothing imports it."""

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
