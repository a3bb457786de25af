"""The reference backend with every feature: :class:`PlainBackend` plus graph capture, store and packed attention.

Its declaration is ``reference_manifest.toml`` beside this file. Each hook here belongs to a feature that is declared there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from attn_core.availability import Availability
from attn_core.batch import AttentionBatch, KvAddress, Part
from attn_core.context import Context, GraphKey, GraphLimits
from attn_core.formats import quantize
from attn_core.geometry import LayerGroup
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.manifest import Manifest, load_toml, parse_manifests
from attn_core.testing.reference_plain import PlainBackend, ReferenceMetadata, as_bytes, rows_of, stored_dtype


@dataclass(slots=True)
class ReferenceState:
    """Static buffers of one lane; one metadata object a key."""

    limits: GraphLimits
    lane: int
    table: torch.Tensor
    kv_lens: torch.Tensor
    query_offsets: torch.Tensor
    row: torch.Tensor
    index: torch.Tensor
    live: torch.Tensor
    pad_kv_len: int = 0
    metadata: dict[GraphKey, ReferenceMetadata] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        buffers = (self.table, self.kv_lens, self.query_offsets, self.row, self.index, self.live)
        return sum(buffer.nbytes for buffer in buffers)


class ReferenceBackend(PlainBackend):
    """:class:`PlainBackend` with graph capture, a store of its own and packed attention."""

    @hookimpl
    def attn_graph_state(
        self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits, lane: int
    ) -> ReferenceState:
        """Feature: graph capture. Buffers for the largest bucket; padded rows have no keys (pad_kv_len 0)."""
        device, rows = self.context.device, limits.max_rows
        columns = -(-limits.max_kv_len // min(self.context.kernel_page_size(phase) for phase in phases))

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        tokens = limits.max_tokens
        return ReferenceState(
            limits, lane, zeros(rows, columns), zeros(rows), zeros(rows + 1),
            zeros(tokens, dtype=torch.int64), zeros(tokens, dtype=torch.int64), zeros(tokens, dtype=torch.bool),
        )  # fmt: skip

    def new_metadata(self, batch: AttentionBatch, phase: str, state: ReferenceState | None) -> ReferenceMetadata:
        """With a state: the key's object; its tensors are slices of the state's buffers, into which the batch is copied."""
        if state is None:
            return super().new_metadata(batch, phase, state)
        address = batch.view(self.context.address_index(), "table", self.context.kernel_page_size(phase))
        rows, tokens = batch.padded_rows, batch.padded_tokens
        key = GraphKey(phase, rows, tokens)
        metadata = state.metadata.get(key)
        if metadata is None:
            metadata = state.metadata[key] = ReferenceMetadata(
                phase, batch.num_tokens, page_size=address.page_size, max_kv_len=state.limits.max_kv_len,
                table=state.table[:rows], kv_lens=state.kv_lens[:rows], query_offsets=state.query_offsets[: rows + 1],
                row=state.row[:tokens], index=state.index[:tokens], live=state.live[:tokens],
            )  # fmt: skip
        table = rows_of(address)
        width = min(table.shape[1], metadata.table.shape[1])
        metadata.table[:, :width].copy_(table[:, :width])
        metadata.kv_lens.copy_(address.kv_lens)
        metadata.query_offsets.copy_(batch.query_offsets)
        return metadata

    @hookimpl
    def attn_store(self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, address: KvAddress) -> None:
        """Feature: store. Quantise k and v and scatter them to the new slots; -1 writes nothing (and needs no sync)."""
        assert inputs.k is not None
        assert inputs.v is not None
        size, name = cache.k.shape[1], stored_dtype(cache)
        for x, pages, blocks, scale in (
            (inputs.k, cache.k, cache.k_blocks, layer.k_scale),
            (inputs.v, cache.v, cache.v_blocks, layer.v_scale),
        ):
            values, value_blocks = quantize(x, name, scale)
            self.scatter(pages, values, address.new_slots, size)
            if blocks is not None and value_blocks is not None:
                self.scatter(blocks, value_blocks, address.new_slots, size)

    def scatter(self, pages: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, size: int) -> None:
        """``pages[slot // size, slot % size] = values``; tokens with slot -1 write back what is there already."""
        pages, values = as_bytes(pages), as_bytes(values)
        kept = slots.clamp(min=0)
        place = (kept // size, kept % size)
        write = (slots >= 0)[:, None, None]
        pages[place] = torch.where(write, values[: len(slots)], pages[place])

    @hookimpl
    def attn_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        metadata: ReferenceMetadata,
        part: Part | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feature: ragged. Packed q[T, Hq, D] over packed k[Tk, Hk, D], v[Tk, Hk, Dv]; `part` is one chunk of a prefix."""
        key_offsets = metadata.key_offsets if part is None else part.offsets
        assert key_offsets is not None
        causal = layer.geometry.causal if part is None else part.causal
        starts = key_offsets.long()[metadata.row][:, None]
        ends = key_offsets.long()[metadata.row + 1][:, None]
        keys = torch.arange(k.shape[0], device=q.device)
        place = keys - starts
        position = ends - starts - self.query_counts(metadata)[metadata.row][:, None] + metadata.index[:, None]
        seen = (keys >= starts) & (keys < ends) & metadata.live[:, None]
        if causal or part is None:
            seen &= self.in_range(position, place, replace(layer.geometry, causal=causal))
        queries = self.queries(q, layer)
        logits = self.logits(queries, k.float().expand(len(q), *k.shape), seen, layer.geometry)
        rows = metadata.query_offsets.shape[0] - 1
        return self.softmax([logits], [v.float().expand(rows, *v.shape)], layer, metadata, None)


# --- the plugin's side ----------------------------------------------------------------------------------------------------


def load_manifest() -> Manifest:
    """The manifest beside this file, parsed."""
    path = Path(__file__).with_name("reference_manifest.toml")
    return parse_manifests(load_toml(path.read_text("utf-8"), path.name), package="attn-core", version="0")[0]


@hookimpl
def attn_probe(manifest: Manifest, platform: Any) -> Mapping[str, Availability]:
    """It runs wherever torch does."""
    return {variant.name: Availability(True) for variant in manifest.variants}


@hookimpl
def attn_create(manifest: Manifest, variant: str, context: Context) -> ReferenceBackend:
    """The backend object."""
    return ReferenceBackend(context)
