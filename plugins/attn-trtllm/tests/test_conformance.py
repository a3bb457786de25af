"""The conformance kit over recording fakes: metadata, addresses, scales and conversions, judged on a CPU."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from trtllm_fake import CAPABILITIES, install, on_cpu

from attn_core.testing.cells import FAILED, PASSED, Cell, describe, list_cells, run_cell
from attn_trtllm.fmha_v2 import FmhaV2
from attn_trtllm.trtllm_gen import TrtllmGen
from attn_trtllm.xqa import Xqa

#: Checks that cannot pass without a call, whatever the types and layout.
ALWAYS_CALL = ("attend_numbers", "sinks", "window", "padding", "address_forms", "lanes", "graph_replay", "verify_chain")


def chosen() -> list[Cell]:
    """Cells of a quick run: at most two of each check and phase (with ``ATTN_SLOW=1`` all)."""
    cells = [cell for cell in list_cells(on_cpu(), quick=True) if cell.variant in CAPABILITIES]
    if os.environ.get("ATTN_SLOW"):
        return cells
    seen: Counter[tuple[str, ...]] = Counter()
    found = []
    for cell in cells:
        key = cell.variant, cell.check, cell.undeclared or (cell.ask.phase if cell.ask else "")
        seen[key] += 1
        if seen[key] <= 2:
            found.append(cell)
    return found


CELLS = chosen()


def test_every_variant_has_cells():
    assert {cell.variant for cell in CELLS if not cell.skip and not cell.undeclared} == set(CAPABILITIES)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_cell(cell, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    recorder = install(monkeypatch, capability=CAPABILITIES[cell.variant])
    for variant in (Xqa, FmhaV2, TrtllmGen):
        monkeypatch.setattr(variant, "workspace_bytes", 9 << 20)  # zeroing hundreds of megabytes a cell takes a minute
    backend = on_cpu()
    result = run_cell(backend, cell, minimise=False)
    assert result.outcome != FAILED, describe(backend, result)
    if result.outcome == PASSED and cell.check in ALWAYS_CALL:
        assert recorder.calls, "the check passed without a library call"
