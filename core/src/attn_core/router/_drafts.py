"""Draft steps: the runs of all steps of a group, from the backend's own hook or from core's default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from attn_core.errors import BatchError, BindError, GraphError
from attn_core.router._checks import graph_allows
from attn_core.router._graph import RouterGraphState, graph_key
from attn_core.router._groups import Group, Route, route_of
from attn_core.router._run import Run

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, DraftSteps, KvAddress
    from attn_core.binding import BoundBackend
    from attn_core.context import GraphLimits, Metadata
    from attn_core.paging import DraftStates
    from attn_core.plan import PhasePlan

HOOK = "attn_draft_metadata"


def draft_runs(
    group: Group, bound: BoundBackend, batch: AttentionBatch, draft: DraftSteps, graph: RouterGraphState | None
) -> Iterator[Run]:
    """One run a draft step, with a row for each branch. Raises :class:`BatchError`, :class:`GraphError`, :class:`BindError`."""
    plan = group.phase("draft")
    if plan.host_lengths == "exact" and not batch.cpu_exact:
        raise BatchError(f"{plan.backend}:{plan.variant} needs exact lengths on the host; the batch has bounds only")
    if draft.topk > 1 and group.pool is not None and not group.keeps_keys:
        raise BatchError(
            f"group {group.name!r} cannot draft with topk {draft.topk}: each branch needs a state of its own",
            fix="draft a chain: --speculative-eagle-topk 1",
        )
    if graph is not None:
        graph_allows(batch, plan, "draft", graph.limits)
    made = _own if bound.provides(HOOK) else _default
    steps = made(group, bound, plan, batch, draft, graph)
    if graph is not None:
        metadata = tuple(one for _, one, _ in steps)
        graph.keep_drafts(group.number, route_of(plan), graph_key(batch, "draft", plan), draft, metadata)
    attend, store = group.attend(bound, "draft"), group.store(bound, plan)
    for rows, one, address in steps:
        whole = slice(0, rows.padded_rows), slice(0, rows.padded_tokens)
        yield Run("draft", plan, bound, attend, store, one, rows, address, *whole)


Steps = list[tuple["AttentionBatch", "Metadata", "KvAddress | None"]]


def _own(
    group: Group,
    bound: BoundBackend,
    plan: PhasePlan,
    batch: AttentionBatch,
    draft: DraftSteps,
    graph: RouterGraphState | None,
) -> Steps:
    """The backend makes all metadata in one call, from the batch of prefixes."""
    from attn_core.paging import branch_batch

    state = None if graph is None else graph.states[group.number, route_of(plan)]
    metadata = tuple(bound.attn_draft_metadata(batch, group.plan.group, draft, state))
    if len(metadata) != draft.steps:
        raise BindError(f"{plan.backend} made metadata for {len(metadata)} draft steps; {draft.steps} were asked for")
    rows = branch_batch(batch, draft)
    address = group.address(rows)
    return [(rows, one, _draft_address(address, draft, number)) for number, one in enumerate(metadata)]


def _default(
    group: Group,
    bound: BoundBackend,
    plan: PhasePlan,
    batch: AttentionBatch,
    draft: DraftSteps,
    graph: RouterGraphState | None,
) -> Steps:
    """One ``attn_metadata`` a step, on the batch of that step; under a graph on static batches and a state a step."""
    from attn_core.binding import draft_steps

    state: DraftStates | None = None
    if graph is not None:
        state = graph.drafts.get((group.number, route_of(plan)))
        if state is None:
            raise GraphError(
                f"the graph state has no draft steps for {plan.backend}:{plan.variant}",
                fix="GraphLimits(..., draft=(steps, topk)) in Router.graph_state",
            )
    made = draft_steps(bound.attn_metadata, batch, group.plan.group, draft, state)
    return [(rows, one, group.address(rows)) for rows, one in made]


def _draft_address(address: KvAddress | None, draft: DraftSteps, number: int) -> KvAddress | None:
    """The address of draft step `number`: its new slots are the step's column of ``DraftSteps.slots``."""
    return None if address is None else replace(address, new_slots=draft.slots[:, :, number].reshape(-1))


def draft_states(group: Group, route: Route, bound: BoundBackend, limits: GraphLimits, lane: int) -> DraftStates | None:
    """A GraphState for each draft step of the limits, sized for branches as rows and drafts as keys.

    None where no draft steps are captured, or where the backend makes their metadata itself.
    """
    plan = group.plan.phases.get("draft")
    if (
        plan is None
        or route_of(plan) != route
        or plan.graph.level == "none"
        or limits.draft is None
        or bound.provides(HOOK)
    ):
        return None
    from attn_core.paging import DraftStates

    steps, topk = limits.draft
    wide = replace(
        limits,
        rows=tuple(rows * topk for rows in limits.rows),
        max_tokens=max(limits.max_tokens, limits.max_rows * topk),
        max_kv_len=limits.max_kv_len + steps,
    )
    states = tuple(bound.attn_graph_state(group.plan.group, ["draft"], wide, lane) for _ in range(steps))
    return DraftStates(states, wide, topk)
