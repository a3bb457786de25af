"""What transformers passes with every attention call, compared with the layer's group. A difference is an error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from attn_core.errors import BatchError, BindError
from attn_core.layers import MhaLayer

#: Values of the last accepted call of a layer; equal values need no second look.
Signature = tuple[Any, ...]
_CHECKED = ("scaling", "sliding_window", "softcap", "s_aux", "dropout", "position_bias", "output_attentions")


def signature(query: torch.Tensor, key: torch.Tensor, kwargs: Mapping[str, Any]) -> Signature:
    """What decides about a call, as a tuple that compares fast."""
    values = [kwargs.get(name) for name in _CHECKED]
    values[3] = values[3] is not None
    return (*values, "sliding_window" in kwargs, query.shape[1], query.shape[3], key.shape[1])


def check_call(layer: MhaLayer, query: torch.Tensor, key: torch.Tensor, kwargs: Mapping[str, Any]) -> None:
    """Raise :class:`BindError` where transformers asks for other attention than the layer's group describes."""
    facts = list(_differences(layer, query, key, kwargs))
    if facts:
        raise BindError(
            f"layer {layer.index} (group {layer.group.name!r}): transformers asks for other attention than was planned",
            *facts,
            fix="plan again from this model's config: attn_transformers.load(model)",
        )


def _differences(layer: MhaLayer, query: torch.Tensor, key: torch.Tensor, kwargs: Mapping[str, Any]) -> Iterator[str]:
    geometry = layer.geometry
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    if not math.isclose(scale, geometry.scale, rel_tol=1e-5):
        yield f"scaling          {scale:.6g}, planned {geometry.scale:.6g}"
    window = kwargs.get("sliding_window") or None
    if "sliding_window" in kwargs and window != geometry.window:
        yield f"sliding_window   {window}, planned {geometry.window}"
    softcap = kwargs.get("softcap") or None
    if softcap != geometry.softcap:
        yield f"softcap          {softcap}, planned {geometry.softcap}"
    sinks = kwargs.get("s_aux") is not None
    if sinks != (layer.sinks is not None):
        yield f"s_aux (sinks)    {'given' if sinks else 'absent'}, planned {'with' if geometry.sinks else 'without'} sinks"
    heads = (query.shape[1], key.shape[1], query.shape[3])
    if heads != (geometry.q_heads, geometry.kv_heads, geometry.qk_dim):
        planned = (geometry.q_heads, geometry.kv_heads, geometry.qk_dim)
        yield f"heads q/kv, dim  {heads}, planned {planned}"
    if kwargs.get("dropout"):
        yield f"dropout          {kwargs['dropout']}, never supported: model.eval()"
    if kwargs.get("position_bias") is not None:
        yield "position_bias    given, never supported"
    if kwargs.get("output_attentions"):
        yield "output_attentions  asked for; attention weights are never materialised"


def check_mask(mask: torch.Tensor | None, rows: int, width: int) -> None:
    """Raise :class:`BatchError` unless `mask` is None or a padding mask ``[rows, width]``."""
    if mask is None:
        return
    if mask.ndim != 2:
        raise BatchError(
            f"a {mask.ndim}-D attention mask was given; only a padding mask [batch, keys] can be expressed",
            fix="pass the 2-D attention_mask of the tokenizer",
        )
    if tuple(mask.shape) != (rows, width):
        raise BatchError(
            "the attention mask does not cover the cached and the new tokens",
            f"mask     {tuple(mask.shape)}",
            f"needed   {(rows, width)}",
        )
