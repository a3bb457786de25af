"""What is declared must be right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attn_core.testing.cells import FAILED, SKIPPED, Cell, CellResult, describe
from attn_core.testing.harness import BackendUnderTest


def test_declared(declared_cell: Cell, run: Callable[[Cell], CellResult], backend: BackendUnderTest) -> None:
    """One check on one declared combination."""
    result = run(declared_cell)
    if result.outcome == SKIPPED:
        pytest.skip(result.reason)
    if result.outcome == FAILED:
        pytest.fail(describe(backend, result), pytrace=False)
