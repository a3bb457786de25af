"""Layer groups at run time: one bound backend per route, made once when the router is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attn_core.context import Context, GraphLimits
from attn_core.errors import BatchError, BindError
from attn_core.hookspecs import PHASE_HOOK
from attn_core.plan import GroupPlan, PhasePlan, Plan

if TYPE_CHECKING:
    import torch

    from attn_core.binding import BoundBackend
    from attn_core.discovery import Registry
    from attn_core.layers import Cache
    from attn_core.manifest import Manifest
    from attn_core.router._run import Attend

#: Phases with one route share a backend object: (backend, variant, package).
Route = tuple[str, str, str]


@dataclass
class Group:
    """One layer group: its plan, its pool, and one bound backend per route."""

    number: int
    plan: GroupPlan
    pool: int | None
    backends: dict[Route, BoundBackend] = field(default_factory=dict)
    caches: list[Cache] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The group's name in messages."""
        return f"{self.plan.group.model}/{self.plan.group.name}"

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
                return part.backend, part.variant, part.package
        return None


class GroupMaker:
    """Creates and binds the backends of a plan."""

    def __init__(
        self, plan: Plan, registry: Registry, device: torch.device, dtype: torch.dtype, limits: GraphLimits | None
    ) -> None:
        self.plan, self.registry, self.device, self.dtype, self.limits = plan, registry, device, dtype, limits
        self.contexts: list[Context] = []

    def make(self, number: int, plan: GroupPlan) -> Group:
        """One group with its backends. Raises :class:`BindError` for a plugin that is missing or breaks the contract."""
        pools = plan.group.pools
        index = (
            {role: self.plan.pool_index(name, plan.group.model) for role, name in pools.items()} if plan.phases else {}
        )
        group = Group(number, plan, index.get("attend", index.get("cross", index.get("state"))))
        for route, phases in routes(plan).items():
            group.backends[route] = self._create(plan, route, phases, index)
        return group

    def _create(
        self, plan: GroupPlan, route: Route, phases: Mapping[str, PhasePlan], index: Mapping[str, int]
    ) -> BoundBackend:
        from attn_core.binding import bind_backend

        manifest = self._manifest(plan.group.backend_kind, route)
        context = Context(
            device=self.device,
            dtype=self.dtype,
            group=plan.group,
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
        backend = self.registry.create(manifest, route[1], context)
        bound: BoundBackend = bind_backend(backend, manifest, route[1], tuple(phases))
        return bound

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
            found.setdefault((part.backend, part.variant, part.package), {})[phase] = phase_plan
    return found


def uses(plan: PhasePlan, route: Route) -> bool:
    """Whether a phase is served by `route`."""
    return any((part.backend, part.variant, part.package) == route for part in plan.parts)
