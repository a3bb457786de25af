"""The backend object of one layer group."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attn_core.batch import AttentionBatch, Part
from attn_core.context import Context, GraphLimits
from attn_core.errors import BatchError, BindError
from attn_core.geometry import LayerGroup
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_flashinfer.calls import attend_packed, attend_pages, finish, merge_prefix
from attn_flashinfer.captured import graph_metadata, make_state
from attn_flashinfer.eager import Steps
from attn_flashinfer.lengths import Lengths
from attn_flashinfer.library import load
from attn_flashinfer.masks import build_mask
from attn_flashinfer.metadata import FlashInferMetadata, FlashInferState
from attn_flashinfer.rules import Rules
from attn_flashinfer.wrappers import Planner, Slot

#: Wrappers that each variant uses.
NEEDS = {"decode": ("decode",), "fa2": ("decode", "prefill", "ragged"), "fa3": ("prefill", "ragged"), "sink": ("sink",)}
Result = tuple[torch.Tensor, torch.Tensor | None]


class FlashInferBackend:
    """One layer group on one variant. Steps borrow planned wrappers; nothing of a step is kept here."""

    def __init__(self, variant: str, context: Context) -> None:
        self.context = context
        self.rules = Rules.of(variant, context)
        self.library = load(NEEDS[variant])
        self.planner = Planner(self.rules, context, self.library)
        self.no_sinks: torch.Tensor | None = None
        if variant == "sink" and not self.rules.sinks:
            self.no_sinks = torch.full((self.rules.q_heads,), -math.inf, dtype=torch.float32, device=context.device)
        self.steps = Steps(self.planner, context)

    def address_index(self) -> int:
        """The pool that this group reads: cross attention has its own."""
        index = self.context.pool_index
        return index["cross"] if "attend" not in index else index["attend"]

    # --- once a step --------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: FlashInferState | None, capture: bool
    ) -> FlashInferMetadata:
        """Plans the step on the host from its exact lengths. Nothing waits for the device."""
        self._check(batch)
        if batch.key_offsets is not None:
            return self.steps.packed(batch, phase)
        address = batch.kv(self.address_index())
        if state is not None:
            return self._settled(graph_metadata(self.steps, batch, address, phase, state), batch)
        metadata = FlashInferMetadata(
            phase, batch.num_tokens, batch.needs_lse, batch.partial, page_size=address.page_size
        )
        if not batch.num_tokens:
            return metadata
        lengths = self.steps.lengths(batch, address, phase)
        metadata.tokens = lengths.tokens
        metadata.without_keys = lengths.rows_without_keys()
        metadata.tree = batch.tree if phase == "verify" else None
        if phase == "prefill" and self.steps.may_pack and self.steps.pack(batch, address, lengths, metadata):
            return metadata
        lease = self.steps.plan_pages(batch, address, lengths, phase, metadata.tree is not None)
        metadata.leases.append(lease)
        metadata.slot = lease.slot
        return self._settled(metadata, batch)

    def _settled(self, metadata: FlashInferMetadata, batch: AttentionBatch) -> FlashInferMetadata:
        """Note the case in which a layer's call is the wrapper's call and nothing else: plain decode, mostly."""
        rules, slot = self.rules, metadata.slot
        assert slot is not None
        more = metadata.needs_lse or metadata.without_keys or metadata.tree is not None
        more = more or rules.quantised or rules.variant == "sink" or metadata.tokens != batch.padded_tokens
        metadata.plain = None if more else slot.wrapper.run
        metadata.shape = (metadata.tokens, rules.q_heads, rules.qk_dim)
        return metadata

    def _check(self, batch: AttentionBatch) -> None:
        if batch.spans is not None and len(batch.spans) and batch.tree is None:
            raise BatchError("mha/flashinfer does not compute spans of images", fix="--attention-backend triton")
        if batch.partial and self.rules.sinks:
            raise BatchError("mha/flashinfer:sink always adds the sinks; partial results need another backend")

    @hookimpl
    def attn_metadata_in_graph(self, metadata: FlashInferMetadata) -> None:
        """The mask of a tree is to be built again by the first layer."""
        metadata.mask_is_old = metadata.tree is not None

    @hookimpl
    def attn_graph_state(
        self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits, lane: int
    ) -> FlashInferState:
        """Buffers for the largest step of a lane."""
        return make_state(self.steps, limits, lane)

    # --- once a layer ---------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_extend(
        self,
        inputs: MhaInputs,
        layer: MhaLayer,
        cache: MhaCache,
        metadata: FlashInferMetadata,
        out: torch.Tensor | None,
    ) -> Result:
        """q[T, Hq, D] over the cache, which holds the new tokens already, into out[T, Hq, Dv]."""
        rules, q = self.rules, inputs.q
        run = metadata.plain
        if run is not None and layer.sinks is None and out is not None and q.shape == metadata.shape and out.is_contiguous():  # fmt: skip
            run(q, (cache.k, cache.v), out=out)
            return out, None
        if q.shape[1] != rules.q_heads or q.shape[2] != rules.qk_dim:
            raise BindError(
                f"layer {layer.index}: q is {list(q.shape)}, planned are {rules.q_heads} heads of {rules.qk_dim}",
                fix="layers that differ in heads or dims belong to different groups",
            )
        if (layer.sinks is not None) != rules.sinks:
            have = "has" if layer.sinks is not None else "lacks"
            raise BindError(f"layer {layer.index} {have} attention sinks, its group says otherwise")
        given = out
        if out is None or not out.is_contiguous():
            out = torch.empty((q.shape[0], rules.q_heads, rules.v_dim), dtype=rules.q_dtype, device=q.device)
        count = metadata.tokens
        lse = self._attend(inputs, layer, cache, metadata, out) if count else None
        return finish(given, out, lse, metadata, count)

    def _attend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: FlashInferMetadata, out: torch.Tensor
    ) -> torch.Tensor | None:
        """The LSE in base 2 of the planned tokens, or None; the result goes into the front of `out`."""
        count = metadata.tokens
        q = inputs.q if inputs.q.shape[0] == count else inputs.q[:count]
        target = out if out.shape[0] == count else out[:count]
        packed, slot = metadata.packed, metadata.slot
        if packed is not None and inputs.k is not None and inputs.v is not None:
            k, v = inputs.k[:count], inputs.v[:count]
            lse = attend_packed(packed, q, k, v, target, metadata.needs_lse or metadata.prefix)
            if not metadata.prefix:
                return lse
            assert slot is not None
            assert lse is not None
            before, lse_before = torch.empty_like(target), None
            lse_before = attend_pages(slot, self.rules, q, layer, cache, before, True)
            assert lse_before is not None
            return merge_prefix(self.library, target, lse, before, lse_before)
        if packed is not None:
            slot = self._pages_after_all(metadata)
        assert slot is not None
        if metadata.mask_is_old and metadata.tree is not None:
            buffers = slot.buffers
            assert buffers is not None
            assert buffers.mask is not None
            assert buffers.mask_offsets is not None
            build_mask(
                buffers.mask, buffers.mask_offsets, buffers.page_offsets, buffers.last_page,
                metadata.tree, metadata.page_size, self.rules.window,
            )  # fmt: skip
            metadata.mask_is_old = False
        sinks = layer.sinks if layer.sinks is not None else self.no_sinks
        return attend_pages(slot, self.rules, q, layer, cache, target, metadata.needs_lse, sinks)

    def _pages_after_all(self, metadata: FlashInferMetadata) -> Slot:
        """The step was planned to read new tokens from the inputs, and a layer brings none: plan its pages, once."""
        assert metadata.fallback is not None
        lease = metadata.fallback()
        metadata.leases.append(lease)
        metadata.slot, metadata.packed, metadata.prefix = lease.slot, None, False
        return lease.slot

    @hookimpl
    def attn_decode(
        self,
        inputs: MhaInputs,
        layer: MhaLayer,
        cache: MhaCache,
        metadata: FlashInferMetadata,
        out: torch.Tensor | None,
    ) -> Result:
        """As :meth:`attn_extend`: the wrapper was chosen with the metadata."""
        return self.attn_extend(inputs, layer, cache, metadata, out)  # type: ignore[no-any-return]

    @hookimpl
    def attn_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        metadata: FlashInferMetadata,
        part: Part | None,
    ) -> Result:
        """Packed q[T, Hq, D] over packed k[Tk, Hk, D], v[Tk, Hk, Dv] without a cache."""
        if part is not None:
            raise BindError("mha/flashinfer does not declare chunked_prefix: a part's offsets are not on the host")
        out = torch.empty((q.shape[0], self.rules.q_heads, self.rules.v_dim), dtype=q.dtype, device=q.device)
        lse, count = None, metadata.tokens
        if count:
            assert metadata.packed is not None
            lse = attend_packed(metadata.packed, q[:count], k, v, out[:count], metadata.needs_lse)
        return finish(None, out, lse, metadata, count)

    @hookimpl
    def attn_warmup(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits) -> None:
        """Compile and load what the phases need, by planning a step of one row."""
        import numpy as np

        pool = self.context.pools.get("attend") or self.context.pools.get("cross")
        page = pool.page_size if pool is not None else 1
        ends = np.array([0, 1], dtype=np.int32)
        one = np.ones(1, dtype=np.int32)
        lengths = Lengths(1, 1, ends, ends, one, None, one.astype(np.int64))
        indices = torch.zeros(1, dtype=torch.int32, device=self.context.device)
        for phase in phases:
            lease = self.planner.borrow(self.steps.kind(phase), 0)
            self.planner.plan(lease.slot, lengths, indices, page, self.steps.causal(phase))
            prepare = getattr(lease.slot.wrapper, "prewarm_paged_kv_stride_variant", None)
            if prepare is not None and self.rules.qk_dim != self.rules.v_dim:
                prepare()  # K and V of different widths are read by a module of their own
