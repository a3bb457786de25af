"""A plain attention backend in fp32 torch: slow, right, and easy to read from top to bottom.

This is what a newcomer writes: ``attn_metadata``, ``attn_extend``, ``attn_decode`` and a manifest. Features that need hooks
of their own (graph capture, store, ragged) are added by :mod:`attn_core.testing.reference_backend`.
It is also the subject of the kit's own tests: each planted fault overrides one of its small methods.

No step depends on a length on the host beyond upper bounds, so a step can be captured. Keys are visited in blocks of
:data:`BLOCK`, so that a row's sums are made in one order whatever else is in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attn_core.batch import AttentionBatch, KvAddress, Tree
from attn_core.context import Context, StepMetadata
from attn_core.formats import dequantize, dtype_name
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer

#: Keys that are visited at a time.
BLOCK = 64
_EMPTY = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class ReferenceMetadata(StepMetadata):
    """One step: the page table and, for every token, its row, its absolute position and whether it is real."""

    page_size: int = 1
    max_kv_len: int = 0
    table: torch.Tensor = _EMPTY  #: i32[R, W]
    kv_lens: torch.Tensor = _EMPTY  #: i32[R]
    query_offsets: torch.Tensor = _EMPTY  #: i32[R + 1]
    origin: torch.Tensor | None = None  #: i32[R] position of column 0 (trimmed pools)
    key_offsets: torch.Tensor | None = None  #: i32[R + 1], packed keys
    num_rows: int = 0
    tree: Tree | None = None
    spans: torch.Tensor | None = None
    row: torch.Tensor = _EMPTY  #: i64[T]
    index: torch.Tensor = _EMPTY  #: i64[T] place among the row's queries
    live: torch.Tensor = _EMPTY  #: bool[T]


class PlainBackend:
    """The backend object: one per (model, layer group, variant). It holds no state of a step."""

    def __init__(self, context: Context) -> None:
        self.context = context

    # --- metadata: once a step ------------------------------------------------------------------------------------------

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: Any, capture: bool
    ) -> ReferenceMetadata:
        """Refer to the batch's tensors; what every token needs is filled in by :meth:`attn_metadata_in_graph`."""
        metadata = self.new_metadata(batch, phase, state)
        metadata.num_tokens, metadata.num_rows = batch.num_tokens, batch.num_rows
        metadata.needs_lse, metadata.partial = batch.needs_lse, batch.partial
        metadata.tree, metadata.spans, metadata.key_offsets = batch.tree, batch.spans, batch.key_offsets
        return metadata

    def new_metadata(self, batch: AttentionBatch, phase: str, state: Any) -> ReferenceMetadata:
        """The tables of an eager step: views of the batch, and room for what every token needs."""
        metadata = ReferenceMetadata(phase, batch.num_tokens, query_offsets=batch.query_offsets)
        if batch.key_offsets is None:
            metadata.page_size = self.context.kernel_page_size(phase)
            address = batch.view(self.context.address_index(), "table", metadata.page_size)
            metadata.table, metadata.kv_lens = rows_of(address), address.kv_lens
            metadata.max_kv_len, metadata.origin = address.max_kv_len, address.origin
        shape, device = (batch.padded_tokens,), self.context.device
        metadata.row, metadata.index = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
        metadata.live = torch.empty(shape, dtype=torch.bool, device=device)
        return metadata

    @hookimpl
    def attn_metadata_in_graph(self, metadata: ReferenceMetadata) -> None:
        """Row, place in the row and liveness of every token, from the offsets on the device."""
        tokens = torch.arange(metadata.row.shape[0], device=metadata.row.device)
        offsets = metadata.query_offsets.long()
        rows = offsets.shape[0] - 1
        found = torch.searchsorted(offsets[1:], tokens, right=True)
        metadata.row.copy_(found.clamp(max=max(rows - 1, 0)))
        metadata.index.copy_(tokens - offsets[metadata.row])
        metadata.live.copy_(self.live_tokens(metadata, tokens, found < rows))

    # --- attention: once a layer ----------------------------------------------------------------------------------------

    @hookimpl
    def attn_extend(
        self,
        inputs: MhaInputs,
        layer: MhaLayer,
        cache: MhaCache,
        metadata: ReferenceMetadata,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """prefill, draft_extend, verify and mixed steps."""
        return self.attend(inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_decode(
        self,
        inputs: MhaInputs,
        layer: MhaLayer,
        cache: MhaCache,
        metadata: ReferenceMetadata,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """decode and draft: the same computation with one query a row."""
        return self.attend(inputs, layer, cache, metadata, out)

    def attend(
        self,
        inputs: MhaInputs,
        layer: MhaLayer,
        cache: MhaCache,
        metadata: ReferenceMetadata,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Visit the keys block by block, then one softmax over all blocks."""
        q = self.queries(inputs.q, layer)
        logits, values = [], []
        for start in range(0, max(metadata.max_kv_len, 1), BLOCK):
            keys = torch.arange(start, start + BLOCK, device=q.device)
            k, v = self.read(cache, layer, metadata, keys)
            visible = self.visible(metadata, keys, layer.geometry)
            logits.append(self.logits(q, k[metadata.row], visible, layer.geometry))
            values.append(v)
        return self.softmax(logits, values, layer, metadata, out)

    def logits(self, q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, geometry: MhaGeometry) -> torch.Tensor:
        """q f32[T, Hk, ratio, D], k f32[T, B, Hk, D], visible bool[T, B] -> f32[T, Hk, ratio, B]."""
        scores = torch.einsum("tgrd,tbgd->tgrb", q, k) * self.scale(geometry)
        if geometry.softcap is not None:
            scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
        return scores.masked_fill(~visible[:, None, None, :], -math.inf)

    def softmax(
        self,
        logits: list[torch.Tensor],
        values: list[torch.Tensor],
        layer: MhaLayer,
        metadata: ReferenceMetadata,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights and weighted sums; the sinks of the layer enter the denominator unless the result is partial."""
        tokens, groups, ratio, _ = logits[0].shape
        largest = torch.stack([block.amax(-1) for block in logits]).amax(0)
        none = largest == -math.inf
        sinks = None if layer.sinks is None or metadata.partial else layer.sinks.float().view(1, groups, ratio)
        top = largest.masked_fill(none, 0.0)
        total = torch.zeros_like(top) if sinks is None else self.sink_weight(sinks, top)
        summed = torch.zeros(tokens, groups, ratio, values[0].shape[-1], device=top.device)
        for block, v in zip(logits, values, strict=True):
            weights = torch.exp(block - top[..., None])
            total = total + weights.sum(-1)
            summed = summed + torch.einsum("tgrb,tbgd->tgrd", weights, v[metadata.row])
        result = (summed / total[..., None]).masked_fill(none[..., None], 0.0).flatten(1, 2)
        lse = self.finish_lse(top + torch.log(total), none).flatten(1, 2)
        return self.write(result, out), lse if metadata.needs_lse else None

    # --- small steps, each easy to get wrong ------------------------------------------------------------------------------

    def queries(self, q: torch.Tensor, layer: MhaLayer) -> torch.Tensor:
        """q[T, Hq, D] as f32[T, Hk, ratio, D]: query head h reads KV head h // ratio."""
        geometry = layer.geometry
        name = dtype_name(q.dtype)
        values = dequantize(q, None, name, layer.q_scale if name.startswith("fp8") else None)
        return values.view(len(q), geometry.kv_heads, geometry.ratio, geometry.qk_dim)

    def scale(self, geometry: MhaGeometry) -> float:
        """The softmax scale is the layer's; it is never computed from a width."""
        return geometry.scale

    def read(
        self, cache: MhaCache, layer: MhaLayer, metadata: ReferenceMetadata, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys f32[R, B, Hk, Dk] and values f32[R, B, Hk, Dv] at positions `keys`; what a row does not have is 0.

        The pool's pages may be larger than those of the table: a slot's number is the same in both.
        """
        page, offset = self.locate(metadata, keys)
        slot, pool_page = page * metadata.page_size + offset, cache.k.shape[1]
        page, offset = slot // pool_page, slot % pool_page
        inside = keys < metadata.kv_lens[:, None]
        if metadata.origin is not None:
            inside &= keys >= metadata.origin[:, None]
        inside = inside[..., None, None]
        k = fetch(cache.k, cache.k_blocks, page, offset, layer.k_scale)
        v = fetch(cache.v, cache.v_blocks, page, offset, layer.v_scale)
        return torch.where(inside, k, 0.0), torch.where(inside, v, 0.0)

    def locate(self, metadata: ReferenceMetadata, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and offset of each position: i64[R, B] and i64[B]. Columns outside the table are clamped (never visible).

        The origin of a trimmed pool is a whole number of pages, so it moves columns and leaves offsets as they are.
        """
        last = max(metadata.table.shape[1] - 1, 0)
        if metadata.origin is None:
            return metadata.table[:, (keys // metadata.page_size).clamp(max=last)].long(), keys % metadata.page_size
        column = (keys - metadata.origin.long()[:, None]) // metadata.page_size
        return metadata.table.gather(1, column.clamp(0, last)).long(), keys % metadata.page_size

    def visible(self, metadata: ReferenceMetadata, keys: torch.Tensor, geometry: MhaGeometry) -> torch.Tensor:
        """bool[T, B]: which of the keys each token sees."""
        kv_len = metadata.kv_lens.long()[metadata.row][:, None]
        queries = self.query_counts(metadata)[metadata.row][:, None]
        prefix = kv_len - queries
        if metadata.tree is not None:
            seen = self.visible_in_tree(metadata, metadata.tree, keys, prefix, geometry)
        else:
            position = prefix + metadata.index[:, None]
            seen = self.in_range(position, keys, geometry) | self.in_span(metadata, position, keys, geometry)
        return seen & (keys < kv_len) & metadata.live[:, None]

    def query_counts(self, metadata: ReferenceMetadata) -> torch.Tensor:
        """i64[R] query tokens of each row."""
        return metadata.query_offsets.long().diff()

    def live_tokens(self, metadata: ReferenceMetadata, tokens: torch.Tensor, in_rows: torch.Tensor) -> torch.Tensor:
        """Tokens that belong to a row; rows of padding have no keys, so that they see nothing either."""
        return in_rows

    def in_range(self, position: torch.Tensor, keys: torch.Tensor, geometry: MhaGeometry) -> torch.Tensor:
        """Causal (bottom-right), windows and chunks; all by absolute position."""
        seen = keys >= self.first_key(position, geometry)
        if geometry.window_right is not None:
            seen &= keys <= position + geometry.window_right
        elif geometry.causal:
            seen &= keys <= position
        if geometry.chunk is not None:
            seen &= keys // geometry.chunk == position // geometry.chunk
        return seen

    def first_key(self, position: torch.Tensor, geometry: MhaGeometry) -> torch.Tensor:
        """The oldest key in the window, which counts the query's own position."""
        return position - geometry.window + 1 if geometry.window is not None else torch.zeros_like(position)

    def in_span(
        self, metadata: ReferenceMetadata, position: torch.Tensor, keys: torch.Tensor, geometry: MhaGeometry
    ) -> torch.Tensor:
        """Both in one span of the row, and nearer to each other than the window."""
        seen = torch.zeros(position.shape[0], keys.shape[0], dtype=torch.bool, device=keys.device)
        if metadata.spans is None:
            return seen
        for row, start, end in metadata.spans.long().unbind(0) if len(metadata.spans) else ():
            both = (position >= start) & (position < end) & (keys >= start) & (keys < end)
            seen |= both & (metadata.row == row)[:, None]
        return seen if geometry.window is None else seen & ((position - keys).abs() < geometry.window)

    def visible_in_tree(
        self, metadata: ReferenceMetadata, tree: Tree, keys: torch.Tensor, prefix: torch.Tensor, geometry: MhaGeometry
    ) -> torch.Tensor:
        """The prefix is seen by position; among the drafts the bits decide. Positions of drafts are prefix + depth."""
        drafts = tree.depth.shape[1]
        me = metadata.index.clamp(0, drafts - 1)
        other = (keys - prefix).clamp(0, drafts - 1)
        depth = tree.depth.long()[metadata.row]
        position = prefix + depth.gather(1, me[:, None])
        key_position = torch.where(keys < prefix, keys.expand_as(other), prefix + depth.gather(1, other))
        allowed = self.tree_bit(tree, metadata.row, me, other)
        return self.in_range(position, key_position, geometry) & ((keys < prefix) | allowed)

    def tree_bit(self, tree: Tree, row: torch.Tensor, me: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """bool[T, B]: draft `me` sees draft `other` by the mask bits of its row."""
        words = tree.mask_bits[row, me].long().gather(1, other // 32)
        return (words >> (other % 32)) & 1 == 1

    def sink_weight(self, sinks: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """exp(sink - top): what the sinks add to the denominator, and to nothing else."""
        return torch.exp(sinks - top)

    def finish_lse(self, lse: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
        """Natural logarithm, -inf where a token sees no key."""
        return lse.masked_fill(none, -math.inf)

    def write(self, result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Into `out` if it was given."""
        return result.to(self.context.dtype) if out is None else out.copy_(result)


# --- helpers without state ----------------------------------------------------------------------------------------------


def rows_of(address: KvAddress) -> torch.Tensor:
    """The page table i32[R, W] of a dense address, in row order."""
    assert address.table is not None
    return address.table if address.table_rows is None else address.table[address.table_rows.long()]


def stored_dtype(cache: MhaCache) -> str:
    """The element type's name: fp4 has block scales beside it."""
    return "fp4" if cache.k_blocks is not None else dtype_name(cache.k.dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8, which every torch can index; other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def fetch(
    pages: torch.Tensor, blocks: torch.Tensor | None, page: torch.Tensor, offset: torch.Tensor, scale: Any
) -> torch.Tensor:
    """``pages[page, offset]`` as fp32 values, through the block scales and the layer's scale."""
    data = as_bytes(pages)[page, offset].view(pages.dtype)
    picked = None if blocks is None else as_bytes(blocks)[page, offset].view(blocks.dtype)
    return dequantize(data, picked, "fp4" if blocks is not None else dtype_name(pages.dtype), scale)
