"""The conformance kit through the stand-in: layouts, offsets, masks, windows, scales and the base of the LSE are right."""

from __future__ import annotations

import pytest

from attn_core.testing.cells import list_cells, run_cell

#: Left to GPUs: these cells take long here and show nothing that others do not.
SLOW = ("512x512", "p256")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["decode", "fa3", "fa2", "sink"])
def test_quick_cells_of_the_kit(backend, fake, variant):
    failed, passed = [], 0
    for cell in list_cells(backend, "cpu", quick=True):
        if cell.variant != variant or any(word in cell.id for word in SLOW):
            continue
        result = run_cell(backend, cell, "cpu", minimise=False)
        fake.CALLS.clear()
        passed += result.outcome == "passed"
        if result.outcome == "failed":
            failed.append(f"{cell.id}: {'; '.join(result.problems)}  {result.smallest}")
    assert not failed, "\n".join(failed)
    assert passed > 20
