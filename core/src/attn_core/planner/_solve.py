"""Solving: page size, format, layout and backends together, over all groups and phases of one model.

By intersection, never by snapping: every combination of page size and layout is tried as a whole, each group takes its
best backends under it, and the best whole wins. Groups that share a pool share its settings; other pools take the same
settings unless somebody would be served worse for it. The order of preference is: better-ranked backends, one page size for
all pools, fewer emulated pages and padded tensors, what the chosen backends prefer, the smallest change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attn_core.options import Options
from attn_core.planner._choice import Choice, GroupChoice, Ties, candidate_layouts, candidate_pages, choose_group
from attn_core.planner._slots import Slot

__all__ = ["Choice", "GroupChoice", "Solution", "Ties", "Wishes", "by_group", "preferences", "solve"]

#: What a page size is without anybody's wish: maximum prefix reuse.
DEFAULT_PAGE = 1

Key = tuple[object, ...]


@dataclass(frozen=True)
class Wishes:
    """What is known about pages before solving: one that is preferred, one that a shared allocation leaves no choice about."""

    page: int | None = None
    block: int | None = None


#: Nobody wishes anything.
FREE = Wishes()


@dataclass(frozen=True)
class Solution:
    """All groups of one model. ``shared_page`` is False where pools had to take different page sizes."""

    groups: Mapping[str, GroupChoice]
    page_size: int
    layout: str
    shared_page: bool = True


def by_group(slots: Iterable[Slot]) -> dict[str, list[Slot]]:
    """Slots by the name of their group, in the model's order."""
    groups: dict[str, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(slot.group.name, []).append(slot)
    return groups


class _Cluster:
    """Groups whose pools are shared: one setting for all of them. Evaluates settings on demand, once each."""

    def __init__(self, members: Mapping[str, list[Slot]], ties: Ties, wishes: Wishes) -> None:
        self.members, self.ties, self.wishes = members, ties, wishes
        slots = [slot for listed in members.values() for slot in listed]
        self.paged = any(not verdict.request.cacheless for slot in slots for verdict in slot.verdicts)
        self._tried: dict[tuple[int, str], dict[str, GroupChoice] | None] = {}

    def at(self, page: int, layout: str) -> dict[str, GroupChoice] | None:
        """The best choice of every group under a setting; None if one group has none."""
        place = (page, layout) if self.paged else (1, "NHD")
        if place not in self._tried:
            self._tried[place] = self._choose(*place)
        return self._tried[place]

    def _choose(self, page: int, layout: str) -> dict[str, GroupChoice] | None:
        found: dict[str, GroupChoice] = {}
        for name, slots in self.members.items():
            choice = choose_group(slots, page, layout, self.ties, blocks=self.wishes.block is not None)
            if choice is None:
                return None
            found[name] = choice
        return found


def solve(slots: Sequence[Slot], options: Options, ties: Ties, wishes: Wishes = FREE) -> Solution | None:
    """The best solution of one model, or None."""
    groups = by_group(slots)
    if not groups:
        return Solution({}, options.page_size or DEFAULT_PAGE, options.kv_layout or "NHD")
    fixed = wishes.block or options.page_size
    free = candidate_pages(slots, wishes.page)
    pages = [fixed] if fixed else free
    layouts = [options.kv_layout] if options.kv_layout else candidate_layouts(slots)
    clusters = [_Cluster(members, ties, wishes) for members in _clusters(groups)]
    places = [(page, layout) for page in pages for layout in layouts]
    together = _together(clusters, places, wishes)
    others = places if wishes.block else [(page, layout) for page in sorted({*free, *pages}) for layout in layouts]
    apart = _apart(clusters, places, others, wishes, together)
    return apart or together


def _clusters(groups: Mapping[str, list[Slot]]) -> list[dict[str, list[Slot]]]:
    """Groups joined by the pools they share; the cluster of the main pool comes first."""
    clusters: list[tuple[set[str], dict[str, list[Slot]]]] = []
    for name, slots in groups.items():
        pools = set(slots[0].group.pools.values()) or {f"({name})"}
        mine: dict[str, list[Slot]] = {name: slots}
        for other in [item for item in clusters if item[0] & pools]:
            clusters.remove(other)
            pools |= other[0]
            mine = {**other[1], **mine}
        clusters.append((pools, mine))
    order = list(groups)
    found = [dict(sorted(mine.items(), key=lambda item: order.index(item[0]))) for _, mine in clusters]
    return sorted(found, key=lambda mine: order.index(next(iter(mine))))


def _together(clusters: Sequence[_Cluster], places: Sequence[tuple[int, str]], wishes: Wishes) -> Solution | None:
    """All pools with the same page size and layout."""
    best: tuple[Key, Solution] | None = None
    for page, layout in places:
        chosen: dict[str, GroupChoice] = {}
        for cluster in clusters:
            found = cluster.at(page, layout)
            if found is None:
                break
            chosen.update(found)
        else:
            key = whole_cost(chosen, page, layout, wishes.page)
            if best is None or key < best[0]:
                best = key, Solution(chosen, page, layout)
    return best[1] if best else None


def _apart(
    clusters: Sequence[_Cluster],
    places: Sequence[tuple[int, str]],
    others: Sequence[tuple[int, str]],
    wishes: Wishes,
    together: Solution | None,
) -> Solution | None:
    """Pools with settings of their own, if that serves somebody better than one setting for all; else None.

    ``--page-size`` names the main pool's, which is that of the first cluster with a paged cache.
    """
    paged = [cluster for cluster in clusters if cluster.paged]
    if len(paged) < 2:
        return None
    main = paged[0]
    chosen: dict[str, GroupChoice] = {}
    first: tuple[int, str] | None = None
    for cluster in clusters:
        listed = places if cluster is main or not cluster.paged else others
        found = [
            (_apart_cost(choice, place, first, wishes.page), place, choice)
            for place in listed
            if (choice := cluster.at(*place)) is not None
        ]
        if not found:
            return None
        _, place, choice = min(found, key=lambda item: item[0])
        if cluster is main:
            first = place
        chosen.update(choice)
    if together is not None and _ranks(chosen) >= _ranks(together.groups):
        return None
    assert first is not None
    sizes = {choice.setting.page_size for cluster in paged for choice in (chosen[name] for name in cluster.members)}
    return Solution(chosen, *first, shared_page=len(sizes) == 1)


def _apart_cost(
    choice: Mapping[str, GroupChoice], place: tuple[int, str], first: tuple[int, str] | None, wished: int | None
) -> Key:
    cost = whole_cost(choice, *place, wished)
    return cost[0], place != first if first else False, *cost[1:]


def _ranks(chosen: Mapping[str, GroupChoice]) -> int:
    return sum(choice.cost[0] for choice in chosen.values())


def whole_cost(chosen: Mapping[str, GroupChoice], page: int, layout: str, wished_page: int | None) -> Key:
    """What is compared between settings, most important first."""
    wishes = preferences(chosen.values())
    return (
        _ranks(chosen),
        layout not in wishes["layout"] if wishes["layout"] else layout != "NHD",
        page != wished_page if wished_page else False,
        sum(choice.cost[1] for choice in chosen.values()),
        wishes["page"].index(page) if page in wishes["page"] else len(wishes["page"]),
        abs(page - (wished_page or DEFAULT_PAGE)),
    )


def preferences(choices: Iterable[GroupChoice]) -> dict[str, list[object]]:
    """Page sizes and layouts that the chosen variants prefer, decode's first."""
    wishes: dict[str, list[object]] = {"page": [], "layout": []}
    for group in choices:
        ordered = sorted(group.choices.items(), key=lambda item: item[0][0] != "decode")
        for _, choice in ordered:
            if choice.verdict.request.cacheless:
                continue
            for row in choice.verdict.candidate.variant.prefer:
                if all(c.holds(choice.verdict.request.axes, unknown=True) for c in row.conditions):
                    if row.page_size:
                        wishes["page"].append(row.page_size)
                    if row.layout:
                        wishes["layout"].append(row.layout)
    return wishes
