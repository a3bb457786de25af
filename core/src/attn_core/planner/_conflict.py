"""The smallest set of slots that cannot be served together, and what each needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from attn_core.options import Options
from attn_core.planner._choice import Ties
from attn_core.planner._slots import Slot
from attn_core.planner._solve import FREE, Wishes, solve


@dataclass(frozen=True)
class Conflict:
    """Slots that have no setting in common, with what each needs."""

    slots: tuple[Slot, ...]
    needs: Mapping[str, str] = field(default_factory=dict)


def find_conflict(slots: Sequence[Slot], options: Options, ties: Ties, wishes: Wishes = FREE) -> Conflict | None:
    """The smallest set of slots that cannot be served together, though each can be served alone. None if there is none."""
    for size in (2, 3, 4):
        for subset in combinations(slots, size):
            if len({slot.group.name for slot in subset}) > 1 and not (options.page_size or wishes.block):
                continue  # pools need not agree on a page size
            leaders = {slot.phase for slot in subset}
            if any(slot.follows and slot.follows not in leaders for slot in subset):
                continue
            if solve(subset, options, ties, wishes) is None:
                return Conflict(subset, {slot.label: needs_of(slot) for slot in subset})
    return None


_WORDS = (("page_size", "page"), ("format.layout", "layout"), ("format.name", "format"))


def needs_of(slot: Slot) -> str:
    """What the eligible candidates of a slot need of the pool, as text: ``fa4 needs page 128``."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for verdict in slot.eligible:
        mine = found.setdefault(verdict.candidate.manifest.name, {word: {} for _, word in _WORDS})
        for live in verdict.live:
            for axis, word in _WORDS:
                mine[word].update(dict.fromkeys(condition.need for condition in live.row.later.get(axis, ())))
    lines = []
    for name, needs in found.items():
        said = [f"{word} {' or '.join(values)}" for word, values in needs.items() if values]
        if said:
            lines.append(f"{name} needs {', '.join(said)}")
    return "; ".join(lines)
