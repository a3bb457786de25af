"""A model as JSON, with the key names of published model files, and the bytes that its layers keep.

Bytes are counted for one token (caches) or one sequence (states) *in one layer*, for the head counts that the group
has: after :meth:`~attn_core.geometry.Model.shard` they are those of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attn_core.dtypes import BITS
from attn_core.geometry import DsaGeometry, GdnGeometry, LayerGroup, MhaGeometry, MlaGeometry, Model
from attn_core.model._groups import STATE_KINDS

#: Tensor-parallel sizes for which latent attention's heads are listed.
_RANKS = (1, 2, 4, 8, 16)
#: Facts that are remarks for people or for this module, not part of the description of a layer.
_PRIVATE = ("listed", "state_dtype", "conv_dtype", "tower")


def kv_bytes_per_token(group: LayerGroup, bytes_per_element: float = 2) -> int:
    """Bytes that one token leaves in the cache of one layer of `group`; 0 without a cache of keys and values.

    K and V: ``kv_heads * (qk_dim + v_dim)`` elements. Latent attention: ``latent_dim + rope_dim`` elements, whatever
    the number of heads. The index keys of DeepSeek sparse attention have a pool of their own and are not counted.
    """
    return int(_kv_elements(group) * bytes_per_element)


def _kv_elements(group: LayerGroup) -> int:
    geometry = group.geometry
    if isinstance(geometry, DsaGeometry):
        geometry = geometry.mla
    if isinstance(geometry, MlaGeometry):
        return geometry.latent_dim + geometry.rope_dim
    if isinstance(geometry, MhaGeometry):
        return geometry.kv_heads * (geometry.qk_dim + geometry.v_dim)
    return 0


def state_shapes(group: LayerGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of (recurrent state, convolution state) of one sequence in one layer; empty where there is none.

    Gated delta networks: ``[v_heads, k_dim, v_dim]`` and ``[conv_dim, conv_width - 1]``. Others as their family keeps
    them (whole model: they are not sharded, because no backend kind serves them).
    """
    geometry = group.geometry
    if isinstance(geometry, GdnGeometry):
        state = (geometry.v_heads, geometry.k_dim, geometry.v_dim)
        return state, (geometry.conv_dim, geometry.conv_width - 1)
    return tuple(group.facts.get("ssm_state_shape", ())), tuple(group.facts.get("conv_state_shape", ()))


def state_bytes(group: LayerGroup, state_dtype: str | None = None, conv_dtype: str | None = None) -> int:
    """Bytes that one sequence keeps in one layer of `group`: recurrent state and convolution state; 0 without a state.

    The element types are the group's own unless given (``fp32``, ``bf16``, …).
    """
    state, conv = state_shapes(group)
    own_state, own_conv = state_dtypes(group)
    sizes = ((state, state_dtype or own_state), (conv, conv_dtype or own_conv))
    return sum(math.prod(shape) * BITS[dtype] // 8 for shape, dtype in sizes if shape)


def state_dtypes(group: LayerGroup) -> tuple[str, str]:
    """Element types of (recurrent state, convolution state)."""
    geometry = group.geometry
    if isinstance(geometry, GdnGeometry):
        return geometry.state_dtype, geometry.conv_dtype
    return str(group.facts.get("state_dtype", "bf16")), str(group.facts.get("conv_dtype", "bf16"))


def describe(model: Model) -> dict[str, Any]:
    """The groups of `model` with every width, window and scale, and the cache bytes of one token over all layers.

    Layers that read another layer's keys and values (``kv_from``) add nothing to the cache. Encoders, vision towers
    and cross attention are listed, but do not count: their keys are not one a token.
    """
    listed = [group for group in model.groups if group.facts.get("listed") is not False]
    described: dict[str, Any] = {
        "attention_groups": [_describe_group(group) for group in listed],
        "layers_counted": model.layers_counted,
        "kv_bytes_per_token_all_layers_bf16_no_window_saving": model_kv_bytes_per_token(model),
    }
    unlisted = [group for group in model.groups if group.facts.get("listed") is False]
    if unlisted:
        described["towers_note"] = "; ".join(_sentence(group) for group in unlisted)
    return described


def model_kv_bytes_per_token(model: Model, bytes_per_element: float = 2) -> int:
    """Cache bytes of one token over all layers of the language model, windows not deducted."""
    total = 0
    for group in model.groups:
        if group.model == "target" and group.kind != "cross":
            total += kv_bytes_per_token(group, bytes_per_element) * len(set(group.layers) - set(group.kv_from))
    return total


def _sentence(group: LayerGroup) -> str:
    geometry = group.geometry
    heads = f", {geometry.q_heads} heads of {geometry.qk_dim}" if isinstance(geometry, MhaGeometry) else ""
    return f"{group.name}: {len(group.layers)} layers{heads}, planned like any tower"


def _describe_group(group: LayerGroup) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": group.kind, "num_layers": len(group.layers), "layers": list(group.layers)}
    geometry = group.geometry
    if isinstance(geometry, MhaGeometry):
        row |= _tower(group, geometry) if group.kind.startswith("vit_") else _heads(group, geometry)
    elif isinstance(geometry, MlaGeometry):
        row |= _latent(group, geometry)
    elif isinstance(geometry, DsaGeometry):
        row |= _latent(group, geometry.mla)
        row |= {
            "index_topk": geometry.index_topk,
            "index_n_heads": geometry.index_heads,
            "index_head_dim": geometry.index_dim,
        }
    elif isinstance(geometry, GdnGeometry):
        row |= _delta(group, geometry)
    if group.kind in STATE_KINDS and not isinstance(geometry, GdnGeometry):
        row |= _facts(group)
        if any(state_shapes(group)):
            row["state_bytes_per_seq_per_layer_fp32_ssm_bf16_conv"] = state_bytes(group, "fp32", "bf16")
    else:
        row |= _facts(group)
    return row | _extras(group)


def _facts(group: LayerGroup) -> Mapping[str, Any]:
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.facts.items()
        if key not in _PRIVATE
    }


