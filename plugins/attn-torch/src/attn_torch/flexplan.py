"""A step as calls of flex attention: rows of like length in one call, their pages, and the mask as blocks and a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from attn_core.batch import KvAddress
from attn_torch.forms import BLOCK, bucket, grid, query_bucket
from attn_torch.rules import Rules, StepLengths, visible
from attn_torch.units import Targets, as_slice, look_up

#: Keys that a row has room for at least, where sizes are rounded to buckets.
SMALLEST_KEYS = 256
#: Rows of more query tokens than this have a call of their own.
TOGETHER = 16

#: Blocks of keys for each block of queries: number i32[n, 1, QB], index i32[n, 1, QB, KB].
Listed = tuple[torch.Tensor, torch.Tensor]
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class FlexCall:
    """One call: n rows of L queries and S keys; key at position j of row b lies at ``b * room + j``, room in whole pages.

    ``tokens`` i64[n * L] are the queries (padding repeats some token); pages ``source`` go to pages ``target`` of the room,
    and keys ``unused`` are zeroed: they lie in blocks that are read. ``mask_kind`` names what the mask is compiled with.
    """

    rows: int
    queries: int
    keys: int
    room: int
    tokens: torch.Tensor
    targets: Targets
    source: torch.Tensor
    target: torch.Tensor
    unused: torch.Tensor
    mask: BlockMask
    mask_kind: tuple[Any, ...]
    seen: torch.Tensor | None = None

    def visible(self) -> torch.Tensor:
        """bool[n, 1, L, S]: the mask as a tensor, made by the first layer and kept for the step's others."""
        if self.seen is None:
            axes = grid((self.rows, 1, self.queries, self.keys), self.tokens.device)
            self.seen = self.mask.mask_mod(*axes)
        return self.seen


