"""From a transformers model to a plan and to the layers that a router binds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from attn_core.errors import BindError, PlanError
from attn_core.geometry import MhaGeometry
from attn_core.layers import MhaLayer
from attn_core.plan import Plan

#: Names under which attention modules keep their learned sinks.
_SINKS = ("sinks", "attention_sink_bias", "sink")


def text_config(model: Any) -> Any:
    """The config of the language model inside `model`. Raises :class:`PlanError` for an encoder-decoder."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise PlanError(
            f"{type(model).__name__} is an encoder-decoder; this bridge serves decoder-only models",
            "cross attention would need a second cache, which transformers keeps for itself",
            fix='attn_implementation="sdpa" for this model',
        )
    return model.config.get_text_config(decoder=True)


def make_plan(model: Any, options: Mapping[str, Any]) -> Plan:
    """Plan the decoder of `model` for the device it is on. Raises the planner's :class:`PlanError`."""
    return plan_config(text_config(model), model.dtype, model.device, options)


def plan_config(
    config: Any, dtype: torch.dtype, device: torch.device, options: Mapping[str, Any], *, draft: Any = None
) -> Plan:
    """Plan a model from its config alone, before any weight is loaded; `draft` is the config of a draft model.

    Raises the planner's :class:`PlanError`.
    """
    from attn_core.discovery import discover
    from attn_core.model import parse_model
    from attn_core.options import Options
    from attn_core.planner import plan_for
    from attn_core.platform import detect_platform

    flags = {"dtype": str(dtype), **{name: value for name, value in options.items() if value is not None}}
    platform = detect_platform(_device_name(device))
    drafts = None if draft is None else parse_model(draft)
    plan = plan_for(parse_model(config), platform, Options.of(flags), discover(), draft=drafts)
    _check_served(plan)
    return plan


def _device_name(device: torch.device) -> str:
    """The device as the platform detection names it: torch calls AMD's GPUs ``cuda`` too."""
    name = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    return name if device.index is None or name == "cpu" else f"{name}:{device.index}"


def _check_served(plan: Plan) -> None:
    for group in plan.groups:
        if group.group.backend_kind != "mha" or "cross" in group.group.pools:
            raise PlanError(
                f"layer group {group.group.name!r} ({group.group.kind}) cannot be served inside transformers",
                "this bridge serves causal self-attention with keys and values",
                fix='attn_implementation="sdpa" for this model',
            )
        if group.group.kv_from:
            raise PlanError(
                f"layer group {group.group.name!r} shares the keys of other layers",
                f"layers   {dict(group.group.kv_from)} (layer: owner)",
                "transformers runs such layers for the last tokens only, which this bridge cannot follow",
                fix='attn_implementation="sdpa" for this model',
            )


def attention_modules(model: Any) -> list[nn.Module]:
    """The modules of the decoder that belong to a layer: those with a ``layer_idx``."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return [module for module in decoder.modules() if isinstance(getattr(module, "layer_idx", None), int)]


def make_layers(model: Any, plan: Plan) -> dict[int, MhaLayer]:
    """One layer for each index of the plan's groups, with the sinks of its attention module. By layer index."""
    modules: dict[int, list[nn.Module]] = {}
    for module in attention_modules(model):
        modules.setdefault(module.layer_idx, []).append(module)  # type: ignore[arg-type]
    layers = {}
    for group_plan in plan.groups:
        group = group_plan.group
        for index in group.layers:
            if index not in modules:
                raise BindError(f"the plan has layer {index} (group {group.name!r}); the model has no such layer")
            sinks = _sinks(index, group.geometry, modules[index])
            layers[index] = MhaLayer(index, group, sinks=sinks)
    return dict(sorted(layers.items()))


def _sinks(index: int, geometry: Any, modules: list[nn.Module]) -> Any:
    if not isinstance(geometry, MhaGeometry) or not geometry.sinks:
        return None
    for module in modules:
        for name in _SINKS:
            value = getattr(module, name, None)
            if value is not None and getattr(value, "ndim", 0) == 1:
                return value.detach().float()
    raise BindError(
        f"layer {index} has attention sinks by its config, but none of its modules holds them", f"looked   {_SINKS}"
    )
