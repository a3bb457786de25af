"""The reference backend with every feature: :class:`PackedBackend` plus graph capture, store and gather.

Its declaration is ``reference_manifest.toml`` beside this file. Each hook here belongs to a feature that is declared there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from attn_core.paging import convert
from attn_core.testing.reference_packed import PackedBackend
from attn_core.testing.reference_plain import (
    ReferenceMetadata,
    as_bytes,
    fetch,
    rows_of,
    stored_dtype,
)


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
    origin: torch.Tensor
    pad_kv_len: int = 0
    metadata: dict[GraphKey, ReferenceMetadata] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        buffers = (self.table, self.kv_lens, self.query_offsets, self.row, self.index, self.live, self.origin)
        return sum(buffer.nbytes for buffer in buffers)


class ReferenceBackend(PackedBackend):
    """:class:`PackedBackend` with graph capture and a store and gather of its own."""

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
            zeros(rows),
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
                origin=state.origin[:rows],
            )  # fmt: skip
        table = rows_of(address)
        width = min(table.shape[1], metadata.table.shape[1])
        metadata.table[:, :width].copy_(table[:, :width])
        metadata.kv_lens.copy_(address.kv_lens)
        origin = state.origin[:rows]
        if address.origin is None:
            origin.zero_()
        else:
            origin.copy_(address.origin)
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
    def attn_gather(
        self, cache: MhaCache, address: KvAddress, part: Part | None, layer: MhaLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feature: gather. Positions start to start + length of each row, packed; needs exact lengths on the host."""
        kv_lens = address.kv_lens.tolist()
        origins = [0] * len(kv_lens) if address.origin is None else address.origin.tolist()
        starts = origins if part is None else part.start.tolist()
        lens = [n - s for n, s in zip(kv_lens, starts, strict=True)] if part is None else part.offsets.diff().tolist()
        lines, pages = rows_of(table_of(address)), []
        for row, (start, length) in enumerate(zip(starts, lens, strict=True)):
            keys = torch.arange(start, start + length, device=lines.device)
            column = (keys - origins[row]) // address.page_size
            pages.append(torch.stack([lines[row, column].long(), keys % address.page_size]))
        page, offset = self.gathered(torch.cat(pages, dim=1))
        k = fetch(cache.k, cache.k_blocks, page, offset, layer.k_scale)
        return k, fetch(cache.v, cache.v_blocks, page, offset, layer.v_scale)

    def gathered(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages and offsets i64[2, n] in the order in which they are returned."""
        return places[0], places[1]


def table_of(address: KvAddress) -> KvAddress:
    """The address as a dense table with its own page size."""
    return convert(address, "table", address.page_size)


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
