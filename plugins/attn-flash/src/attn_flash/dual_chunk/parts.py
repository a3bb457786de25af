"""Which keys each query meets, as at most three varlen calls a step.

The queries of every row are cut at chunk boundaries into pieces; decode is a piece of one token. A piece in chunk c meets

======  ======================================  ==========================
range   keys                                    mask
======  ======================================  ==========================
intra   [c L, end of the piece)                 causal, aligned at the end
succ    [(c - 1) L, c L)       if c >= 1        none
inter   [0, (c - 1) L)         if c >= 2        none
======  ======================================  ==========================

with L the chunk's length, a multiple of the pages it is read in, so that each range is a slice of the row's page list. All pieces of
all rows take part in each call; where a range is empty they have no keys (out 0, LSE -inf).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attn_core.batch import KvAddress
from attn_flash.dual_chunk.rotary import INTER, INTRA, SUCC


@dataclass(frozen=True, slots=True)
class RangeCall:
    """One call: n sequences of queries over paged keys of the same cache.

    ``version`` says which rotation of the query it takes. Tensors are i32 on the device: ``query_offsets`` [n + 1] over all
    real tokens, ``table`` [n, W] pages from the range's first key on, ``key_lens`` [n]. Bounds are host numbers.
    """

    version: int
    causal: bool
    query_offsets: torch.Tensor
    table: torch.Tensor
    key_lens: torch.Tensor
    max_query_len: int
    max_key_len: int


#: The kernel: (q[T, Hq, D], k pages[pages, P, Hk, D], v pages, call, scale) -> (out[T, Hq, D], lse f32[T, Hq], natural log).
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RangeCall, float], tuple[torch.Tensor, torch.Tensor]]


class Piece(NamedTuple):
    """Consecutive queries of one row in one chunk: positions [start, stop)."""

    row: int
    chunk: int
    start: int
    stop: int


def cut(query_lens: Sequence[int], kv_lens: Sequence[int], length: int) -> list[Piece]:
    """The pieces of all rows, in the order of their tokens. The queries of a row are its last tokens."""
    pieces = []
    for row, (queries, keys) in enumerate(zip(query_lens, kv_lens, strict=True)):
        start = keys - queries
        while start < keys:
            chunk = start // length
            stop = min((chunk + 1) * length, keys)
            pieces.append(Piece(row, chunk, start, stop))
            start = stop
    return pieces


def key_range(piece: Piece, version: int, length: int) -> tuple[int, int]:
    """First key of a piece's range, and how many."""
    first = piece.chunk * length
    if version == INTRA:
        return first, piece.stop - first
    if version == SUCC:
        return (first - length, length) if piece.chunk >= 1 else (0, 0)
    return 0, max(first - length, 0)


def plan_calls(pieces: Sequence[Piece], address: KvAddress, length: int) -> tuple[RangeCall, ...]:
    """The calls of one step, intra first. `address` is a table view in the kernel's pages; one copy goes to the device."""
    if not pieces:
        return ()
    used = [INTRA] + [v for v in (SUCC, INTER) if any(key_range(piece, v, length)[1] for piece in pieces)]
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + piece.stop - piece.start)
    ranges = {version: [key_range(piece, version, length) for piece in pieces] for version in used}
    numbers = [*offsets, *(piece.row for piece in pieces)]
    for version in used:
        numbers += [first // address.page_size for first, _ in ranges[version]]
        numbers += [count for _, count in ranges[version]]
    n = len(pieces)
    host = torch.tensor(numbers, dtype=torch.int32)
    device = address.kv_lens.device
    on_device = host.to(device) if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
    query_offsets, rows, rest = on_device[: n + 1], on_device[n + 1 : 2 * n + 1].long(), on_device[2 * n + 1 :]
    assert address.table is not None
    lines = rows if address.table_rows is None else address.table_rows[rows].long()
    longest = max(piece.stop - piece.start for piece in pieces)
    calls = []
    for place, version in enumerate(used):
        first_page, key_lens = rest[2 * n * place : 2 * n * (place + 1)].view(2, n)
        most = max(count for _, count in ranges[version])
        table = cut_table(address.table, lines, first_page, -(-most // address.page_size))
        calls.append(RangeCall(version, version == INTRA, query_offsets, table, key_lens, longest, most))
    return tuple(calls)


def cut_table(table: torch.Tensor, lines: torch.Tensor, first_page: torch.Tensor, width: int) -> torch.Tensor:
    """i32[n, width]: from line ``lines[i]`` of table[N, W] the columns from ``first_page[i]`` on, none past the last."""
    columns = first_page.long()[:, None] + torch.arange(width, device=table.device)
    return table[lines[:, None], columns.clamp(max=table.shape[1] - 1)]
