"""Dual chunk attention: each query with three rotations against the keys of its chunk, the one before, and earlier ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_core.layers import Rope
from attn_core.testing.batches import build
from attn_core.testing.bench import Bench
from attn_core.testing.checks._registry import check
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.elements import random_values
from attn_core.testing.harness import Result
from attn_core.testing.oracle_dual_chunk import ChunkSizes, attend_plain, attend_rotated
from attn_core.testing.oracle_mha import Answer, read_row, token_slots
from attn_core.testing.spec import Case, CaseSpec

_PHASES = ("prefill", "decode")
_BASE = 10000.0
#: How much wider the tolerance is where queries or keys are rounded once more.
_ROUNDED = {"fp16": 4.0, "bf16": 8.0}


def _sizes(bench: Bench) -> ChunkSizes:
    """Chunks of a few pages; the local size is no multiple of anything."""
    length = bench.ask.page_size * (1 if bench.ask.page_size >= 64 else 2) + (2 if bench.ask.page_size == 1 else 0)
    return ChunkSizes(length + length // 3 + 1, length // 3 + 1)


def _lengths(bench: Bench, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(query_lens, kv_lens): in one chunk, at its end, one token into the next, and rows over two and three chunks."""
    edges = (1, length - 1, length, length + 1, 2 * length, 2 * length + 1, 3 * length + 2)
    if bench.ask.phase == "decode":
        return (1,) * len(edges), edges
    queries = (1, min(3, length - 1), 2, 3, 1, min(length + 1, 9), 4)
    return queries, edges


def _options(sizes: ChunkSizes) -> dict[str, int]:
    options = {"chunk_size": sizes.chunk_size, "local_size": sizes.local_size}
    return {**options, "original_max_position_embeddings": sizes.original} if sizes.original else options


@check("dual_chunk", phases=_PHASES, spread="all")
def dual_chunk(bench: Bench) -> None:
    """Queries in five versions [T, Hq, 5, D] meet keys of their chunk, of the one before and of earlier ones; lengths around each boundary."""
    plain = _sizes(bench)
    for sizes in (plain, replace(plain, original=plain.length)):
        at_work = replace(bench, options=_options(sizes))
        queries, keys = _lengths(bench, sizes.length)
        spec = bench.spec(query_lens=queries, kv_lens=keys, seed=bench.turn)

        def judge(candidate: CaseSpec, bench: Bench = at_work, sizes: ChunkSizes = sizes) -> list[str]:
            case = build(candidate)
            shape = (case.inputs.q.shape[0], candidate.geometry.q_heads, 5, candidate.geometry.qk_dim)
            versions = random_values(shape, candidate.dtype, torch.Generator().manual_seed(candidate.seed + 11))
            case.inputs = case.inputs._replace(q=versions.to(case.inputs.q.device))
            want = attend_rotated(case.batch, case.layer, case.expected, case.inputs.q, sizes, pool=case.pool_index)
            result = bench.open(case).run(case)
            return _compare(case, result, want, rounded=sizes.original > 0) + case.problems()

        bench.require_none(judge(spec), spec, judge)


@check("dual_chunk", phases=_PHASES, spread="types")
def dual_chunk_rope(bench: Bench) -> None:
    """Where the variant fuses rope, queries and keys come without rotation: the answer of angles made for every pair in float64."""
    if "rope" not in bench.row.fuses:
        return
    sizes = _sizes(bench)
    at_work = replace(bench, options=_options(sizes))
    queries, keys = _lengths(bench, sizes.length)
    for interleaved in (False, True):
        spec = bench.spec(query_lens=queries, kv_lens=keys, seed=bench.turn, store=True)
        bench.require_none(_with_rope(at_work, spec, sizes, interleaved), spec)


def _with_rope(bench: Bench, spec: CaseSpec, sizes: ChunkSizes, interleaved: bool) -> list[str]:
    """Prefixes are stored token by token through the backend's own store, then the step runs: both rotate."""
    case = build(spec)
    dim = spec.geometry.qk_dim
    frequencies = _BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    theta = torch.arange(sizes.chunk_size + 1, dtype=torch.float64)[:, None] * frequencies
    table = torch.cat((theta.cos(), theta.sin()), dim=-1).float().to(bench.device)
    address = case.batch.kv(case.pool_index)
    rows = [read_row(case.expected, address, row, case.layer) for row in range(case.batch.num_rows)]
    session = bench.open(case)
    for row, (keys, values) in enumerate(rows):
        count = len(keys)
        slots = torch.tensor(token_slots(address, row), dtype=torch.int64, device=bench.device)
        positions = torch.arange(count, device=bench.device)
        given = case.inputs._replace(
            k=keys.to(case.cache.k.dtype).to(bench.device),
            v=values.to(case.cache.v.dtype).to(bench.device),
            rope=Rope(table, positions, interleaved),
        )
        session.call("attn_store", given, case.layer, case.cache, replace(address, new_slots=slots))
    assert case.batch.positions is not None
    case.inputs = case.inputs._replace(rope=Rope(table, case.batch.positions, interleaved))
    want = attend_plain(
        case.batch, case.layer, [k for k, _ in rows], [v for _, v in rows], case.inputs.q, frequencies, sizes,
        interleaved=interleaved, pool=case.pool_index,
    )  # fmt: skip
    return _compare(case, session.run(case), want, rounded=True) + case.problems_outside_cache()


def _compare(case: Case, result: Result, want: Answer, rounded: bool) -> list[str]:
    """Against the oracle. `rounded`: rotations or logit scales are multiplied in before rounding to 16 bit, once each for q and k."""
    spec = case.spec
    limits = tolerance(spec.dtype, spec.kv, spec.out)
    more = _ROUNDED.get(spec.dtype, 1.0) if rounded else 1.0
    found = [compare_out(result.out, want, limits.out * more, case.batch.num_tokens)]
    if spec.needs_lse:
        found.append(compare_lse(result.lse, want, limits.lse * more, case.batch.num_tokens))
    return [str(mismatch) for mismatch in found if mismatch is not None]
