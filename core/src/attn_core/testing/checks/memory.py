"""Memory: what a backend may read and write. Poison, canaries, padding, strides, storage and workspaces."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.batch import Part
from attn_core.context import Context
from attn_core.errors import AttnError
from attn_core.testing.batches import build
from attn_core.testing.bench import Bench
from attn_core.testing.checks._registry import check
from attn_core.testing.guards import bytes_of, same_bits
from attn_core.testing.oracle_mha import read_row
from attn_core.testing.spec import CaseSpec


@check(spread="types")
def unused_slots(bench: Bench) -> None:
    """NaN, infinity or 1e30 in slots that no row owns leave every bit of the result as it is with zeros (case C70)."""
    page = bench.ask.page_size

    def judge(spec: CaseSpec) -> list[str]:
        results = {}
        for poison in ("zero", "nan", "inf", "big"):
            case = build(spec.but(unused=poison))
            results[poison] = bench.open(case).run(case).out[: case.batch.num_tokens]
        return [
            f"unused slots with {poison} change the result"
            for poison in ("nan", "inf", "big")
            if not same_bits(results[poison], results["zero"])
        ]

    queries, lens = bench.lengths(bench.ask.phase, page)
    spec = bench.spec(query_lens=queries, kv_lens=lens, strides="contiguous")
    bench.require_none(judge(spec), spec, judge)


@check(spread="types")
def padding(bench: Bench) -> None:
    """Rows and tokens of padding write no slot (slot 0 included) and leave in the result what padded_out declares."""
    bench.require(bench.spec(pad_rows=3, pad_tokens=5))
    bench.require(bench.spec(pad_rows=0, pad_tokens=2))


@check(spread="phase")
def only_padding(bench: Bench) -> None:
    """A step whose rows are all padding runs and writes nothing (case C76)."""
    bench.require(bench.spec(query_lens=(), kv_lens=(), pad_rows=2, pad_tokens=2))


@check("strided_q", spread="types")
def strides(bench: Bench) -> None:
    """Slices of one qkv buffer and transposed views give what contiguous tensors give (case C74)."""
    for layout in ("fused", "transposed"):
        bench.require(bench.spec(strides=layout))


@check(spread="types")
def cache_strides(bench: Bench) -> None:
    """A cache is a logical view: k and v may share storage, and pages need not be contiguous."""
    if bench.ask.layout == "NHD":
        for storage in ("joint", "separate"):
            bench.require(bench.spec(storage=storage))


@check(spread="types")
def address_forms(bench: Bench) -> None:
    """Dense tables with row numbers and CSR lists address the same keys."""
    for form in ("table", "csr"):
        bench.require(bench.spec(form=form, shared=1))


@check("writes_out", spread="phase")
def writes_out(bench: Bench) -> None:
    """The result is written into the tensor that was given, and that tensor comes back."""
    spec = bench.spec()
    case = build(spec)
    result = bench.open(case).run(case, give_out=True)
    if result.out.data_ptr() != case.out.data_ptr() or result.out.shape != case.out.shape:
        bench.require_none(["writes_out is declared; another tensor came back"], spec)
    bench.require_none(bench.compare(case, result, bench.oracle(case)), spec)


@check(spread="phase")
def out_is_optional(bench: Bench) -> None:
    """Without `out` a new tensor is returned, and a second call does not change the first result."""
    spec = bench.spec()
    first, second = build(spec), build(spec.but(seed=spec.seed + 50))
    session = bench.open(first)
    result = session.run(first, give_out=False)
    kept = bytes_of(result.out).clone()
    session.run(second, give_out=False)
    if not bool((bytes_of(result.out) == kept).all()):
        bench.require_none(["a later call overwrote an earlier result that was returned without `out`"], spec)
    bench.require_none(bench.compare(first, result, bench.oracle(first)), spec)


@check("store", spread="all")
def store(bench: Bench) -> None:
    """The backend's own store writes the new slots, quantised as published, and nothing else."""
    spec = bench.spec(pad_tokens=2)

    def judge(candidate: CaseSpec) -> list[str]:
        case = build(candidate)
        bench.open(case).store(case)
        return case.problems()

    bench.require_none(judge(spec), spec, judge)


