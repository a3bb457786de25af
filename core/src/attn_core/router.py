"""The router: binds what was planned, once, and dispatches every step by phase and layer group.

    router = Router(plan)
    router.bind(layers, caches)
    step = router.begin(batch)
    out = step.attend(layer, MhaInputs(q, k, v))

Planning decided everything; the router only checks that it still holds. Hooks are bound functions, so a call costs an
attribute look-up more than the backend itself and does not depend on how many plugins are installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attn_core.context import Context, GraphKey, GraphLimits, GraphState, Metadata
from attn_core.errors import BatchError, BindError, GraphError
from attn_core.hookspecs import PHASE_HOOK
from attn_core.plan import GroupPlan, PhasePlan, Plan
from attn_core.router_checks import check_batch, check_layer, graph_allows
from attn_core.step import Attend, Run, Step

if TYPE_CHECKING:
    import torch

    from attn_core.batch import AttentionBatch, DraftSteps, KvAddress
    from attn_core.binding import BoundBackend
    from attn_core.discovery import Registry
    from attn_core.layers import Cache, Layer
    from attn_core.manifest import Manifest


@dataclass
class _Group:
    """One layer group at run time: its plan, its pools' addresses, and one bound backend per route."""

    number: int
    plan: GroupPlan
    pool: int | None
    index_pool: int | None
    backends: dict[tuple[str, str, str], BoundBackend] = field(default_factory=dict)
    caches: list[Cache] = field(default_factory=list)

    def bound(self, route: tuple[str, str, str]) -> BoundBackend:
        return self.backends[route]


