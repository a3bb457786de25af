"""The best backends of one layer group under one setting of its pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice

from attn_core.planner._slots import Slot
from attn_core.planner._verdict import Fit, Setting, Verdict, fit
from attn_core.predicate import Condition

#: Page sizes that are tried besides those that rows name.
COMMON_PAGES = (1, 16, 32, 64, 128)
#: Combinations of phases that are tried per group and setting before it is given up.
_TRIES = 4096


@dataclass(frozen=True)
class Choice:
    """A verdict with the way it fits. ``prefix`` serves rows with a cached prefix, where the main part cannot.

    ``companion_of`` names the backend whose manifest brought this one in.
    """

    verdict: Verdict
    fit: Fit
    prefix: Choice | None = None
    companion_of: str = ""
    reason: str = ""

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.verdict.candidate.manifest.name


@dataclass(frozen=True)
class GroupChoice:
    """One group under a setting: the choice of each (phase, part)."""

    setting: Setting
    choices: Mapping[tuple[str, str], Choice]
    cost: tuple[int, int]


class Ties:
    """Order among equal ranks: the published order of the kind, then the name; never the order of discovery."""

    def __init__(self, order: Mapping[str, Sequence[str]]) -> None:
        self._order = {kind: {name: index for index, name in enumerate(names)} for kind, names in order.items()}

    def key(self, verdict: Verdict) -> tuple[int, int, str, int]:
        """Sort key of a verdict: rank, published position, name, variant (in the manifest's own order)."""
        manifest = verdict.candidate.manifest
        position = self._order.get(manifest.kind, {}).get(manifest.name, 1000)
        return verdict.rank, position, manifest.name, manifest.variants.index(verdict.candidate.variant)


def candidate_pages(slots: Iterable[Slot], wished: int | None) -> list[int]:
    """Every page size worth trying: common ones and those that live rows name (multiples and minima included)."""
    pages = {*COMMON_PAGES, *([wished] if wished else [])}
    for condition in {c.need: c for c in _later(slots, "page_size")}.values():
        pages |= set(_named_pages(condition))
    return sorted(pages)


def _later(slots: Iterable[Slot], axis: str) -> Iterator[Condition]:
    for slot in slots:
        for verdict in slot.eligible:
            for live in verdict.live:
                yield from live.row.later.get(axis, ())


def candidate_layouts(slots: Iterable[Slot]) -> list[str]:
    """NHD, and HND where some live row speaks of layouts at all."""
    return ["NHD", "HND"] if any(True for _ in _later(slots, "format.layout")) else ["NHD"]


def _named_pages(condition: Condition) -> Iterator[int]:
    value = condition.value
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, int):
            yield item
        elif isinstance(item, tuple) and item[0] in ("min", "multiple", "exactly"):
            yield from item[1] if isinstance(item[1], tuple) else (item[1],)


def choose_group(
    slots: Sequence[Slot], page: int, layout: str, ties: Ties, *, blocks: bool = False
) -> GroupChoice | None:
    """The best choice of one group under (page, layout), over the formats its candidates can take; None if there is none."""
    best: GroupChoice | None = None
    for name in _formats(slots):
        choice = _choose_with_format(slots, Setting(page, name, layout, blocks), ties)
        if choice is not None and (best is None or choice.cost < best.cost):
            best = choice
    return best


def _formats(slots: Sequence[Slot]) -> list[str]:
    """The default format first, then every other format that live rows name."""
    main = [slot for slot in slots if slot.part == "main"]
    defaults = (v.request.axes.get("format.default", "") for slot in main for v in slot.verdicts[:1])
    names = dict.fromkeys(str(name) for name in defaults)
    for condition in _later(main, "format.name"):
        listed = condition.value if isinstance(condition.value, tuple) else (condition.value,)
        names.update(dict.fromkeys(item for item in listed if isinstance(item, str)))
    return list(names)


class _Ranked:
    """The choices of one slot under a setting, best first, found one at a time: the first one is mostly enough."""

    def __init__(self, slot: Slot, setting: Setting, ties: Ties) -> None:
        self._slot, self._setting = slot, _slot_setting(slot.part, setting)
        self._waiting = iter(slot.in_order(ties.key))
        self._found: list[Choice] = []
        self.needs: Callable[[Choice], bool] | None = None

    def get(self, position: int) -> Choice | None:
        """The choice at a position; None after the last."""
        while len(self._found) <= position:
            verdict = next(self._waiting, None)
            if verdict is None:
                return None
            how = fit(verdict, self._setting, {})
            choice = None if how is None else self._with_prefix(Choice(verdict, how))
            if choice is not None and (self.needs is None or self.needs(choice)):
                self._found.append(choice)
        return self._found[position]

    def all(self) -> list[Choice]:
        """Every choice."""
        while self.get(len(self._found)) is not None:
            pass
        return self._found

    def _with_prefix(self, choice: Choice) -> Choice | None:
        """The choice, with who serves cached prefixes where its expanded form cannot; None if nobody can."""
        how = choice.verdict.request.prefix
        if not how or (how == "chunks" and "chunked_prefix" in choice.fit.live.row.features):
            return choice
        absorbed = [verdict for verdict in self._slot.eligible if verdict.candidate.role == "absorbed"]
        absorbed.sort(key=lambda v: (v.candidate.manifest.id != choice.verdict.candidate.manifest.id, v.rank))
        for verdict in absorbed:
            found = fit(verdict, self._setting, {})
            if found is not None and not found.live.pads:  # the plan records padding of main parts only
                return replace(choice, prefix=Choice(verdict, found))
        return None


