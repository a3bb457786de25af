"""The backend: what a step needs is planned once in ``attn_metadata``; ``attend`` streams over blocks of keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from attn_core import (
    AttentionBatch,
    BindError,
    Context,
    GraphState,
    KvAddress,
    LayerGroup,
    MhaCache,
    MhaGeometry,
    MhaInputs,
    MhaLayer,
    StepMetadata,
    hookimpl,
)
from attn_example_vendor.streaming import Softmax, read_block

#: Rows and queries that are served together: they bound the memory of one block.
ROWS, QUERIES = 64, 256
BLOCK_SIZE = 128

Result = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Tile:
    """Queries of rows with one query length: N rows, S queries each, and the range of keys that any of them sees."""

    tokens: torch.Tensor  #: i64[N, S] indices into the token axis
    positions: torch.Tensor  #: i64[N, S] absolute positions
    pages: torch.Tensor  #: i64[N, W] page numbers
    origin: torch.Tensor  #: i64[N] position of the first key in the table
    keys: torch.Tensor  #: i64[N] number of keys
    first: int
    last: int


@dataclass
class StreamMetadata(StepMetadata):
    """The tiles of one step."""

    page_size: int = 1
    tiles: list[Tile] = field(default_factory=list)


class StreamingAttention:
    """One object per layer group. It holds options only: two steps may be in flight."""

    def __init__(self, context: Context) -> None:
        self.context = context
        geometry = context.group.geometry
        if not isinstance(geometry, MhaGeometry):
            raise BindError(f"example_vendor serves multi-head attention, not {type(geometry).__name__}")
        self.geometry = geometry
        self.block_size = int(context.options.get("block_size", BLOCK_SIZE))
        self.compute = torch.float64 if context.options.get("double_accumulation") else torch.float32

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: GraphState | None, capture: bool
    ) -> StreamMetadata:
        """Sort the rows into tiles. The page table comes in the page size that was planned."""
        address = batch.view(self.context.address_index(), "table", self.context.kernel_page_size(phase))
        metadata = StreamMetadata(phase, batch.num_tokens, batch.needs_lse, batch.partial, page_size=address.page_size)
        starts = batch.query_offsets[: batch.num_rows + 1].long()
        lengths = starts.diff()
        for queries in sorted(set(lengths.tolist()) - {0}):
            for rows in (lengths == queries).nonzero().flatten().split(ROWS):
                for low in range(0, queries, QUERIES):
                    span = torch.arange(low, min(low + QUERIES, queries))
                    metadata.tiles.append(self._tile(address, rows, starts[rows], span, queries))
        return metadata

    def _tile(
        self, address: KvAddress, rows: torch.Tensor, starts: torch.Tensor, span: torch.Tensor, queries: int
    ) -> Tile:
        """The tile of queries `span` of `rows`. Queries are the last tokens of their row's keys (bottom-right)."""
        assert address.table is not None
        keys = address.kv_lens[rows].long()
        origin = torch.zeros_like(keys) if address.origin is None else address.origin[rows].long()
        positions = (keys - queries)[:, None] + span
        first, window = int(origin.min()), self.geometry.window
        if window is not None:  # the window counts the query's own position
            first = max(first, int(positions.min()) - window + 1)
        table_rows = rows if address.table_rows is None else address.table_rows[rows].long()
        return Tile(
            tokens=starts[:, None] + span,
            positions=positions,
            pages=address.table[table_rows].long(),
            origin=origin,
            keys=keys,
            first=first,
            last=min(int(keys.max()), int(positions.max()) + 1),
        )

    @hookimpl
    def attn_extend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: StreamMetadata, out: torch.Tensor | None
    ) -> Result:
        """Prefill and mixed batches."""
        return self.attend(inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_decode(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: StreamMetadata, out: torch.Tensor | None
    ) -> Result:
        """Decode: one query a row."""
        return self.attend(inputs, layer, cache, metadata, out)

    @torch.no_grad()
    def attend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: StreamMetadata, out: torch.Tensor | None
    ) -> Result:
        """out[T, Hq, Dv] in q's dtype (0 in padded rows); lse f32[T, Hq], natural log, -inf for a row without keys."""
        shape = (inputs.q.shape[0], self.geometry.q_heads, self.geometry.v_dim)
        out = inputs.q.new_zeros(shape) if out is None else out.zero_()
        lse = torch.full(shape[:2], -math.inf)
        sinks = None if metadata.partial else self._sinks(layer)
        for tile in metadata.tiles:
            self._stream(tile, inputs.q, cache, metadata.page_size, sinks, out, lse)
        return out, lse if metadata.needs_lse else None

    def _sinks(self, layer: MhaLayer) -> torch.Tensor | None:
        if layer.k_scale is not None or layer.v_scale is not None:
            raise BindError("example_vendor does not declare quantised caches; the layer brings scales")
        return layer.sinks

    def _stream(
        self,
        tile: Tile,
        q: torch.Tensor,
        cache: MhaCache,
        page_size: int,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """One tile over its blocks of keys, from the first that anybody sees to the last."""
        geometry = self.geometry
        rows, queries = tile.tokens.shape
        heads = (rows, queries, geometry.kv_heads, geometry.ratio)
        scaled = q[tile.tokens].to(self.compute).reshape(*heads, geometry.qk_dim) * geometry.scale
        softmax = Softmax.start(heads, geometry.v_dim, sinks, self.compute)
        for low in range(tile.first, tile.last, self.block_size):
            position = torch.arange(low, min(low + self.block_size, tile.last))
            block = read_block(tile.pages, tile.origin, tile.keys, position, cache, page_size, self.compute)
            scores = torch.einsum("nsgrd,nbgd->nsgrb", scaled, block.k)
            if geometry.softcap is not None:
                scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
            hidden = ~block.held[:, None, :] | (position > tile.positions[..., None])
            if geometry.window is not None:
                hidden |= position <= tile.positions[..., None] - geometry.window
            softmax.add(scores.masked_fill_(hidden[:, :, None, None, :], -math.inf), block.v)
        result, sums = softmax.finish()
        out[tile.tokens] = result.flatten(2, 3).to(out.dtype)
        lse[tile.tokens] = sums.flatten(2, 3).float()
