"""Packed attention without a cache: vision towers, encoders, chunks of a prefix.

Sequence b owns queries ``query_offsets[b] … query_offsets[b + 1]`` and keys ``key_offsets[b] … key_offsets[b + 1]``.
Sequences of one shape are computed together (windows of a vision tower are mostly that), whatever their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from attn_core.batch import AttentionBatch, Part
from attn_core.errors import BatchError
from attn_core.layers import MhaLayer
from attn_torch.engines import Engine, Mask, flash_cpu
from attn_torch.merging import Results, finish
from attn_torch.rules import Rules

#: Elements of one mask, and of the logits that one call may hold where no fused kernel is used.
MASK = 8 << 20
LOGITS = 32 << 20


@dataclass(slots=True)
class Shape:
    """The sequences with `queries` query tokens and `keys` keys: their first tokens, i64[n] on the host."""

    queries: int
    keys: int
    query_starts: torch.Tensor
    key_starts: torch.Tensor


@dataclass(slots=True)
class PackedPlan:
    """Sequences by shape, tokens without keys, and masks that layers share."""

    rules: Rules
    tokens: int
    shapes: list[Shape] = field(default_factory=list)
    blank: list[slice] = field(default_factory=list)
    masks: dict[tuple[int, ...], Mask] = field(default_factory=dict)
    parts: dict[int, PackedPlan] = field(default_factory=dict)
    query_offsets: list[int] = field(default_factory=list)


def plan_packed(batch: AttentionBatch, rules: Rules) -> PackedPlan:
    """The plan of a batch with ``key_offsets`` (or without: keys are where the queries are). Lengths are read on the host."""
    rows = batch.num_rows
    host = batch.query_offsets_cpu if batch.cpu_exact else None
    query_offsets = (batch.query_offsets if host is None else host)[: rows + 1].tolist()
    key_offsets = query_offsets if batch.key_offsets is None else batch.key_offsets[: rows + 1].tolist()
    return _plan(query_offsets, key_offsets, rules)


def _plan(query_offsets: list[int], key_offsets: list[int], rules: Rules) -> PackedPlan:
    plan = PackedPlan(rules, query_offsets[-1] if query_offsets else 0, query_offsets=query_offsets)
    starts = torch.tensor([query_offsets, key_offsets], dtype=torch.int64)
    lengths, starts = starts.diff(dim=1), starts[:, :-1]
    shapes, member = torch.unique(lengths, dim=1, return_inverse=True)
    for number, (queries, keys) in enumerate(shapes.T.tolist()):
        mine = (member == number).nonzero().flatten()
        if queries and keys:
            plan.shapes.append(Shape(queries, keys, starts[0, mine], starts[1, mine]))
        elif queries:
            plan.blank += [slice(first, first + queries) for first in starts[0, mine].tolist()]
    return plan


def attend_packed(
    engine: Engine,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: MhaLayer,
    plan: PackedPlan | None,
    part: Part | None,
    *,
    need_lse: bool,
    partial: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out[T, Hq, Dv] and lse f32[T, Hq] (None unless needed) of one layer. Tokens of no sequence get 0 and -inf.

    With `part` the keys are one chunk of every row's prefix: all of it is visible unless the part is causal.
    Raises :class:`BatchError` if the batch had no packed keys.
    """
    if plan is None:
        raise BatchError("packed attention needs a batch with key_offsets", fix="set AttentionBatch.key_offsets")
    if part is not None:
        plan = _of_part(plan, part)
    heads, v_dim = q.shape[1], v.shape[-1]
    keeps_lse = need_lse or (layer.sinks is not None and not partial)
    results = Results(
        torch.empty(q.shape[0], heads, v_dim, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[0], heads, device=q.device) if keeps_lse else None,
    )
    if engine is flash_cpu and q.shape[-1] != v_dim:
        wide = max(q.shape[-1], v_dim)
        q, k, v = (functional.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
    scale = layer.geometry.scale
    for shape in plan.shapes:
        _run_shape(engine, plan, shape, (q, k, v), scale, v_dim, results)
    for blank in (*plan.blank, slice(plan.tokens, q.shape[0])):
        results.blank(blank)
    finish(results, layer, partial)
    return results.out, results.lse if need_lse else None


def _of_part(plan: PackedPlan, part: Part) -> PackedPlan:
    made = plan.parts.get(part.index)
    if made is None:
        rules = plan.rules if part.causal else Rules(None, None, None)
        rows = len(plan.query_offsets)
        made = plan.parts[part.index] = _plan(plan.query_offsets, part.offsets[:rows].tolist(), rules)
    return made


def _run_shape(
    engine: Engine,
    plan: PackedPlan,
    shape: Shape,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    v_dim: int,
    results: Results,
) -> None:
    """All sequences of one shape, as many at once as the budget of logits allows where they are held."""
    heads = qkv[0].shape[1]
    most = len(shape.query_starts)
    if engine is not flash_cpu:
        most = max(1, LOGITS // (heads * shape.queries * shape.keys))
    if heads != qkv[1].shape[1] and _needs_mask(plan.rules, shape):
        most = 1  # a shared mask and shared keys at once would need a copy of either
    for at in range(0, len(shape.query_starts), most):
        rows = _take(qkv[0], shape.query_starts[at : at + most], shape.queries)
        keys, values = (_take(x, shape.key_starts[at : at + most], shape.keys) for x in qkv[1:])
        for first, last in _ranges(plan.rules, shape):
            out, lse = _attend(engine, plan, shape, rows[:, first:last], keys, values, (first, last), scale)
            targets = shape.query_starts[at : at + most] + first
            _put(results.out, targets, out[..., :v_dim])
            if results.lse is not None:
                assert lse is not None
                _put(results.lse, targets, lse)


def _ranges(rules: Rules, shape: Shape) -> Iterator[tuple[int, int]]:
    size = shape.queries if not _needs_mask(rules, shape) else max(16, MASK // shape.keys)
    if rules.window is not None:
        size = min(size, max(64, rules.window))
    for first in range(0, shape.queries, size):
        yield first, min(first + size, shape.queries)


def _needs_mask(rules: Rules, shape: Shape) -> bool:
    longest = max(shape.keys, shape.queries)
    if rules.chunk is not None or (rules.window is not None and rules.window < longest):
        return True
    if rules.right is None or (rules.right >= longest and shape.queries <= shape.keys):
        return False
    return rules.right != 0 or shape.queries != shape.keys


def _attend(
    engine: Engine,
    plan: PackedPlan,
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: tuple[int, int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q[n, L, Hq, D] over k[n, S, Hk, D], v[n, S, Hk, D]: out[n, L, Hq, D] and lse[n, L, Hq]."""
    heads, kv_heads = q.shape[2], k.shape[2]
    masked, ratio = _needs_mask(plan.rules, shape), heads // kv_heads
    mask = _mask(plan, shape, queries, q.device) if masked else None
    causal = plan.rules.right == 0 and not masked and shape.queries == shape.keys
    if ratio == 1:
        out, lse = engine(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale, mask=mask, causal=causal)
        return out.transpose(1, 2), None if lse is None else lse.transpose(1, 2)
    if mask is None and not causal:  # query heads of one KV head are further queries
        packed = torch.unflatten(q, 2, (kv_heads, ratio)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        out, lse = engine(packed, k.transpose(1, 2), v.transpose(1, 2), scale=scale)
        out = torch.unflatten(out, 2, (-1, ratio)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        return out, None if lse is None else torch.unflatten(lse, 2, (-1, ratio)).permute(0, 2, 1, 3).flatten(2, 3)
    results = [
        engine(
            torch.unflatten(one, 1, (kv_heads, ratio)).permute(1, 2, 0, 3),
            *(x[:, :, None].permute(1, 2, 0, 3).expand(-1, ratio, -1, -1) for x in (keys, values)),
            scale=scale,
            mask=mask,
            causal=causal,
        )
        for one, keys, values in zip(q, k, v, strict=True)
    ]
    out = torch.stack([out.permute(2, 0, 1, 3).flatten(1, 2) for out, _ in results])
    if results[0][1] is None:
        return out, None
    return out, torch.stack([lse.permute(2, 0, 1).flatten(1, 2) for _, lse in results if lse is not None])


def _mask(plan: PackedPlan, shape: Shape, queries: tuple[int, int], device: torch.device) -> Mask:
    """bool[1, 1, L, S], the same for all sequences of a shape."""
    name = (shape.queries, shape.keys, *queries)
    mask = plan.masks.get(name)
    if mask is None:
        position = torch.arange(*queries, device=device) + (shape.keys - shape.queries)
        key = torch.arange(shape.keys, device=device)
        keep = plan.rules.allow(position[:, None], key[None, :]).expand(len(position), len(key))
        mask = plan.masks[name] = Mask(keep[None, None])
    return mask


def _take(packed: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """[n, length, ..] of the sequences that begin at `starts`; a view where they follow each other."""
    n, first = len(starts), int(starts[0])
    if n == 1 or torch.equal(starts, first + torch.arange(n) * length):
        return torch.unflatten(packed[first : first + n * length], 0, (n, length))
    return packed[(starts[:, None] + torch.arange(length)).to(packed.device, non_blocking=True)]


def _put(target: torch.Tensor, starts: torch.Tensor, values: torch.Tensor) -> None:
    """Write values[n, L, ..] to L tokens from each of `starts`."""
    n, length = values.shape[:2]
    first = int(starts[0])
    if n == 1 or torch.equal(starts, first + torch.arange(n) * length):
        torch.unflatten(target[first : first + n * length], 0, (n, length)).copy_(values)
    else:
        target[(starts[:, None] + torch.arange(length)).to(target.device, non_blocking=True)] = values.to(target.dtype)