def plan_calls(
    step: StepLengths,
    on_device: StepLengths,
    address: KvAddress,
    sees: torch.Tensor,
    rules: Rules,
    rounded: bool,
) -> list[FlexCall]:
    """Calls for the rows ``sees`` (bool[R]). `step` has the lengths on the host; `rounded` asks for bucketed sizes."""
    classes: dict[tuple[int, int], list[int]] = {}
    for row in sees.nonzero().flatten().tolist():
        queries, keys = int(step.query_len[row]), int(step.kv_len[row])
        room = bucket(max(keys, address.page_size), SMALLEST_KEYS) if rounded else -1
        width = query_bucket(queries) if rounded else queries
        name = (width, room) if width <= TOGETHER or not rounded else (width, -2 - row)
        classes.setdefault(name, []).append(row)
    calls = []
    for (queries, _), rows in classes.items():
        longest = max(int(step.kv_len[row]) for row in rows)
        keys = -(-max(longest, 1) // address.page_size) * address.page_size
        if rounded:
            keys = bucket(max(longest, address.page_size), SMALLEST_KEYS)
        calls.append(_call(step, on_device, address, torch.tensor(rows), queries, keys, rules, rounded))
    return calls


def _call(
    step: StepLengths,
    on_device: StepLengths,
    address: KvAddress,
    rows: torch.Tensor,
    queries: int,
    keys: int,
    rules: Rules,
    rounded: bool,
) -> FlexCall:
    device, real = address.kv_lens.device, len(rows)
    count = bucket(real, 1) if rounded and queries <= TOGETHER else real
    start, query_len, kv_len = step.start[rows], step.query_len[rows], step.kv_len[rows]
    low = rules.first_key(kv_len - query_len, step.spans is not None)
    origin = torch.zeros_like(low) if step.origin is None else step.origin[rows]
    low = torch.maximum(low, origin)
    number = torch.arange(queries)
    tokens = torch.zeros(count, queries, dtype=torch.int64)
    tokens[:real] = start[:, None] + torch.minimum(number, query_len[:, None] - 1)
    valid = number < query_len[:, None]
    written = (start[:, None] + number)[valid]
    everything = count == real and bool(valid.all())
    picks = None if everything else valid.flatten().nonzero().flatten().to(device, non_blocking=True)
    room = -(-keys // address.page_size) * address.page_size
    source, target = _pages(address, rows, low, kv_len, origin, room)
    mask, kind = _mask(on_device, rows, count, queries, keys, (kv_len, query_len, low), rules)
    return FlexCall(
        count, queries, keys, room, tokens.flatten().to(device, non_blocking=True), Targets(written.to(device, non_blocking=True), picks, as_slice(written)),
        source, target, _unused(low, kv_len, room, rounded).to(device, non_blocking=True), mask, kind,
    )  # fmt: skip


def _pages(
    address: KvAddress, rows: torch.Tensor, low: torch.Tensor, kv_len: torch.Tensor, origin: torch.Tensor, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(source i32[m], target i64[m]): the pages that hold keys ``low … kv_len - 1``, and their places in the room.

    The origin of a trimmed pool is page aligned, so that a key's page is the same from either end.
    """
    size, device = address.page_size, address.kv_lens.device
    first, last = low // size, (kv_len + size - 1) // size
    counts = last - first
    owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
    page = torch.arange(owner.numel()) - (counts.cumsum(0) - counts)[owner] + first[owner]
    column = page - (origin // size)[owner]
    source = look_up(
        address, rows[owner].to(device, non_blocking=True), column.to(device, non_blocking=True)[:, None]
    ).flatten()
    return source, (owner * (room // size) + page).to(device, non_blocking=True)


def _unused(low: torch.Tensor, kv_len: torch.Tensor, room: int, rounded: bool) -> torch.Tensor:
    """i64: what is no key in the blocks that are read (compiled) or anywhere (uncompiled code reads everything)."""
    place = torch.arange(room)
    inside = (place >= low[:, None]) & (place < kv_len[:, None])
    if rounded:
        block = place // BLOCK
        read = (block >= (low // BLOCK)[:, None]) & (block <= ((kv_len - 1) // BLOCK)[:, None])
        return (read & ~inside).flatten().nonzero().flatten()
    return (~inside).flatten().nonzero().flatten()


# --- masks ---------------------------------------------------------------------------------------------------------------


def _mask(
    step: StepLengths,
    rows: torch.Tensor,
    count: int,
    queries: int,
    keys: int,
    lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rules: Rules,
) -> tuple[BlockMask, tuple[Any, ...]]:
    """The mask and what it is compiled with: positions and constants, or for trees and spans a table of bits."""
    device = step.kv_len.device
    special = step.tree is not None or step.spans is not None
    kind: tuple[Any, ...] = ("table",)
    masked, whole = _blocks(count, queries, keys, lengths, rules, special)
    if special:
        seen = visible(
            rules, step, rows.to(device, non_blocking=True), torch.arange(queries, device=device),
            torch.arange(keys, device=device).expand(len(rows), keys),
        )  # fmt: skip
        table = torch.zeros(count, queries, keys, dtype=torch.bool, device=device)
        table[: len(rows)] = seen
        function = _from_table(table)
    else:
        kv_len, query_len, low = (torch.zeros(count, dtype=torch.int64) for _ in range(3))
        kv_len[: len(rows)], query_len[: len(rows)], low[: len(rows)] = lengths
        columns = [
            (kv_len - query_len).to(device, non_blocking=True),
            kv_len.to(device, non_blocking=True),
            low.to(device, non_blocking=True),
        ]
        function, kind = _from_rules(rules, *columns), (rules.right, rules.window, rules.chunk)
    mask = BlockMask.from_kv_blocks(
        masked[0].to(device, non_blocking=True), masked[1].to(device, non_blocking=True), whole[0].to(device, non_blocking=True), whole[1].to(device, non_blocking=True),
        BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=function, seq_lengths=(queries, keys),
    )  # fmt: skip
    return mask, kind


def _blocks(
    count: int,
    queries: int,
    keys: int,
    lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rules: Rules,
    special: bool,
) -> tuple[Listed, Listed]:
    """Key blocks to be masked, and key blocks that are seen as a whole.

    Both are always given: without the second pair the generated code for one query and few rows does not compile.
    """
    kv_len, query_len, low = (column[:, None, None] for column in lengths)
    first = (torch.arange(-(-queries // BLOCK)) * BLOCK)[None, :, None]
    start = (torch.arange(-(-keys // BLOCK)) * BLOCK)[None, None, :]
    prefix = kv_len - query_len
    top, bottom = prefix + first, prefix + torch.minimum(first + BLOCK, query_len) - 1
    read = (first < query_len) & (start < kv_len) & (start + BLOCK > low)
    whole = torch.zeros_like(read)
    if not special:
        read &= start + BLOCK > rules.first_key(top, False)
        if rules.right is not None:
            read &= start <= bottom + rules.right
        sees = rules.sees_all(top, bottom, start, start + BLOCK - 1)
        whole = read & sees & (start >= low) & (start + BLOCK <= kv_len)
    return _listed(count, read & ~whole), _listed(count, whole)


def _listed(count: int, chosen: torch.Tensor) -> Listed:
    """bool[rows, QB, KB] as (number i32[n, 1, QB], index i32[n, 1, QB, KB]): the chosen blocks come first."""
    rows, query_blocks, key_blocks = chosen.shape
    number = torch.zeros(count, 1, query_blocks, dtype=torch.int32)
    index = torch.zeros(count, 1, query_blocks, key_blocks, dtype=torch.int32)
    number[:rows, 0] = chosen.sum(-1)
    index[:rows, 0] = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True).to(torch.int32)
    return number, index


def _from_rules(rules: Rules, prefix: torch.Tensor, kv_len: torch.Tensor, low: torch.Tensor) -> MaskFunction:
    """A mask function of positions; prefix, kv_len and low are i64[n]."""
    right, window, chunk = rules.right, rules.window, rules.chunk

    def mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        position = prefix[b] + q
        keep = (k >= low[b]) & (k < kv_len[b])
        if right is not None:
            keep = keep & (k <= position + right)
        if window is not None:
            keep = keep & (k > position - window)
        if chunk is not None:
            keep = keep & (k // chunk == position // chunk)
        return keep

    return mask


def _from_table(table: torch.Tensor) -> MaskFunction:
    """A mask function that looks up bool[n, L, S]."""

    def mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return table[b, q, k]

    return mask
