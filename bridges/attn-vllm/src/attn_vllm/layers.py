"""vLLM's attention layers against the plan: which group a layer belongs to, and whether it asks for what was planned."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from attn_core.errors import BindError
from attn_core.formats import torch_dtype
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import MhaCache, MhaLayer, Scale
from attn_core.plan import Plan, Pool

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)(?:\.|$)")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class LayerFacts(NamedTuple):
    """What vLLM says when it makes an attention layer; head counts per rank. ``window`` counts the query's own position."""

    q_heads: int
    kv_heads: int
    qk_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool


def layer_index(name: str) -> int:
    """The layer number in a module path such as ``model.layers.3.self_attn.attn``. Raises :class:`BindError` if there is none."""
    found = _LAYER.search(name) or _NUMBER.search(name)
    if found is None:
        raise BindError(f"attention layer {name!r} has no number in its name", "plans know layers by their number")
    return int(found.group(1))


def differences(facts: LayerFacts, geometry: MhaGeometry) -> Iterator[str]:
    """One line for each thing in which a layer differs from its planned group."""
    planned = LayerFacts(
        geometry.q_heads,
        geometry.kv_heads,
        geometry.qk_dim,
        geometry.scale,
        geometry.window,
        geometry.softcap,
        geometry.sinks,
    )
    for name, here, there in zip(LayerFacts._fields, facts, planned, strict=True):
        same = (here or None) == (there or None)
        if name == "scale":
            same = math.isclose(facts.scale, geometry.scale, rel_tol=1e-5)
        if not same:
            yield f"{name:9} vLLM {here}, planned {there}"


def check_against_any(facts: LayerFacts, plan: Plan) -> None:
    """Raise :class:`BindError` if no planned group looks like this layer. Cheap: runs while the model is being built."""
    told = []
    for group in plan.groups:
        lines = list(differences(facts, group.group.geometry))  # type: ignore[arg-type]
        if not lines:
            return
        told.append(f"{group.group.name}: {'; '.join(lines)}")
    raise _not_planned("an attention layer of vLLM fits no planned group", told)


def group_of(name: str, facts: LayerFacts, plan: Plan) -> LayerGroup:
    """The planned group of the layer called `name`. Raises :class:`BindError` if there is none or it differs."""
    index = layer_index(name)
    for item in plan.groups:
        if index in item.group.layers:
            lines = list(differences(facts, item.group.geometry))  # type: ignore[arg-type]
            if lines:
                raise _not_planned(f"{name} (group {item.group.name!r}) is not what was planned", lines)
            return item.group
    raise _not_planned(f"{name} is in no group of the plan", [f"groups   {[g.group.name for g in plan.groups]}"])


def _not_planned(message: str, facts: list[str]) -> BindError:
    return BindError(message, *facts, fix="start vLLM without ATTN_BACKEND, and report the model's config")


def make_layer(module: Any, group: LayerGroup, quantised: bool) -> MhaLayer:
    """A router's layer from vLLM's module, after its weights are loaded: sinks in float32, scales where the cache has any."""
    sinks = module.impl.sinks
    return MhaLayer(
        layer_index(module.layer_name),
        group,
        sinks=None if sinks is None else sinks.detach().float(),
        k_scale=_scale(module._k_scale, module._k_scale_float) if quantised else None,
        v_scale=_scale(module._v_scale, module._v_scale_float) if quantised else None,
    )


def _scale(tensor: torch.Tensor, value: float) -> Scale:
    flat = tensor.detach().float().reshape(-1)
    return Scale(flat, value if flat.numel() == 1 else None)


def make_cache(kv_cache: torch.Tensor, qk_dim: int, pool: Pool) -> MhaCache:
    """vLLM's view ``[pages, heads, page size, qk_dim + v_dim]``, K first, as K and V ``[pages, page size, heads, dim]``.

    Views only: every memory layout of vLLM keeps this logical shape. Raises :class:`BindError` for another one.
    """
    if kv_cache.dim() != 4 or kv_cache.shape[2] != pool.page_size:
        raise BindError(
            f"vLLM's cache has shape {list(kv_cache.shape)}",
            f"needed   [pages, heads, {pool.page_size}, K and V] (page size of pool {pool.name!r})",
        )
    stored = torch_dtype(pool.dtype)
    if kv_cache.dtype != stored:
        if kv_cache.dtype.itemsize != stored.itemsize or kv_cache.dtype != torch.uint8:
            raise BindError(f"vLLM's cache holds {kv_cache.dtype}; pool {pool.name!r} was planned as {pool.dtype}")
        kv_cache = kv_cache.view(stored)  # vLLM keeps 8-bit floats as bytes
    tokens_first = kv_cache.transpose(1, 2)
    return MhaCache(tokens_first[..., :qk_dim], tokens_first[..., qk_dim:])
