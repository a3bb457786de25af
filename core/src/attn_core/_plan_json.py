"""The JSON form of plans and of their parts. Public through :mod:`attn_core.plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from attn_core.geometry import DsaGeometry, GdnGeometry, Geometry, LayerGroup, MhaGeometry, MlaGeometry
from attn_core.reasons import Reason

if TYPE_CHECKING:
    from attn_core.plan import GroupPlan, PhasePlan, Plan

_GEOMETRIES: Mapping[str, type] = {"mha": MhaGeometry, "mla": MlaGeometry, "gdn": GdnGeometry, "dsa": DsaGeometry}


def contract_of(geometry: Geometry | None) -> dict[str, Any]:
    """What two nodes must agree on about a group: heads per rank, widths, windows, state shapes."""
    if isinstance(geometry, MhaGeometry):
        return {
            "kv_heads_per_rank": geometry.kv_heads,
            "qk_dim": geometry.qk_dim,
            "v_dim": geometry.v_dim,
            "window": geometry.window,
            "chunk": geometry.chunk,
        }
    if isinstance(geometry, MlaGeometry):
        return {"kv_heads_per_rank": 1, "latent_dim": geometry.latent_dim, "rope_dim": geometry.rope_dim}
    if isinstance(geometry, DsaGeometry):
        return {**contract_of(geometry.mla), "index_dim": geometry.index_dim, "index_topk": geometry.index_topk}
    if isinstance(geometry, GdnGeometry):
        return {
            "state": [geometry.v_heads, geometry.v_dim, geometry.k_dim],
            "state_dtype": geometry.state_dtype,
            "conv": [geometry.conv_dim, geometry.conv_width - 1],
        }
    return {}


def plain(value: Any) -> Any:
    """Dataclasses, tuples and frozensets as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def dump_group(plan: GroupPlan) -> dict[str, Any]:
    """One group with the plan of its phases."""
    group = plan.group
    return {
        "name": group.name,
        "model": group.model,
        "kind": group.kind,
        "backend_kind": group.backend_kind,
        "layers": list(group.layers),
        "num_layers": len(group.layers),
        "geometry": dump_geometry(group.geometry),
        "pools": dict(group.pools),
        "kv_from": {str(layer): owner for layer, owner in group.kv_from.items()},
        "features": sorted(group.features),
        "wants": sorted(group.wants),
        "unsupported": list(group.unsupported),
        "kv_len": group.kv_len,
        "phases": {phase: plain(phase_plan) for phase, phase_plan in plan.phases.items()},
        "shard": plain(plan.shard),
    }


def dump_geometry(geometry: Geometry | None) -> dict[str, Any] | None:
    """A geometry with its type name, as JSON."""
    for name, cls in _GEOMETRIES.items():
        if isinstance(geometry, cls):
            return {"type": name, **plain(geometry)}
    return None


def load_geometry(table: Mapping[str, Any] | None) -> Geometry | None:
    """The inverse of :func:`dump_geometry`."""
    if table is None:
        return None
    content = dict(table)
    cls = _GEOMETRIES[content.pop("type")]
    if cls is DsaGeometry:
        content["mla"] = MlaGeometry(**content["mla"])
        content["index_from"] = {int(key): value for key, value in content.get("index_from", {}).items()}
    return cls(**content)  # type: ignore[no-any-return]


def _load_phase(table: Mapping[str, Any]) -> PhasePlan:
    from attn_core.plan import GraphPlan, PartPlan, PhasePlan

    content = dict(table)
    content["parts"] = tuple(
        PartPlan(**{**part, "fuses": tuple(part.get("fuses", ())), "features": tuple(part.get("features", ()))})
        for part in content["parts"]
    )
    graph = dict(content["graph"])
    graph["kv_thresholds"] = tuple(graph.get("kv_thresholds", ()))
    content["graph"] = GraphPlan(**graph)
    return PhasePlan(**content)


def _load_group(table: Mapping[str, Any]) -> GroupPlan:
    from attn_core.plan import ContextShard, GroupPlan

    group = LayerGroup(
        model=table["model"],
        name=table["name"],
        kind=table["kind"],
        layers=tuple(table["layers"]),
        geometry=load_geometry(table["geometry"]),
        pools=dict(table["pools"]),
        kv_from={int(layer): owner for layer, owner in table["kv_from"].items()},
        features=frozenset(table["features"]),
        wants=frozenset(table["wants"]),
        unsupported=tuple(table["unsupported"]),
        kv_len=table["kv_len"],
    )
    shard = ContextShard(**table["shard"]) if table.get("shard") else None
    return GroupPlan(group, {phase: _load_phase(item) for phase, item in table["phases"].items()}, shard)


def build_plan(table: Mapping[str, Any]) -> Plan:
    """A plan from its parsed JSON. Raises KeyError, TypeError or ValueError for a document of another form."""
    from attn_core.plan import Adjustment, Plan, Pool, Rejection

    renamed = {"tp": table["tp_size"]}
    plain_fields = (
        "model", "platform", "page_size", "kv_cache_dtype", "kv_layout", "dtype", "cuda_graph", "options", "lanes",
        "batch_invariant", "async_schedule", "limits", "mixed_batch", "api_version", "ok",
    )  # fmt: skip
    return Plan(
        groups=tuple(_load_group(group) for group in table["groups"]),
        pools=tuple(Pool(**{**pool, "layers": tuple(pool["layers"])}) for pool in table["pools"]),
        adjustments=tuple(
            Adjustment(a["field"], a["from"], a["to"], a["reason"], a["by"]) for a in table["adjustments"]
        ),
        rejected=tuple(
            Rejection(**{**r, "reasons": tuple(map(Reason.from_dict, r["reasons"]))}) for r in table["rejected"]
        ),
        warnings=tuple(table["warnings"]),
        **renamed,
        **{name: table[name] for name in plain_fields},
    )
