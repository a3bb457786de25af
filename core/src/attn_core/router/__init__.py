"""The router: binds what was planned, once, and dispatches every step by phase and layer group.

    router = Router(plan)
    router.bind(layers, caches)
    step = router.begin(batch)
    out = step.attend(layer, MhaInputs(q, k, v))

Planning decided everything; the router only checks that it still holds. Hooks are bound functions, so a call costs a
fraction of a microsecond more than the backend itself and does not depend on how many plugins are installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from attn_core.context import GraphKey, GraphLimits, GraphState, Metadata, log
from attn_core.errors import BatchError, BindError, GraphError, UsageError
from attn_core.plan import PhasePlan, Plan
from attn_core.router._checks import (
    check_batch,
    check_layers,
    drop_scales,
    graph_allows,
    refuse_what_routers_cannot,
)
from attn_core.router._groups import Group, GroupMaker, Route, uses
from attn_core.router._run import Run
from attn_core.router._step import BoundLayer, Step

if TYPE_CHECKING:
    import torch

    from attn_core.batch import AttentionBatch, DraftSteps, KvAddress
    from attn_core.binding import BoundBackend
    from attn_core.discovery import Registry
    from attn_core.layers import Cache, Layer

__all__ = ["Router", "RouterGraphState", "Run", "Step"]

#: The phases that one call of a backend with the feature ``mixed`` may serve together.
_MIXED = frozenset({"prefill", "decode"})
#: torch's device name where it is not the platform's.
_TORCH_DEVICE = {"rocm": "cuda"}


@dataclass
class RouterGraphState:
    """Static state of one lane: one GraphState per (group, route), the limits, and the metadata of each key."""

    limits: GraphLimits
    lane: int
    states: dict[tuple[int, Route], GraphState]
    metadata: dict[tuple[int, Route, GraphKey], Metadata | tuple[Metadata, ...]] = field(default_factory=dict)

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        limits: GraphLimits | None = None,
    ) -> None:
        """Create and bind every planned backend. ``device`` None is the device of the plan's platform.

        Raises :class:`WorkerMismatch` if this process lacks a planned plugin or has another version, :class:`PluginError`
        and :class:`BindError` for one that fails or breaks the contract.
        """
        import torch

        from attn_core.discovery import discover, verify_plan
        from attn_core.formats import torch_dtype

        self.plan = plan
        self.registry = registry or discover()
        planned = plan.platform.partition(" ")[0].partition(":")[0]
        self.device = torch.device(device or _TORCH_DEVICE.get(planned, planned))
        if self.device.type != _TORCH_DEVICE.get(planned, planned):
            log.info("the plan was made for %s; this router runs on %s", plan.platform, self.device)
        self.dtype = dtype or torch_dtype(plan.dtype)
        verify_plan(plan, self.registry)
        for group in plan.groups:
            refuse_what_routers_cannot(group)
        maker = GroupMaker(plan, self.registry, self.device, self.dtype, limits)
        self._groups = [maker.make(number, group) for number, group in enumerate(plan.groups)]
        self._contexts = maker.contexts
        self._names = {(g.plan.group.model, g.plan.group.name): g.number for g in self._groups}
        self._models = {group.group.model for group in plan.groups}
        self._bound: list[BoundLayer] = []
        self._counts: dict[str, dict[str, int]] = {}
        self._live: dict[tuple[str, int], tuple[Step, ...]] = {}

    # --- set-up ---------------------------------------------------------------------------------------------------------

    def bind(self, layers: Sequence[Layer], caches: Sequence[Cache | None]) -> None:
        """Register the model's layers and their caches, once. ``caches[i]`` belongs to ``layers[i]`` (None for ``mm``).

        Checks every layer against its group (sinks, soft cap, dims, dtypes, formats, page sizes). Raises :class:`BindError`;
        the router is then as it was. Scales of keys and values are taken off layers whose pool holds 16-bit or wider elements:
        those are the values themselves, whatever a checkpoint brings for an 8-bit cache.
        """
        if self._bound:
            raise BindError("this router is bound already; make another one for other layers")
        found = check_layers(layers, caches, self._groups, self._names, self.plan)
        for slot, (layer, number, cache) in enumerate(found):
            layer.slot = slot
            drop_scales(layer, cache)
            if cache is not None:
                self._groups[number].caches.append(cache)
        self._bound = [BoundLayer(*item) for item in found]

    def group_number(self, model: str, name: str) -> int:
        """The number of a group. Raises :class:`UsageError` for an unknown one."""
        number = self._names.get((model, name))
        if number is None:
            raise UsageError(f"the plan has no group {model}/{name}; it has {sorted(self._names)}")
        return number

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
        self._check_model(model)
        check_batch(batch, self.plan, model)
        runs: list[tuple[Run, ...]] = [()] * len(self._groups)
        if not batch.idle:
            for group in self._groups:
                if group.plan.group.model == model and group.backends:
                    runs[group.number] = self._runs(group, batch, graph, capture)
        step = Step(batch, self._bound, runs, self, graph)
        self._remember("step", batch.lane, (step,))
        if graph is None:
            self.in_graph(step)
        return step

    def _check_model(self, model: str) -> None:
        if model not in self._models:
            raise UsageError(f"the plan has no {model!r} model; it has {sorted(self._models)}")

    def in_graph(self, step: Step) -> None:
        """Device work of every group's metadata: the first thing inside a capture; eager steps have it done by begin."""
        for run in step.runs():
            _in_graph(run)

    def _runs(
        self, group: Group, batch: AttentionBatch, graph: RouterGraphState | None, capture: bool, lse: bool = False
    ) -> tuple[Run, ...]:
        phases = list(dict.fromkeys(segment.phase for segment in batch.segments))
        together = len(phases) == 1
        if set(phases) == _MIXED and group.phase("prefill").mixed:
            together, phases = True, ["prefill"]  # any prefill token: the prefill backend
        if together:
            whole = slice(0, batch.padded_rows), slice(0, batch.padded_tokens)
            return (self._run(group, phases[0], batch, *whole, graph, capture, lse),)
        return tuple(
            self._run(group, s.phase, batch.part(number), s.rows, s.tokens, graph, capture, lse)
            for number, s in enumerate(batch.segments)
        )

    def _run(
        self,
        group: Group,
        phase: str,
        batch: AttentionBatch,
        rows: slice,
        tokens: slice,
        graph: RouterGraphState | None,
        capture: bool,
        lse: bool,
    ) -> Run:
        plan = group.phase(phase)
        if plan.host_lengths == "exact" and not batch.cpu_exact:
            raise BatchError(
                f"{plan.backend}:{plan.variant} needs exact lengths on the host; the batch has bounds only"
            )
        if (plan.needs_lse or lse) and not batch.needs_lse:
            batch = replace(batch, needs_lse=True)  # the server's batch stays as it is; views are shared
        bound = group.backends[plan.route]
        metadata = self._metadata(group, plan.route, bound, phase, batch, graph, capture, plan)
        attend, store = group.attend(bound, phase), group.store(bound, plan)
        run = Run(phase, plan, bound, attend, store, metadata, batch, self._address(group, batch), rows, tokens)
        route = group.index_route(plan)
        if route is not None:
            indexer = group.backends[route]
            run.index = indexer, self._metadata(group, route, indexer, phase, batch, graph, capture, plan)
        return run

    def _address(self, group: Group, batch: AttentionBatch) -> KvAddress | None:
        if group.pool is None or self.plan.pools[group.pool].kind == "state":
            return None
        return batch.kv(group.pool)

    def _metadata(
        self,
        group: Group,
        route: Route,
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
        state = graph.states[group.number, route]
        metadata: Metadata = bound.attn_metadata(batch, group.plan.group, phase, state, capture)
        key = graph_key(batch, phase, plan)
        known = graph.metadata.setdefault((group.number, route, key), metadata)
        if known is not metadata:
            raise _moved(route, key)
        return metadata

    # --- what a step asks for later -------------------------------------------------------------------------------------

    def lse_runs(self, group: int, step: Step) -> tuple[Run, ...]:
        """The runs of a group with an LSE; the same ones if the plan has asked for it already."""
        runs = step.group_runs(group)
        for run in runs:
            if "lse" not in run.plan.parts[0].features:
                raise BindError(
                    f"{run.plan.backend}:{run.plan.variant} does not declare lse; plan with a backend that does"
                )
        if not runs or all(run.metadata.needs_lse for run in runs):
            return runs
        if step.graph is not None:
            raise GraphError("attend_lse under a graph needs a plan with needs_lse (it decides the metadata)")
        made = self._runs(self._groups[group], step.batch, None, False, lse=True)
        for run in made:
            _in_graph(run)
        return made

    def segment_run(self, group: int, step: Step, segment: int) -> Run:
        """One segment as a run of its own, where the step serves several with one."""
        if step.graph is not None:
            raise GraphError("segments of a captured batch cannot be attended one by one")
        part = step.batch.segments[segment]
        whole = step.batch.part(segment)
        run = self._run(self._groups[group], part.phase, whole, part.rows, part.tokens, None, False, False)
        _in_graph(run)
        return run

    # --- drafts, verify, graphs, warm-up --------------------------------------------------------------------------------

    def begin_draft(
        self, batch: AttentionBatch, draft: DraftSteps, graph: RouterGraphState | None = None, *, model: str = "draft"
    ) -> tuple[Step, ...]:
        """All draft steps at once: N steps whose metadata came from one call per group."""
        self._check_model(model)
        check_batch(batch, self.plan, model)
        per_step: list[list[tuple[Run, ...]]] = [[()] * len(self._groups) for _ in range(draft.steps)]
        for group in self._groups if not batch.idle else ():
            if group.plan.group.model == model and group.backends:
                for number, run in enumerate(self._draft_runs(group, batch, draft, graph)):
                    per_step[number][group.number] = (run,)
        steps = tuple(Step(batch, self._bound, runs, self, graph) for runs in per_step)
        self._remember("draft", batch.lane, steps)
        for step in steps if graph is None else ():
            self.in_graph(step)
        return steps

    def _draft_runs(
        self, group: Group, batch: AttentionBatch, draft: DraftSteps, graph: RouterGraphState | None
    ) -> Iterator[Run]:
        plan = group.phase("draft")
        bound = group.backends[plan.route]
        state = None
        if graph is not None:
            graph_allows(batch, plan, "draft", graph.limits)
            state = graph.states[group.number, plan.route]
        metadata = tuple(bound.attn_draft_metadata(batch, group.plan.group, draft, state))
        if len(metadata) != draft.steps:
            raise BindError(
                f"{plan.backend} made metadata for {len(metadata)} draft steps; {draft.steps} were asked for"
            )
        if graph is not None:
            _same_drafts(graph, group.number, plan, graph_key(batch, "draft", plan), metadata)
        address = self._address(group, batch)
        whole = slice(0, batch.padded_rows), slice(0, batch.padded_tokens)
        attend, store = group.attend(bound, "draft"), group.store(bound, plan)
        for number, one in enumerate(metadata):
            yield Run("draft", plan, bound, attend, store, one, batch, _draft_address(address, draft, number), *whole)

    def commit(self, step: Step, accepted: torch.Tensor) -> None:
        """After verification: states move to the accepted token, once a step for all layers. `accepted` i32[R], device.

        Only rows in verify are committed; each backend gets the rows it served.
        """
        for group in self._groups:
            for run in step.group_runs(group.number):
                if run.phase == "verify":
                    rows = accepted[run.rows]
                    run.bound.attn_commit(run.batch, group.plan.group, tuple(group.caches), run.metadata, rows)

    def graph_state(self, limits: GraphLimits, lane: int = 0) -> RouterGraphState:
        """Static buffers of one lane, allocated once at the maximum."""
        states: dict[tuple[int, Route], GraphState] = {}
        for group in self._groups:
            for route, bound in group.backends.items():
                phases = [
                    n for n, plan in group.plan.phases.items() if plan.graph.level != "none" and uses(plan, route)
                ]
                if phases:
                    states[group.number, route] = bound.attn_graph_state(group.plan.group, phases, limits, lane)
        if not states:
            raise GraphError(
                "no planned backend declares a graph level: run eagerly", f"plan     {self.plan.cuda_graph}"
            )
        return RouterGraphState(limits, lane, states)

    def freeze(self) -> None:
        """After the first capture no workspace grows any more that a graph may have recorded the address of.

        A backend without a graph level in any of its phases runs eagerly beside the graphs, and may still meet longer rows.
        """
        for context in self._contexts:
            context.frozen = any(phase.graph.level != "none" for phase in context.phases.values())

    def warmup(self, limits: GraphLimits) -> None:
        """Compile and tune every planned backend before serving or capture."""
        for group in self._groups:
            for route, bound in group.backends.items():
                phases = [name for name, plan in group.plan.phases.items() if uses(plan, route)]
                bound.attn_warmup(group.plan.group, phases, limits)

    # --- statistics -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, dict[str, int]]:
        """Calls per backend and phase since the router was made: ``{"torch_native": {"prefill": 30, "decode": 990}}``."""
        for steps in self._live.values():
            self._collect(steps)
        return {backend: dict(phases) for backend, phases in self._counts.items()}

    def _remember(self, what: str, lane: int, steps: tuple[Step, ...]) -> None:
        """Keep the steps in flight for their counts; the ones before them on this lane are done."""
        self._collect(self._live.get((what, lane), ()))
        self._live[what, lane] = steps

    def _collect(self, steps: Sequence[Step]) -> None:
        for step in steps:
            for run in step.runs():
                if run.calls:
                    phases = self._counts.setdefault(run.plan.backend, {})
                    phases[run.phase] = phases.get(run.phase, 0) + run.calls
                    run.calls = 0


def _in_graph(run: Run) -> None:
    run.bound.attn_metadata_in_graph(run.metadata)
    if run.index is not None:
        run.index[0].attn_metadata_in_graph(run.index[1])


def _moved(route: Route, key: GraphKey) -> GraphError:
    return GraphError(
        f"{route[0]}:{route[1]} made a new Metadata object for a key that was captured",
        f"key      {key}",
        fix="metadata hooks must return the same objects per key and rewrite their contents",
    )


def _same_drafts(
    graph: RouterGraphState, group: int, plan: PhasePlan, key: GraphKey, metadata: tuple[Metadata, ...]
) -> None:
    known = graph.metadata.setdefault((group, plan.route, key), metadata)
    if not isinstance(known, tuple) or any(a is not b for a, b in zip(known, metadata, strict=True)):
        raise _moved(plan.route, key)


def _draft_address(address: KvAddress | None, draft: DraftSteps, number: int) -> KvAddress | None:
    """The address of draft step `number`: its new slots are the step's column of ``DraftSteps.slots``."""
    return None if address is None else replace(address, new_slots=draft.slots[:, :, number].reshape(-1))


def graph_key(batch: AttentionBatch, phase: str, plan: PhasePlan) -> GraphKey:
    """The key of a step's graph: phase, padded sizes, query length, KV bucket and form."""
    lengths = {segment.query_len for segment in batch.segments}
    query_len = lengths.pop() if len(lengths) == 1 else None
    longest = max((a.max_kv_len for a in batch.addresses if hasattr(a, "max_kv_len")), default=0)
    bucket = next((limit for limit in plan.graph.kv_thresholds if longest <= limit), None)
    return GraphKey(phase, batch.padded_rows, batch.padded_tokens, query_len, bucket, plan.form)
