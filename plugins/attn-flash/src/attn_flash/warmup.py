"""Tiny steps that make a library compile, or load, every kernel that a group's phases need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment, Tree
from attn_core.layers import MhaCache, MhaInputs, MhaLayer

if TYPE_CHECKING:
    from attn_core.context import GraphLimits
    from attn_flash.paged import FlashBackend


def warm_up(backend: FlashBackend, phases: Sequence[str], limits: GraphLimits) -> None:
    """Run one row of each phase over a page of zeros. Phases that share a kernel cost nothing twice."""
    context, geometry = backend.context, backend.geometry
    pool = context.pools.get("attend") or context.pools.get("cross")
    assert pool is not None
    shape = (2, pool.page_size, geometry.kv_heads)
    dtype, device = context.dtype, context.device
    k, v = (torch.zeros(*shape, dim, dtype=dtype, device=device) for dim in (geometry.qk_dim, geometry.v_dim))
    cache = MhaCache(k, v)
    sinks = torch.zeros(geometry.q_heads, device=device) if geometry.sinks else None
    layer = MhaLayer(context.group.layers[0], context.group, sinks=sinks)
    for phase in phases:
        tokens = 1 if phase in ("decode", "draft") else max(1, min(limits.max_query_len, 2))
        batch = _batch(backend, phase, tokens, pool.page_size)
        metadata = backend.attn_metadata(batch, context.group, phase, None, False)
        backend.attn_metadata_in_graph(metadata)
        q = torch.zeros(tokens, geometry.q_heads, geometry.qk_dim, dtype=dtype, device=device)
        context.log.info("warm up %s: %s", context.group.name, phase)
        backend.attend(MhaInputs(q, store=False), layer, cache, metadata, None)


def _batch(backend: FlashBackend, phase: str, tokens: int, page: int) -> AttentionBatch:
    """One row of `tokens` queries and as many keys, on page 1."""
    device = backend.context.device

    def i32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pages = -(-tokens // page)
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    table = torch.ones(1, pages, dtype=torch.int32, device=device)
    address = KvAddress(
        page, i32(tokens), slots, tokens, table=table, kv_lens_cpu=torch.tensor([tokens], dtype=torch.int32)
    )
    tree = None
    if phase in backend.trees:
        line = torch.arange(tokens, dtype=torch.int32, device=device)[None]
        words = -(-tokens // 32)
        tree = Tree(line - 1, line, torch.full((1, tokens, words), -1, dtype=torch.int32, device=device))
    plan = backend.context.phases.get(phase)
    return AttentionBatch(
        1, tokens, (Segment(phase, slice(0, 1), slice(0, tokens), tokens),), i32(0, tokens), tokens,
        (address,) * (backend.address_index + 1), tree=tree, needs_lse=plan is not None and plan.needs_lse,
    )  # fmt: skip
