"""Long rows (prefill): one row at a time, in blocks of queries and keys that keep masks and copies small.

A row's keys are gathered once, in blocks of at most ``Budget.keys`` tokens; against each block the row's queries are computed
range by range, so that no mask has more than ``Budget.mask`` elements. Where the keys took several blocks the results are
merged by log-sum-exp. A fresh causal prompt needs no mask at all, and takes one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from attn_core.batch import KvAddress
from attn_torch.engines import Mask
from attn_torch.reader import Block
from attn_torch.rules import Rules, StepLengths, visible
from attn_torch.units import look_up


@dataclass(slots=True)
class Budget:
    """Limits: elements of one mask, elements of all masks that a step keeps, keys gathered at once (None: a whole row)."""

    mask: int
    kept: int
    keys: int | None


@dataclass(slots=True)
class PieceMask:
    """The mask of queries ``first … last`` of a row against keys at positions ``begin … end`` (ends exclusive).

    It is built when it is needed, and kept for the step's other layers where the budget allows it.
    """

    rules: Rules
    step: StepLengths
    row: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    keep: bool
    _mask: Mask | None = None

    def get(self) -> Mask:
        """keep has [1, 1, queries, keys]."""
        if self._mask is not None:
            return self._mask
        device = self.step.kv_len.device
        row = torch.full((1,), self.row, device=device)
        seen = visible(
            self.rules, self.step, row, torch.arange(*self.queries, device=device),
            torch.arange(*self.keys, device=device)[None],
        )  # fmt: skip
        mask = Mask(seen[:, None])
        if self.keep:
            self._mask = mask
        return mask


@dataclass(slots=True)
class Piece:
    """Query numbers of a row against keys of a block (slices); ``part`` is first, last, both ("whole") or "middle"."""

    queries: slice
    keys: slice
    causal: bool = False
    mask: PieceMask | None = None
    part: str = "whole"


@dataclass(slots=True)
class KeyBlock:
    """Keys that are gathered together, and what is computed while they are there."""

    block: Block
    pieces: list[Piece]


@dataclass(slots=True)
class LongRow:
    """One row: its tokens, its keys block by block, and the query numbers that see nothing."""

    tokens: slice
    blocks: list[KeyBlock] = field(default_factory=list)
    blank: list[slice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Facts:
    """A row's numbers on the host. ``low`` is the first key that any of its queries may see."""

    row: int
    start: int
    queries: int
    keys: int
    origin: int
    low: int


def plan_long_row(
    step: StepLengths, device_step: StepLengths, address: KvAddress, row: int, rules: Rules, budget: Budget
) -> LongRow:
    """The plan of one row. `step` has the lengths on the host, `device_step` on the device; `budget.kept` is used up."""
    facts = _facts(step, row, rules)
    plan = LongRow(slice(facts.start, facts.start + facts.queries))
    blocks = list(_key_ranges(facts, address.page_size, budget))
    fresh = _fresh(step, rules, facts) and len(blocks) == 1
    ranges = [(0, facts.queries)] if fresh else list(_query_ranges(step, rules, facts, blocks, budget))
    for first, last in blocks:
        if fresh:
            pieces = [Piece(slice(0, facts.queries), slice(0, last - first), causal=rules.right == 0)]
        else:
            found = (_piece(step, device_step, rules, facts, each, (first, last), budget) for each in ranges)
            pieces = [piece for piece in found if piece is not None]
        if pieces:
            plan.blocks.append(_key_block(address, facts, first, last, pieces))
    _mark_parts(plan, ranges)
    return plan


def _facts(step: StepLengths, row: int, rules: Rules) -> _Facts:
    start, queries, keys = (int(column[row]) for column in (step.start, step.query_len, step.kv_len))
    origin = 0 if step.origin is None else int(step.origin[row])
    low = int(rules.first_key(torch.tensor(keys - queries), step.spans is not None))
    return _Facts(row, start, queries, keys, origin, max(low, origin))


