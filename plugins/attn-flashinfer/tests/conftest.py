"""The adapter on a CPU: flashinfer's stand-in, and the shipped manifest with its hardware replaced by the CPU."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest

import attn_flashinfer
from attn_core.manifest import load_toml, parse_manifests
from attn_core.testing.harness import BackendUnderTest

SOURCE = Path(attn_flashinfer.__file__).parent
HERE = Path(__file__).parent


def _load(name):
    spec = importlib.util.spec_from_file_location(f"attn_flashinfer_tests_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def signatures():
    """The module that reads signatures."""
    return _load("signatures")


@pytest.fixture
def fake(monkeypatch):
    """flashinfer's stand-in, in place of the library."""
    module = _load("fake_flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


@pytest.fixture(scope="session")
def shipped() -> dict:
    """The manifest file as data."""
    return load_toml((SOURCE / "attn_manifest.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def on_cpu(shipped):
    """The shipped manifest, declared for CPUs instead of GPUs: nothing else changes."""
    table = copy.deepcopy(shipped)
    for variant in table["backend"][0]["variant"]:
        for row in variant["allow"]:
            row["when"].pop("arch")
            row["when"].pop("cuda", None)
            row["when"]["vendor"] = "cpu"
    return parse_manifests(table)[0]


@pytest.fixture
def backend(fake, on_cpu):
    """The backend as the kit wants it."""
    return BackendUnderTest(on_cpu, attn_flashinfer.attn_create)