def _extras(group: LayerGroup) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if group.facts.get("tower"):
        extras["tower"] = group.facts["tower"]
    if group.kv_len is not None:
        extras["kv_len"] = group.kv_len
    if group.kv_from:
        extras["kv_from"] = {str(layer): owner for layer, owner in group.kv_from.items()}
    if group.unsupported:
        extras["unsupported"] = list(group.unsupported)
    if isinstance(group.geometry, DsaGeometry) and group.geometry.index_from:
        extras["index_from_note"] = {str(layer): owner for layer, owner in group.geometry.index_from.items()}
    return extras


def _heads(group: LayerGroup, geometry: MhaGeometry) -> dict[str, Any]:
    window = geometry.window
    row = {
        "num_q_heads": geometry.q_heads,
        "num_kv_heads": geometry.kv_heads,
        "gqa_ratio": geometry.ratio,
        "qk_head_dim": geometry.qk_dim,
        "v_head_dim": geometry.v_dim,
        "window_tokens_incl_self": window,
        "window_left_exclusive": None if window is None else window - 1,
        "sinks": geometry.sinks,
        "logit_softcap": geometry.softcap,
        "softmax_scale": geometry.scale,
        "causal": geometry.causal,
        "kv_bytes_per_token_per_layer_bf16": kv_bytes_per_token(group),
    }
    if geometry.window_right is not None:
        row["window_right"] = geometry.window_right
    if geometry.chunk is not None:
        row["chunk_size"] = geometry.chunk
    return row


def _tower(group: LayerGroup, geometry: MhaGeometry) -> dict[str, Any]:
    return {
        "num_q_heads": geometry.q_heads,
        "num_kv_heads": geometry.kv_heads,
        "gqa_ratio": geometry.ratio,
        "qk_head_dim": geometry.qk_dim,
        "v_head_dim": geometry.v_dim,
        "causal": geometry.causal,
    }


def _latent(group: LayerGroup, geometry: MlaGeometry) -> dict[str, Any]:
    return {
        "num_q_heads": geometry.q_heads,
        "num_kv_heads_absorbed": 1,
        "qk_head_dim_expanded": geometry.nope_dim + geometry.rope_dim,
        "v_head_dim_expanded": geometry.v_dim,
        "qk_head_dim_absorbed": geometry.latent_dim + geometry.rope_dim,
        "v_head_dim_absorbed": geometry.latent_dim,
        "softmax_scale": geometry.scale,
        "kv_bytes_per_token_per_layer_bf16": kv_bytes_per_token(group),
        "heads_per_rank": {str(n): geometry.q_heads // n for n in _RANKS if geometry.q_heads % n == 0},
    }


def _delta(group: LayerGroup, geometry: GdnGeometry) -> dict[str, Any]:
    state, conv = state_shapes(group)
    row: dict[str, Any] = {
        "num_k_heads": geometry.k_heads,
        "num_v_heads": geometry.v_heads,
        "head_k_dim": geometry.k_dim,
        "head_v_dim": geometry.v_dim,
        "conv_kernel": geometry.conv_width,
        "ssm_state_shape": list(state),
    }
    if not geometry.external_conv:  # a convolution that stays with the model keeps its own state
        row["conv_dim"] = geometry.conv_dim
        row["conv_state_shape"] = list(conv)
        row["state_bytes_per_seq_per_layer_fp32_ssm_bf16_conv"] = state_bytes(group, "fp32", "bf16")
    return row
