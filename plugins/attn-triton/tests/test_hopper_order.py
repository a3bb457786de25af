"""In which order the programs of the Hopper prefill kernel take their works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from attn_triton.kernels import hopper_copy


def works(
    monkeypatch: pytest.MonkeyPatch, programs: int, end: int, window: int, chunk: int, rows: int = 1
) -> list[list[int]]:
    """The works of each program, in its order; programs without a work end before they ask."""
    found = []
    monkeypatch.setattr(hopper_copy, "work_of", getattr(hopper_copy.work_of, "fn", hopper_copy.work_of))
    for program in range(min(programs, end)):
        device = SimpleNamespace(
            num_programs=lambda axis: programs,
            program_id=lambda axis, program=program: program,
            where=lambda condition, yes, no: yes if condition else no,
        )
        monkeypatch.setattr(hopper_copy, "gl", device)
        turns = hopper_copy.turns_of.fn(end, rows, window, chunk)
        found.append([hopper_copy.work_of(turn, rows, window, chunk) for turn in range(turns)])
    return found


@pytest.mark.parametrize(("window", "chunk", "rows"), [(0, 0, 1), (0, 0, 3), (1024, 0, 1), (0, 256, 1)])
@pytest.mark.parametrize("programs", [1, 2, 3, 7, 132])
@pytest.mark.parametrize("end", [1, 2, 6, 7, 13, 18, 131, 132, 133, 264, 300, 1000])
def test_every_work_is_done_once(
    monkeypatch: pytest.MonkeyPatch, programs: int, end: int, window: int, chunk: int, rows: int
) -> None:
    found = works(monkeypatch, programs, end, window, chunk, rows)
    assert sorted(work for mine in found for work in mine) == list(range(end))
    assert all(mine == sorted(mine) for mine in found)


def test_rounds_alternate_where_works_differ_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert works(monkeypatch, 3, 11, 0, 0) == [[0, 5, 6], [1, 4, 7, 10], [2, 3, 8, 9]]


@pytest.mark.parametrize(("window", "chunk", "rows"), [(64, 0, 1), (0, 64, 1), (0, 0, 2)])
def test_rounds_run_forwards_where_alternating_gains_nothing(
    monkeypatch: pytest.MonkeyPatch, window: int, chunk: int, rows: int
) -> None:
    assert works(monkeypatch, 3, 11, window, chunk, rows) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]


def test_alternating_evens_out_a_causal_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tiles of 1 to 64 blocks, the longest first, of 32 heads on 132 programs."""

    def longest(chunk: int) -> int:
        found = works(monkeypatch, 132, 64 * 32, 0, chunk)
        return max(sum(64 - work // 32 for work in mine) for mine in found)

    ideal = sum(range(1, 65)) * 32 / 132
    assert longest(0) < 1.02 * ideal
    assert longest(1) > 1.05 * ideal


def test_several_prompts_run_forwards_because_alternating_would_do_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 prompts of 8 tiles each, 1 to 8 blocks long, row after row, of 32 heads on 132 programs."""

    def longest(rows: int) -> int:
        found = works(monkeypatch, 132, 16 * 8 * 32, 0, 0, rows)
        return max(sum(8 - work // 32 % 8 for work in mine) for mine in found)

    ideal = sum(range(1, 9)) * 16 * 32 / 132
    assert longest(16) < 1.05 * ideal
    assert longest(1) > 1.2 * ideal
