"""The plan: data that says for every layer group and phase who serves it, with what, and why not the others.

A plan is JSON both ways, picklable, and has a fingerprint. The run time never decides again; it only checks that what was
planned is what is installed. Two nodes that exchange caches compare ``cache_contract``, not the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from attn_core._lazy import callable_module
from attn_core._plan_json import build_plan, contract_of, dump_group, plain
from attn_core.errors import UsageError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.reasons import Reason

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How far a phase may be captured. ``piecewise``: ``rebuild`` or ``stable_address`` metadata between pieces."""

    level: str = "none"
    max_rows: int = 0
    max_query_len: int = 1
    max_kv_len: int = 0
    kv_thresholds: tuple[int, ...] = ()
    piecewise: str = "rebuild"


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part of a phase: the role it plays and who plays it."""

    role: str
    backend: str
    variant: str
    package: str
    version: str
    fuses: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """Who serves one phase of one group; ``parts[0]`` is the main part, whose names are repeated for convenience."""

    backend: str
    variant: str
    package: str
    version: str
    parts: tuple[PartPlan, ...]
    kernel_page_size: int = 1
    form: str | None = None
    index_space: str | None = None
    graph: GraphPlan = GraphPlan()
    needs_lse: bool = False
    mixed: bool = False
    rank: int = 50
    explicit: bool = False
    reason: str = ""
    host_lengths: str = "bound"
    padded_out: str = "garbage"
    q_dtype: str = ""
    pads: Mapping[str, Any] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def route(self) -> tuple[str, str, str]:
        """(backend, variant, package): phases with one route share a backend object."""
        return self.backend, self.variant, self.package


@dataclass(frozen=True, slots=True)
class Pool:
    """Layers that share pages: one table, one page size, one format. ``kind``: kv, latent, index, state or cross."""

    name: str
    model: str
    layers: tuple[int, ...]
    format: str
    dtype: str
    layout: str
    page_size: int
    bytes_per_page: int
    kind: str = "kv"
    alignment: int = 16
    zero_init: bool = False
    verify_state: str | None = None
    states_per_row: int = 0


@dataclass(frozen=True, slots=True)
class ContextShard:
    """This rank's share of the keys under context parallelism."""

    rank: int
    size: int
    interleave: int = 1


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One layer group with the plan of each of its phases."""

    group: LayerGroup
    phases: Mapping[str, PhasePlan]
    shard: ContextShard | None = None

    @property
    def stored(self) -> LayerGroup:
        """The group as its cache holds it: K and V as wide as the widest padding of its phases."""
        geometry = self.group.geometry
        if not isinstance(geometry, MhaGeometry):
            return self.group
        qk, v = geometry.qk_dim, geometry.v_dim
        for phase in self.phases.values():
            wide_qk, wide_v = phase.pads["head_dims"][1] if "head_dims" in phase.pads else (qk, v)
            qk, v = max(qk, wide_qk), max(v, wide_v, phase.pads["v_dim"][1] if "v_dim" in phase.pads else v)
        if (qk, v) == (geometry.qk_dim, geometry.v_dim):
            return self.group
        return replace(self.group, geometry=replace(geometry, qk_dim=qk, v_dim=v))


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A value that planning changed, with the reason and who asked for it. ``before`` is ``from`` in JSON, ``after`` is ``to``."""

    field: str
    before: Any
    after: Any
    reason: str
    by: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"field": self.field, "from": self.before, "to": self.after, "reason": self.reason, "by": self.by}


