"""Batches from plain lists. Public through :mod:`attn_core.paging`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from attn_core.batch import AttentionBatch, Form, KvAddress, Segment
from attn_core.errors import BatchError

#: The order in which rows of different phases stand in a batch.
PHASE_ORDER = ("decode", "draft", "verify", "draft_extend", "prefill")


@dataclass(frozen=True, slots=True)
class PoolRows:
    """Where the rows of a batch lie in one pool, as lists.

    ``pages[r]`` are row r's pages in order, of ``page_size`` tokens each; the first one holds position ``origin[r]``
    (default 0; a multiple of the page size). ``kv_lens`` are this pool's lengths where they differ from the batch's (cross
    attention). ``write`` False: the new tokens are not stored here (all new slots are -1).
    """

    page_size: int
    pages: Sequence[Sequence[int]]
    kv_lens: Sequence[int] | None = None
    origin: Sequence[int] | None = None
    write: bool = True


def build_batch(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    pools: Sequence[PoolRows] | PoolRows,
    phases: str | Sequence[str],
    *,
    form: Form = "table",
    device: torch.device | str = "cpu",
    padded_rows: int | None = None,
    padded_tokens: int | None = None,
    pad_kv_len: int = 0,
    max_kv_len: int | None = None,
    lane: int = 0,
) -> AttentionBatch:
    """A batch whose row r has ``query_lens[r]`` new tokens, the last ones of its ``kv_lens[r]`` keys.

    `pools` gives one address each, in `form`; new slots, positions, offsets and segments are computed. `phases` is one
    phase or one a row; rows must be grouped in :data:`PHASE_ORDER`. With a single phase of one query length, padded rows
    have that length too (as a decode graph needs); otherwise padded rows have no tokens. Padded rows have `pad_kv_len`
    keys, page 0 and new slot -1; segments cover the real rows and tokens only. `max_kv_len`
    is the bound that table widths are made for (default: the longest row).
    Raises :class:`BatchError` for lengths, pages or phases that do not fit together; nothing is guessed.
    """
    pools = (pools,) if isinstance(pools, PoolRows) else tuple(pools)
    _check_lists(query_lens, kv_lens, pools)
    rows, tokens = len(query_lens), sum(query_lens)
    names = [phases] * rows if isinstance(phases, str) else list(phases)
    segments = _segments(names, query_lens)
    if not rows and padded_rows:  # no real row, and yet not idle: one empty segment names the phase
        whole = (padded_tokens or 0) // padded_rows or (1 if phases == "decode" else None)
        segments = (Segment(str(phases), slice(0, 0), slice(0, 0), whole),)
    padded_rows, padded_tokens, steps = _padding(segments, (rows, tokens), padded_rows, padded_tokens)
    lengths = torch.tensor([*query_lens, *[steps] * (padded_rows - rows)], dtype=torch.int32)
    offsets = torch.zeros(padded_rows + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    layout = _Tokens(list(query_lens), list(kv_lens), padded_rows, padded_tokens)
    addresses = [_address(index, pool, layout, pad_kv_len, max_kv_len) for index, pool in enumerate(pools)]
    return AttentionBatch(
        num_rows=rows,
        num_tokens=tokens,
        padded_rows=padded_rows,
        padded_tokens=padded_tokens,
        segments=segments,
        query_offsets=offsets.to(device),
        query_offsets_cpu=offsets,
        positions=layout.positions().clamp(min=0).to(device),
        max_query_len=int(lengths.max()) if padded_rows else 0,
        addresses=tuple(_finish(address, form, device) for address in addresses),
        lane=lane,
    )


# --- building -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Which token belongs to which row; the padded ones come last."""

    query_lens: list[int]
    kv_lens: list[int]
    padded_rows: int
    padded_tokens: int

    def rows(self) -> torch.Tensor:
        """i64[num_tokens]: the row of each real token."""
        counts = torch.tensor(self.query_lens, dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(self.query_lens)), counts)

    def positions(self) -> torch.Tensor:
        """i64[padded_tokens]: position of each token, its row's last ones; negative where a row has fewer keys."""
        counts = torch.tensor(self.query_lens, dtype=torch.int64)
        ends = counts.cumsum(0)
        shift = torch.tensor(self.kv_lens, dtype=torch.int64) - ends
        real = torch.arange(int(counts.sum())) + torch.repeat_interleave(shift, counts)
        padded = torch.zeros(self.padded_tokens, dtype=torch.int64)
        padded[: real.numel()] = real
        return padded