@dataclass
class RouterGraphState:
    """Static state of one lane: one GraphState per (group, route), the limits, and the metadata of each key."""

    limits: GraphLimits
    lane: int
    states: dict[tuple[int, tuple[str, str, str]], GraphState]
    metadata: dict[tuple[int, tuple[str, str, str], GraphKey], Metadata] = field(default_factory=dict)

    @property
    def pad_kv_len(self) -> int:
        """The kv_len that padded rows must have: the largest that any backend asks for."""
        return max((state.pad_kv_len for state in self.states.values()), default=1)

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers."""
        return sum(state.nbytes for state in self.states.values())


class Router:
    """Runs a plan. ``bind`` and ``begin`` are for one thread at a time; steps of different lanes may run concurrently."""

    def __init__(
        self,
        plan: Plan,
        registry: Registry | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        limits: GraphLimits | None = None,
    ) -> None:
        import torch

        from attn_core.discovery import discover, verify_plan
        from attn_core.formats import torch_dtype

        self.plan = plan
        self.registry = registry or discover()
        self.device = torch.device(device)
        self.dtype = dtype or torch_dtype(plan.dtype)
        self.limits = limits
        verify_plan(plan, self.registry)
        self._contexts: list[Context] = []
        self._groups = [self._make_group(number, group) for number, group in enumerate(plan.groups)]
        self._names = {(g.plan.group.model, g.plan.group.name): g.number for g in self._groups}
        self._bound: list[tuple[int, Cache | None]] = []
        self._layers: list[Layer] = []
        self._counts: dict[str, dict[str, int]] = {}
        self._steps: dict[int, Step] = {}

    # --- set-up ---------------------------------------------------------------------------------------------------------

    def _make_group(self, number: int, plan: GroupPlan) -> _Group:
        pools = plan.group.pools
        index = (
            {role: self.plan.pool_index(name, plan.group.model) for role, name in pools.items()} if plan.phases else {}
        )
        main = index.get("attend", index.get("cross", index.get("state")))
        group = _Group(number, plan, main, index.get("index"))
        for route, phases in _routes(plan).items():
            group.backends[route] = self._create(plan, route, phases, index)
        return group

    def _create(
        self, plan: GroupPlan, route: tuple[str, str, str], phases: Mapping[str, PhasePlan], index: Mapping[str, int]
    ) -> BoundBackend:
        from attn_core.binding import bind_backend

        manifest = self._manifest(plan.group.backend_kind, route)
        options = next(
            part.options
            for phase in phases.values()
            for part in phase.parts
            if (part.backend, part.variant) == route[:2]
        )
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
            options=dict(options),
            batch_invariant=self.plan.batch_invariant,
        )
        self._contexts.append(context)
        backend = self.registry.create(manifest, route[1], context)
        bound: BoundBackend = bind_backend(backend, manifest, route[1], tuple(phases))
        return bound

    def _manifest(self, kind: str, route: tuple[str, str, str]) -> Manifest:
        for manifest in self.registry.manifests:
            if (manifest.kind, manifest.name, manifest.package) == (kind, route[0], route[2]):
                return manifest
        raise BindError(f"the plan needs {kind}/{route[0]} of {route[2]}, which this process does not have")

    def bind(self, layers: Sequence[Layer], caches: Sequence[Cache | None]) -> None:
        """Register the model's layers and their caches, once. ``caches[i]`` belongs to ``layers[i]`` (None for ``mm``).

        Checks every layer against its group (sinks, soft cap, dims, formats, page sizes). Raises :class:`BindError`.
        """
        if len(layers) != len(caches):
            raise BindError(f"{len(layers)} layers and {len(caches)} caches")
        if self._layers:
            raise BindError("this router is bound already; make another one for other layers")
        owners = {(layer.group.model, layer.index): cache for layer, cache in zip(layers, caches, strict=True)}
        for layer, cache in zip(layers, caches, strict=True):
            number = self._names.get((layer.group.model, layer.group.name))
            if number is None or not self._groups[number].backends:
                raise BindError(f"layer {layer.index}: the plan serves no group {layer.group.model}/{layer.group.name}")
            owner = getattr(layer, "kv_from", None)
            if owner is not None:
                cache = owners.get((layer.group.model, owner))
            group = self._groups[number]
            pool = self.plan.pools[group.pool] if group.pool is not None else None
            check_layer(layer, cache, group.plan, pool)
            layer.slot = len(self._bound)
            self._bound.append((number, cache))
            self._layers.append(layer)
            if cache is not None:
                group.caches.append(cache)

    # --- steps ----------------------------------------------------------------------------------------------------------

    def begin(
        self,
        batch: AttentionBatch,
        graph: RouterGraphState | None = None,
        *,
        model: str = "target",
        capture: bool = False,
    ) -> Step:
        """Start a step: metadata of every group of `model`, once. Under ``graph`` the same Metadata objects come back.

        Raises :class:`BatchError` for a batch that does not fit the plan and :class:`GraphError` outside the declared level.
        """
        check_batch(batch, self.plan, model)
        runs: list[tuple[Run, ...]] = [()] * len(self._groups)
        if not batch.idle:
            for group in self._groups:
                if group.plan.group.model == model and group.backends:
                    runs[group.number] = self._runs(group, batch, graph, capture)
        step = self._step(batch, runs, graph, capture)
        if graph is None:
            self.in_graph(step)
        return step

    def _step(
        self, batch: AttentionBatch, runs: list[tuple[Run, ...]], graph: RouterGraphState | None, capture: bool
    ) -> Step:
        def make_lse(number: int) -> tuple[Run, ...]:
            return self._lse_runs(self._groups[number], batch, graph, runs[number])

        previous = self._steps.get(batch.lane)
        if previous is not None:
            self._collect(previous)
        step = Step(batch, self._bound, runs, self._names, make_lse, self._count, capture)
        self._steps[batch.lane] = step
        return step

    def in_graph(self, step: Step) -> None:
        """Device work of every group's metadata: the first thing inside a capture; eager steps have it done by begin."""
        for run in step.runs():
            run.bound.attn_metadata_in_graph(run.metadata)
            if run.index is not None:
                run.index[0].attn_metadata_in_graph(run.index[1])

    def _runs(
        self, group: _Group, batch: AttentionBatch, graph: RouterGraphState | None, capture: bool
    ) -> tuple[Run, ...]:
        phases = list(dict.fromkeys(segment.phase for segment in batch.segments))
        lead = "prefill" if "prefill" in phases else phases[0]
        plan = group.plan.phases.get(lead)
        if plan is None:
            raise BatchError(
                f"group {group.plan.group.name!r} has no plan for phase {lead!r}; it has {sorted(group.plan.phases)}"
            )
        if len(phases) == 1 or plan.mixed:
            return (self._run(group, lead, batch, None, graph, capture),)
        return tuple(
            self._run(group, segment.phase, batch.part(number), segment.tokens, graph, capture)
            for number, segment in enumerate(batch.segments)
        )

    def _run(
        self,
        group: _Group,
        phase: str,
        batch: AttentionBatch,
        tokens: slice | None,
        graph: RouterGraphState | None,
        capture: bool,
    ) -> Run:
        plan = group.plan.phases.get(phase)
        if plan is None:
            raise BatchError(
                f"group {group.plan.group.name!r} has no plan for phase {phase!r}; it has {sorted(group.plan.phases)}"
            )
        bound = group.bound(plan.route)
        batch.needs_lse = batch.needs_lse or plan.needs_lse
        metadata = self._metadata(group, plan.route, bound, phase, batch, graph, capture, plan)
        run = Run(
            phase,
            plan,
            bound,
            _attend_of(bound, phase, group.plan.group.backend_kind),
            _store_of(bound, plan, group.plan.group.backend_kind),
            metadata,
            batch,
            self._address(group, batch),
            tokens,
        )
        for part in plan.parts[1:]:
            route = (part.backend, part.variant, part.package)
            other = group.bound(route)
            run.index = other, self._metadata(group, route, other, phase, batch, graph, capture, plan)
        return run

    def _address(self, group: _Group, batch: AttentionBatch) -> KvAddress | None:
        if group.pool is None or self.plan.pools[group.pool].kind == "state":
            return None
        return batch.kv(group.pool)

    def _metadata(
        self,
        group: _Group,
        route: tuple[str, str, str],
        bound: BoundBackend,
        phase: str,
        batch: AttentionBatch,
        graph: RouterGraphState | None,
        capture: bool,
        plan: PhasePlan,
    ) -> Metadata:
        if graph is None:
            made: Metadata = bound.attn_metadata(batch, group.plan.group, phase, None, capture)
            return made
        graph_allows(batch, plan, phase, graph.limits)
        key = graph_key(batch, phase, plan)
        state = graph.states[group.number, route]
        metadata: Metadata = bound.attn_metadata(batch, group.plan.group, phase, state, capture)
        known = graph.metadata.setdefault((group.number, route, key), metadata)
        if known is not metadata:
            raise GraphError(
                f"{route[0]}:{route[1]} made a new Metadata object for a key that was captured",
                f"key      {key}",
                fix="attn_metadata must return the same object per key and rewrite its contents",
            )
        return metadata

    def _lse_runs(
        self, group: _Group, batch: AttentionBatch, graph: RouterGraphState | None, runs: tuple[Run, ...]
    ) -> tuple[Run, ...]:
        for run in runs:
            if "lse" not in run.plan.parts[0].features:
                raise BindError(
                    f"{run.plan.backend}:{run.plan.variant} does not declare lse; plan with a backend that does"
                )
        if all(run.metadata.needs_lse for run in runs):
            return runs
        if graph is not None:
            raise GraphError("attend_lse under a graph needs a plan with needs_lse (it decides the metadata)")
        batch.needs_lse = True
        for run in runs:
            run.batch.needs_lse = True
        made = self._runs(group, batch, graph, False)
        for run in made:
            run.bound.attn_metadata_in_graph(run.metadata)
        return made

    # --- drafts, verify, graphs, warm-up --------------------------------------------------------------------------------

    def begin_draft(
        self, batch: AttentionBatch, draft: DraftSteps, graph: RouterGraphState | None = None, *, model: str = "draft"
    ) -> tuple[Step, ...]:
        """All draft steps at once: N steps whose metadata came from one call per group."""
        check_batch(batch, self.plan, model)
        per_step: list[list[tuple[Run, ...]]] = [[()] * len(self._groups) for _ in range(draft.steps)]
        for group in self._groups if not batch.idle else ():
            if group.plan.group.model == model and group.backends:
                for number, run in enumerate(self._draft_runs(group, batch, draft, graph)):
                    per_step[number][group.number] = (run,)
        steps = tuple(Step(batch, self._bound, runs, self._names, _no_lse, self._count) for runs in per_step)
        for step in steps if graph is None else ():
            self.in_graph(step)
        return steps

    def _draft_runs(
        self, group: _Group, batch: AttentionBatch, draft: DraftSteps, graph: RouterGraphState | None
    ) -> Iterable[Run]:
        plan = group.plan.phases.get("draft")
        if plan is None:
            raise BatchError(f"group {group.plan.group.name!r} has no plan for phase 'draft'")
        bound = group.bound(plan.route)
        state = graph.states[group.number, plan.route] if graph is not None else None
        metadata = bound.attn_draft_metadata(batch, group.plan.group, draft, state)
        if len(metadata) != draft.steps:
            raise BindError(
                f"{plan.backend} made metadata for {len(metadata)} draft steps; {draft.steps} were asked for"
            )
        kind = group.plan.group.backend_kind
        attend, store = _attend_of(bound, "draft", kind), _store_of(bound, plan, kind)
        for number, one in enumerate(metadata):
            address = self._address(group, batch)
            yield Run("draft", plan, bound, attend, store, one, batch, _draft_address(address, draft, number), None)

    def commit(self, step: Step, accepted: torch.Tensor) -> None:
        """After verification: states move to the accepted token, once a step for all layers. `accepted` i32[R], device."""
        for runs, group in zip(step._runs, self._groups, strict=True):
            for run in runs:
                run.bound.attn_commit(run.batch, group.plan.group, tuple(group.caches), run.metadata, accepted)

    def graph_state(self, limits: GraphLimits, lane: int = 0) -> RouterGraphState:
        """Static buffers of one lane, allocated once at the maximum."""
        states: dict[tuple[int, tuple[str, str, str]], GraphState] = {}
        for group in self._groups:
            for route, bound in group.backends.items():
                phases = [
                    name
                    for name, plan in group.plan.phases.items()
                    if plan.graph.level != "none" and _uses(plan, route)
                ]
                if phases:
                    states[group.number, route] = bound.attn_graph_state(group.plan.group, phases, limits, lane)
        if not states:
            raise GraphError(
                "no planned backend declares a graph level: run eagerly", f"plan     {self.plan.cuda_graph}"
            )
        return RouterGraphState(limits, lane, states)

    def freeze(self) -> None:
        """After the first capture no workspace of any backend grows any more (a graph has recorded its address)."""
        for context in self._contexts:
            context.frozen = True

    def warmup(self, limits: GraphLimits) -> None:
        """Compile and tune every planned backend before serving or capture."""
        for group in self._groups:
            for route, bound in group.backends.items():
                phases = [name for name, plan in group.plan.phases.items() if _uses(plan, route)]
                bound.attn_warmup(group.plan.group, phases, limits)

    # --- statistics -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, dict[str, int]]:
        """Calls per backend and phase since the router was made: ``{"torch_native": {"prefill": 30, "decode": 990}}``."""
        for step in self._steps.values():
            self._collect(step)
        return {backend: dict(phases) for backend, phases in self._counts.items()}

    def _collect(self, step: Step) -> None:
        for run in (*step.runs(), *(run for runs in step._lse_runs.values() for run in runs)):
            self._count(run)

    def _count(self, run: Run) -> None:
        if run.calls:
            phases = self._counts.setdefault(run.plan.backend, {})
            phases[run.phase] = phases.get(run.phase, 0) + run.calls
            run.calls = 0


