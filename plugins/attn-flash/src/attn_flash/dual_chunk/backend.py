"""The backend object. Keys lie in the cache rotated by their place in the chunk; a query comes in one of three forms.

=====================  =====================================================================================================
``inputs.rope`` given  q[T, Hq, D] and k[T, Hk, D] not rotated: the backend rotates the query for each range, and the key when
                       it is stored
q[T, Hq, 5, D]         rotated by the server (intra, succ, inter, and the two critical versions, which are not read; three
                       versions will do), k rotated: :func:`~attn_flash.dual_chunk.as_versions` makes this view
q[T, Hq, D], no rope   rotated by its position, as for ordinary attention: right while a row lies in one chunk, refused after
=====================  =====================================================================================================

The logit scale of rows longer than the model was trained for is applied to the query alone (m^2, made from the number of keys
of the row in this step), so that cached keys do not depend on the length of the request that wrote them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attn_core.context import Context, StepMetadata
from attn_core.errors import BatchError, BindError
from attn_core.geometry import MhaGeometry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.merge import merge_many
from attn_core.store import default_store
from attn_flash.caches import Views
from attn_flash.dual_chunk.chunks import NAME, Chunks
from attn_flash.dual_chunk.parts import Attend, RangeCall, cut, plan_calls
from attn_flash.dual_chunk.rotary import COUNTS, INTRA, check_rope, query_positions, rotate

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, KvAddress
    from attn_core.layers import Rope


@dataclass(slots=True)
class DualChunkStep(StepMetadata):
    """One step: its calls, and what multiplies the query of each token (f32[T], None for 1)."""

    page_size: int = 1
    calls: tuple[RangeCall, ...] = ()
    factors: torch.Tensor | None = None
    longest: int = 0


class DualChunk:
    """Dual chunk attention of one layer group over `attend`, in pages of at most `largest_page`. Holds no state of a step.

    Raises :class:`BindError` for a geometry other than plain causal attention and for sizes that cannot be.
    """

    def __init__(self, context: Context, attend: Attend, largest_page: int = 1 << 30) -> None:
        geometry = context.group.geometry
        assert isinstance(geometry, MhaGeometry)
        self.context, self.attend, self.geometry = context, attend, geometry
        self.chunks = Chunks.of(context.options)
        self._check_geometry(geometry)
        self._pages = {
            phase: self.chunks.part_of(plan.kernel_page_size, largest_page) for phase, plan in context.phases.items()
        }
        self._views = Views()

    def _check_geometry(self, geometry: MhaGeometry) -> None:
        named = {
            "attention that is not causal": not geometry.causal or geometry.window_right is not None,
            "a sliding window": geometry.window is not None,
            "chunked-local attention": geometry.chunk is not None,
            "a soft cap": geometry.softcap is not None,
            "attention sinks": geometry.sinks,
            f"head dims {geometry.qk_dim} and {geometry.v_dim}, which differ": geometry.qk_dim != geometry.v_dim,
        }
        wrong = [name for name, there in named.items() if there]
        if wrong:
            raise BindError(f"{NAME} does not do {', '.join(wrong)}", fix="another --attention-backend")

    # --- once a step --------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_metadata(self, batch: AttentionBatch, phase: str) -> DualChunkStep:
        """Cut the queries at chunk boundaries and the page tables with them. Needs exact lengths on the host."""
        page = self._pages[phase]
        address = batch.view(self.context.address_index(), "table", page)
        queries, keys = self._lengths(batch, address)
        pieces = cut(queries, keys, self.chunks.length)
        calls = plan_calls(pieces, address, self.chunks.length)
        factors = self._factors(queries, keys, address.kv_lens.device)
        longest = max(keys, default=0)
        return DualChunkStep(
            phase,
            batch.num_tokens,
            batch.needs_lse,
            batch.partial,
            page_size=page,
            calls=calls,
            factors=factors,
            longest=longest,
        )

    def _lengths(self, batch: AttentionBatch, address: KvAddress) -> tuple[list[int], list[int]]:
        """Query and key lengths of the real rows. Raises :class:`BatchError` if the host does not know them."""
        if address.origin is not None:
            raise BatchError(f"{NAME} does not read trimmed pools: every key is needed", fix="do not trim this pool")
        offsets, lens = batch.query_offsets_cpu, address.kv_lens_cpu
        if not batch.cpu_exact or offsets is None or lens is None:
            raise BatchError(
                f"{NAME} needs exact lengths on the host, where queries are cut at chunk boundaries",
                fix="give query_offsets_cpu and kv_lens_cpu with the batch",
            )
        rows = batch.num_rows
        starts = offsets[: rows + 1].tolist()
        return [b - a for a, b in zip(starts, starts[1:], strict=False)], lens[:rows].tolist()

    def _factors(self, queries: list[int], keys: list[int], device: torch.device) -> torch.Tensor | None:
        factors = [self.chunks.factor(n) for n in keys]
        if all(factor == 1.0 for factor in factors):
            return None
        return torch.tensor(factors).repeat_interleave(torch.tensor(queries)).to(device)

    # --- once a layer -------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_store(self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, address: KvAddress) -> None:
        """Write k and v to ``address.new_slots``; k is rotated here if it comes with its rotary table."""
        if inputs.rope is not None and inputs.k is not None:
            self._check_rope(inputs.rope)
            places = query_positions(INTRA, inputs.rope.positions, self.chunks)
            inputs = inputs._replace(k=rotate(inputs.k, inputs.rope, places))
        if layer.k_scale is not None or layer.v_scale is not None:  # of quantised caches; this one is read as it is
            layer = replace(layer, k_scale=None, v_scale=None)
        default_store(inputs, layer, cache, address)

    @hookimpl
    def attn_extend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: DualChunkStep, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out[T, Hq, D], lse f32[T, Hq] if asked for) of prefill and decode alike; padded rows are 0 and -inf."""
        if layer.sinks is not None:
            raise BindError(f"{NAME} does not support attention sinks", fix="another --attention-backend")
        self._check_inputs(inputs, metadata)
        tokens, shape = metadata.num_tokens, (inputs.q.shape[0], self.geometry.q_heads, self.geometry.v_dim)
        if out is None:
            out = inputs.q.new_empty(shape)
        lse = None
        if metadata.needs_lse:
            lse = torch.full(shape[:2], -math.inf, dtype=torch.float32, device=out.device)
        out[tokens:].zero_()
        if metadata.calls:
            parts = [self._call(inputs, cache, call, metadata) for call in metadata.calls]
            merged = self._merge(parts, out[:tokens])
            if lse is not None:
                lse[:tokens] = merged
        return out, lse

    @hookimpl
    def attn_decode(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: DualChunkStep, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :meth:`attn_extend`: a decode row is a piece of one token."""
        return self.attn_extend(inputs, layer, cache, metadata, out)  # type: ignore[no-any-return]

    def _call(
        self, inputs: MhaInputs, cache: MhaCache, call: RangeCall, metadata: DualChunkStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q = self._query(inputs, call.version, metadata)
        k, v = self._views.of(cache, metadata.page_size)
        return self.attend(q, k, v, call, self.geometry.scale)

    def _query(self, inputs: MhaInputs, version: int, metadata: DualChunkStep) -> torch.Tensor:
        """One version of the real tokens' queries, times the logit scale: [T, Hq, D]."""
        q = inputs.q[: metadata.num_tokens]
        if q.dim() == 4:
            q = q[:, :, version]
        elif inputs.rope is not None:
            positions = inputs.rope.positions[: metadata.num_tokens]
            q = rotate(q, inputs.rope, query_positions(version, positions, self.chunks))
        if metadata.factors is None:
            return q
        return (q.float() * metadata.factors[:, None, None]).to(q.dtype)

    def _merge(self, parts: list[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor) -> torch.Tensor:
        if len(parts) == 1:
            out.copy_(parts[0][0])
            return parts[0][1]
        return merge_many(parts, out)[1]

    # --- checks -------------------------------------------------------------------------------------------------------------

    def _check_inputs(self, inputs: MhaInputs, metadata: DualChunkStep) -> None:
        q, geometry = inputs.q, self.geometry
        versions = q.dim() == 4
        wanted = (geometry.q_heads, geometry.qk_dim)
        if (q.shape[1], q.shape[-1]) != wanted or (versions and q.shape[2] not in COUNTS):
            raise BindError(
                f"{NAME}: queries of shape {list(q.shape)}",
                f"needed   [tokens, {wanted[0]}, {wanted[1]}], or [tokens, {wanted[0]}, 5, {wanted[1]}] in versions",
                fix="attn_flash.dual_chunk.as_versions(q, q_heads) for the output of a dual chunk rotary layer",
            )
        if versions and inputs.rope is not None:
            raise BindError(
                f"{NAME}: rotated versions of the query together with a rotary table", fix="give one of the two"
            )
        if versions or inputs.rope is not None:
            self._need_stated()
        elif metadata.longest > self.chunks.length:
            raise BindError(
                f"{NAME}: a row of {metadata.longest} keys spans chunks of {self.chunks.length}, and its queries come in one version",
                "needed   the rotary table (inputs.rope) with q and k not rotated, or q in versions [T, Hq, 5, D]",
            )
        if inputs.rope is not None:
            self._check_rope(inputs.rope)

    def _need_stated(self) -> None:
        if not self.chunks.stated:
            raise BindError(
                f"{NAME}: the chunk size of this model is not known",
                fix=f"--backend-option {NAME}.chunk_size=… and local_size=…, from the model's dual_chunk_attention_config",
            )

    def _check_rope(self, rope: Rope) -> None:
        self._need_stated()
        check_rope(rope, self.chunks, self.geometry.qk_dim)