@dataclass(frozen=True, slots=True)
class Rejection:
    """A candidate that does not serve a (group, phase), with every reason. An eligible one that lost has code ``outranked``."""

    group: str
    phase: str
    role: str
    backend: str
    variant: str
    reasons: tuple[Reason, ...]
    package: str = ""
    version: str = ""
    model: str = "target"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        table = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reasons"}
        return {**table, "reasons": [reason.to_dict() for reason in self.reasons]}


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two cache contracts differ; ``fatal`` ones make an exchange of caches impossible."""

    field: str
    here: Any
    there: Any
    fatal: bool = True


@dataclass(frozen=True)
class Plan:
    """The whole plan. See CONTRACT for the life of a step that it prepares."""

    model: str
    platform: str
    page_size: int
    kv_cache_dtype: str
    kv_layout: str
    dtype: str
    groups: tuple[GroupPlan, ...]
    pools: tuple[Pool, ...]
    cuda_graph: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    adjustments: tuple[Adjustment, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    warnings: tuple[str, ...] = ()
    lanes: int = 1
    batch_invariant: bool = False
    async_schedule: bool = False
    tp: int = 1
    limits: Mapping[str, Any] = field(default_factory=dict)
    mixed_batch: str = ""
    api_version: str = "1.0"
    ok: bool = True

    def group(self, name: str, model: str = "target") -> GroupPlan:
        """The plan of one layer group. Raises :class:`UsageError` if the plan has none of that name."""
        for group in self.groups:
            if group.group.name == name and group.group.model == model:
                return group
        raise UsageError(
            f"the plan has no group {name!r} of the {model} model; it has {[(g.group.model, g.group.name) for g in self.groups]}"
        )

    def pool_index(self, name: str, model: str = "target") -> int:
        """Index of a pool in ``pools`` and in ``batch.addresses``."""
        for index, pool in enumerate(self.pools):
            if pool.name == name and pool.model == model:
                return index
        raise UsageError(f"the plan has no pool {name!r} of the {model} model")

    def phase_plans(self) -> Iterator[tuple[GroupPlan, str, PhasePlan]]:
        """All (group, phase, phase plan) triples."""
        for group in self.groups:
            for phase, phase_plan in group.phases.items():
                yield group, phase, phase_plan

    def packages(self) -> dict[str, str]:
        """Every planned distribution with its version: what a worker must have."""
        found: dict[str, str] = {}
        for _, _, phase_plan in self.phase_plans():
            for part in phase_plan.parts:
                found[part.package] = part.version
        return dict(sorted(found.items()))

    @cached_property
    def cache_contract(self) -> dict[str, Any]:
        """What two nodes must agree on to exchange caches: pools, formats, heads per rank, dims and windows."""
        contract: dict[str, Any] = {"api": self.api_version, "tp_size": self.tp, "pools": {}, "groups": {}}
        for pool in self.pools:
            contract["pools"][f"{pool.model}/{pool.name}"] = {
                "kind": pool.kind,
                "format": pool.format,
                "kv_cache_dtype": pool.dtype,
                "layout": pool.layout,
                "page_size": pool.page_size,
                "layers": len(pool.layers),
            }
        for group_plan in self.groups:
            group = group_plan.group
            contract["groups"][f"{group.model}/{group.name}"] = contract_of(group_plan.stored.geometry)
        return contract

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything in the plan but this field: the same plan has the same fingerprint in every process."""
        text = json.dumps(self._body(), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: Plan | Mapping[str, Any]) -> list[Difference]:
        """The fields in which this plan's cache contract differs from another plan's (or from its JSON form's)."""
        there = other.cache_contract if isinstance(other, Plan) else other.get("cache_contract", other)
        return list(_differences("", self.cache_contract, there))

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "api_version": self.api_version,
            "ok": self.ok,
            "model": self.model,
            "platform": self.platform,
            "dtype": self.dtype,
            "tp_size": self.tp,
            "page_size": self.page_size,
            "kv_cache_dtype": self.kv_cache_dtype,
            "kv_layout": self.kv_layout,
            "groups": [dump_group(group) for group in self.groups],
            "pools": [plain(pool) for pool in self.pools],
            "cuda_graph": plain(self.cuda_graph),
            "mixed_batch": self.mixed_batch,
            "limits": plain(self.limits),
            "lanes": self.lanes,
            "batch_invariant": self.batch_invariant,
            "async_schedule": self.async_schedule,
            "options": plain(self.options),
            "adjustments": [item.to_dict() for item in self.adjustments],
            "rejected": [item.to_dict() for item in self.rejected],
            "warnings": list(self.warnings),
        }
        return body

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; :func:`load_plan` is the inverse."""
        return {**self._body(), "fingerprint": self.fingerprint, "cache_contract": self.cache_contract}

    def to_json(self, indent: int | None = 1) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)


def _differences(prefix: str, here: Any, there: Any) -> Iterator[Difference]:
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        for key in sorted(set(here) | set(there)):
            yield from _differences(f"{prefix}.{key}" if prefix else key, here.get(key), there.get(key))
    elif plain(here) != plain(there):
        yield Difference(prefix, here, there, fatal=prefix != "tp_size")


def load_plan(document: Mapping[str, Any] | str) -> Plan:
    """A plan from its JSON text or parsed form.

    Raises :class:`UsageError` for text that is not JSON, for another schema or form, and for a plan that was changed.
    """
    try:
        table = json.loads(document) if isinstance(document, str) else document
        version = table.get("schema_version")
    except (ValueError, AttributeError) as error:
        raise UsageError(f"not a plan: {error}", fix="write one with: attn plan … --output FILE") from error
    if version != SCHEMA_VERSION:
        raise UsageError(f"plan schema_version {version!r} is not {SCHEMA_VERSION}: plan again with this version")
    try:
        plan = build_plan(table)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"not a plan of schema version {version}: {what}", fix="plan again with this version"
        ) from error
    stated = table.get("fingerprint")
    if stated is not None and stated != plan.fingerprint:
        raise UsageError(
            "the plan was changed after it was made",
            f"stated   {stated}",
            f"content  {plan.fingerprint}",
            fix="plan again instead of editing the file",
        )
    return plan


callable_module(__name__, "attn_core.planner", "plan")  # attn_core.plan(...) makes a plan
