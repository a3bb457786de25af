"""Captured steps: wrappers of fixed size on a lane's static buffers, planned again only when a plan would differ."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.context import GraphKey, GraphLimits
from attn_flashinfer.eager import Steps
from attn_flashinfer.lengths import Lengths, lengths_of
from attn_flashinfer.metadata import FlashInferMetadata, FlashInferState
from attn_flashinfer.rules import WORKSPACE_BYTES
from attn_flashinfer.wrappers import PLAN_BYTES, Buffers, Slot


def make_state(steps: Steps, limits: GraphLimits, lane: int) -> FlashInferState:
    """Buffers for the largest step. A mask for trees is added when the first tree is captured."""
    context, window = steps.context, steps.rules.window
    pool = context.pools.get("attend") or context.pools.get("cross")
    page = pool.page_size if pool is not None else 1
    longest = limits.max_kv_len
    if window:
        longest = min(longest, window + limits.max_query_len + page)
    buffers = Buffers.make(limits.max_rows, limits.max_rows * (-(-longest // page) + 1), context.device)
    memory = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=context.device)
    context.workspace("split_keys", WORKSPACE_BYTES, lane, zeroed=True)
    return FlashInferState(limits, lane, buffers, memory)


def graph_metadata(
    steps: Steps, batch: AttentionBatch, address: KvAddress, phase: str, state: FlashInferState
) -> FlashInferMetadata:
    """The metadata of a captured key, its contents rewritten. Planned again only if a row has gained a page."""
    tree = batch.tree if phase == "verify" else None
    key = (GraphKey(phase, batch.padded_rows, batch.padded_tokens), tree is not None)
    metadata = state.metadata.get(key)
    last = None if metadata is None or metadata.slot is None else metadata.slot.planned
    lengths = lengths_of(batch, address, steps.rules.window, padded=True, last=last)
    if metadata is None:
        metadata = FlashInferMetadata(phase, batch.num_tokens, tokens=batch.padded_tokens, tree=tree)
        metadata.page_size = address.page_size
        metadata.slot = _captured_slot(steps, state, steps.kind(phase), lengths, tree)
        state.metadata[key] = metadata
    metadata.num_tokens, metadata.needs_lse, metadata.partial = batch.num_tokens, batch.needs_lse, batch.partial
    slot = metadata.slot
    assert slot is not None
    query_len = batch.padded_tokens // batch.padded_rows
    uniform = query_len if query_len * batch.padded_rows == batch.padded_tokens else 0
    steps.planner.refresh(slot, address, lengths, steps.causal(phase), uniform, state.owner is slot)
    state.owner = slot
    return metadata


def _captured_slot(steps: Steps, state: FlashInferState, kind: str, lengths: Lengths, tree: Any) -> Slot:
    """A wrapper for one key, on the state's buffers and plan memory."""
    if tree is not None and state.buffers.mask is None:
        bits = state.limits.max_query_len * (state.limits.max_kv_len + 8)
        state.buffers.mask = torch.zeros(
            state.limits.max_rows * (bits // 8 + 1), dtype=torch.uint8, device=steps.context.device
        )
        state.buffers.mask_offsets = torch.zeros(
            state.limits.max_rows + 1, dtype=torch.int32, device=steps.context.device
        )
    buffers = state.buffers.first(lengths.rows)
    if tree is None:
        buffers.mask = buffers.mask_offsets = None
    slot = steps.planner.make(kind, state.lane, buffers)
    steps.planner.share(slot, state.lane, state.plan_memory)
    return slot
