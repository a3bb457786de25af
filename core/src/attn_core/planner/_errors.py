"""Why there is no plan: one message with the nearest misses, the conflict, and what would make it work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from attn_core.errors import ModelError, PlanError
from attn_core.geometry import Model
from attn_core.manifest import Row
from attn_core.options import Options
from attn_core.plan import Rejection
from attn_core.planner._choice import Ties
from attn_core.planner._conflict import Conflict, find_conflict
from attn_core.planner._losers import rejection, rejections, unfit_reasons
from attn_core.planner._remedies import Solvable, suggest, working_ranks
from attn_core.planner._request import Situation
from attn_core.planner._slots import Slot
from attn_core.planner._solve import Wishes, by_group, solve
from attn_core.planner._verdict import Setting, Verdict
from attn_core.reasons import Reason

#: Rows of the table of rivals; nearest misses come first, the rest is in ``rejected``.
_SHOWN = 12
#: Hardware of another kind is no near miss, whatever else fits.
_FAR = 100


def no_plan(situation: Situation, slots: Sequence[Slot], ties: Ties, wishes: Wishes, solvable: Solvable) -> PlanError:
    """The error for a model that cannot be solved. ``solvable`` says whether other options would have a plan."""
    options = situation.options
    # what was named cannot be served: that comes first; then what nobody serves
    stuck = [slot for slot in slots if not _can_serve(slot, options, ties)]
    stuck.sort(
        key=lambda slot: (slot.pin is None or bool(slot.pin.companion_of), slot.pin is None, slot.part != "main")
    )
    rejected = tuple(_all_rejections(slots, options))
    suggestions = suggest(options, slots, stuck, solvable)
    if stuck:
        return _nobody(situation, stuck, slots, ties, rejected, suggestions)
    conflict = find_conflict(slots, options, ties, wishes)
    return _conflicting(situation, conflict, slots, rejected, suggestions)


def no_shard(error: ModelError, model: Model, options: Options, solvable: Solvable) -> PlanError:
    """The error for heads that do not divide over the ranks, with the sizes that do."""
    sizes = working_ranks(options, solvable)
    suggestions = [f"--tp-size {' or '.join(map(str, sizes))}"] if sizes else []
    asked = f"asked    --tp-size {options.tp_size}   (model {model.name})"
    return PlanError(error.message, asked, suggestions=suggestions)


def _can_serve(slot: Slot, options: Options, ties: Ties) -> bool:
    """Whether somebody serves this slot alone; ``--page-size`` speaks of the main pool only, and is met together."""
    alone = replace(slot, follows=None)
    return solve([alone], options, ties) is not None


def _nobody(
    situation: Situation,
    stuck: Sequence[Slot],
    slots: Sequence[Slot],
    ties: Ties,
    rejected: tuple[Rejection, ...],
    suggestions: list[str],
) -> PlanError:
    slot = stuck[0]
    facts = [f"asked    {asked_line(situation, slot)}"]
    shown = [v for v in slot.verdicts if slot.pin is None or slot.pin.covers(v.candidate)]
    facts += list(_table(slot, shown, situation.options))
    if slot.pin is not None:
        facts += list(_other_groups(slot, slots, situation.options, ties))
        who = (
            f"{slot.pin.companion_of} leaves {slot.phase} to {slot.pin.name}, which"
            if slot.pin.companion_of
            else slot.pin.name
        )
        message = f"{who} cannot serve {_layers(slot)}"
    else:
        message = f"no installed backend can serve {_layers(slot)}"
    return PlanError(message, *facts, rejected=rejected, suggestions=suggestions)


def _layers(slot: Slot) -> str:
    count = len(slot.group.layers)
    return f"{slot.label}: {count} {slot.group.kind} layer{'s' if count != 1 else ''}"


def _table(slot: Slot, verdicts: Iterable[Verdict], options: Options) -> Iterable[str]:
    rows = []
    for verdict in verdicts:
        manifest = verdict.candidate.manifest
        reasons = verdict.reasons or _pinned_page_reasons(slot, verdict, options)
        text = " | ".join(_with_fix(reason) for reason in reasons) or "fits alone, not with the other phases"
        version = f" {manifest.version} ({manifest.package})" if manifest.package else ""
        codes = {reason.code for reason in verdict.reasons}
        distance = len(codes) + _FAR * bool(codes & {"arch", "vendor"})
        rows.append((distance, f"{verdict.candidate.name}{version}", text))
    width = max((len(name) for _, name, _ in rows), default=0)
    for _, name, text in sorted(dict.fromkeys(rows))[:_SHOWN]:
        yield f"{name:<{width}}  {text}"
    if len(rows) > _SHOWN:
        yield f"… and {len(rows) - _SHOWN} further candidates (attn explain, or --json, lists all)"


def _with_fix(reason: Reason) -> str:
    return f"{reason}" + (f" -> {reason.fix}" if reason.fix else "")


def _pinned_page_reasons(slot: Slot, verdict: Verdict, options: Options) -> tuple[Reason, ...]:
    if options.page_size is None and options.kv_layout is None:
        return ()
    default = str(verdict.request.axes.get("format.default", ""))
    setting = Setting(options.page_size or 1, default, options.kv_layout or "NHD")
    reasons = unfit_reasons(verdict, setting, {})
    return tuple(replace(r, asked_by=r.asked_by or "--page-size") if r.code == "page_size" else r for r in reasons)


def _other_groups(slot: Slot, slots: Sequence[Slot], options: Options, ties: Ties) -> Iterable[str]:
    """What the pinned backend can serve in the other groups, and the map flag that says so."""
    assert slot.pin is not None
    fine: dict[str, Slot] = {}
    for name, members in by_group(slots).items():
        mine = [m for m in members if m.pin is not None and m.pin.name == slot.pin.name]
        if name != slot.group.name and mine and all(_can_serve(m, options, ties) for m in mine):
            fine[name] = mine[0]
    for name, other in fine.items():
        yield f"ok for   {len(other.group.layers)} {other.group.kind} layers (group {name!r})"
    if fine:
        pairs = ",".join([*(f"{name}={slot.pin.name}" for name in fine), f"{slot.group.name}=…"])
        yield f"or       {slot.pin.flag} {pairs}"


def asked_line(situation: Situation, slot: Slot) -> str:
    """What was asked for, in one line: dims, dtypes, page, features, platform, and the flags behind them."""
    options = situation.options
    verdict = slot.verdicts[0] if slot.verdicts else None
    axes = verdict.request.axes if verdict else {}
    features = verdict.request.features if verdict else {}
    parts = []
    if "head_dims" in axes:
        parts.append("head dim " + "/".join(map(str, axes["head_dims"])))
    if "q_heads" in axes:
        parts.append(f"{axes['q_heads']}/{axes['kv_heads']} heads")
    parts += [f"{situation.dtype} q", f"{situation.kv_dtype} kv"]
    if options.page_size:
        parts.append(f"page {options.page_size}")
    if slot.phase in ("verify", "draft_extend"):
        parts.append(f"verify width {options.speculative_num_draft_tokens}, topk {options.topk}")
    parts += sorted(features)
    parts.append(str(situation.platform))
    flags = sorted(
        {
            flag
            for flag in (slot.pin.flag if slot.pin else "", *(verdict.request.asked_by.values() if verdict else ()))
            if flag
        }
    )
    return ", ".join(parts) + f"   ({', '.join([*flags, 'model config'])})"


def _conflicting(
    situation: Situation,
    conflict: Conflict | None,
    slots: Sequence[Slot],
    rejected: tuple[Rejection, ...],
    suggestions: list[str],
) -> PlanError:
    if conflict is None:
        names = ", ".join(dict.fromkeys(slot.label for slot in slots))
        return PlanError(
            f"no combination of backends serves {names} together", rejected=rejected, suggestions=suggestions
        )
    facts: list[str] = []
    for slot in conflict.slots:
        flag = f"   ({slot.pin.flag})" if slot.pin else ""
        need = conflict.needs.get(slot.label) or "is denied together with the other"
        facts.append(f"{slot.label}: {need}{flag}")
        facts += dict.fromkeys(f"  denied: {_denial(row)}" for v in slot.eligible for row in v.deny)
    follows = [slot for slot in conflict.slots if slot.follows]
    for slot in follows:
        facts += _unable(slot, [other for other in slots if other.phase == slot.follows and other.pin])
    facts += [
        f"{slot.phase} must be served by the {slot.follows} backend (--speculative-attention-mode)" for slot in follows
    ]
    asked = f" with --page-size {situation.options.page_size}" if situation.options.page_size else ""
    title = "the smallest set of needs that cannot be met together" + asked
    return PlanError(title, *facts, rejected=rejected, suggestions=suggestions)


def _unable(slot: Slot, leaders: Sequence[Slot]) -> Iterable[str]:
    """Why the backend that was named for a phase cannot serve the slot that follows it."""
    for leader in leaders:
        for verdict in slot.verdicts:
            if leader.pin is not None and leader.pin.covers(verdict.candidate) and verdict.reasons:
                yield f"  {verdict.candidate.name} ({slot.phase})  " + " | ".join(map(_with_fix, verdict.reasons))


def _denial(row: Row) -> str:
    return row.reason + (f" -> {row.fix}" if row.fix else "")


def _all_rejections(slots: Sequence[Slot], options: Options) -> Iterable[Rejection]:
    yield from rejections(slots, None)
    for slot in slots:
        for verdict in slot.eligible:
            reasons = _pinned_page_reasons(slot, verdict, options)
            if reasons:
                yield rejection(slot, verdict, reasons)
