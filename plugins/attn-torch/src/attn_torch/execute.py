"""Running a step's plans for one layer: read keys, compute, merge, write results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from attn_core.layers import MhaCache
from attn_torch.engines import Engine
from attn_torch.longrows import LongRow, Piece
from attn_torch.merging import Results, Running, merge_regular, merge_units
from attn_torch.reader import Buffers, read_block
from attn_torch.units import Targets, Tile, UnitPlan


@dataclass(slots=True)
class Call:
    """One layer's work: q[T, Hq, D] in the type that is computed in; ``scale`` has the key scale in it."""

    q: torch.Tensor
    cache: MhaCache
    kv_heads: int
    v_dim: int
    scale: float
    engine: Engine
    buffers: Buffers

    def padded(self, q: torch.Tensor) -> torch.Tensor:
        """q[.., D] with zeros up to the width of keys."""
        width = self.buffers.width
        return q if width is None or width == q.shape[-1] else functional.pad(q, (0, width - q.shape[-1]))


def run_units(plan: UnitPlan, call: Call, results: Results, parts: torch.Tensor | None) -> None:
    """All short rows with one number of queries. `parts` u8 has room for the units that are merged after all tiles."""
    queries, need_lse = plan.queries, results.lse is not None
    results = results.grouped(call.kv_heads)
    q = call.q[plan.contiguous] if plan.contiguous is not None else call.q.index_select(0, plan.tokens)
    q = torch.unflatten(call.padded(q), 1, (call.kv_heads, -1))
    outs, lses = _part_buffers(parts, plan.count - plan.direct, (queries, *q.shape[1:3]), call.v_dim)
    for tile in plan.tiles:
        final = tile.targets is not None and tile.parts == 1
        mine = q[tile.first * queries : tile.units.stop * queries]
        out, lse = _run_tile(tile, queries, call, mine, need_lse or not final)
        if tile.targets is None:
            assert lse is not None
            units = slice(tile.first - plan.direct, tile.units.stop - plan.direct)
            outs[units].flatten(0, 1).copy_(out)
            lses[units].flatten(0, 1).copy_(lse)
            continue
        if not final and lse is not None:
            out, lse = _merge_tile(out, lse, queries, tile.parts, need_lse)
        write(results, tile.targets, out, lse)
    if plan.targets is not None:
        _merge_parts(plan, outs, lses, results)


