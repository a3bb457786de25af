"""Graphs: static metadata that is re-used with other lengths. Real capture on CUDA, the same protocol acted out on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attn_core.capabilities import graph_rank
from attn_core.testing.batches import UNIFORM, build
from attn_core.testing.bench import Bench, NotHere
from attn_core.testing.checks._registry import check
from attn_core.testing.checks.steps import layers_of
from attn_core.testing.replay import Replayer, load, roomy, static_case, tensor_addresses
from attn_core.testing.spec import Case, CaseSpec

_ROWS = 4


def _level_needed(phase: str) -> str:
    if phase in ("decode", "draft"):
        return "uniform_decode"
    return "uniform_query" if phase in UNIFORM else "ragged_query"


def _require_level(bench: Bench) -> None:
    needed = _level_needed(bench.ask.phase)
    if graph_rank(bench.row.graph) < graph_rank(needed):
        raise NotHere(f"graph level {bench.row.graph} does not capture {bench.ask.phase} ({needed} does)")


def _steps(bench: Bench, real: Sequence[int]) -> list[CaseSpec]:
    """Specs of one key (same padded rows and tokens) with other lengths and `real` rows each."""
    page, phase = bench.ask.page_size, bench.ask.phase
    specs = []
    for number, rows in enumerate(real):
        width = 3 if phase == "verify" else 1
        if phase in UNIFORM:
            queries = (width,) * rows
            more: dict[str, Any] = {"pad_rows": _ROWS - rows}
        else:
            queries = tuple(1 + (number + r) % 4 for r in range(rows))
            more = {"pad_rows": _ROWS - rows, "pad_tokens": 4 * _ROWS - sum(queries)}
        prefixes = [(0, 2 * page + 1, page - 1, page)[(number + r) % 4] + number for r in range(rows)]
        lens = tuple(q + p for q, p in zip(queries, prefixes, strict=True))
        plain: dict[str, Any] = {
            "form": "table",
            "strides": "contiguous",
            "storage": "hnd" if bench.ask.layout == "HND" else "separate",
        }
        specs.append(bench.spec(query_lens=queries, kv_lens=lens, seed=bench.turn + number, **plain, **more))
    return specs


def _replayer(bench: Bench, first: CaseSpec, lanes: int = 1, lane: int = 0, session: Any = None) -> Replayer:
    longest = 6 * bench.ask.page_size + 24
    width = 8  # every spec here has shorter rows, its bound included
    limits = bench.limits(_ROWS, 4 * _ROWS, width, longest)
    session = session or bench.open(first, limits=limits, lanes=lanes)
    state = session.graph_state(limits, (bench.ask.phase,), lane)
    case = build(first.but(pad_kv_len=state.pad_kv_len))
    static = static_case(case, -(-longest // bench.ask.page_size) + 4, longest)
    static.cache = roomy(case.cache, limits.max_pages + 8)
    static.batch.max_query_len = width
    load(case, static)
    return Replayer(session, static, limits, state)


def _replay_all(bench: Bench, specs: Sequence[CaseSpec]) -> Replayer:
    """Capture with the first spec, replay with all; compare each with the oracle and check that no other slot changed."""
    replayer = _replayer(bench, specs[0])
    replayer.capture()
    assert replayer.metadata is not None
    addresses = tensor_addresses(replayer.metadata)
    for number, spec in enumerate(specs):
        case = build(spec.but(pad_kv_len=replayer.state.pad_kv_len))
        result = replayer.replay(case)
        problems = bench.compare(case, result, bench.oracle(case)) + bench.padding_problems(case, result)
        problems += _slots_outside(case, replayer.static) + replayer.problems
        moved = [
            name for name, address in tensor_addresses(replayer.metadata).items() if addresses.get(name) != address
        ]
        if moved and bench.row.piecewise == "stable_address":
            problems.append(f"piecewise is declared stable_address; {', '.join(moved)} moved")
        bench.require_none([f"replay {number} of a graph captured with {_text(specs[0])}: {p}" for p in problems], spec)
    return replayer


def _text(spec: CaseSpec) -> str:
    return f"query_lens {spec.query_lens}, kv_lens {spec.kv_lens}"


def _slots_outside(case: Case, static: Case) -> list[str]:
    """The static cache against what the step should have left there."""
    pages = len(case.expected.k)
    kept = replace(case.cache)
    for name in ("k", "v", "k_blocks", "v_blocks"):
        value = getattr(static.cache, name)
        setattr(kept, name, None if value is None else value[:pages])
    return replace(case, cache=kept, guards=[]).problems()


@check(spread="types")
def graph_replay(bench: Bench) -> None:
    """A captured step is replayed with other lengths: the same metadata object, contents rewritten in place."""
    _require_level(bench)
    _replay_all(bench, _steps(bench, (_ROWS, _ROWS, _ROWS, _ROWS)))


@check(spread="types")
def graph_padding(bench: Bench) -> None:
    """A bucket is replayed with fewer real rows than it holds; rows of padding write nothing (cases C94, C128)."""
    _require_level(bench)
    _replay_all(bench, _steps(bench, (_ROWS, 1, 3, 2)))


@check(spread="phase")
def graph_captured_small(bench: Bench) -> None:
    """A graph captured with the shortest lengths serves the longest ones that its limits allow (cases C59, C60)."""
    _require_level(bench)
    specs = _steps(bench, (_ROWS, _ROWS))
    short = specs[0].but(kv_lens=specs[0].query_lens)
    longest = tuple(6 * bench.ask.page_size + 16 for _ in specs[1].kv_lens)
    _replay_all(bench, [short, specs[1].but(kv_lens=longest), short])


@check(spread="phase")
def graph_two_layers(bench: Bench) -> None:
    """A graph of two layers computes its metadata once; replayed with other lengths, each layer gets its own result."""
    _require_level(bench)
    specs = _steps(bench, (_ROWS, 2, _ROWS))
    replayer = _replayer(bench, specs[0].but(layers=2))
    steps = [layers_of(bench, spec.but(pad_kv_len=replayer.state.pad_kv_len)) for spec in specs]
    first = replayer.static
    for number, case in enumerate(steps[0]):
        static = replace(static_case(case, 0, first.batch.kv(case.pool_index).max_kv_len), batch=first.batch)
        static.cache, static.layer = roomy(case.cache, replayer.limits.max_pages + 8), case.layer
        load(case, static)
        if number:
            replayer.others.append(static)
        else:
            replayer.static = static
    replayer.capture()
    for number, cases in enumerate(steps):
        results = [replayer.replay(*cases), *replayer.other_results]
        for case, result, static in zip(cases, results, (replayer.static, *replayer.others), strict=True):
            found = bench.compare(case, result, bench.oracle(case)) + _slots_outside(case, static) + replayer.problems
            bench.require_none([f"replay {number}, layer {case.layer.index}: {line}" for line in found], case.spec)


@check(spread="phase")
def graph_allocates_once(bench: Bench) -> None:
    """After the first capture no workspace grows and the state keeps its size."""
    _require_level(bench)
    specs = _steps(bench, (1, _ROWS))
    replayer = _replayer(bench, specs[0])
    before = replayer.state.nbytes
    replayer.capture()
    for spec in specs:
        replayer.replay(build(spec.but(pad_kv_len=replayer.state.pad_kv_len)))
    if replayer.state.nbytes != before:
        bench.require_none([f"the state grew from {before} to {replayer.state.nbytes} bytes"], specs[0])


@check(spread="phase")
def graph_lanes(bench: Bench) -> None:
    """Two lanes have states of their own: a replay of one leaves the other's captured step valid."""
    _require_level(bench)
    specs = _steps(bench, (_ROWS, _ROWS))
    first = _replayer(bench, specs[0], lanes=2)
    second = _replayer(bench, specs[1].but(lane=1), lanes=2, lane=1, session=first.session)
    for replayer in (first, second):
        replayer.session.context.frozen = False  # both lanes are captured before either is replayed
        replayer.capture()
    cases = [build(spec.but(lane=lane, pad_kv_len=first.state.pad_kv_len)) for lane, spec in enumerate(specs[::-1])]
    for replayer, case in zip((first, second), cases, strict=True):
        replayer.prepare(case)
    for replayer, case in zip((first, second), cases, strict=True):
        bench.require_none(bench.compare(case, replayer.launch(), bench.oracle(case)), case.spec)
