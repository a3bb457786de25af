"""From a solution to the plan of every group: phases, parts, forms, graph levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attn_core.geometry import DsaGeometry, MlaGeometry
from attn_core.options import Options
from attn_core.plan import ContextShard, GraphPlan, GroupPlan, PartPlan, PhasePlan
from attn_core.planner._choice import Choice, GroupChoice
from attn_core.planner._request import Situation
from attn_core.planner._slots import Slot
from attn_core.planner._solve import Solution, by_group


@dataclass(frozen=True)
class Solved:
    """One model with its slots and the solution: what a plan is built from."""

    situation: Situation
    slots: tuple[Slot, ...]
    solution: Solution


def build_groups(solved: Solved) -> Iterator[GroupPlan]:
    """The plan of every group; external groups have no phases."""
    options = solved.situation.options
    shard = ContextShard(0, options.dcp_size) if options.dcp_size > 1 else None
    members = by_group(solved.slots)
    for group in solved.situation.model.groups:
        choice = solved.solution.groups.get(group.name)
        phases = {} if choice is None else _phases(choice, members[group.name], solved.situation)
        yield GroupPlan(group, phases, shard if phases and group.backend_kind in ("mha", "mla", "dsa") else None)


def _phases(choice: GroupChoice, slots: Sequence[Slot], situation: Situation) -> dict[str, PhasePlan]:
    found: dict[str, PhasePlan] = {}
    for slot in slots:
        if slot.part == "main":
            parts = [other for other in slots if other.phase == slot.phase and other.part != "main"]
            found[slot.phase] = _phase(choice, slot, parts, situation)
    return found


def _phase(choice: GroupChoice, slot: Slot, others: Sequence[Slot], situation: Situation) -> PhasePlan:
    main = choice.choices[slot.phase, "main"]
    candidate, live = main.verdict.candidate, main.fit.live
    manifest, row = candidate.manifest, live.row
    served = [main, *([main.prefix] if main.prefix else []), *(choice.choices[s.phase, s.part] for s in others)]
    chunks = main.verdict.request.prefix and main.prefix is None
    return PhasePlan(
        backend=manifest.name,
        variant=candidate.variant.name,
        package=manifest.package,
        version=manifest.version,
        parts=tuple(_part(one, situation.options) for one in served),
        kernel_page_size=(main.prefix or main).fit.kernel_page,
        form=_form(slot, main),
        index_space="slot" if isinstance(slot.group.geometry, DsaGeometry) else None,
        graph=_graph(slot, main, situation),
        needs_lse="lse" in main.verdict.request.features or bool(chunks),
        mixed="mixed" in row.features,
        rank=main.verdict.rank,
        explicit=slot.pin is not None and not slot.pin.companion_of,
        reason=_why(slot, main),
        host_lengths=row.host_lengths or candidate.variant.host_lengths,
        padded_out=row.padded_out,
        q_dtype=live.q_dtype,
        pads={name: list(change) for name, change in live.pads.items()},
        libraries=dict(candidate.available.versions) if candidate.available else {},
    )


def _form(slot: Slot, main: Choice) -> str | None:
    """``ragged``: new tokens and prefix chunks expanded; ``by_length(0)``: absorbed wherever there is a cached prefix."""
    if not isinstance(slot.group.geometry, MlaGeometry | DsaGeometry):
        return None
    if main.verdict.candidate.role != "ragged":
        return "absorbed"
    return "by_length(0)" if main.prefix else "ragged"


def _part(choice: Choice, options: Options) -> PartPlan:
    candidate, row = choice.verdict.candidate, choice.fit.live.row
    manifest = candidate.manifest
    return PartPlan(
        role=candidate.role,
        backend=manifest.name,
        variant=candidate.variant.name,
        package=manifest.package,
        version=manifest.version,
        fuses=tuple(sorted(row.fuses)),
        features=tuple(sorted(row.features)),
        options=dict(options.backend_options.get(manifest.name, {})),
    )


def _graph(slot: Slot, main: Choice, situation: Situation) -> GraphPlan:
    options, row = situation.options, main.fit.live.row
    width = options.speculative_num_draft_tokens if slot.phase in ("verify", "draft_extend") else 1
    return GraphPlan(
        level=row.graph,
        max_rows=options.max_running_requests or 0,
        max_query_len=width,
        max_kv_len=max(options.context_length or situation.model.max_positions or 0, slot.group.kv_len or 0),
        piecewise=row.piecewise,
    )


def _why(slot: Slot, main: Choice) -> str:
    if main.companion_of:
        return main.reason or f"the manifest of {main.companion_of} names it for {slot.phase}"
    if slot.pin is not None:
        return slot.pin.reason or f"asked for with {slot.pin.flag}"
    if slot.follows is not None:
        return f"serves with the {slot.follows} backend{_mode(slot)}"
    if main.verdict.preferred:
        return "ranked first by --prefer-backends"
    rivals = {v.candidate.manifest.id for v in slot.eligible} - {main.verdict.candidate.manifest.id}
    if not rivals:
        return "the only eligible backend"
    said = f": {main.verdict.rank_reason}" if main.verdict.rank_reason else ""
    return f"best rank ({main.verdict.rank}) of {len(rivals) + 1} eligible backends{said}"


def _mode(slot: Slot) -> str:
    return "" if slot.group.backend_kind == "dsa" else f" (--speculative-attention-mode {slot.follows})"