def _merge_tile(
    out: torch.Tensor, lse: torch.Tensor, queries: int, parts: int, need_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Units [n * S, ..] of a tile, every `parts` of which are a row, as rows [n / parts * S, ..]."""
    if queries == 1:
        return merge_regular(out, lse, parts, need_lse)
    out, lse = (torch.unflatten(x, 0, (-1, queries)) for x in (out, lse))
    merged, merged_lse = merge_regular(out, lse, parts, need_lse)
    return merged.flatten(0, 1), None if merged_lse is None else merged_lse.flatten(0, 1)


def _merge_parts(plan: UnitPlan, outs: torch.Tensor, lses: torch.Tensor, results: Results) -> None:
    """Units in the part buffers as rows."""
    assert plan.member is not None
    assert plan.slots is not None
    assert plan.targets is not None
    lse: torch.Tensor | None
    if plan.regular is None:
        merged, lse = merge_units(outs.flatten(1, -2), lses.flatten(1), plan.member, plan.slots)
    else:
        merged, lse = merge_regular(outs, lses[:-1], plan.regular, results.lse is not None)
    heads = results.out.shape[1:3]
    write(results, plan.targets, merged.view(-1, *heads, outs.shape[-1]), None if lse is None else lse.view(-1, *heads))


def _part_buffers(
    parts: torch.Tensor | None, units: int, shape: tuple[int, ...], v_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """outs f32[units, S, Hk, G, Dv] and lses f32[units + 1, S, Hk, G], whose last line is -inf, in the workspace `parts`."""
    if parts is None or units == 0:
        nothing = torch.empty(0)
        return nothing, nothing
    flat, columns = parts.view(torch.float32), math.prod(shape)
    size = units * columns * v_dim
    lses = flat[size : size + (units + 1) * columns].view(units + 1, *shape)
    lses[units].fill_(-math.inf)
    return flat[:size].view(units, *shape, v_dim), lses


def part_bytes(plan: UnitPlan, heads: int, v_dim: int) -> int:
    """Bytes that :func:`run_units` needs in `parts`."""
    units = plan.count - plan.direct
    return 4 * plan.queries * heads * (units * v_dim + units + 1) if units else 0


def _run_tile(
    tile: Tile, queries: int, call: Call, q: torch.Tensor, need_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q[n * S, Hk, G, D] against the tile's keys: out[n * S, Hk, G, Dv] and lse[n * S, Hk, G].

    The query heads of a KV head are packed beside its queries, [n, Hk, S * G, D], so that keys are read once.
    """
    k, v = read_block(call.cache, tile.block, call.buffers)
    if queries > 1:
        q = torch.unflatten(q, 0, (-1, queries)).transpose(1, 2).flatten(2, 3)
    out, lse = call.engine(q, k, v, scale=call.scale, mask=tile.mask, need_lse=need_lse)
    if out.shape[-1] != call.v_dim:
        out = out[..., : call.v_dim]
    if queries > 1:
        out = torch.unflatten(out, 2, (queries, -1)).transpose(1, 2).flatten(0, 1)
        lse = None if lse is None else torch.unflatten(lse, 2, (queries, -1)).transpose(1, 2).flatten(0, 1)
    return out, lse


def write(results: Results, targets: Targets, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Results of [rows * S] queries to their tokens: out[.., Dv] and lse[..], of the shapes that `results` has."""
    for target, values in ((results.out, out), (results.lse, lse)):
        if target is None or values is None:
            continue
        if targets.picks is not None:
            values = values.index_select(0, targets.picks)
        if targets.contiguous is not None:
            target[targets.contiguous].copy_(values)
        else:
            target.index_copy_(0, targets.tokens, values.to(target.dtype))


# --- long rows -----------------------------------------------------------------------------------------------------------


def run_long_row(plan: LongRow, call: Call, results: Results) -> None:
    """One long row. Every KV head is a batch entry; its query heads share the keys without a copy."""
    q = torch.unflatten(call.padded(call.q[plan.tokens]), 1, (call.kv_heads, -1)).permute(1, 2, 0, 3)  # [Hk, G, L, D]
    row = Results(results.out[plan.tokens], None if results.lse is None else results.lse[plan.tokens])
    running: dict[int, Running] = {}
    for key_block in plan.blocks:
        k, v = read_block(call.cache, key_block.block, call.buffers)
        for piece in key_block.pieces:
            _run_piece(piece, call, q, k, v, row, running)
    for queries in plan.blank:
        row.blank(queries)


def _run_piece(
    piece: Piece,
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row: Results,
    running: dict[int, Running],
) -> None:
    ratio = q.shape[1]
    shared = (-1, ratio, -1, -1)
    keys, values = (x[0, :, None, piece.keys].expand(shared) for x in (k, v))
    out, lse = call.engine(
        q[:, :, piece.queries],
        keys,
        values,
        scale=call.scale,
        mask=None if piece.mask is None else piece.mask.get(),
        causal=piece.causal,
        need_lse=row.lse is not None or piece.part != "whole",
    )
    out = out[..., : call.v_dim]
    if piece.part != "whole":
        assert lse is not None
        sum_so_far = running.setdefault(piece.queries.start, Running())
        sum_so_far.add(out, lse)
        if piece.part != "last":
            return
        del running[piece.queries.start]
        assert sum_so_far.out is not None
        out, lse = sum_so_far.out, sum_so_far.lse
    torch.unflatten(row.out[piece.queries], 1, (call.kv_heads, ratio)).copy_(out.permute(2, 0, 1, 3))
    if row.lse is not None:
        assert lse is not None
        torch.unflatten(row.lse[piece.queries], 1, (call.kv_heads, ratio)).copy_(lse.permute(2, 0, 1))
