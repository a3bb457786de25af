"""Layers gathered into groups: one group for each distinct geometry, with a readable name, its pools and features."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from attn_core.geometry import DsaGeometry, LayerGroup, MhaGeometry, MlaGeometry
from attn_core.model._layers import Layer

#: Order of the groups of a model; kinds that are absent here come between states and cross attention.
_ORDER = ("full", "sliding", "chunked_local", "mla", "mla_sparse_dsa", "linear_gdn", "linear_jet", "linear_kda",
          "linear_lightning", "mamba1", "mamba2", "rg_lru", "rwkv", "xlstm", "short_conv", "",
          "no_attention_mlp_or_moe", "cross", "encoder_bidirectional", "vit_full_bidirectional",
          "vit_windowed_bidirectional")  # fmt: skip
_NAMES: Mapping[str, str] = {
    "mla_sparse_dsa": "dsa",
    "linear_gdn": "linear",
    "linear_jet": "linear",
    "linear_kda": "linear",
    "linear_lightning": "linear",
    "mamba1": "mamba",
    "mamba2": "mamba",
    "no_attention_mlp_or_moe": "no_attention",
    "encoder_bidirectional": "encoder",
    "vit_full_bidirectional": "vision",
    "vit_windowed_bidirectional": "vision_windowed",
}
#: Kinds that keep one recurrent state a sequence instead of keys and values.
STATE_KINDS = frozenset(
    {"linear_gdn", "linear_jet", "linear_kda", "linear_lightning", "mamba1", "mamba2", "rg_lru", "rwkv", "xlstm",
     "short_conv"}
)  # fmt: skip
_CACHED = ("full", "sliding", "chunked_local", "mla", "mla_sparse_dsa")


def gather(layers: Sequence[Layer]) -> tuple[LayerGroup, ...]:
    """The groups of `layers`, ordered by kind, then by first layer. Names are unique and stable."""
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(_key(layer), []).append(layer)
    sets = sorted(found.values(), key=lambda group: (_rank(group[0].kind), group[0].model, group[0].index))
    used: dict[str, int] = {}
    groups = []
    for members in sets:
        name = _unique(_base_name(members[0]), used)
        groups.append(_group(name, members))
    return _with_pools(tuple(groups))


def _key(layer: Layer) -> str:
    """Text that is equal for layers of one group."""
    return repr(
        (layer.model, layer.tower, layer.kind, layer.geometry, sorted(layer.features), sorted(layer.wants),
         layer.unsupported, layer.kv_len, layer.listed, json.dumps(layer.facts, sort_keys=True, default=str))
    )  # fmt: skip


def _rank(kind: str) -> int:
    return _ORDER.index(kind if kind in _ORDER else "")


def _base_name(layer: Layer) -> str:
    if layer.tower == "audio":
        return "audio"
    return _NAMES.get(layer.kind, layer.kind)


def _unique(name: str, used: dict[str, int]) -> str:
    used[name] = used.get(name, 0) + 1
    return name if used[name] == 1 else f"{name}_{used[name]}"


def _group(name: str, members: Sequence[Layer]) -> LayerGroup:
    first = members[0]
    geometry = first.geometry
    owners = {layer.index: layer.kv_from for layer in members if layer.kv_from is not None}
    if isinstance(geometry, DsaGeometry):
        shared = {layer.index: layer.index_from for layer in members if layer.index_from is not None}
        geometry = replace(geometry, index_from=shared)
    facts = {**first.facts, **({"tower": first.tower} if first.tower else {})}
    return LayerGroup(
        model=first.model,
        name=name,
        kind=first.kind,
        layers=tuple(layer.index for layer in members),
        geometry=geometry,
        kv_from=owners,
        features=first.features | ({"shared_kv"} if owners else frozenset()),
        wants=first.wants,
        unsupported=first.unsupported,
        kv_len=first.kv_len,
        facts=facts if first.listed else {**facts, "listed": False},
    )


def _with_pools(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """One pool for each group. The pool of the first group with keys and values is ``kv``, the main one."""
    used: dict[str, int] = {}
    result = []
    for group in groups:
        pools: dict[str, str] = {}
        if group.kind in _CACHED and group.model == "target":
            pools["attend"] = _pool("kv", group, used)
            if group.kind == "mla_sparse_dsa":
                pools["index"] = _pool("index", group, used)
        elif group.kind == "cross":
            pools["cross"] = _pool("cross", group, used)
        elif group.kind in STATE_KINDS and group.model == "target":
            pools["state"] = _pool("state", group, used)
        result.append(replace(group, pools=pools))
    return tuple(result)


def _pool(base: str, group: LayerGroup, used: dict[str, int]) -> str:
    used[base] = used.get(base, 0) + 1
    return base if used[base] == 1 else f"{base}_{group.name}"


def traits(groups: Sequence[LayerGroup]) -> frozenset[str]:
    """What a manifest may say about a whole model (axis ``traits``)."""
    own = [group for group in groups if group.model == "target"]
    kinds = {group.kind for group in own}
    heads = [group.geometry for group in own if isinstance(group.geometry, MhaGeometry)]
    attends = any(isinstance(group.geometry, (MhaGeometry, MlaGeometry, DsaGeometry)) for group in own)
    found = {
        "hybrid_linear": attends and bool(kinds & STATE_KINDS),
        "mixed_head_dims": len({(geometry.qk_dim, geometry.v_dim) for geometry in heads}) > 1,
        "shared_kv": any(group.kv_from for group in own),
        "swa_pools": "sliding" in kinds and len(kinds & set(_CACHED)) > 1,
        "encoder_decoder": "cross" in kinds,
        "mla": bool(kinds & {"mla", "mla_sparse_dsa"}),
        "sinks": any(geometry.sinks for geometry in heads),
        "mm_spans": any("mm_spans" in group.wants for group in own),
    }
    return frozenset(name for name, true in found.items() if true)