@check("gather", spread="all")
def gather(bench: Bench) -> None:
    """The backend reads its cache back, whole or a part of each row, row after row, with the layer's scales applied."""
    page = bench.ask.page_size
    spec = bench.spec(query_lens=(1, 1, 1), kv_lens=(page + 1, 1, 2 * page + 3), store=False)
    case = build(spec)
    address, session = case.batch.kv(case.pool_index), bench.open(case)
    rows = [read_row(case.expected, address, row, case.layer) for row in range(3)]
    for start, most in ((0, 0), (0, page), (page, 2), (page + 1, page + 2)):
        cuts = [(0, n) if not most else (min(start, n), min(start + most, n)) for n in spec.kv_lens]
        part = None if not most else _part_of(cuts, bench.device)
        found = session.call("attn_gather", case.cache, address, part, case.layer)
        for name, have, index in (("k", found[0], 0), ("v", found[1], 1)):
            want = torch.cat([rows[row][index][a:b] for row, (a, b) in enumerate(cuts)])
            error = (have[: len(want)].double().cpu() - want).abs().max() if len(have) >= len(want) > 0 else 0.0
            if len(have) < len(want) or not float(error) <= 0.01 * max(
                float(want.abs().max()) if len(want) else 0, 1.0
            ):
                bench.require_none([f"{name} of positions {cuts}: {len(have)} rows, error {float(error):.3g}"], spec)
    bench.require_none(case.problems(), spec)


def _part_of(cuts: list[tuple[int, int]], device: str) -> Part:
    offsets = [0]
    for start, stop in cuts:
        offsets.append(offsets[-1] + stop - start)
    lens = [stop - start for start, stop in cuts]
    starts = torch.tensor([start for start, _ in cuts], dtype=torch.int32, device=device)
    return Part(0, torch.tensor(offsets, dtype=torch.int32, device=device), starts, max(lens), 0 in lens, False)


class PoisonedContext(Context):
    """A context whose workspaces come filled with 0xFF, unless they were asked for zeroed (case C129)."""

    __slots__ = ("lasting",)

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.lasting: set[tuple[str, int]] = set()  #: workspaces that were asked for zeroed: they keep their contents

    def workspace(self, name: str, nbytes: int, lane: int = 0, *, zeroed: bool = False) -> torch.Tensor:
        """As :meth:`Context.workspace`; one that is not zeroed never starts with useful contents."""
        known = (name, lane) in self._workspaces
        buffer = Context.workspace(self, name, nbytes, lane, zeroed=zeroed)
        if zeroed:
            self.lasting.add((name, lane))
        elif not known:
            buffer.fill_(0xFF)
        return buffer

    def poison(self) -> None:
        """Fill every workspace that may not keep contents between steps."""
        for key, buffer in self._workspaces.items():
            if key not in self.lasting:
                buffer.fill_(0xFF)


@check(spread="phase")
def workspaces(bench: Bench) -> None:
    """Workspaces hold nothing from step to step: they are poisoned before a small step that follows a large one."""
    large, small = bench.spec(), bench.spec(seed=bench.turn + 9)
    small = small.but(query_lens=small.query_lens[:2], kv_lens=small.kv_lens[:2])
    cases = [build(large), build(small)]
    session = bench.open(cases[0], context_class=PoisonedContext)
    assert isinstance(session.context, PoisonedContext)
    for case in cases:
        session.context.poison()
        result = session.run(case)
        bench.require_none(bench.compare(case, result, bench.oracle(case)), case.spec)


@check(spread="once")
def refuses_bad_inputs(bench: Bench) -> None:
    """A layer with features that the group does not have is refused or served right, never ignored (case C18)."""
    if "sinks" in bench.row.features:
        return
    spec = bench.spec(needs_lse=False)
    case = build(spec)
    case.layer.sinks = torch.full((bench.ask.heads[0],), 2.0, device=bench.device)
    try:
        result = bench.open(case).run(case)
    except (AttnError, NotImplementedError, ValueError):
        return
    problems = bench.compare(case, result, bench.oracle(case))
    bench.require_none([f"sinks are not declared, were given, and were ignored: {line}" for line in problems], spec)
