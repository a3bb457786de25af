"""Layer groups at run time: one bound backend per route, made once when the router is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attn_core._plan_json import plain
from attn_core.context import Context, GraphLimits
from attn_core.errors import BatchError, BindError
from attn_core.hookspecs import PHASE_HOOK
from attn_core.plan import GroupPlan, PartPlan, PhasePlan, Plan
from attn_core.router._pads import pad_backend, padded_group

if TYPE_CHECKING:
    import torch

    from attn_core._device import Place
    from attn_core.batch import AttentionBatch, KvAddress
    from attn_core.binding import BoundBackend
    from attn_core.discovery import Registry
    from attn_core.layers import Cache
    from attn_core.manifest import Manifest
    from attn_core.router._run import Attend

#: Phases with one route share a backend object: (backend, variant, package, what is padded for it).
Route = tuple[str, str, str, str]


def route_of(plan: PhasePlan, part: PartPlan | None = None) -> Route:
    """The route of a phase's part, the main one by default. Only the main part is padded."""
    main = part is None or part is plan.parts[0]
    part = part or plan.parts[0]
    pads = json.dumps(plain(plan.pads), sort_keys=True) if plan.pads and main else ""
    return part.backend, part.variant, part.package, pads


@dataclass
class Group:
    """One layer group: its plan, its pool, and one bound backend per route."""

    number: int
    plan: GroupPlan
    pool: int | None
    keeps_keys: bool = True
    backends: dict[Route, BoundBackend] = field(default_factory=dict)
    caches: list[Cache] = field(default_factory=list)
    _held: dict[Route, BoundBackend] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The group's name in messages."""
        return f"{self.plan.group.model}/{self.plan.group.name}"

    def held(self, route: Route, place: Place) -> BoundBackend:
        """The backend of a route, each of whose functions makes `place` the current device while it runs."""
        found = self._held.get(route)
        if found is None:
            found = self._held[route] = self.backends[route].with_functions(place.hold)
        return found

    def address(self, batch: AttentionBatch) -> KvAddress | None:
        """The batch's address of the pool that new keys and values go to; None where the group keeps none."""
        return batch.kv(self.pool) if self.pool is not None and self.keeps_keys else None

    def phase(self, phase: str) -> PhasePlan:
        """The plan of a phase. Raises :class:`BatchError` if there is none."""
        plan = self.plan.phases.get(phase)
        if plan is None:
            raise BatchError(f"group {self.name!r} has no plan for phase {phase!r}; it has {sorted(self.plan.phases)}")
        return plan

    def attend(self, bound: BoundBackend, phase: str) -> Attend:
        """The function that serves `phase`, in the form of attn_extend."""
        if self.plan.group.backend_kind == "mm":
            return bound.attend_ragged
        hook: Attend = getattr(bound, PHASE_HOOK[phase])
        return hook

    def store(self, bound: BoundBackend, plan: PhasePlan) -> Attend | None:
        """The function that writes new keys and values; None where nothing is stored, or attention does it itself."""
        if self.plan.group.backend_kind in ("mm", "gdn") or "store" in plan.parts[0].fuses:
            return None
        store: Attend = bound.attn_store
        return store

    def index_route(self, plan: PhasePlan) -> Route | None:
        """The route of the indexer of a sparse group."""
        for part in plan.parts[1:]:
            if part.role == "index":
                return route_of(plan, part)
        return None


class GroupMaker:
    """Creates and binds the backends of a plan."""

    def __init__(
        self, plan: Plan, registry: Registry, place: Place, dtype: torch.dtype, limits: GraphLimits | None
    ) -> None:
        self.plan, self.registry, self.place, self.dtype, self.limits = plan, registry, place, dtype, limits
        self.contexts: list[Context] = []

    def make(self, number: int, plan: GroupPlan) -> Group:
        """One group with its backends. Raises :class:`BindError` for a plugin that is missing or breaks the contract."""
        pools = plan.group.pools
        index = (
            {role: self.plan.pool_index(name, plan.group.model) for role, name in pools.items()} if plan.phases else {}
        )
        pool = index.get("attend", index.get("cross", index.get("state")))
        group = Group(number, plan, pool, pool is not None and self.plan.pools[pool].kind != "state")
        for route, phases in routes(plan).items():
            group.backends[route] = self._create(plan, route, phases, index)
        return group

    def _create(
        self, plan: GroupPlan, route: Route, phases: Mapping[str, PhasePlan], index: Mapping[str, int]
    ) -> BoundBackend:
        from attn_core.binding import bind_backend

        manifest = self._manifest(plan.group.backend_kind, route)
        wide = padded_group(plan.group, json.loads(route[3]) if route[3] else {})
        context = Context(
            device=self.place.device,
            dtype=self.dtype,
            group=wide,
            pools={role: self.plan.pools[number] for role, number in index.items()},
            pool_index=dict(index),
            phases=dict(phases),
            limits=self.limits,
            lanes=self.plan.lanes,
            shard=plan.shard,
            options=_options(route, phases),
            batch_invariant=self.plan.batch_invariant,
        )
        self.contexts.append(context)
        with self.place.use():
            backend = self.registry.create(manifest, route[1], context)
        bound: BoundBackend = bind_backend(backend, manifest, route[1], tuple(phases))
        return pad_backend(bound, plan.group, wide, plan.stored)

    def _manifest(self, kind: str, route: Route) -> Manifest:
        for manifest in self.registry.manifests:
            if (manifest.kind, manifest.name, manifest.package) == (kind, route[0], route[2]):
                return manifest
        raise BindError(f"the plan needs {kind}/{route[0]} of {route[2]}, which this process does not have")


def _options(route: Route, phases: Mapping[str, PhasePlan]) -> dict[str, Any]:
    parts = (part for phase in phases.values() for part in phase.parts)
    return next(dict(part.options) for part in parts if (part.backend, part.variant) == route[:2])


def routes(plan: GroupPlan) -> dict[Route, dict[str, PhasePlan]]:
    """The phases of a group by the route that serves them (with a part of theirs)."""
    found: dict[Route, dict[str, PhasePlan]] = {}
    for phase, phase_plan in plan.phases.items():
        for part in phase_plan.parts:
            found.setdefault(route_of(phase_plan, part), {})[phase] = phase_plan
    return found


def uses(plan: PhasePlan, route: Route) -> bool:
    """Whether a phase is served by `route`."""
    return any(route_of(plan, part) == route for part in plan.parts)
