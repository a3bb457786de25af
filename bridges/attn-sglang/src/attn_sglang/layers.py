"""The attention layers of a loaded model: what SGLang asks of each, as attn-core's layer groups.

Groups come from the ``RadixAttention`` modules, not from the model's config: what they say (heads of this rank, scale,
window, soft cap) is what SGLang's own backends obey, so a bridged backend computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attn_core.errors import PlanError
from attn_core.geometry import LayerGroup, MhaGeometry, Model
from attn_core.layers import MhaLayer, Scale

if TYPE_CHECKING:
    import torch

    from attn_core.plan import Plan
    from attn_sglang.facts import ServerFacts

#: What every attention module of SGLang has; found by shape, so that subclasses count.
_MARKS = ("tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim", "scaling", "layer_id", "sliding_window_size")

#: Pools by attn-core's name: SGLang's main pool, and the sub-pool of sliding-window layers.
MAIN, SLIDING = "main", "sliding"


@dataclass(eq=False, slots=True)
class Found:
    """One attention module: its place in the model and the sinks its parent holds (None without)."""

    path: str
    module: Any
    sinks: torch.Tensor | None = None
    shared: bool = False  #: another module owns the cache of this ``layer_id``


@dataclass(eq=False, slots=True)
class Bound:
    """A module with its layer."""

    found: Found
    layer: MhaLayer


@dataclass(slots=True)
class Layout:
    """Groups of a model and the modules of each, by group name."""

    model: Model
    members: dict[str, list[Found]] = field(default_factory=dict)


#: Names under which attention modules of SGLang's models keep their learned sinks.
_SINKS = ("sinks", "attention_sink_bias", "sink")


def find_layers(model: Any) -> list[Found]:
    """Every attention module of `model`, in order. Modules of one ``layer_id`` after the first share its cache."""
    found: list[Found] = []
    owners: set[int] = set()
    parents = dict(model.named_modules())
    for path, module in parents.items():
        if not all(hasattr(module, mark) for mark in _MARKS):
            continue
        parent = parents.get(path.rpartition(".")[0])
        sinks = next((value for name in _SINKS if (value := getattr(parent, name, None)) is not None), None)
        found.append(Found(path, module, sinks, shared=module.layer_id in owners))
        owners.add(module.layer_id)
    return found


def describe(found: list[Found], facts: ServerFacts, sliding_layers: frozenset[int] = frozenset()) -> Layout:
    """Layer groups of the modules. `sliding_layers` are the layer ids whose keys lie in SGLang's sliding-window pool.

    Raises :class:`PlanError` for a model without such modules and for what a batch of attn-core cannot express.
    """
    if not found:
        raise PlanError(
            f"{facts.model}: no attention layer was found", "looked   modules with " + ", ".join(_MARKS),
            fix="serve this model with a backend of SGLang's own",
        )  # fmt: skip
    table: dict[tuple[MhaGeometry, str], list[Found]] = {}
    for item in found:
        _refuse(item)
        pool = SLIDING if item.module.layer_id in sliding_layers else MAIN
        table.setdefault((_geometry(item, facts), pool), []).append(item)
    layout = Layout(Model("", "", "", None, (), 0))
    groups: list[LayerGroup] = []
    for (geometry, pool), members in table.items():
        group = _group(geometry, pool, members, {g.name for g in groups})
        groups.append(group)
        layout.members[group.name] = members
    layout.model = Model(
        name=facts.model,
        architecture=facts.architecture,
        model_type=facts.model_type,
        dtype=None,
        groups=tuple(groups),
        layers_counted=len({item.module.layer_id for item in found}),
        traits=frozenset({"swa_pools"} if sliding_layers else ()),
        max_positions=facts.context_length,
    )
    return layout


def _geometry(item: Found, facts: ServerFacts) -> MhaGeometry:
    layer = item.module
    window = layer.sliding_window_size
    return MhaGeometry(
        q_heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        qk_dim=layer.qk_head_dim,
        v_dim=layer.v_head_dim,
        scale=float(layer.scaling),
        # SGLang's window is the distance to the farthest key; attn-core's counts the query's own position, too
        window=window + 1 if window is not None and window > 0 else None,
        chunk=facts.attention_chunk if getattr(layer, "use_irope", False) else None,
        softcap=float(layer.logit_cap) if getattr(layer, "logit_cap", 0) else None,
        sinks=item.sinks is not None,
    )


def _group(geometry: MhaGeometry, pool: str, members: list[Found], used: set[str]) -> LayerGroup:
    kind = "chunked_local" if geometry.chunk else "sliding" if geometry.window else "full"
    name, number = kind, 1
    while name in used:
        number += 1
        name = f"{kind}_{number}"
    shared = {item.module.layer_id: item.module.layer_id for item in members if item.shared}
    return LayerGroup(
        model="target",
        name=name,
        kind=kind,
        layers=tuple(dict.fromkeys(item.module.layer_id for item in members)),
        geometry=geometry,
        pools={"attend": pool},
        features=frozenset({"shared_kv"}) if shared else frozenset(),
    )


def _refuse(item: Found) -> None:
    facts = list(_refusals(item.module))
    if facts:
        raise PlanError(
            f"attention layer {item.path} cannot be served through attn-core", *facts,
            fix="serve this model with a backend of SGLang's own",
        )  # fmt: skip


def _refusals(layer: Any) -> Iterator[str]:
    if getattr(layer, "is_cross_attention", False):
        yield "cross attention: its keys lie in an encoder's cache"
    kind = getattr(getattr(layer, "attn_type", None), "value", "decoder")
    if kind != "decoder":
        yield f"attention type {kind}: only causal self-attention is served"
    if getattr(layer, "pos_encoding_mode", "NONE") != "NONE":
        yield f"position encoding {layer.pos_encoding_mode} inside the kernel"
    if getattr(layer, "logit_cap", 0) and getattr(layer, "logit_capping_method", "tanh") != "tanh":
        yield f"logit capping by {layer.logit_capping_method}; only tanh is served"
    if getattr(layer, "xai_temperature_len", -1) > 0:
        yield f"query temperature by position (length {layer.xai_temperature_len})"


def make_layers(plan: Plan, layout: Layout, quantised: bool) -> list[Bound]:
    """One :class:`MhaLayer` for each module. Sinks are f32 buffers of their own, filled at the first call; scales apply
    to a quantised cache only, as in SGLang's own pools."""
    bound = []
    for group in plan.groups:
        for item in layout.members[group.group.name]:
            layer = item.module
            made = MhaLayer(
                layer.layer_id,
                group.group,
                sinks=_sink_buffer(item, group.group.geometry),
                k_scale=_scale(layer, "k") if quantised else None,
                v_scale=_scale(layer, "v") if quantised else None,
                kv_from=layer.layer_id if item.shared else None,
            )
            bound.append(Bound(item, made))
    return bound


def _sink_buffer(item: Found, geometry: Any) -> torch.Tensor | None:
    if item.sinks is None:
        return None
    import torch

    return torch.zeros(geometry.q_heads, dtype=torch.float32, device=item.sinks.device)


def _scale(layer: Any, name: str) -> Scale | None:
    tensor = getattr(layer, f"{name}_scale", None)
    if tensor is None:
        return None
    value = getattr(layer, f"{name}_scale_float", None)
    return Scale(tensor.detach().reshape(-1).float(), None if value is None else float(value))


def copy_sinks(bound: Bound, given: torch.Tensor) -> None:
    """Bring the layer's sinks up to date, at every call: a weight update leaves no trace, and a captured copy is replayed."""
    assert bound.layer.sinks is not None
    bound.layer.sinks.copy_(given.detach().reshape(-1))
