"""Short rows (decode, verify, short extends) as equal work units, so that no loop runs over requests.

The keys of every row are cut into units: chunks of C keys and one tail, whose width is rounded up a little. Units
of one shape are computed together, tile by tile, so that the keys of a tile are still in the processor's cache when they
are used. Rows of several units are merged by log-sum-exp (:mod:`attn_torch.merging`). How a row is cut, and the shape of
its units, depends on that row alone.

Letters: U units, n units of a tile, W keys of a unit, S query tokens of a row, P tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch

from attn_core.batch import KvAddress
from attn_torch.engines import Mask
from attn_torch.reader import Block
from attn_torch.rules import Rules, StepLengths, visible

#: Units wider than this many tokens are rounded up to a multiple of it, narrower ones to a power of two.
STEP = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """How rows are cut. ``chunk`` None: a row is one unit. All are in tokens."""

    chunk: int | None
    smallest: int
    tile: int
    one_by_one: bool = False  #: a tile is one unit: results do not depend on what else is in the batch

    def chunk_pages(self, page_size: int, most: int) -> int:
        """Pages of a chunk, where a row has at most `most`."""
        return most if self.chunk is None else max(1, self.chunk // page_size)


@dataclass(slots=True)
class Targets:
    """Where [rows * S] results go in the token axis: those of ``picks`` (None: all) to ``tokens``, i64 each.

    ``contiguous`` is the slice that the tokens are, if they are one.
    """

    tokens: torch.Tensor
    picks: torch.Tensor | None
    contiguous: slice | None


@dataclass(slots=True)
class Tile:
    """Units ``first … first + n`` of a plan, which share a shape. ``mask`` has [n, 1, S * G, W] (query-major).

    ``targets`` is where results go; None where the rows have further units. Every ``parts`` units are one row.
    """

    first: int
    block: Block
    mask: Mask | None
    targets: Targets | None = None
    parts: int = 1

    @property
    def units(self) -> slice:
        """Where the tile's results go among the plan's units."""
        return slice(self.first, self.first + self.block.units)


@dataclass(slots=True)
class UnitPlan:
    """All short rows with S query tokens. Results of the first ``direct`` units are complete within their tiles.

    ``tokens`` i64[U * S]: the query of each unit, shorter rows repeat their last one. For the rows of the other units:
    ``member`` i64[U - direct] is the row (counted from 0 among them) of a unit, ``slots`` i64[rows, most units of a row]
    the units of a row, padded with U - direct, and ``targets`` where their results go. ``regular`` is the number of units
    of each of them, where all have as many and they lie row by row.
    """

    queries: int
    count: int
    direct: int
    tiles: list[Tile]
    tokens: torch.Tensor
    contiguous: slice | None
    targets: Targets | None = None
    member: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    regular: int | None = None


@dataclass(slots=True)
class _Units:
    """Columns of the units in order of computation, i64[U] on the host."""

    row: torch.Tensor
    page: torch.Tensor
    pages: torch.Tensor  #: width class in pages
    masked: torch.Tensor
    sole: torch.Tensor


def plan_units(
    step: StepLengths,
    device_step: StepLengths,
    address: KvAddress,
    rows: torch.Tensor,
    queries: int,
    rules: Rules,
    ratio: int,
    sizes: Sizes,
) -> UnitPlan:
    """The plan for ``rows`` i64[r] (host): rows that see a key and have at most `queries` query tokens.

    `step` has the lengths on the host, `device_step` the same on the device.
    """
    units = _cut(step, rows, rules, address.page_size, sizes)
    device, count, whole = address.kv_lens.device, units.row.numel(), int(units.sole.sum())
    tokens = _query_tokens(step, units.row, queries)
    flat = tokens.flatten()
    plan = UnitPlan(queries, count, whole, [], flat.to(device, non_blocking=True), as_slice(flat))
    if whole < count:
        _plan_merge(plan, step, units.row[whole:], device, sizes)
    row, page = units.row.to(device, non_blocking=True), units.page.to(device, non_blocking=True)
    tile_of = _TileMaker(device_step, address, queries, rules, ratio)
    firsts = tokens[:, 0].tolist() if bool((step.query_len[rows] == queries).all()) else None
    for first, last, width, masked in _runs(units):
        part = tile_of.part(row[first:last], page[first:last], width, masked)
        most = 1 if sizes.one_by_one else max(1, sizes.tile // (width * address.page_size))
        parts = 1
        if first == whole and last == count and plan.regular is not None and most >= plan.regular:
            parts = plan.regular
            plan.direct, plan.targets, most = count, None, most // parts * parts
        for at in range(first, last, most):
            end = min(at + most, last)
            tile = tile_of(part, at, slice(at - first, end - first))
            tile.parts = parts
            if at < plan.direct and firsts is not None:
                tile.targets = _even_targets(plan.tokens, firsts, slice(at, end, parts), queries)
            elif at < plan.direct:
                tile.targets = _targets(step, units.row[at:end:parts], queries, device)
            plan.tiles.append(tile)
    return plan


def plan_bounded(
    device_step: StepLengths, address: KvAddress, rows: int, queries: int, rules: Rules, ratio: int, sizes: Sizes
) -> UnitPlan:
    """The plan for rows ``0 … rows - 1`` of exactly `queries` tokens whose lengths only the device knows.

    Every row is one unit, as wide as the longest may be (or the window, if that is less).
    """
    size, device = address.page_size, address.kv_lens.device
    low = rules.first_key(device_step.kv_len - device_step.query_len, device_step.spans is not None)
    origin = torch.zeros_like(low) if device_step.origin is None else device_step.origin
    page = (torch.maximum(low, origin) - origin) // size
    longest = max(1, address.max_kv_len)
    if rules.window is not None:
        longest = min(longest, rules.window + queries - 1 + size)
    width = -(-longest // size)
    tokens = torch.arange(rows * queries, device=device)
    plan = UnitPlan(queries, rows, rows, [], tokens, slice(0, rows * queries))
    tile_of = _TileMaker(device_step, address, queries, rules, ratio)
    most = max(1, sizes.tile // (width * size))
    for at in range(0, rows, most):
        end = min(at + most, rows)
        part = tile_of.part(torch.arange(at, end, device=device), page[at:end], width, True)
        tile = tile_of(part, at, slice(0, end - at))
        out = slice(at * queries, end * queries)
        tile.targets = Targets(tokens[out], None, out)
        plan.tiles.append(tile)
    return plan


# --- cutting -------------------------------------------------------------------------------------------------------------


def _cut(step: StepLengths, rows: torch.Tensor, rules: Rules, page_size: int, sizes: Sizes) -> _Units:
    """The units of `rows`, sorted: sole ones first, then by row; equal shapes together among the sole ones."""
    kv_len, query_len = step.kv_len[rows], step.query_len[rows]
    low = rules.first_key(kv_len - query_len, step.spans is not None)
    origin = torch.zeros_like(low) if step.origin is None else step.origin[rows]
    low = torch.maximum(low, origin)
    first = (low - origin) // page_size
    pages = torch.where(low < kv_len, (kv_len - origin + page_size - 1) // page_size - first, 0)
    chunk = sizes.chunk_pages(page_size, max(1, int(pages.max())))
    parts = (pages + chunk - 1) // chunk
    ends = parts.cumsum(0)
    unit = torch.arange(int(ends[-1]))
    owner = torch.searchsorted(ends, unit, right=True)  # repeat_interleave starts threads for it
    number = unit - (ends - parts)[owner]
    page = first[owner] + number * chunk
    have = (pages[owner] - number * chunk).clamp(max=chunk)
    width = width_classes(chunk, sizes.smallest, page_size)[have]
    start, end = origin[owner] + page * page_size, origin[owner] + (page + width) * page_size - 1
    position = (kv_len - query_len)[owner]
    sees = rules.sees_all(position, kv_len[owner] - 1, start, end)
    if step.tree is not None:
        sees &= end < position
    masked = ~(sees & (start >= low[owner]) & (end < kv_len[owner]))
    sole = (parts == 1)[owner]
    order = _order(owner, width, masked, sole)
    row = rows[owner]
    return _Units(row[order], page[order], width[order], masked[order], sole[order])


@lru_cache(maxsize=64)
def width_classes(chunk: int, smallest: int, page_size: int) -> torch.Tensor:
    """i64[chunk + 1]: the width in pages that a unit of so many pages is given: powers of two, then multiples of STEP."""
    widths, width, step = [], max(1, smallest // page_size), max(1, STEP // page_size)
    for pages in range(chunk + 1):
        while width < pages:
            width = 2 * width if width < step else width + step
        widths.append(min(width, chunk))
    return torch.tensor(widths)


def _order(owner: torch.Tensor, width: torch.Tensor, masked: torch.Tensor, sole: torch.Tensor) -> torch.Tensor:
    """A stable order in which units of one shape are neighbours and sole units come first."""
    rank = (~sole).long() * 2 + masked.long()
    return torch.argsort(rank * (int(width.max()) + 1) + width, stable=True)


def _runs(units: _Units) -> list[tuple[int, int, int, bool]]:
    """(first, last, width in pages, masked) of units that share a shape; ``last`` is exclusive."""
    shapes = zip(units.sole.tolist(), units.masked.tolist(), units.pages.tolist(), strict=True)
    found, first = [], 0
    for (_, masked, width), members in groupby(shapes):
        last = first + sum(1 for _ in members)
        found.append((first, last, width, masked))
        first = last
    return found


# --- tiles and targets ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Units of one shape, on the device: pages i32[n, w]; keep bool[n, S, W] and unseen bool[n, W] where masked."""

    pages: torch.Tensor
    width: int
    keep: torch.Tensor | None
    unseen: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _TileMaker:
    """Makes tiles from rows and first pages; everything is computed on the device of the address."""

    step: StepLengths
    address: KvAddress
    queries: int
    rules: Rules
    ratio: int

    def part(self, row: torch.Tensor, page: torch.Tensor, pages: int, masked: bool) -> _Part:
        """All units of one shape: row i64[n] and first page i64[n]; they are `pages` wide."""
        size, device = self.address.page_size, row.device
        found = look_up(self.address, row, page[:, None] + torch.arange(pages, device=device))
        if not masked:
            return _Part(found, pages * size, None, None)
        key = page[:, None] * size + torch.arange(pages * size, device=device)
        if self.step.origin is not None:
            key = key + self.step.origin[row][:, None]
        keep = self._visible(row, key)
        unseen = ~(keep[:, 0] if self.queries == 1 else keep.any(1))
        if self.ratio > 1 and self.queries > 1:  # one query broadcasts over the heads that share its keys
            keep = keep.repeat_interleave(self.ratio, dim=1)
        return _Part(found, pages * size, keep, unseen)

    def _visible(self, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """bool[n, S, W]. The only query of a row sees every key that exists, where there are no rules but causality."""
        step = self.step
        if self.queries == 1 and self.rules.plain and step.tree is None and step.spans is None:
            return (key < step.kv_len[row][:, None])[:, None, :]
        return visible(self.rules, step, row, torch.arange(self.queries, device=key.device), key)

    def __call__(self, part: _Part, first: int, units: slice) -> Tile:
        """The tile of `units` of a part; `first` is the number of its first unit in the plan."""
        block = Block(units.stop - units.start, part.width, part.pages[units].flatten(), None)
        if part.keep is None or part.unseen is None:
            return Tile(first, block, None)
        block.blank = _blank(part.unseen[units].flatten())
        return Tile(first, block, Mask(part.keep[units, None]))


def _blank(unseen: torch.Tensor) -> torch.Tensor:
    """Which keys to zero: a list of them on a CPU, where it is quick to make and to use; elsewhere it would be a sync."""
    return unseen.nonzero().flatten() if unseen.device.type == "cpu" else unseen


def look_up(address: KvAddress, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """i32[n, w]: the page at ``column[n, w]`` of ``row[n]``; columns past the end repeat the last one."""
    assert address.table is not None
    line = row if address.table_rows is None else address.table_rows[row].to(torch.int64)
    width = address.table.shape[1]
    return address.table[line[:, None], column.clamp(0, width - 1)]


def _query_tokens(step: StepLengths, row: torch.Tensor, queries: int) -> torch.Tensor:
    """i64[U, S]: the query tokens of each unit, on the host; shorter rows repeat their last one."""
    start = step.start[row][:, None]
    if queries == 1:
        return start
    return start + torch.minimum(torch.arange(queries)[None, :], step.query_len[row][:, None] - 1)


def _even_targets(tokens: torch.Tensor, firsts: list[int], units: slice, queries: int) -> Targets:
    """Targets of the rows (in ascending order) of these units, which all have exactly `queries` tokens."""
    starts = firsts[units]
    count = len(starts) * queries
    consecutive = starts[-1] + queries - starts[0] == count
    mine = tokens.view(-1, queries)[units].flatten()
    return Targets(mine, None, slice(starts[0], starts[0] + count) if consecutive else None)


def _targets(step: StepLengths, row: torch.Tensor, queries: int, device: torch.device) -> Targets:
    number = torch.arange(queries)
    real = number[None, :] < step.query_len[row][:, None]
    tokens = (step.start[row][:, None] + number)[real]
    picks = None if bool(real.all()) else real.flatten().nonzero().flatten().to(device, non_blocking=True)
    return Targets(tokens.to(device, non_blocking=True), picks, as_slice(tokens))


def as_slice(tokens: torch.Tensor) -> slice | None:
    """The slice that `tokens` (on the host) are, if they are consecutive."""
    count = tokens.numel()
    if tokens.device.type != "cpu" or count == 0:
        return None
    first = int(tokens[0])
    return slice(first, first + count) if torch.equal(tokens, torch.arange(first, first + count)) else None


def _plan_merge(plan: UnitPlan, step: StepLengths, row: torch.Tensor, device: torch.device, sizes: Sizes) -> None:
    """Which units make up which row, for the units of rows that have several."""
    owners, member, counts = torch.unique(row, return_inverse=True, return_counts=True)
    order = torch.argsort(member, stable=True)
    place = torch.arange(row.numel()) - (counts.cumsum(0) - counts)[member[order]]
    slots = torch.full((owners.numel(), int(counts.max())), row.numel())
    slots[member[order], place] = order
    plan.member, plan.slots = member.to(device, non_blocking=True), slots.to(device, non_blocking=True)
    if not sizes.one_by_one and torch.equal(slots.flatten(), torch.arange(row.numel())):
        plan.regular = slots.shape[1]
    plan.targets = _targets(step, owners, plan.queries, device)
