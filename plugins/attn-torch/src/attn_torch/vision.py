"""The ``torch_native`` backend of kind ``mm``: vision towers and encoders, packed and without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_core.batch import AttentionBatch, Part
from attn_core.context import Context, GraphState, StepMetadata
from attn_core.errors import BatchError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaLayer
from attn_torch.engines import choose
from attn_torch.packed import PackedPlan, attend_packed, plan_packed
from attn_torch.rules import Rules


@dataclass(slots=True)
class VisionMetadata(StepMetadata):
    """One step's sequences, by shape."""

    packed: PackedPlan | None = None


class TorchVision:
    """A backend object for one layer group of a tower. It holds no state of a step."""

    def __init__(self, context: Context) -> None:
        assert isinstance(context.group.geometry, MhaGeometry)
        self.rules = Rules.of(context.group.geometry)
        self.engine = choose(context.device, context.group.geometry.softcap)

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: GraphState | None, capture: bool
    ) -> VisionMetadata:
        """The step's plan from ``query_offsets`` and ``key_offsets``. Raises :class:`BatchError` under a graph."""
        if state is not None or capture:
            raise BatchError("torch_native cannot be captured in a graph", fix="plan without CUDA graphs")
        made = VisionMetadata(phase, batch.num_tokens, batch.needs_lse, batch.partial, None, "metadata")
        made.packed = plan_packed(batch, self.rules)
        return made

    @hookimpl
    @torch.no_grad()
    def attn_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        metadata: VisionMetadata,
        part: Part | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q[T, Hq, D] over k[Tk, Hk, D], v[Tk, Hk, Dv], packed: out[T, Hq, Dv] and lse f32[T, Hq] if asked for."""
        return attend_packed(
            self.engine, q, k, v, layer, metadata.packed, part, need_lse=metadata.needs_lse, partial=metadata.partial
        )
