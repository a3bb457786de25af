"""The backend objects: ``mha`` over pages, and ``mm`` over packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attn_core.context import Context, GraphKey, GraphLimits
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_triton.call import Pages, as_bytes, attend, scale_of
from attn_triton.launch import INVARIANT_SHARE, SHARE_FLOOR, find_launch
from attn_triton.metadata import (
    Buffers,
    TritonMetadata,
    TritonState,
    allocate,
    check_captured,
    count_items,
    describe,
    fill,
)
from attn_triton.rules import Rules, Tile, power_of_two

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, KvAddress, Part

#: Most rows (tokens times heads) of a tile of the split kernel.
MOST_SPLIT_ROWS = 128


def device_facts(device: torch.device) -> tuple[str, int]:
    """(architecture, multiprocessors); the interpreter is a device of four."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        arch = getattr(facts, "gcnArchName", "").split(":")[0] if torch.version.hip else f"sm{facts.major}{facts.minor}"
        return arch, facts.multi_processor_count
    if device.type == "xpu":
        return "xpu", int(getattr(torch.xpu.get_device_properties(device), "gpu_subslice_count", 32))
    return "interpreter", 4


class TritonBackend:
    """One layer group. Holds no state of a step: metadata and graph state do."""

    def __init__(self, context: Context) -> None:
        geometry = context.group.geometry
        assert isinstance(geometry, MhaGeometry)
        self.context, self.geometry = context, geometry
        self.rules = Rules.of(geometry)
        self.arch, self.processors = device_facts(context.device)
        self.dim = max(geometry.qk_dim, geometry.v_dim)
        self._pages: dict[int, Pages] = {}

    # --- once a step --------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: TritonState | None, capture: bool
    ) -> TritonMetadata:
        """Buffers and choices of one step; one launch fills them. Nothing waits for the device."""
        address = None if batch.key_offsets is not None else batch.kv(self.address_index())
        split = self.splits(batch, phase, address)
        tile = self.tile(split, batch.max_query_len)
        floor, target = self.shares(tile)
        max_kv_len = 0 if address is None else (state.limits.max_kv_len if state is not None else address.max_kv_len)
        items = count_items(batch, tile, split, max_kv_len, floor, target)
        key = GraphKey(phase, batch.padded_rows, batch.padded_tokens, batch.max_query_len)
        metadata = state.metadata.get(key) if state is not None else None
        if metadata is None:
            metadata = TritonMetadata(phase, batch.num_tokens, split=split, tile=tile, num_items=items)
            describe(metadata, batch, address)
            if state is not None:
                metadata.buffers = state.buffers
                state.metadata[key] = metadata
            else:
                metadata.buffers = self.buffers(
                    batch.padded_rows, items, tile, split, batch.padded_tokens, metadata.has_spans
                )
        else:
            check_captured(metadata, batch, address)
        metadata.num_tokens, metadata.key_offsets = batch.num_tokens, batch.key_offsets
        if state is not None and batch.key_offsets is not None:
            metadata.key_offsets = state.buffers.kv_lens[: len(batch.key_offsets)].copy_(batch.key_offsets)
        metadata.needs_lse, metadata.partial = batch.needs_lse, batch.partial
        if batch.padded_rows:
            fill(metadata, batch, address, self.rules.window, floor, target)
        return metadata

    def address_index(self) -> int:
        """The pool that this group reads: cross attention has its own."""
        index = self.context.pool_index
        return index["cross"] if "attend" not in index else index["attend"]

    def splits(self, batch: AttentionBatch, phase: str, address: KvAddress | None) -> bool:
        """Whether keys are split over programs: decode, and short queries of other phases."""
        return address is not None and self.splits_rows_of(batch.max_query_len, phase)

    def splits_rows_of(self, query_len: int, phase: str) -> bool:
        """Whether rows of so many queries, over pages, split their keys."""
        if self.context.batch_invariant and phase == "prefill":
            return False
        return power_of_two(max(1, query_len)) * self.group_size(True, query_len) <= MOST_SPLIT_ROWS

    def group_size(self, split: bool, query_len: int) -> int:
        """Query heads of one KV head that share a tile."""
        return min(power_of_two(self.geometry.ratio), 64) if split else 1

    def tile(self, split: bool, query_len: int) -> Tile:
        """The tile of a step, from the launch table."""
        bits = self.stored_bits()
        launch = find_launch(self.arch, split, bits, self.dim)
        group = self.group_size(split, query_len)
        block_m = max(16, power_of_two(max(1, query_len)) * group) if split else launch.block_m
        block_n = launch.block_n if block_m <= 64 else min(launch.block_n, 64)
        return Tile(
            block_m,
            block_n,
            group,
            -(-self.geometry.ratio // group),
            launch.warps,
            launch.stages,
            launch.resident,
            launch.ahead,
            self.arch == "sm90" and not split and block_m == 128,
            self.processors,
        )

    def stored_bits(self) -> int:
        """Bits of a stored key: 4, 8, 16 or 32."""
        pool = self.context.pools.get("attend") or self.context.pools.get("cross")
        name = pool.dtype if pool is not None else ""
        if name == "fp4":
            return 4
        if name.startswith("fp8"):
            return 8
        return 32 if self.context.dtype == torch.float32 else 16

    def shares(self, tile: Tile) -> tuple[int, int | None]:
        """(fewest keys of a share, items to spread all keys over); the second is None when shares are fixed."""
        if self.context.batch_invariant:
            return max(INVARIANT_SHARE, tile.block_n), None
        heads = self.geometry.kv_heads * tile.head_blocks
        return max(SHARE_FLOOR, tile.block_n), max(1, self.processors * tile.resident // heads)

    def buffers(self, rows: int, items: int, tile: Tile, split: bool, tokens: int, spans: bool) -> Buffers:
        """Device memory for a step of these sizes."""
        parts = items * self.geometry.kv_heads * tile.head_blocks * tile.block_m if split else 0
        return allocate(rows, items, tokens if spans else 0, parts, self.geometry.v_dim, self.context.device)

    @hookimpl
    def attn_graph_state(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits, lane: int) -> TritonState:
        """Buffers for the largest of all steps that the limits allow."""
        most_items, most_parts = 1, 1
        for query_len in {1, limits.max_query_len, *(1 << n for n in range(limits.max_query_len.bit_length()))}:
            for split in (True, False):
                tile = self.tile(split, min(query_len, limits.max_query_len))
                if split and tile.block_m > MOST_SPLIT_ROWS:
                    continue
                floor, target = self.shares(tile)
                most = limits.max_rows * max(1, -(-limits.max_kv_len // floor))
                items = min(most, target + limits.max_rows) if target is not None else most
                items = (items if split else limits.max_rows + 2) + -(-limits.max_tokens // tile.tokens) + 1
                most_items = max(most_items, items)
                if split:
                    most_parts = max(most_parts, items * self.geometry.kv_heads * tile.head_blocks * tile.block_m)
        buffers = allocate(
            limits.max_rows, most_items, limits.max_tokens, most_parts, self.geometry.v_dim, self.context.device
        )
        return TritonState(limits, lane, buffers, most_items)

    @hookimpl
    def attn_warmup(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits) -> None:
        """Compile every kernel that steps within `limits` launch."""
        from attn_triton.warmup import warm

        warm(self, group, phases, limits)

    # --- once a layer -------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_extend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: TritonMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries against the cache, which holds the new tokens already: q[T, Hq, D] -> out[T, Hq, DV]."""
        q = inputs.q
        if out is None:
            out = torch.empty((q.shape[0], q.shape[1], self.geometry.v_dim), dtype=self.context.dtype, device=q.device)
        return attend(q, self.pages(cache), layer, self.rules, metadata, out, self.arch)

    @hookimpl
    def attn_decode(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: TritonMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :meth:`attn_extend`: which kernel runs is the metadata's choice."""
        return self.attn_extend(inputs, layer, cache, metadata, out)  # type: ignore[no-any-return]

    @hookimpl
    def attn_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        metadata: TritonMetadata,
        part: Part | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Packed q[T, Hq, D] over packed k[Tk, Hk, D], v[Tk, Hk, DV]; `part` is one chunk of a prefix."""
        offsets = metadata.key_offsets if part is None else part.offsets
        rules = self.rules if part is None else Rules.of(self.geometry, part.causal)
        out = torch.empty((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
        return attend(q, Pages.packed(k, v), layer, rules, metadata, out, self.arch, offsets)

    @hookimpl
    def attn_store(self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, address: KvAddress) -> None:
        """Scatter k and v to ``address.new_slots``, quantised; -1 writes nothing. One launch."""
        from attn_triton.kernels.store import store_kernel

        k, v, slots = inputs.k, inputs.v, address.new_slots
        if k is None or v is None or not slots.numel():
            return
        pages = self.pages(cache)
        (to_k, to_v, kb, vb), s = pages.store_arguments
        k_scale, k_scales = scale_of(layer.k_scale, pages.kind)
        v_scale, v_scales = scale_of(layer.v_scale, pages.kind)
        heads, dim, v_dim = k.shape[1], k.shape[2], v.shape[2]
        k, v = as_bytes(k) if pages.kind and k.dtype.itemsize == 1 else k, v
        block_d, block_dv = power_of_two(dim, 16), power_of_two(v_dim, 16)
        block_h = min(power_of_two(heads), max(1, 2048 // max(block_d, block_dv)))
        store_kernel[(slots.numel(), -(-heads // block_h))](
            k, v, to_k, to_v, kb, vb, slots, k_scale, v_scale, heads,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), *s[0:3], *s[6:9], *s[3:6], *s[9:12],
            PAGE=pages.page_size, KIND=pages.kind, K_SCALES=k_scales, V_SCALES=v_scales,
            D=dim, DV=v_dim, BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_H=block_h, num_warps=4,
        )  # fmt: skip

    def forget(self, cache: MhaCache) -> None:
        """Drop what :meth:`pages` keeps of a cache that was used for a moment."""
        self._pages.pop(id(cache), None)

    def pages(self, cache: MhaCache) -> Pages:
        """The cache's kernel arguments, made once: caches are bound once and never move."""
        found = self._pages.get(id(cache))
        if found is None or found.cache is not cache:
            found = self._pages[id(cache)] = Pages(cache)
        return found