def _choose_with_format(slots: Sequence[Slot], setting: Setting, ties: Ties) -> GroupChoice | None:
    free = [slot for slot in slots if slot.follows is None]
    bound = [slot for slot in slots if slot.follows is not None]
    ranked = [_Ranked(slot, setting, ties) for slot in free]
    followers: dict[tuple[str, str, str], Choice] = {}
    for slot in bound:
        _lead(slot, free, ranked, followers, _Ranked(slot, setting, ties))
    if any(choices.get(0) is None for choices in ranked):
        return None
    for combination in islice(_cheapest_first(ranked), _TRIES):
        chosen = {(slot.phase, slot.part): choice for slot, choice in zip(free, combination, strict=True)}
        for slot in bound:
            leader = chosen.get((slot.follows or "", slot.part))
            if leader is not None:
                chosen[slot.phase, slot.part] = followers[slot.phase, slot.part, _id(leader)]
        settled = _with_peers(chosen, setting)
        if settled is not None and len(settled) == len(slots):
            return GroupChoice(setting, settled, _cost(settled.values(), setting))
    return None


def _lead(
    slot: Slot,
    free: Sequence[Slot],
    ranked: Sequence[_Ranked],
    followers: dict[tuple[str, str, str], Choice],
    mine: _Ranked,
) -> None:
    """Let the slot that `slot` follows choose only who has a follower there; `followers` remembers whom."""
    for leader, choices in zip(free, ranked, strict=True):
        if (leader.phase, leader.part) != (slot.follows, slot.part):
            continue
        before = choices.needs

        def has_follower(choice: Choice, before: Callable[[Choice], bool] | None = before) -> bool:
            follower = follower_of(slot, mine.all(), choice)
            if follower is None or (before is not None and not before(choice)):
                return False
            followers[slot.phase, slot.part, _id(choice)] = follower
            return True

        choices.needs = has_follower


def _id(choice: Choice) -> str:
    candidate = choice.verdict.candidate
    return f"{candidate.manifest.id}:{candidate.variant.name}:{candidate.role}"


@lru_cache(maxsize=256)
def _index_setting(setting: Setting) -> Setting:
    """The index pool of a sparse group has a format of its own; page size and layout are the group's."""
    return replace(setting, format="index_132_planar")


def _slot_setting(slot_part: str, setting: Setting) -> Setting:
    return _index_setting(setting) if slot_part == "index" else setting


def follower_of(slot: Slot, mine: Sequence[Choice], leader: Choice) -> Choice | None:
    """Who serves a bound slot beside `leader`: the leader's backend, else the companion its manifest names."""
    manifest = leader.verdict.candidate.manifest
    same = [c for c in mine if c.verdict.candidate.manifest.id == manifest.id]
    if same:  # the same variant where it can, else another path of the same backend
        variant = leader.verdict.candidate.variant.name
        return min(same, key=lambda c: c.verdict.candidate.variant.name != variant)
    for row in manifest.companions:
        for choice in mine if row.phase == slot.phase else ():
            axes = choice.verdict.request.axes
            if choice.backend == row.backend and all(c.holds(axes, unknown=False) for c in row.conditions):
                return replace(choice, companion_of=manifest.name, reason=row.reason)
    return None


def _cheapest_first(ranked: Sequence[_Ranked]) -> Iterator[tuple[Choice, ...]]:
    """Combinations in the order of the sum of ranks, the best of every slot first; made one by one, since the first mostly fits."""
    start = (0,) * len(ranked)
    first = _at(ranked, start)
    heap = [(_rank_sum(first), start, first)] if first is not None else []
    seen = {start}
    while heap:
        _, positions, choices = heappop(heap)
        yield choices
        for index, position in enumerate(positions):
            after = (*positions[:index], position + 1, *positions[index + 1 :])
            following = None if after in seen else _at(ranked, after)
            if following is not None:
                seen.add(after)
                heappush(heap, (_rank_sum(following), after, following))


def _at(ranked: Sequence[_Ranked], positions: tuple[int, ...]) -> tuple[Choice, ...] | None:
    found: list[Choice] = []
    for choices, position in zip(ranked, positions, strict=True):
        choice = choices.get(position)
        if choice is None:
            return None
        found.append(choice)
    return tuple(found)


def _rank_sum(choices: Sequence[Choice]) -> int:
    return sum(choice.verdict.rank for choice in choices)


def _with_peers(chosen: Mapping[tuple[str, str], Choice], setting: Setting) -> dict[tuple[str, str], Choice] | None:
    peers = {phase: choice.backend for (phase, part), choice in chosen.items() if part == "main"}
    settled: dict[tuple[str, str], Choice] = {}
    for key, choice in chosen.items():
        verdict = choice.verdict
        if verdict.deny or any("peer" in live.row.later for live in verdict.live):
            how = fit(verdict, _slot_setting(key[1], setting), peers)
            if how is None:
                return None
            choice = replace(choice, fit=how)
        settled[key] = choice
    return settled


def _cost(choices: Iterable[Choice], setting: Setting) -> tuple[int, int]:
    ranks = changed = 0
    for choice in choices:
        ranks += choice.verdict.rank
        split = choice.fit.kernel_page != setting.page_size and not choice.verdict.request.cacheless
        changed += split + len(choice.fit.live.pads)
    return ranks, changed
