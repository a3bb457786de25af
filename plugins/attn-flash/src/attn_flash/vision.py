"""Vision towers and encoders: the packed part of a backend alone. One class serves both generations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attn_core.context import GraphLimits
from attn_core.geometry import LayerGroup
from attn_core.hookspecs import hookimpl
from attn_flash.steps import FlashMetadata, FlashState

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, Part
    from attn_core.layers import MhaLayer
    from attn_flash.paged import FlashBackend


class VisionBackend:
    """Packed attention without a cache, by the kernels of `paged`."""

    def __init__(self, paged: FlashBackend) -> None:
        self.paged = paged

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: FlashState | None, capture: bool
    ) -> FlashMetadata:
        """The offsets of the batch, as they are."""
        return self.paged.attn_metadata(batch, group, phase, state, capture)

    @hookimpl
    def attn_graph_state(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits, lane: int) -> FlashState:
        """No buffers: offsets are read where they are."""
        return self.paged.attn_graph_state(group, phases, limits, lane)

    @hookimpl
    def attn_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        metadata: FlashMetadata,
        part: Part | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q[T, H, D] over k[Tk, Hk, D], v[Tk, Hk, Dv], sequence by sequence."""
        return self.paged.attn_ragged(q, k, v, layer, metadata, part)
