"""What planning changed, and why every other candidate lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attn_core.options import Options
from attn_core.plan import Adjustment, Rejection
from attn_core.planner._build import Solved
from attn_core.planner._choice import Choice, GroupChoice
from attn_core.planner._pools import padding_costs
from attn_core.planner._slots import Slot
from attn_core.planner._solve import Solution
from attn_core.planner._verdict import Setting, Verdict, denied_by, deny_reason, fit
from attn_core.reasons import Reason

# --- what was changed ---------------------------------------------------------------------------------------------------


def adjustments(solved: Solved, options: Options, block: int | None) -> Iterator[Adjustment]:
    """Page sizes, companions and padding: every value set otherwise than by default, with who asked for it."""
    prefix = "draft." if solved.situation.is_draft else ""
    yield from _pages(solved, options, prefix, block)
    for slot in solved.slots:
        name = f"{prefix}{slot.group.name}.{slot.phase}"
        chosen = solved.solution.groups[slot.group.name].choices[slot.phase, slot.part]
        if slot.pin is not None and slot.pin.companion_of:
            yield Adjustment(name, slot.pin.companion_of, slot.pin.name, slot.pin.reason, slot.pin.companion_of)
        elif chosen.companion_of:
            yield Adjustment(name, chosen.companion_of, chosen.backend, chosen.reason, chosen.companion_of)
        if chosen.prefix is not None:
            why = "a cached prefix is attended in absorbed form: its expanded form takes no prefix chunks here"
            yield Adjustment(f"{name}.prefix", "ragged", "absorbed", why, chosen.backend)
    yield from _padding(solved, prefix)


def _pages(solved: Solved, options: Options, prefix: str, block: int | None) -> Iterator[Adjustment]:
    first: int | None = None
    seen: set[int] = set()
    for name, choice in solved.solution.groups.items():
        if all(chosen.verdict.request.cacheless for chosen in choice.choices.values()):
            continue
        page = choice.setting.page_size
        asked = options.page_size if first is None or options.page_size is None else first
        if page in seen or page == (asked or 1):
            first = first or page
            seen.add(page)
            continue
        if block is not None:
            by, why = "--shared-allocation", f"exactly {block} tokens of K fill one recurrent state"
        else:
            by, why = _page_reason(solved, page)
        field = f"{prefix}page_size" if first is None else f"{prefix}{name}.page_size"
        yield Adjustment(field, asked or 1, page, why, by)
        first = first or page
        seen.add(page)


def _page_reason(solved: Solved, page: int) -> tuple[str, str]:
    demanding: dict[str, str] = {}
    preferring: dict[str, str] = {}
    for choice in solved.solution.groups.values():
        for chosen in choice.choices.values() if choice.setting.page_size == page else ():
            conditions, name = chosen.fit.live.page, chosen.backend
            if conditions and not all(condition.accepts(1) for condition in conditions):
                demanding[name] = " and ".join(condition.need for condition in conditions)
            for row in chosen.verdict.candidate.variant.prefer:
                if row.page_size == page:
                    preferring[name] = row.reason
    said = {name: f"{name} reads pages of {need}" for name, need in demanding.items()}
    for name, why in preferring.items():
        wish = f"prefers {page}" + (f" ({why})" if why else "")
        said[name] = f"{said[name]} and {wish}" if name in said else f"{name} {wish}"
    if said:
        return ", ".join(said), "; ".join(said.values())
    return "", "the smallest page size that all phases have in common"


def _padding(solved: Solved, prefix: str) -> Iterator[Adjustment]:
    costs = dict(padding_costs(solved))
    for name, choice in solved.solution.groups.items():
        told: set[tuple[str, str]] = set()
        for chosen in choice.choices.values():
            for axis, (before, after) in chosen.fit.live.pads.items():
                if (axis, chosen.backend) in told:
                    continue
                told.add((axis, chosen.backend))
                yield Adjustment(
                    f"{prefix}{name}.{axis}", before, after, _pad_text(chosen, axis, costs.get(name)), chosen.backend
                )


_PADDED = {"q_heads": "query heads", "v_dim": "pad V", "head_dims": "head dims"}


def _pad_text(chosen: Choice, axis: str, cost: str | None) -> str:
    before, after = chosen.fit.live.pads[axis]
    shown = ["/".join(map(str, n)) if isinstance(n, tuple) else str(n) for n in (before, after)]
    available = chosen.verdict.candidate.available
    versions = ", ".join(available.versions.values()) if available else ""
    library = f" (library {versions})" if versions else ""
    text = f"{_PADDED[axis]} padded {shown[0]}->{shown[1]}{library}"
    if axis == "v_dim":
        text = f"pad V to {shown[1]}: {text.removeprefix('pad V ')}"
    return text + (f": {cost}" if cost and axis != "q_heads" else "")


# --- who lost -----------------------------------------------------------------------------------------------------------


def rejections(slots: Iterable[Slot], solution: Solution | None) -> Iterator[Rejection]:
    """Every candidate that does not serve its slot, with its reasons."""
    for slot in slots:
        choice = solution.groups.get(slot.group.name) if solution else None
        winner = choice.choices.get((slot.phase, slot.part)) if choice else None
        serving = [one.verdict for one in (winner, winner.prefix if winner else None) if one is not None]
        for verdict in slot.verdicts:
            if any(verdict is one for one in serving):
                continue
            reasons = verdict.reasons or _lost(slot, verdict, choice, winner)
            if reasons:
                yield rejection(slot, verdict, reasons)


def rejection(slot: Slot, verdict: Verdict, reasons: tuple[Reason, ...]) -> Rejection:
    """The record of one candidate that does not serve a slot."""
    candidate = verdict.candidate
    manifest = candidate.manifest
    return Rejection(
        slot.group.name, slot.phase, candidate.role, manifest.name, candidate.variant.name, reasons,
        manifest.package, manifest.version, slot.group.model,
    )  # fmt: skip


def _lost(slot: Slot, verdict: Verdict, choice: GroupChoice | None, winner: Choice | None) -> tuple[Reason, ...]:
    """Why an eligible candidate was not taken."""
    if choice is not None:
        peers = {
            phase: other.backend
            for (phase, part), other in choice.choices.items()
            if part == "main" and phase != slot.phase
        }
        setting = choice.setting
        unfit = unfit_reasons(verdict, setting, peers) if slot.part == "main" else ()
        if unfit and winner is not None and _would_lose(slot, verdict, winner):
            return (_outranked(verdict, winner.verdict), *unfit)
        if unfit:
            return unfit
    if slot.pin is not None and not slot.pin.covers(verdict.candidate):
        return (Reason("not_asked", f"{slot.pin.name} was asked for", asked_by=slot.pin.flag),)
    if winner is None:
        return ()
    if verdict.candidate.manifest.status == "experimental":
        fix = "--allow-experimental, or name it"
        return (Reason("experimental", "experimental backends are not chosen by auto", fix=fix),)
    if slot.follows is not None:
        need = f"{slot.phase} is served by the {slot.follows} backend"
        return (Reason("follows", need, asked_by="--speculative-attention-mode"),)
    return (_outranked(verdict, winner.verdict),)


def _would_lose(slot: Slot, verdict: Verdict, winner: Choice) -> bool:
    """Whether rank alone speaks against a candidate, so that the page size went another way for that reason."""
    free = slot.pin is None and slot.follows is None and not verdict.request.axes.get("explicit.page_size")
    return free and verdict.rank > winner.verdict.rank


def _outranked(verdict: Verdict, winner: Verdict) -> Reason:
    mine, theirs = (f" ({v.rank_reason})" if v.rank_reason else "" for v in (verdict, winner))
    return Reason("outranked", f"rank {verdict.rank}{mine}, {winner.candidate.name} has {winner.rank}{theirs}")


def unfit_reasons(verdict: Verdict, setting: Setting, peers: Mapping[str, str]) -> tuple[Reason, ...]:
    """Why a candidate does not fit the settings that were chosen; empty if it fits."""
    if fit(verdict, setting, peers) is not None:
        return ()
    row = denied_by(verdict, setting, setting.page_size, peers)
    if row is not None:
        return (deny_reason(row, verdict.request),)
    found = list(_unmet(verdict, setting))
    if not found:
        have = f"page {setting.page_size}, {setting.format}, {setting.layout}"
        found = [Reason("settings", "another page size, format or layout", have)]
    return tuple(found)


def _unmet(verdict: Verdict, setting: Setting) -> Iterator[Reason]:
    request = verdict.request
    slots = request.elements_per_slot
    values = {
        "page_size": setting.page_size,
        "format.name": setting.format,
        "format.layout": setting.layout,
        "pool_elements": None if slots is None else slots * setting.page_size,
    }
    for code, have in values.items():
        conditions = [c for live in verdict.live for c in live.row.later.get(code, ())]
        if have is None or not conditions or any(condition.accepts(have) for condition in conditions):
            continue
        need = ", ".join(dict.fromkeys(c.need for c in conditions))
        if code == "page_size" and request.tree:
            need += f" for token trees (topk {request.axes.get('topk')}): pages are not split for them"
        yield Reason(code, need, str(have), request.asked_by.get(code, ""))
