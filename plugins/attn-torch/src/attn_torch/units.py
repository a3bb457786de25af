"""Short rows (decode, verify, short extends) as equal work units, so that no loop runs over requests.

The keys of every row are cut into units: chunks of C keys and one tail, whose width is rounded up a little. Units
of one shape are computed together, tile by tile, so that the keys of a tile are still in the processor's cache when they
are used. Rows of several units are merged by log-sum-exp (:mod:`attn_torch.merging`). How a row is cut, and the shape of
its units, depends on that row alone.

Letters: U units, n units of a tile, W keys of a unit, S query tokens of a row, P tokens of a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

    ``targets`` is where results go; None where the rows have further units.
    """

    first: int
    block: Block
    mask: Mask | None
    targets: Targets | None = None

    @property
    def units(self) -> slice:
        """Where the tile's results go among the plan's units."""
        return slice(self.first, self.first + self.block.units)


@dataclass(slots=True)
class UnitPlan:
    """All short rows with S query tokens. The first ``whole`` units are the only ones of their rows.

    ``tokens`` i64[U * S]: the query of each unit, shorter rows repeat their last one. For the rows of several units:
    ``member`` i64[U - whole] is the row (counted from 0 among them) of a unit, ``slots`` i64[rows, most units of a row]
    the units of a row, padded with U - whole, and ``targets`` where their results go.
    """

    queries: int
    count: int
    whole: int
    tiles: list[Tile]
    tokens: torch.Tensor
    contiguous: slice | None
    targets: Targets | None = None
    member: torch.Tensor | None = None
    slots: torch.Tensor | None = None


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
    device = address.kv_lens.device
    row, page = units.row.to(device, non_blocking=True), units.page.to(device, non_blocking=True)
    whole = int(units.sole.sum())
    tiles = []
    for first, last in _runs(units, sizes, address.page_size):
        width, masked = int(units.pages[first]), bool(units.masked[first])
        tile = _tile(
            device_step, address, first, row[first:last], page[first:last], width, masked, queries, rules, ratio
        )
        if first < whole:
            tile.targets = _targets(step, units.row[first:last], queries, device)
        tiles.append(tile)
    plan = UnitPlan(queries, row.numel(), whole, tiles, *_query_tokens(device_step, row, queries))
    if whole < row.numel():
        _plan_merge(plan, step, units.row[whole:], device)
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
    row = torch.arange(rows, device=device)
    tokens = torch.arange(rows * queries, device=device)
    most, tiles = max(1, sizes.tile // (width * size)), []
    for at in range(0, rows, most):
        end = min(at + most, rows)
        tile = _tile(device_step, address, at, row[at:end], page[at:end], width, True, queries, rules, ratio)
        out = slice(at * queries, end * queries)
        tile.targets = Targets(tokens[out], None, out)
        tiles.append(tile)
    return UnitPlan(queries, rows, rows, tiles, tokens, slice(0, rows * queries))


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
    owner = torch.repeat_interleave(torch.arange(rows.numel()), parts)
    number = torch.arange(owner.numel()) - (parts.cumsum(0) - parts)[owner]
    page = first[owner] + number * chunk
    have = torch.minimum(pages[owner] - number * chunk, torch.tensor(chunk))
    width = _width_classes(chunk, sizes.smallest, page_size)[have]
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


def _width_classes(chunk: int, smallest: int, page_size: int) -> torch.Tensor:
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


def _runs(units: _Units, sizes: Sizes, page_size: int) -> Iterator[tuple[int, int]]:
    """Ranges of units that make one tile."""
    columns = torch.stack([units.sole.long(), units.masked.long(), units.pages])
    counts = torch.unique_consecutive(columns, dim=1, return_counts=True)[1].tolist()
    first = 0
    for count in counts:
        keys = int(units.pages[first]) * page_size
        most = 1 if sizes.one_by_one else max(1, sizes.tile // keys)
        for at in range(first, first + count, most):
            yield at, min(at + most, first + count)
        first += count


# --- tiles and targets ---------------------------------------------------------------------------------------------------


def _tile(
    step: StepLengths,
    address: KvAddress,
    first: int,
    row: torch.Tensor,
    page: torch.Tensor,
    pages: int,
    masked: bool,
    queries: int,
    rules: Rules,
    ratio: int,
) -> Tile:
    """One tile on the device: row i64[n] and first page i64[n] of its units, which are `pages` wide."""
    size, device = address.page_size, row.device
    column = page[:, None] + torch.arange(pages, device=device)
    block = Block(row.numel(), pages * size, look_up(address, row, column).flatten(), None)
    if not masked:
        return Tile(first, block, None)
    key = page[:, None] * size + torch.arange(pages * size, device=device)
    if step.origin is not None:
        key = key + step.origin[row][:, None]
    keep = visible(rules, step, row, torch.arange(queries, device=device), key)
    unseen = ~keep.any(1).flatten()
    block.blank = _blank(unseen)
    if ratio > 1:
        keep = keep.repeat_interleave(ratio, dim=1)
    return Tile(first, block, Mask(keep[:, None]))


def _blank(unseen: torch.Tensor) -> torch.Tensor:
    """Which keys to zero: a list of them on a CPU, where it is quick to make and to use; elsewhere it would be a sync."""
    return unseen.nonzero().flatten() if unseen.device.type == "cpu" else unseen


def look_up(address: KvAddress, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """i32[n, w]: the page at ``column[n, w]`` of ``row[n]``; columns past the end repeat the last one."""
    assert address.table is not None
    line = row if address.table_rows is None else address.table_rows[row].to(torch.int64)
    width = address.table.shape[1]
    return address.table[line[:, None], column.clamp(0, width - 1)]


def _query_tokens(step: StepLengths, row: torch.Tensor, queries: int) -> tuple[torch.Tensor, slice | None]:
    """The query tokens of each unit, and the slice that they are if they are one."""
    number = torch.arange(queries, device=row.device)
    last = (step.query_len[row] - 1).clamp(min=0)[:, None]
    tokens = (step.start[row][:, None] + torch.minimum(number[None, :], last)).flatten()
    return tokens, as_slice(tokens)


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


def _plan_merge(plan: UnitPlan, step: StepLengths, row: torch.Tensor, device: torch.device) -> None:
    """Which units make up which row, for the units of rows that have several."""
    owners, member, counts = torch.unique(row, return_inverse=True, return_counts=True)
    order = torch.argsort(member, stable=True)
    place = torch.arange(row.numel()) - (counts.cumsum(0) - counts)[member[order]]
    slots = torch.full((owners.numel(), int(counts.max())), row.numel())
    slots[member[order], place] = order
    plan.member, plan.slots = member.to(device, non_blocking=True), slots.to(device, non_blocking=True)
    plan.targets = _targets(step, owners, plan.queries, device)
