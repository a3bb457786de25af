"""What ``benchmarks/adapter_overhead.py`` makes of its figures; the figures themselves need a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def overhead() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("adapter_overhead", FOLDER / "adapter_overhead.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def test_what_is_judged_is_the_difference_within_a_round(overhead: ModuleType) -> None:
    """A host that slows down half-way moves both medians, each by chance; the difference of neighbours stays."""
    times = {"direct": [10.0, 20.0, 30.0, 40.0, 50.0], "routed": [12.0, 22.0, 32.0, 42.0, 90.0]}
    found = overhead.medians(times)
    assert found == {"direct": 30.0, "routed": 32.0, "extra": 2.0}
    row = overhead.judged({"mode": "eager"}, {"direct": 30.0, "routed": 60.0, "extra": 2.0})
    assert row["passed"]
    assert row["allowed_us"] == overhead.EAGER_MICROS
    assert not overhead.judged({"mode": "graph"}, {"direct": 30.0, "routed": 60.0, "extra": 2.0})["passed"]


def test_the_sides_change_places_and_few_rows_get_enough_calls(overhead: ModuleType) -> None:
    sides = {"direct": 1, "routed": 2}
    orders = [[side for side, _ in overhead.in_turn(sides, number)] for number in range(4)]
    assert orders == [["routed", "direct"], ["direct", "routed"]] * 2
    assert overhead.DECODE_ROUNDS * overhead.DECODE_CALLS >= 400


def test_a_run_that_is_cut_short_leaves_what_it_finished(overhead: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "made" / "found.json"
    overhead.save([{"backend": "mha/a", "passed": True}, {"backend": "mha/a", "failed": "why"}], out)
    content = json.loads(out.read_text(encoding="utf-8"))
    assert (content["failed"], len(content["rows"])) == (1, 2)