def _routes(plan: GroupPlan) -> dict[tuple[str, str, str], dict[str, PhasePlan]]:
    routes: dict[tuple[str, str, str], dict[str, PhasePlan]] = {}
    for phase, phase_plan in plan.phases.items():
        for part in phase_plan.parts:
            routes.setdefault((part.backend, part.variant, part.package), {})[phase] = phase_plan
    return routes


def _uses(plan: PhasePlan, route: tuple[str, str, str]) -> bool:
    return any((part.backend, part.variant, part.package) == route for part in plan.parts)


def _attend_of(bound: BoundBackend, phase: str, kind: str) -> Attend:
    if kind == "mm":
        return bound.attend_ragged
    hook: Attend = getattr(bound, PHASE_HOOK[phase])
    return hook


def _store_of(bound: BoundBackend, plan: PhasePlan, kind: str) -> Attend | None:
    if kind in ("mm", "gdn") or "store" in plan.parts[0].fuses:
        return None
    store: Attend = bound.attn_store
    return store


def _draft_address(address: KvAddress | None, draft: DraftSteps, number: int) -> KvAddress | None:
    """The address of draft step `number`: its new slots are the step's column of ``DraftSteps.slots``."""
    if address is None:
        return None
    from dataclasses import replace

    return replace(address, new_slots=draft.slots[:, :, number].reshape(-1))


def _no_lse(number: int) -> tuple[Run, ...]:
    raise BindError("draft steps return no LSE")


def graph_key(batch: AttentionBatch, phase: str, plan: PhasePlan) -> GraphKey:
    """The key of a step's graph: phase, padded sizes, query length, KV bucket and form."""
    lengths = {segment.query_len for segment in batch.segments}
    query_len = lengths.pop() if len(lengths) == 1 else None
    longest = max((a.max_kv_len for a in batch.addresses if hasattr(a, "max_kv_len")), default=0)
    bucket = next((limit for limit in plan.graph.kv_thresholds if longest <= limit), None)
    return GraphKey(phase, batch.padded_rows, batch.padded_tokens, query_len, bucket, plan.form)