def _check_lists(query_lens: Sequence[int], kv_lens: Sequence[int], pools: Sequence[PoolRows]) -> None:
    rows = len(query_lens)
    if len(kv_lens) != rows:
        raise BatchError(f"query_lens has {rows} rows, kv_lens {len(kv_lens)}")
    for name, values in (("query_lens", query_lens), ("kv_lens", kv_lens)):
        if any(value < 0 for value in values):
            raise BatchError(f"{name} holds a negative length: {list(values)}")
    for index, pool in enumerate(pools):
        for name in ("pages", "kv_lens", "origin"):
            values = getattr(pool, name)
            if values is not None and len(values) != rows:
                raise BatchError(f"pool {index}: {name} has {len(values)} rows, the batch has {rows}")


def _segments(names: Sequence[str], query_lens: Sequence[int]) -> tuple[Segment, ...]:
    """Runs of one phase, in :data:`PHASE_ORDER`."""
    if len(names) != len(query_lens):
        raise BatchError(f"phases has {len(names)} rows, query_lens {len(query_lens)}")
    unknown = sorted(set(names) - set(PHASE_ORDER))
    if unknown:
        raise BatchError(f"unknown phase {unknown[0]!r}; known are {', '.join(PHASE_ORDER)}")
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    ranks = [PHASE_ORDER.index(name) for name, _ in runs]
    if ranks != sorted(set(ranks)):
        raise BatchError(
            "rows of different phases are not grouped in the contract's order",
            f"have     {', '.join(name for name, _ in runs)}",
            f"need     {', '.join(PHASE_ORDER)}",
            fix="sort the rows by phase before building the batch",
        )
    segments, row, token = [], 0, 0
    for name, count in runs:
        lengths = query_lens[row : row + count]
        if name == "decode" and set(lengths) != {1}:
            raise BatchError(f"a decode row has one new token, have {list(lengths)}", fix="use verify or prefill")
        uniform = lengths[0] if len(set(lengths)) == 1 else None
        end = token + sum(lengths)
        segments.append(Segment(name, slice(row, row + count), slice(token, end), uniform))
        row, token = row + count, end
    return tuple(segments)


def _padding(
    segments: tuple[Segment, ...], real: tuple[int, int], padded_rows: int | None, padded_tokens: int | None
) -> tuple[int, int, int]:
    """(padded rows, padded tokens, query length of a padded row)."""
    rows = real[0] if padded_rows is None else padded_rows
    steps = (segments[0].query_len or 0) if len(segments) == 1 else 0
    tokens = real[1] + steps * max(0, rows - real[0]) if padded_tokens is None else padded_tokens
    if rows < real[0] or tokens < real[1] or (tokens and not rows):
        raise BatchError(
            "padded counts are smaller than real ones",
            f"rows     {real[0]} real, {rows} padded",
            f"tokens   {real[1]} real, {tokens} padded",
        )
    return rows, tokens, steps if rows * steps == tokens else 0