def _fresh(step: StepLengths, rules: Rules, facts: _Facts) -> bool:
    """Whether every query sees every key, or the row is a causal prompt without a prefix."""
    if step.tree is not None or step.spans is not None or facts.low > 0 or facts.keys == 0:
        return False
    if rules.chunk is not None or (rules.window is not None and rules.window < max(facts.keys, facts.queries)):
        return False
    return rules.right is None or (rules.right == 0 and facts.keys == facts.queries)


def _key_ranges(facts: _Facts, page_size: int, budget: Budget) -> Iterator[tuple[int, int]]:
    """Ranges of key positions that are gathered together; all but the first begin at a page."""
    at = facts.low
    while at < facts.keys:
        end = facts.keys
        if budget.keys is not None:
            column = (at - facts.origin) // page_size + max(1, budget.keys // page_size)
            end = min(end, facts.origin + column * page_size)
        yield at, end
        at = end


def _query_ranges(
    step: StepLengths, rules: Rules, facts: _Facts, blocks: list[tuple[int, int]], budget: Budget
) -> Iterator[tuple[int, int]]:
    """Ranges of query numbers, the same for every block of keys."""
    size = facts.queries
    if not (rules == Rules(None, None, None) and step.tree is None):
        widest = max((last - first for first, last in blocks), default=1)
        size = max(16, budget.mask // widest)
        if rules.window is not None:  # a range of queries sees only the keys of its own windows
            size = min(size, max(64, rules.window))
    for at in range(0, facts.queries, size):
        yield at, min(at + size, facts.queries)


def _piece(
    step: StepLengths,
    device_step: StepLengths,
    rules: Rules,
    facts: _Facts,
    queries: tuple[int, int],
    keys: tuple[int, int],
    budget: Budget,
) -> Piece | None:
    """One piece, or None where these queries see nothing of these keys."""
    prefix = facts.keys - facts.queries
    low, high = prefix + queries[0], prefix + queries[1] - 1
    spans, tree = step.spans is not None, step.tree is not None
    lowest = torch.tensor(prefix if tree else low)  # a draft stands at its depth, at most its number
    begin, end = max(keys[0], int(rules.first_key(lowest, spans))), keys[1]
    if rules.right is not None and not tree and not spans:
        end = min(end, high + rules.right + 1)
    if begin >= end:
        return None
    piece = Piece(slice(*queries), slice(begin - keys[0], end - keys[0]))
    seen = bool(rules.sees_all(lowest, *(torch.tensor(n) for n in (high, begin, end - 1))))
    if not seen or (tree and end > prefix):
        size = (queries[1] - queries[0]) * (end - begin)
        keep = size <= budget.kept
        budget.kept -= size if keep else 0
        piece.mask = PieceMask(rules, device_step, facts.row, queries, (begin, end), keep)
    return piece


def _key_block(address: KvAddress, facts: _Facts, first: int, last: int, pieces: list[Piece]) -> KeyBlock:
    """The pages of keys ``first … last - 1``; the pieces' slices then count from the first key of the first page.

    The block's ``blank`` is not used: what lies in the pages beside these keys is cut off by the slices.
    """
    size, device = address.page_size, address.kv_lens.device
    begin, end = (first - facts.origin) // size, -(-(last - facts.origin) // size)
    columns = torch.arange(begin, end, device=device)[None]
    pages = look_up(address, torch.full((1,), facts.row, device=device), columns).flatten()
    skip = first - facts.origin - begin * size
    for piece in pieces:
        piece.keys = slice(piece.keys.start + skip, piece.keys.stop + skip)
    return KeyBlock(Block(1, (end - begin) * size, pages, None), pieces)


def _mark_parts(plan: LongRow, ranges: list[tuple[int, int]]) -> None:
    """Note which piece of a query range is its first and its last, and which ranges have none."""
    found: dict[int, list[Piece]] = {first: [] for first, _ in ranges}
    for key_block in plan.blocks:
        for piece in key_block.pieces:
            found[piece.queries.start].append(piece)
    for first, last in ranges:
        pieces = found[first]
        if not pieces:
            plan.blank.append(slice(first, last))
        elif len(pieces) > 1:
            for piece in pieces:
                piece.part = "middle"
            pieces[0].part, pieces[-1].part = "first", "last"
