"""The ``torch_native`` backend of kind ``mha``: fused torch kernels over pages that are read in place, on any device.

One object serves one layer group. What a step needs is planned once, in ``attn_metadata``: short rows (decode, verify)
become equal work units (:mod:`attn_torch.units`), long ones are planned one by one (:mod:`attn_torch.longrows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attn_core.batch import AttentionBatch, KvAddress, Part
from attn_core.context import Context, GraphState, StepMetadata
from attn_core.errors import BatchError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, Scale
from attn_torch.engines import choose, flash_cpu
from attn_torch.execute import Call, part_bytes, run_long_row, run_units
from attn_torch.longrows import Budget, LongRow, plan_long_row
from attn_torch.merging import Results, finish
from attn_torch.packed import PackedPlan, attend_packed, plan_packed
from attn_torch.reader import Buffers, bytes_per_key
from attn_torch.rules import Rules, StepLengths, rows_with_keys, tokens_of
from attn_torch.units import STEP, Sizes, UnitPlan, plan_bounded, plan_units

#: Rows with more query tokens than this are long.
SHORT = 64
#: Keys of a unit on a CPU with at most as many threads as KV heads, and with more (then one row must feed many threads).
CHUNK = 2048
CHUNK_MANY_THREADS = 512
#: Bytes of keys and values that are read before they are used: they should still be in a cache then. Smaller tiles gain little
#: and suffer where other programs run, for every tile waits for its slowest thread three times.
TILE_BYTES = 32 << 20
#: The same on a device, where only memory limits it.
DEVICE_TILE_BYTES = 512 << 20
#: A tail narrower than this many bytes is not worth a shape of its own.
TAIL_BYTES = 256 << 10
#: Elements of one mask; elements of all masks that are kept for a step's other layers; bytes of a long row's key block.
MASK = 8 << 20
KEPT_MASKS = 32 << 20
KEY_BLOCK_BYTES = 256 << 20
#: Logits that are held at once where no fused kernel is used.
LOGITS = 32 << 20


@dataclass(slots=True)
class NativeMetadata(StepMetadata):
    """One step's plan for one group. ``blank`` are tokens of rows without keys; tokens from ``num_tokens`` on are padding."""

    page_size: int = 1
    lane: int = 0
    units: list[UnitPlan] = field(default_factory=list)
    long_rows: list[LongRow] = field(default_factory=list)
    blank: torch.Tensor | None = None
    packed: PackedPlan | None = None
    buffers: dict[torch.dtype, Buffers] = field(default_factory=dict)