def _address(index: int, pool: PoolRows, layout: _Tokens, pad_kv_len: int, max_kv_len: int | None) -> KvAddress:
    """One pool's address as a dense table on the host."""
    rows, size = len(layout.query_lens), pool.page_size
    lens = list(layout.kv_lens if pool.kv_lens is None else pool.kv_lens)
    if size < 1:
        raise BatchError(f"pool {index}: page size {size} is not positive")
    origin = torch.tensor(pool.origin or [0] * rows, dtype=torch.int64)
    if bool((origin % size).any()) or bool((origin < 0).any()):
        raise BatchError(f"pool {index}: origins {origin.tolist()} are not multiples of the page size {size}")
    longest = max([pad_kv_len if layout.padded_rows > rows else 0, *lens])
    if max_kv_len is not None and longest > max_kv_len:
        raise BatchError(f"pool {index}: a row has {longest} keys, the limit max_kv_len is {max_kv_len}")
    bound = longest if max_kv_len is None else max_kv_len
    kv_lens = torch.tensor([*lens, *[pad_kv_len] * (layout.padded_rows - rows)], dtype=torch.int32)
    table = _table(index, pool, lens, origin, (layout.padded_rows, max(1, -(-bound // size))))
    padded_origin = torch.zeros(layout.padded_rows, dtype=torch.int32)
    padded_origin[:rows] = origin
    return KvAddress(
        page_size=size,
        kv_lens=kv_lens,
        new_slots=_new_slots(index, pool, layout, lens, origin, table),
        max_kv_len=bound,
        table=table,
        kv_lens_cpu=kv_lens,
        origin=None if pool.origin is None else padded_origin,
    )


def _table(
    index: int, pool: PoolRows, lens: Sequence[int], origin: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """i32[R, W], 0 past a row's pages. Checks that each row has its pages and none of them is the dummy."""
    table = torch.zeros(shape, dtype=torch.int32)
    for row, (pages, length, first) in enumerate(zip(pool.pages, lens, origin.tolist(), strict=True)):
        needed = -(-max(0, length - first) // pool.page_size)
        if len(pages) < needed:
            raise BatchError(
                f"pool {index}, row {row}: too few pages",
                f"keys     {length} from position {first} on, in pages of {pool.page_size}: needs {needed} pages",
                f"pages    {len(pages)}",
            )
        used = list(pages[:needed])
        if used and min(used) < 1:
            raise BatchError(
                f"pool {index}, row {row}: page {min(used)} cannot hold keys",
                f"pages    {used[:8]}",
                fix="number pages from 1: page 0 is the dummy that padded rows point to",
            )
        table[row, :needed] = torch.tensor(used, dtype=torch.int32)
    return table


def _new_slots(
    index: int,
    pool: PoolRows,
    layout: _Tokens,
    lens: Sequence[int],
    origin: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """i64[padded_tokens]: the last query_len slots of each row; -1 for padding, or for all if the pool is not written."""
    slots = torch.full((layout.padded_tokens,), -1, dtype=torch.int64)
    if not pool.write:
        return slots
    for row, (queries, length, first) in enumerate(zip(layout.query_lens, lens, origin.tolist(), strict=True)):
        if queries and length - queries < first:
            raise BatchError(
                f"pool {index}, row {row}: the new tokens are not all among its keys",
                f"keys     {length} from position {first} on, {queries} of them new",
                fix="kv_lens count the new tokens too; a pool that is only read has write=False",
            )
    rows = layout.rows()
    shift = torch.tensor(lens, dtype=torch.int64) - torch.tensor(layout.kv_lens, dtype=torch.int64) - origin
    place = layout.positions()[: rows.numel()] + shift[rows]
    written = table[rows, place // pool.page_size].to(torch.int64) * pool.page_size + place % pool.page_size
    ordered = written.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.numel():
        raise BatchError(
            f"pool {index}: two new tokens would be written to slot {int(twice[0])}",
            fix="rows may share only full pages that neither of them writes",
        )
    slots[: written.numel()] = written
    return slots


def _finish(address: KvAddress, form: Form, device: torch.device | str) -> KvAddress:
    """The address in `form`, on `device`."""
    from attn_core.paging import convert

    if form != "table":
        address = convert(address, form, 1 if form == "slots" else address.page_size)
    for name in ("kv_lens", "new_slots", "table", "indices", "indptr", "origin"):
        tensor = getattr(address, name)
        if tensor is not None:
            setattr(address, name, tensor.to(device))
    return address
