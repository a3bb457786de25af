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
    """All short rows with one number of queries. `parts` u8 has room for the units of rows that have several."""
    heads, split = call.q.shape[1], plan.count - plan.whole
    q = call.q[plan.contiguous] if plan.contiguous is not None else call.q.index_select(0, plan.tokens)
    q = torch.unflatten(call.padded(q), 0, (plan.count, plan.queries))
    outs, lses = _part_buffers(parts, split, plan.queries * heads, call.v_dim)
    for tile in plan.tiles:
        whole = tile.targets is not None
        out, lse = _run_tile(tile, plan.queries, call, q[tile.units], results.lse is not None or not whole)
        if tile.targets is not None:
            write(results, tile.targets, out.flatten(0, 1), None if lse is None else lse.flatten(0, 1))
        else:
            units = slice(tile.first - plan.whole, tile.units.stop - plan.whole)
            outs[units].view(out.shape).copy_(out)
            assert lse is not None
            lses[units].view(lse.shape).copy_(lse)
    if plan.targets is not None:
        assert plan.member is not None
        assert plan.slots is not None
        if plan.regular is None:
            merged, lse = merge_units(outs, lses, plan.member, plan.slots)
        else:
            merged, lse = merge_regular(outs, lses, plan.regular, results.lse is not None)
        lse = None if lse is None else lse.view(-1, heads)
        write(results, plan.targets, merged.view(-1, heads, call.v_dim), lse)


def _part_buffers(
    parts: torch.Tensor | None, units: int, columns: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """outs f32[units, columns, Dv] and lses f32[units + 1, columns], whose last line is -inf, in the workspace `parts`."""
    if parts is None or units == 0:
        nothing = torch.empty(0)
        return nothing, nothing
    flat = parts.view(torch.float32)
    size = units * columns * v_dim
    lses = flat[size : size + (units + 1) * columns].view(units + 1, columns)
    lses[units].fill_(-math.inf)
    return flat[:size].view(units, columns, v_dim), lses


def part_bytes(plan: UnitPlan, heads: int, v_dim: int) -> int:
    """Bytes that :func:`run_units` needs in `parts`."""
    units = plan.count - plan.whole
    return 4 * plan.queries * heads * (units * v_dim + units + 1) if units else 0


def _run_tile(
    tile: Tile, queries: int, call: Call, q: torch.Tensor, need_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q[n, S, Hq, D] against the tile's keys: out[n, S, Hq, Dv] and lse[n, S, Hq].

    The query heads of a KV head are packed beside its queries, [n, Hk, S * G, D], so that keys are read once.
    """
    k, v = read_block(call.cache, tile.block, call.buffers)
    n, _, heads, width = q.shape
    if queries == 1:
        packed = q.view(n, call.kv_heads, -1, width)
    else:
        packed = torch.unflatten(q, 2, (call.kv_heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    out, lse = call.engine(packed, k, v, scale=call.scale, mask=tile.mask, need_lse=need_lse)
    if out.shape[-1] != call.v_dim:
        out = out[..., : call.v_dim]
    if queries == 1:
        return out.reshape(n, 1, heads, -1), None if lse is None else lse.reshape(n, 1, heads)
    out = torch.unflatten(out, 2, (queries, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return out, None if lse is None else torch.unflatten(lse, 2, (queries, -1)).permute(0, 2, 1, 3).flatten(2, 3)


def write(results: Results, targets: Targets, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Results of [rows * S] queries to their tokens: out[.., Hq, Dv] and lse[.., Hq]."""
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