class TorchNative:
    """A backend object for one layer group. It holds no state of a step; workspaces come from the context, per lane."""

    def __init__(self, context: Context) -> None:
        geometry = context.group.geometry
        assert isinstance(geometry, MhaGeometry)
        self.context, self.geometry = context, geometry
        self.rules = Rules.of(geometry)
        self.engine = choose(context.device, geometry.softcap)
        self.fused = geometry.softcap is None
        wide = max(geometry.qk_dim, geometry.v_dim)
        same = geometry.qk_dim == geometry.v_dim
        self.width = wide if self.engine is flash_cpu and not same else None
        self.widest = wide
        self.compute = context.dtype if context.dtype.itemsize > 1 else torch.bfloat16

    # --- metadata -------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: GraphState | None, capture: bool
    ) -> NativeMetadata:
        """The step's plan. Raises :class:`BatchError` under a graph, which this backend does not declare."""
        if state is not None or capture:
            raise BatchError("torch_native cannot be captured in a graph", fix="plan without CUDA graphs")
        metadata = NativeMetadata(
            phase, batch.num_tokens, batch.needs_lse, batch.partial, None, "layers", lane=batch.lane
        )
        if batch.key_offsets is not None:
            metadata.packed = plan_packed(batch, self.rules)
        if batch.addresses and batch.num_tokens:
            address = batch.kv(self._pool())
            address = batch.view(self._pool(), "table", address.page_size)
            metadata.page_size = address.page_size
            self._plan(metadata, batch, address)
        return metadata

    def _pool(self) -> int:
        pools = self.context.pool_index
        return pools["attend"] if "attend" in pools else pools["cross"]

    def _plan(self, metadata: NativeMetadata, batch: AttentionBatch, address: KvAddress) -> None:
        on_device = StepLengths.of(batch, address)
        step = on_device.on_host(batch, address)
        sizes = self._sizes(address.page_size)
        if step is None:
            queries = _uniform_queries(batch)
            if queries is not None:
                metadata.units.append(
                    plan_bounded(on_device, address, batch.num_rows, queries, self.rules, self.geometry.ratio, sizes)
                )
                return
            step = on_device.fetch()
        self._plan_rows(metadata, step, on_device, address, sizes)

    def _plan_rows(
        self, metadata: NativeMetadata, step: StepLengths, on_device: StepLengths, address: KvAddress, sizes: Sizes
    ) -> None:
        """Sort the rows into classes of equal query lengths, and long ones; the lengths are on the host."""
        sees = rows_with_keys(self.rules, step)
        classes = torch.where(step.query_len <= 8, step.query_len, (step.query_len + 7) // 8 * 8)
        classes = torch.where(step.query_len <= SHORT, classes, SHORT + 1).masked_fill(~sees, 0)
        for queries in torch.unique(classes).tolist():
            rows = (classes == queries).nonzero().flatten()
            if 0 < queries <= SHORT:
                metadata.units.append(
                    plan_units(step, on_device, address, rows, queries, self.rules, self.geometry.ratio, sizes)
                )
            elif queries > SHORT:
                budget = Budget(self._mask_elements(), KEPT_MASKS, self._keys_at_once())
                for row in rows.tolist():
                    metadata.long_rows.append(plan_long_row(step, on_device, address, row, self.rules, budget))
        blank = tokens_of(step, ~sees)
        metadata.blank = None if blank is None else blank.to(address.kv_lens.device, non_blocking=True)

    def _sizes(self, page_size: int) -> Sizes:
        """How short rows are cut. On a device one unit is a whole row: its kernels split the keys themselves."""
        per_key = bytes_per_key(self.geometry.kv_heads, self.widest, self.compute)
        smallest = 1 << max(5, (TAIL_BYTES // per_key - 1).bit_length())
        if self.context.device.type != "cpu":
            return Sizes(None, min(smallest, 1024), DEVICE_TILE_BYTES // per_key)
        threads = torch.get_num_threads()
        chunk = CHUNK if threads <= self.geometry.kv_heads else CHUNK_MANY_THREADS
        tile = max(TILE_BYTES // per_key, CHUNK_MANY_THREADS * -(-2 * threads // self.geometry.kv_heads))
        return Sizes(chunk, min(smallest, STEP), tile, self.context.batch_invariant)

    def _mask_elements(self) -> int:
        return MASK if self.fused else min(MASK, LOGITS // self.geometry.q_heads)

    def _keys_at_once(self) -> int | None:
        """On a device the fused kernel returns no LSE to merge by: a row's keys are one block."""
        if self.context.device.type != "cpu" and self.fused:
            return None
        return max(1024, KEY_BLOCK_BYTES // bytes_per_key(self.geometry.kv_heads, self.widest, self.compute))

    # --- layers ---------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_extend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: NativeMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """prefill, draft_extend, verify and mixed batches: out[T, Hq, Dv] and lse f32[T, Hq] if the metadata asks for it."""
        return self._attend(inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_decode(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: NativeMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """decode and draft: the same as :meth:`attn_extend`."""
        return self._attend(inputs, layer, cache, metadata, out)

    @torch.no_grad()
    def _attend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: NativeMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = inputs.q.shape[0]
        results = self._results(tokens, layer, metadata, out)
        call = self._call(inputs.q, layer, cache, metadata)
        for plan in metadata.units:
            run_units(plan, call, results, self._parts(plan, metadata.lane))
        for row in metadata.long_rows:
            run_long_row(row, call, results)
        if metadata.blank is not None:
            results.blank(metadata.blank)
        if metadata.num_tokens < tokens:
            results.blank(slice(metadata.num_tokens, tokens))
        finish(results, layer, metadata.partial)
        return results.out, results.lse if metadata.needs_lse else None

    def _results(self, tokens: int, layer: MhaLayer, metadata: NativeMetadata, out: torch.Tensor | None) -> Results:
        heads, device = self.geometry.q_heads, self.context.device
        if out is None:
            out = torch.empty(tokens, heads, self.geometry.v_dim, dtype=self.compute, device=device)
        sinks = layer.sinks is not None and not metadata.partial
        lse = torch.empty(tokens, heads, device=device) if metadata.needs_lse or sinks else None
        return Results(out, lse)

    def _call(self, q: torch.Tensor, layer: MhaLayer, cache: MhaCache, metadata: NativeMetadata) -> Call:
        geometry, scale = self.geometry, self.geometry.scale
        if q.dtype.itemsize == 1:
            q = q.to(self.compute)
            q, scale = _scaled(q, layer.q_scale, scale, 1)
        q, scale = _scaled(q, layer.k_scale, scale, geometry.ratio)
        buffers = metadata.buffers.get(q.dtype)
        if buffers is None:
            buffers = metadata.buffers[q.dtype] = self._buffers(metadata, q.dtype)
        return Call(q, cache, geometry.kv_heads, geometry.v_dim, scale, self.engine, buffers)

    def _buffers(self, metadata: NativeMetadata, dtype: torch.dtype) -> Buffers:
        """Room for the largest block of the step."""
        blocks = [tile.block for plan in metadata.units for tile in plan.tiles]
        blocks += [key_block.block for row in metadata.long_rows for key_block in row.blocks]
        keys = max((block.units * block.width for block in blocks), default=0)
        geometry = self.geometry
        half = bytes_per_key(geometry.kv_heads, self.widest, dtype) // 2 * keys
        return Buffers(
            self.context.workspace("torch_native.k", half, metadata.lane),
            self.context.workspace("torch_native.v", half, metadata.lane),
            dtype, metadata.page_size, geometry.kv_heads, (geometry.qk_dim, geometry.v_dim), self.width,
        )  # fmt: skip

    def _parts(self, plan: UnitPlan, lane: int) -> torch.Tensor | None:
        nbytes = part_bytes(plan, self.geometry.q_heads, self.geometry.v_dim)
        return self.context.workspace("torch_native.parts", nbytes, lane)[:nbytes] if nbytes else None

    @hookimpl
    def attn_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        metadata: NativeMetadata,
        part: Part | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Packed attention without a cache: q[T, Hq, Dk] over k[Tk, Hk, Dk], v[Tk, Hk, Dv]; see :mod:`attn_torch.packed`."""
        return attend_packed(
            self.engine, q, k, v, layer, metadata.packed, part, need_lse=metadata.needs_lse, partial=metadata.partial
        )


def _uniform_queries(batch: AttentionBatch) -> int | None:
    """The number of query tokens that every row has, where the batch says so on the host."""
    lengths = {segment.query_len for segment in batch.segments}
    if len(lengths) == 1:
        return lengths.pop()
    return None


def _scaled(q: torch.Tensor, scale: Scale | None, factor: float, ratio: int) -> tuple[torch.Tensor, float]:
    """`scale` (one value, or one a KV head of `ratio` query heads) as part of the softmax scale, or multiplied into q.

    A product with q is computed on in fp32: rounding it to 16 bits would cost the logits as much as the quantised keys.
    """
    if scale is None:
        return q, factor
    if scale.value is not None:
        return q, factor * scale.value
    tensor = scale.tensor
    if tensor.numel() == 1 and tensor.device.type == "cpu":
        return q, factor * float(tensor)
    if tensor.numel() > 1:
        tensor = tensor.repeat_interleave(ratio)
    return q.float() * tensor[:, None], factor
