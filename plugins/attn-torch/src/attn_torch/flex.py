"""The ``flex_attention`` backend of kind ``mha``: keys are gathered to rows of equal length, masks are functions.

Variant ``compiled`` runs torch's generated kernels (:mod:`attn_torch.forms`); variant ``eager`` needs no compiler, holds all
logits, and returns the LSE, which generated kernels for CPUs refuse to do. What a step needs is planned once, in
``attn_metadata`` (:mod:`attn_torch.flexplan`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attn_core.batch import AttentionBatch
from attn_core.context import Context, GraphState, StepMetadata
from attn_core.errors import BatchError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, Scale
from attn_torch.execute import write
from attn_torch.flexplan import FlexCall, plan_calls
from attn_torch.forms import FormKey, Modify, eager, form
from attn_torch.merging import Results, finish
from attn_torch.reader import bytes_per_key, pick_pages
from attn_torch.rules import Rules, StepLengths, rows_with_keys, tokens_of


@dataclass(slots=True)
class FlexMetadata(StepMetadata):
    """One step's calls for one group. ``blank`` are tokens without keys; from ``num_tokens`` on there is padding."""

    page_size: int = 1
    lane: int = 0
    calls: list[FlexCall] = field(default_factory=list)
    blank: list[torch.Tensor] = field(default_factory=list)


class FlexAttention:
    """A backend object for one layer group. It holds no state of a step; workspaces come from the context, per lane."""

    def __init__(self, context: Context, compiled: bool) -> None:
        assert isinstance(context.group.geometry, MhaGeometry)
        self.context, self.geometry, self.compiled = context, context.group.geometry, compiled
        self.rules = Rules.of(self.geometry)

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: GraphState | None, capture: bool
    ) -> FlexMetadata:
        """The step's plan. Raises :class:`BatchError` under a graph, which this backend does not declare."""
        if state is not None or capture:
            raise BatchError("flex_attention cannot be captured in a graph", fix="plan without CUDA graphs")
        metadata = FlexMetadata(
            phase, batch.num_tokens, batch.needs_lse, batch.partial, None, "layers", lane=batch.lane
        )
        if batch.num_tokens:
            pools = self.context.pool_index
            pool = pools["attend"] if "attend" in pools else pools["cross"]
            address = batch.view(pool, "table", batch.kv(pool).page_size)
            on_device = StepLengths.of(batch, address)
            step = on_device.on_host(batch, address) or on_device.fetch()
            metadata.page_size = address.page_size
            sees = rows_with_keys(self.rules, step)
            metadata.calls = plan_calls(step, on_device, address, sees, self.rules, self.compiled)
            self._plan_blank(metadata, step, sees)
        return metadata

    def _plan_blank(self, metadata: FlexMetadata, step: StepLengths, sees: torch.Tensor) -> None:
        """Tokens without keys: those of empty rows, and queries that stand before the first key."""
        found = [tokens_of(step, ~sees)]
        if self.rules.right is not None:
            early = (step.query_len - step.kv_len - self.rules.right).clamp(min=0)
            before = StepLengths(step.start, torch.minimum(early, step.query_len), step.kv_len, None, None, None)
            found.append(tokens_of(before, sees))
        metadata.blank = [tokens.to(self.context.device, non_blocking=True) for tokens in found if tokens is not None]

    @hookimpl
    def attn_extend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: FlexMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """prefill, draft_extend, verify and mixed batches: out[T, Hq, Dv] and lse f32[T, Hq] if the metadata asks for it."""
        return self._attend(inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_decode(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: FlexMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """decode and draft: the same as :meth:`attn_extend`."""
        return self._attend(inputs, layer, cache, metadata, out)

    @torch.no_grad()
    def _attend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: FlexMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, geometry, device = inputs.q.shape[0], self.geometry, self.context.device
        if out is None:
            out = torch.empty(tokens, geometry.q_heads, geometry.v_dim, dtype=self.context.dtype, device=device)
        lse = None if self.compiled else torch.empty(tokens, geometry.q_heads, device=device)
        results = Results(out, lse)
        factor = _factor(layer.k_scale, geometry)
        for call in metadata.calls:
            found, found_lse = self._run(call, inputs.q, factor, cache, metadata)
            write(results, call.targets, found, found_lse)
        for blank in metadata.blank:
            results.blank(blank)
        if metadata.num_tokens < tokens:
            results.blank(slice(metadata.num_tokens, tokens))
        finish(results, layer, metadata.partial)
        return results.out, results.lse if metadata.needs_lse else None

    def _run(
        self, call: FlexCall, q: torch.Tensor, factor: torch.Tensor | None, cache: MhaCache, metadata: FlexMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One call: out[n * L, Hq, Dv] and, uncompiled, lse[n * L, Hq]."""
        geometry = self.geometry
        queries = torch.unflatten(q.index_select(0, call.tokens), 0, (call.rows, call.queries)).transpose(1, 2)
        half = bytes_per_key(geometry.kv_heads, 1, q.dtype) // 2 * call.rows * call.room
        planes: list[torch.Tensor] = []
        for name, pages, factors, dim in (
            ("flex.k", cache.k, cache.k_blocks, geometry.qk_dim),
            ("flex.v", cache.v, cache.v_blocks, geometry.v_dim),
        ):
            room = self.context.workspace(name, half * dim, metadata.lane)[: half * dim].view(q.dtype)
            room = room.view(call.rows * call.room, geometry.kv_heads, dim)
            picked = pick_pages(pages, factors, call.source, metadata.page_size, q.dtype)
            torch.unflatten(room, 0, (-1, metadata.page_size)).index_copy_(0, call.target, picked)
            room.index_fill_(0, call.unused, 0)
            planes.append(torch.unflatten(room, 0, (call.rows, call.room))[:, : call.keys].transpose(1, 2))
        modify = _modify(geometry.softcap, factor)
        if not self.compiled:
            out, lse = eager(queries, planes[0], planes[1], call.visible(), modify, geometry.scale)
            return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        key = FormKey(
            call.rows, call.queries, call.keys, call.room, geometry.q_heads, geometry.kv_heads, geometry.qk_dim,
            geometry.v_dim, q.dtype, str(q.device), (*call.mask_kind, factor is not None), geometry.softcap, geometry.scale,
        )  # fmt: skip
        out = form(key)(queries, planes[0], planes[1], call.mask, modify, self.context.log)
        return out.transpose(1, 2).flatten(0, 1), None


def _modify(softcap: float | None, factor: torch.Tensor | None) -> Modify | None:
    """The function of scores: times `factor` f32[Hq], then ``cap * tanh(score / cap)``; both after the scale.

    The key scale varies by layer and comes as a tensor: a constant would be compiled in, and rounding it into q costs bits.
    """
    if softcap is None and factor is None:
        return None

    def modify(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if factor is not None:
            score = score * factor[h]
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    return modify


def _factor(scale: Scale | None, geometry: MhaGeometry) -> torch.Tensor | None:
    """The key scale as f32[Hq], or None where it is 1."""
    if scale is None or scale.value == 1.0:
        return None
    tensor = scale.tensor.float()
    return tensor.repeat_interleave(geometry.q_heads // tensor.numel())
