"""The conformance kit's quick subset through the adapters, over stand-ins that check every call and compute in float64."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
from flashfakes import fa3_library, fa4_library
from flashmanifests import on_cpu

import attn_flash
from attn_core.testing.cells import FAILED, PASSED, describe, list_cells, run_cell
from attn_core.testing.harness import BackendUnderTest

CASES = [
    ("mha", "fa3", "tokenspeed", lambda: fa3_library("tokenspeed")),
    ("mha", "fa3", "sgl-kernel", lambda: fa3_library("sgl-kernel")),
    ("mha", "fa4", "hopper", fa4_library),
    ("mha", "fa4", "hopper", lambda: fa4_library(inner=False)),
    ("mha", "fa4", "fp4", fa4_library),
    ("mm", "fa3", "default", lambda: fa3_library("tokenspeed")),
    ("mm", "fa4", "default", fa4_library),
]


@pytest.mark.parametrize(("kind", "name", "variant", "library"), CASES)
def test_quick_subset(kind: str, name: str, variant: str, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_flash import builds

    monkeypatch.setattr(builds, "any_build", lambda: builds.TOKENSPEED)
    backend = BackendUnderTest.of_module(attn_flash, on_cpu(kind, name, variant))
    backend.probe = None
    used: AbstractContextManager[Any] = library()
    with used:
        cells = list_cells(backend, "cpu", quick=True)
        results = [run_cell(backend, cell, "cpu", minimise=False) for cell in cells]
    failures = [describe(backend, result) for result in results if result.outcome == FAILED]
    assert not failures, "\n".join(failures)
    assert sum(result.outcome == PASSED for result in results) >= (4 if kind == "mm" or variant == "fp4" else 50)
