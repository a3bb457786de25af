"""What a layer adds to a call: sinks in the kernel's type, and the descale factors of 8-bit queries, keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_core.layers import MhaLayer, Scale

#: The largest finite e4m3 value. Conversion does not saturate by itself.
E4M3_MAX = 448.0


class Descales(NamedTuple):
    """f32[R, Hk] each, expanded without a copy; None is 1."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None


class LayerFacts:
    """Derived tensors of bound layers, made once. A layer's own tensors are remembered by identity: new ones are seen."""

    __slots__ = ("_descales", "_heads", "_sinks")

    def __init__(self, kv_heads: int) -> None:
        self._heads = kv_heads
        self._sinks: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._descales: dict[tuple[int, int], tuple[tuple[Scale | None, ...], tuple[object, ...], Descales]] = {}

    def sinks_bf16(self, layer: MhaLayer) -> torch.Tensor:
        """bf16[Hq]. Converted again where the layer's tensor was replaced or written in place."""
        given = layer.sinks
        assert given is not None
        version = 0 if given.is_inference() else given._version
        found = self._sinks.get(id(layer))
        if found is None or found[0] is not given or found[1] != version:
            found = self._sinks[id(layer)] = (given, version, given.to(torch.bfloat16).contiguous())
        return found[2]

    def descales(self, layer: MhaLayer, rows: int) -> Descales:
        """The factors for a step of `rows` rows."""
        scales = (layer.q_scale, layer.k_scale, layer.v_scale)
        tensors = tuple(None if scale is None else scale.tensor for scale in scales)
        found = self._descales.get((id(layer), rows))
        if found is None or any(a is not b for a, b in zip(found[1], tensors, strict=True)):
            made = Descales(*(None if t is None else t.expand(self._heads).expand(rows, -1) for t in tensors))
            found = self._descales[id(layer), rows] = (scales, tensors, made)
        return found[2]


def quantise_query(q: torch.Tensor, scale: Scale | None, kv_heads: int) -> torch.Tensor:
    """q[T, Hq, D] in e4m3, divided by the layer's scale and saturated; a query that is e4m3 already comes back as it is."""
    if q.dtype == torch.float8_e4m3fn:
        return q
    if scale is not None:
        factor = scale.tensor
        if factor.numel() > 1:
            factor = factor.repeat_interleave(q.shape[1] // kv_heads)[:, None]
        q = q / factor
    return q.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
