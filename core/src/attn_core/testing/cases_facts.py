"""Facts about a model or a plan that case files state in numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attn_core.dtypes import row_bytes
from attn_core.geometry import DsaGeometry, GdnGeometry, LayerGroup, MhaGeometry, MlaGeometry
from attn_core.plan import GroupPlan
from attn_core.planner._pools import state_bytes
from attn_core.testing.cases_outcome import Outcome
from attn_core.testing.cases_words import CaseError, listed


def _attention(outcome: Outcome) -> LayerGroup:
    """The group that facts about "the" attention are about: MLA where there is one, else the main group."""
    latent = [g for g in outcome.model.groups if isinstance(g.geometry, MlaGeometry | DsaGeometry)]
    return latent[0] if latent else outcome.main


def _geometry(group: LayerGroup) -> MhaGeometry | MlaGeometry:
    geometry = group.geometry.mla if isinstance(group.geometry, DsaGeometry) else group.geometry
    if not isinstance(geometry, MhaGeometry | MlaGeometry):
        raise CaseError(f"group {group.name} has no attention dims")
    return geometry


def _qk(outcome: Outcome) -> int:
    geometry = _geometry(_attention(outcome))
    return geometry.qk_dim if isinstance(geometry, MhaGeometry) else geometry.nope_dim + geometry.rope_dim


def _v(outcome: Outcome) -> int:
    return _geometry(_attention(outcome)).v_dim


def _cache(outcome: Outcome) -> int:
    """Elements one token takes in one layer's cache."""
    geometry = _geometry(_attention(outcome))
    if isinstance(geometry, MlaGeometry):
        return geometry.latent_dim + geometry.rope_dim
    return geometry.kv_heads * (geometry.qk_dim + geometry.v_dim)


def _kv_heads(outcome: Outcome) -> int:
    geometry = _geometry(_attention(outcome))
    return geometry.kv_heads if isinstance(geometry, MhaGeometry) else 1


def _ratio(outcome: Outcome) -> int:
    geometry = _geometry(outcome.main)
    return geometry.ratio if isinstance(geometry, MhaGeometry) else geometry.q_heads


def _window(outcome: Outcome) -> int | None:
    """The window with the query's own position, of the first group that has one."""
    for group in outcome.model.groups:
        if isinstance(group.geometry, MhaGeometry) and group.geometry.window and group.model == "target":
            return group.geometry.window
    return None


def _layer_bytes(outcome: Outcome, kind: str = "full", dtype: str = "bf16") -> int:
    """Bytes one token takes in one layer of a kind, in bf16."""
    for group in outcome.model.groups:
        if group.kind == kind or group.name == kind:
            geometry = _geometry(group)
            if isinstance(geometry, MlaGeometry):
                return row_bytes(geometry.latent_dim + geometry.rope_dim, dtype)
            return geometry.kv_heads * (row_bytes(geometry.qk_dim, dtype) + row_bytes(geometry.v_dim, dtype))
    raise CaseError(f"no group of kind {kind!r}")


def main_bytes(outcome: Outcome) -> int:
    """Bytes of one token over all layers with a cache, on this rank, in bf16."""
    total = 0
    for group in outcome.model.groups:
        if group.model == "target" and ("attend" in group.pools or "cross" in group.pools):
            total += _layer_bytes(outcome, group.name) * sum(layer not in group.kv_from for layer in group.layers)
    return total


def state_bytes_of(outcome: Outcome) -> int:
    """Bytes of one layer's recurrent state of one request, without the convolution's, in the planned type."""
    from attn_core.dtypes import canonical

    for group in outcome.model.groups:
        geometry = group.geometry
        if isinstance(geometry, GdnGeometry):
            asked = outcome.read_options().mamba_ssm_dtype or geometry.state_dtype
            return state_bytes(geometry, canonical(asked if asked != "auto" else outcome.model.dtype or "bf16"))
    raise CaseError("the model has no recurrent state that is described here")


def padded_heads(outcome: Outcome) -> int:
    """Query heads as the decode kernel sees them."""
    pads = outcome.phase("decode").pads
    if "q_heads" in pads:
        return int(pads["q_heads"][1])
    return _geometry(_attention(outcome)).q_heads


FACTS: Mapping[str, Callable[..., Any]] = {
    "qk": _qk,
    "v": _v,
    "cache": _cache,
    "ratio": _ratio,
    "kv_heads_per_rank": _kv_heads,
    "window_tokens_incl_self": _window,
    "bytes_per_layer": _layer_bytes,
    "bytes_per_token": main_bytes,
}


def group_matches(plan: GroupPlan, wanted: Mapping[str, Any]) -> list[str]:
    """What of a group differs from its description in a case; empty if nothing does."""
    group, failures = plan.group, []
    serving = {name for phase in plan.phases.values() for name in (phase.backend, f"{phase.backend}:{phase.variant}")}
    geometry = group.geometry
    facts = {
        "kind": group.kind,
        "name": group.name,
        "model": group.model,
        "num_layers": len(group.layers),
        "layers": list(group.layers),
        **{
            key: getattr(geometry, key)
            for key in ("q_heads", "kv_heads", "qk_dim", "v_dim", "window", "sinks")
            if hasattr(geometry, key)
        },
        "head_dim": getattr(geometry, "qk_dim", None),
    }
    for key, value in wanted.items():
        if key == "not":
            failures += [f"{name} serves {group.name}" for name in listed(value) if name in serving]
        elif key in ("backend", "any"):
            failures += [] if set(listed(value)) & serving else [f"{sorted(serving)} serve {group.name}"]
        elif key.removesuffix("_in") in plan.phases:
            phase = plan.phases[key.removesuffix("_in")]
            names = {phase.backend, f"{phase.backend}:{phase.variant}"}
            failures += [] if names & set(listed(value)) else [f"{key} is {phase.backend}:{phase.variant}"]
        elif key in facts:
            failures += [] if facts[key] == value else [f"{key} is {facts[key]}"]
        else:
            failures.append(f"unknown key {key!r}")
    return failures
