"""Pools and scratch memory: sizes in bytes, for this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attn_core.dtypes import row_bytes
from attn_core.errors import PlanError
from attn_core.geometry import DsaGeometry, GdnGeometry, Geometry, LayerGroup, MhaGeometry, MlaGeometry, Model
from attn_core.manifest import WORKSPACE_SIZES
from attn_core.options import Options
from attn_core.plan import Pool
from attn_core.planner._build import Solved
from attn_core.planner._choice import Choice, GroupChoice
from attn_core.planner._request import Situation
from attn_core.predicate import compile_when

#: Bytes of one token in formats whose rows are not simply width x element size (per token, all heads).
_PACKED_ROWS: Mapping[str, int] = {"flashmla_656": 656, "flashmla_528": 528, "index_132_planar": 132}
#: Tokens that a page of a shared allocation is rounded up to.
_BLOCK = 16


def build_pools(solved: Solved) -> Iterator[Pool]:
    """One pool for every (role, name) that the groups of a solution use."""
    pending: dict[str, list[tuple[LayerGroup, str, GroupChoice]]] = {}
    for group in solved.situation.model.groups:
        choice = solved.solution.groups.get(group.name)
        if choice is not None:
            for role, name in group.pools.items():
                pending.setdefault(name, []).append((group, role, choice))
    for name, users in pending.items():
        yield _pool(name, users, solved.situation)


def _pool(name: str, users: Sequence[tuple[LayerGroup, str, GroupChoice]], situation: Situation) -> Pool:
    group, role, choice = users[0]
    setting = choice.setting
    state = role == "state"
    dtype = situation.kv_dtype if not state else _state_dtype(group.geometry, situation)
    layout, page, fmt = setting.layout, setting.page_size, setting.format
    if role == "index":
        fmt, dtype = "index_132_planar", "fp8_e4m3"
    if state:
        layout, page, fmt = "VK", 1, "state_vk"
    layers = tuple(sorted({layer for g, _, _ in users for layer in g.layers if layer not in g.kv_from}))
    per_token = sum(
        _layer_bytes(g, role, dtype, fmt, situation, c) * sum(layer not in g.kv_from for layer in g.layers)
        for g, _, c in users
    )
    kinds = {"attend": "latent" if group.backend_kind in ("mla", "dsa") else "kv"}
    verify = _verify_state(choice) if state and situation.options.topk else None
    width = situation.options.speculative_num_draft_tokens
    return Pool(
        name=name,
        model=group.model,
        layers=layers,
        format=fmt,
        dtype=dtype,
        layout=layout,
        page_size=page,
        bytes_per_page=per_token * page,
        kind=kinds.get(role, role),
        verify_state=verify,
        states_per_row=(1 + (width if verify else 0)) if state else 0,
    )


def _verify_state(choice: GroupChoice) -> str:
    """How verify keeps the states between draft tokens: what the chosen row says, else intermediate buffers."""
    verify = choice.choices.get(("verify", "main"))
    for condition in verify.fit.live.row.settled if verify else ():
        if condition.axis == "verify_state" and not condition.accepts("intermediate"):
            return "slots"
    return "intermediate"


def _state_dtype(geometry: Geometry | None, situation: Situation) -> str:
    declared = geometry.state_dtype if isinstance(geometry, GdnGeometry) else "fp32"
    asked = situation.options.mamba_ssm_dtype or declared
    return situation.dtype if asked == "auto" else asked


def _layer_bytes(
    group: LayerGroup, role: str, dtype: str, fmt: str, situation: Situation, choice: GroupChoice | None = None
) -> int:
    """Bytes one layer keeps for one token (or one request, for states)."""
    geometry = group.geometry
    if fmt in _PACKED_ROWS:
        return _PACKED_ROWS[fmt]
    if isinstance(geometry, DsaGeometry):
        geometry = geometry.mla
    if isinstance(geometry, MhaGeometry):
        qk, v = _widths(geometry, choice)
        return geometry.kv_heads * (row_bytes(qk, dtype) + row_bytes(v, dtype))
    if isinstance(geometry, MlaGeometry):
        return row_bytes(geometry.latent_dim + geometry.rope_dim, dtype)
    if isinstance(geometry, GdnGeometry):
        return state_bytes(geometry, dtype) + row_bytes(geometry.conv_dim * (geometry.conv_width - 1), situation.dtype)
    return 0


def _widths(geometry: MhaGeometry, choice: GroupChoice | None) -> tuple[int, int]:
    """The widths that K and V are stored with: those of the model, or what an adapter pads them to."""
    qk, v = geometry.qk_dim, geometry.v_dim
    for chosen in choice.choices.values() if choice else ():
        pads = chosen.fit.live.pads
        v = max(v, pads["v_dim"][1]) if "v_dim" in pads else v
        if "head_dims" in pads:
            qk, v = max(qk, pads["head_dims"][1][0]), max(v, pads["head_dims"][1][1])
    return qk, v


def padding_costs(solved: Solved) -> Iterator[tuple[str, str]]:
    """What padding costs in cache memory, as (group, sentence)."""
    for group in solved.situation.model.groups:
        choice = solved.solution.groups.get(group.name)
        if choice is None or not isinstance(group.geometry, MhaGeometry):
            continue
        plain, wide = (
            _layer_bytes(group, "attend", solved.situation.kv_dtype, "plain", solved.situation, one)
            for one in (None, choice)
        )
        if wide > plain and "format.default" in next(iter(choice.choices.values())).verdict.request.axes:
            more = (
                f"{wide - plain} bytes more a token and layer ({wide} instead of {plain}, {100 * wide // plain - 100}%)"
            )
            yield group.name, more


def state_bytes(geometry: GdnGeometry, dtype: str) -> int:
    """Bytes of one layer's recurrent state of one request, without the convolution's."""
    return row_bytes(geometry.v_heads * geometry.v_dim * geometry.k_dim, dtype)


def shared_block(model: Model, situation: Situation) -> int | None:
    """The one page size of a shared allocation: K's half of a page is exactly one recurrent state. None without states.

    Pages and states are the same blocks of memory: a larger page would leave the state tensor overlapping its neighbour.
    """
    states = [g for g in model.groups if isinstance(g.geometry, GdnGeometry)]
    full = [g for g in model.groups if isinstance(g.geometry, MhaGeometry) and g.backend_kind == "mha"]
    if not (situation.options.shared_allocation and states and full):
        return None
    largest = max(
        state_bytes(g.geometry, _state_dtype(g.geometry, situation))
        for g in states
        if isinstance(g.geometry, GdnGeometry)
    )
    keys = min(
        g.geometry.kv_heads * row_bytes(g.geometry.qk_dim, situation.kv_dtype)
        for g in full
        if isinstance(g.geometry, MhaGeometry)
    )
    page = -(-largest // (keys * _BLOCK)) * _BLOCK
    asked = situation.options.page_size
    if asked is not None and asked != page:
        raise PlanError(
            f"the page size of a shared allocation needs {page}, have {asked}",
            "asked    --page-size together with --shared-allocation",
            f"state    {largest} bytes a layer and request",
            f"keys     {keys} bytes a token and layer: exactly {page} tokens hold one state",
            suggestions=[f"--page-size {page}", "without --page-size", "without --shared-allocation"],
        )
    return page


# --- scratch memory -----------------------------------------------------------------------------------------------------


def workspaces(solved: Sequence[Solved], limits: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Scratch memory per lane of every variant that serves; ``shareable`` ones of one package may be one buffer."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in solved:
        for choice in one.solution.groups.values():
            for chosen in choice.choices.values():
                for part in (chosen, chosen.prefix):
                    if part is not None and part.verdict.candidate.variant.workspace:
                        entry = _workspace(part, one.situation.options, limits)
                        key = (entry["kind"], entry["backend"], entry["variant"])
                        if key not in found or found[key]["bytes"] < entry["bytes"]:
                            found[key] = entry
    return [found[key] for key in sorted(found)]


def _workspace(choice: Choice, options: Options, limits: Mapping[str, Any]) -> dict[str, Any]:
    candidate = choice.verdict.candidate
    declared = candidate.variant.workspace
    heads = int(choice.verdict.request.axes.get("q_heads") or 0)
    sizes = [declared]
    for row in declared.get("rows", ()):
        if all(c.holds(choice.verdict.request.axes, unknown=False) for c in compile_when(row.get("when", {}))):
            sizes.append(row)
    counts = {
        "bytes": 1,
        "per_row": options.max_running_requests or 0,
        "per_token": limits["max_tokens_per_extend"],
        "per_row_head": (options.max_running_requests or 0) * heads,
    }
    return {
        "kind": candidate.manifest.kind,
        "backend": candidate.manifest.name,
        "variant": candidate.variant.name,
        "bytes": max(sum(size.get(key, 0) * counts[key] for key in WORKSPACE_SIZES) for size in sizes),
        "zeroed": bool(declared.get("zeroed", False)),
        "shareable": bool(declared.get("shareable", False)),
    }
