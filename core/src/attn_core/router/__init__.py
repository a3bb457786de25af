"""The router: binds what was planned, once, and dispatches every step by phase and layer group.

    router = Router(plan)
    router.bind(layers, caches)
    step = router.begin(batch)
    out = step.attend(layer, MhaInputs(q, k, v))

Planning decided everything; the router only checks that it still holds. Hooks are bound functions, so a call costs a
fraction of a microsecond more than the backend itself and does not depend on how many plugins are installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attn_core.context import GraphLimits, GraphState, Metadata, log
from attn_core.errors import BatchError, BindError, GraphError, UsageError
from attn_core.plan import PhasePlan, Plan
from attn_core.router._checks import check_batch, check_layers, drop_scales, graph_allows
from attn_core.router._drafts import draft_runs, draft_states
from attn_core.router._graph import RouterGraphState, graph_key
from attn_core.router._groups import Group, GroupMaker, Route, route_of, uses
from attn_core.router._latent import ragged_attend, settled, strictest_lengths, with_key_offsets
from attn_core.router._pads import clear_padding
from attn_core.router._run import Attend, Run
from attn_core.router._step import BoundLayer, Step

if TYPE_CHECKING:
    import torch

    from attn_core.batch import AttentionBatch, DraftSteps
    from attn_core.binding import BoundBackend
    from attn_core.discovery import Registry
    from attn_core.layers import Cache, Layer
    from attn_core.paging import DraftStates

__all__ = ["Router", "RouterGraphState", "Run", "Step"]

#: The phases that one call of a backend with the feature ``mixed`` may serve together.
_MIXED = frozenset({"prefill", "decode"})
#: torch's device name where it is not the platform's.
_TORCH_DEVICE = {"rocm": "cuda"}


class Router:
    """Runs a plan. ``bind`` and ``begin`` are for one thread at a time; steps of different lanes may run concurrently.

    Backends run on the router's own device, also where another one is current; a step's layers are called by the thread that
    began it, or by one with the same current device.
    """

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
        and :class:`BindError` for one that fails or breaks the contract, :class:`PlatformError` for a device that is not here.
        """
        from attn_core._device import Place
        from attn_core.discovery import discover, verify_plan
        from attn_core.formats import torch_dtype

        self.plan = plan
        self.registry = registry or discover()
        planned = plan.platform.partition(" ")[0].partition(":")[0]
        self.place = Place(device or _TORCH_DEVICE.get(planned, planned))
        self.device = self.place.device
        if self.device.type != _TORCH_DEVICE.get(planned, planned):
            log.info("the plan was made for %s; this router runs on %s", plan.platform, self.device)
        self.dtype = dtype or torch_dtype(plan.dtype)
        verify_plan(plan, self.registry)
        maker = GroupMaker(plan, self.registry, self.place, self.dtype, limits)
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
            if self._groups[number].plan.stored != layer.group:
                clear_padding(cache, layer.group)
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
        if set(phases) == _MIXED and _takes_mixed(group, batch):
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
        plan = settled(group.phase(phase), batch, group.pool)
        bound = self._backend(group, route_of(plan))
        if not batch.cpu_exact and self._needs_exact(group.phase(phase), plan, bound):
            raise BatchError(
                f"{plan.backend}:{plan.variant} needs exact lengths on the host; the batch has bounds only"
            )
        if (plan.needs_lse or lse) and not batch.needs_lse:
            batch = replace(batch, needs_lse=True)  # the server's batch stays as it is; views are shared
        own, attend = batch, group.attend(bound, phase)
        if plan.form == "ragged" and plan.parts[0].role == "ragged":
            own, attend = with_key_offsets(batch), self._expanded(group, bound, batch, graph)
        metadata = self._metadata(group, route_of(plan), bound, phase, own, graph, capture, plan)
        store = group.store(bound, plan)
        run = Run(phase, plan, bound, attend, store, metadata, batch, group.address(batch), rows, tokens)
        route = group.index_route(plan)
        if route is not None:
            indexer = self._backend(group, route)
            run.index = indexer, self._metadata(group, route, indexer, phase, batch, graph, capture, plan)
        return run

    def _needs_exact(self, planned: PhasePlan, plan: PhasePlan, bound: BoundBackend) -> bool:
        """Whether a run needs exact lengths on the host. Of a part for prefixes the plan records no row: the strictest counts,
        unless planning has left out all that need them."""
        if plan.form in (planned.form, "ragged"):
            return plan.host_lengths == "exact"
        bounds = self.plan.options.get("host_lengths") == "bound"
        return not bounds and strictest_lengths(bound.manifest, plan.variant) == "exact"

    def _backend(self, group: Group, route: Route) -> BoundBackend:
        """The bound functions of a route; where another device is current they make the router's own current at each call."""
        return group.backends[route] if self.place.is_current else group.held(route, self.place)

    def _expanded(
        self, group: Group, bound: BoundBackend, batch: AttentionBatch, graph: RouterGraphState | None
    ) -> Attend:
        address = group.address(batch)
        if graph is not None or address is None:
            raise GraphError(
                f"group {group.name!r}: the expanded form of latent attention is not captured",
                fix="prefill runs eagerly beside the graphs",
            )
        return ragged_attend(bound, batch, address)

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
        return graph.keep(group.number, route, graph_key(batch, phase, plan), metadata)

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
        """All draft steps at once, with the prefixes as `batch`: N steps of one token for each row and branch (``topk``).

        A step's inputs and outputs are in the order of ``draft.slots``: row by row, the branches of a row side by side. Under a
        graph whose backend leaves the metadata of drafts to core, ``graph`` was made with ``GraphLimits.draft``; every replay
        loads ``batch`` and ``draft`` into static batches of its own. Raises what :meth:`begin` raises.
        """
        self._check_model(model)
        check_batch(batch, self.plan, model)
        per_step: list[list[tuple[Run, ...]]] = [[()] * len(self._groups) for _ in range(draft.steps)]
        rows = [batch] * draft.steps
        for group in self._groups if not batch.idle else ():
            if group.plan.group.model == model and group.backends:
                bound = self._backend(group, route_of(group.phase("draft")))
                for number, run in enumerate(draft_runs(group, bound, batch, draft, graph)):
                    per_step[number][group.number], rows[number] = (run,), run.batch
        steps = tuple(Step(one, self._bound, runs, self, graph) for one, runs in zip(rows, per_step, strict=True))
        self._remember("draft", batch.lane, steps)
        for step in steps if graph is None else ():
            self.in_graph(step)
        return steps

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
        """Static buffers of one lane, allocated once at the maximum; with ``limits.draft`` those of every draft step, too."""
        states: dict[tuple[int, Route], GraphState] = {}
        drafts: dict[tuple[int, Route], DraftStates] = {}
        for group in self._groups:
            for route in group.backends:
                phases = [
                    n for n, plan in group.plan.phases.items() if plan.graph.level != "none" and uses(plan, route)
                ]
                if phases:
                    bound = self._backend(group, route)
                    states[group.number, route] = bound.attn_graph_state(group.plan.group, phases, limits, lane)
                    drafted = draft_states(group, route, bound, limits, lane)
                    if drafted is not None:
                        drafts[group.number, route] = drafted
        if not states:
            raise GraphError(
                "no planned backend declares a graph level: run eagerly", f"plan     {self.plan.cuda_graph}"
            )
        return RouterGraphState(limits, lane, states, drafts=drafts)

    def freeze(self) -> None:
        """After the first capture no workspace grows any more that a graph may have recorded the address of.

        A backend without a graph level in any of its phases runs eagerly beside the graphs, and may still meet longer rows.
        """
        for context in self._contexts:
            context.frozen = any(phase.graph.level != "none" for phase in context.phases.values())

    def warmup(self, limits: GraphLimits) -> None:
        """Compile and tune every planned backend before serving or capture."""
        for group in self._groups:
            for route in group.backends:
                phases = [name for name, plan in group.plan.phases.items() if uses(plan, route)]
                self._backend(group, route).attn_warmup(group.plan.group, phases, limits)

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


def _takes_mixed(group: Group, batch: AttentionBatch) -> bool:
    """Whether whoever serves prefill takes decode rows in the same call; with a form by length, who serves this batch."""
    plan = group.phase("prefill")
    chosen = settled(plan, batch, group.pool)
    return plan.mixed if chosen is plan else "mixed" in chosen.parts[0].features
