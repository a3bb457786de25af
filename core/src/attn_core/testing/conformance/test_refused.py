"""What is not declared must be refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attn_core.testing.cells import REFUSED, Cell, CellResult, describe
from attn_core.testing.harness import BackendUnderTest


def test_refused(undeclared_cell: Cell, run: Callable[[Cell], CellResult], backend: BackendUnderTest) -> None:
    """One request that differs from a declared one in what the manifest does not declare."""
    result = run(undeclared_cell)
    if result.outcome != REFUSED:
        pytest.fail(describe(backend, result), pytrace=False)
