"""Packed attention without a cache on top of the plain backend: the ragged role, which ``mha`` and ``mla`` share."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_core.batch import Part
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaLayer
from attn_core.testing.reference_plain import PlainBackend, ReferenceMetadata


class PackedBackend(PlainBackend):
    """:class:`PlainBackend` with ``attn_ragged``."""

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
