"""The interpreter must be chosen before any kernel module is imported."""

from __future__ import annotations

import importlib.util
import os

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
_HERE = "needs triton: pip install triton"


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if HAS_TRITON and not _on_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not HAS_TRITON and "needs_triton" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=_HERE))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_triton: needs triton to be installed")
