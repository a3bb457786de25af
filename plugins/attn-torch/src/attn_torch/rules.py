"""Who sees whom: the visibility rules of a layer group, vectorised over rows, queries and keys.

The letters of shapes are those of :mod:`attn_core.batch`; n is any number of (row, key range) pairs that are treated at
once, S the queries of each and W its keys. Positions are absolute; a row's queries end at its last key (bottom-right).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_core.batch import AttentionBatch, KvAddress, Tree
from attn_core.geometry import MhaGeometry


@dataclass(frozen=True, slots=True)
class Rules:
    """The part of a geometry that decides visibility. ``right`` is how far a query sees past itself (None: to the end)."""

    right: int | None
    window: int | None
    chunk: int | None

    @classmethod
    def of(cls, geometry: MhaGeometry) -> Rules:
        """The rules of a geometry: a right window takes the place of causality."""
        right = geometry.window_right if geometry.window_right is not None else (0 if geometry.causal else None)
        return cls(right, geometry.window, geometry.chunk)

    @property
    def plain(self) -> bool:
        """Only causality, or nothing at all."""
        return self.window is None and self.chunk is None and self.right in (0, None)

    def first_key(self, position: torch.Tensor, spans: bool) -> torch.Tensor:
        """The first key that the query at `position` (any shape) may see; spans reach back beyond a chunk."""
        first = torch.zeros_like(position)
        if self.window is not None:
            first = torch.maximum(first, position - self.window + 1)
        if self.chunk is not None and not spans:
            first = torch.maximum(first, position // self.chunk * self.chunk)
        return first

    def sees_all(self, low: torch.Tensor, high: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Whether all queries at positions ``low … high`` see all keys ``first … last`` (ends inclusive); all broadcast."""
        sees = torch.ones((), dtype=torch.bool, device=first.device)
        if self.right is not None:
            sees = sees & (last <= low + self.right)
        if self.window is not None:
            sees = sees & (first > high - self.window)
        if self.chunk is not None:
            chunk = high // self.chunk
            for end in (first, last, low):
                sees = sees & (end // self.chunk == chunk)
        return sees

    def allow(self, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query at `position` sees the key at position `key`; both broadcast."""
        keep = torch.ones((), dtype=torch.bool, device=key.device)
        if self.right is not None:
            keep = keep & (key <= position + self.right)
        if self.window is not None:
            keep = keep & (key > position - self.window)
        if self.chunk is not None:
            keep = keep & (key // self.chunk == position // self.chunk)
        return keep


@dataclass(slots=True)
class StepLengths:
    """Lengths of the real rows of a step, on one device: i64[R] each. ``origin`` is None where no pool is trimmed."""

    start: torch.Tensor  #: first query token
    query_len: torch.Tensor
    kv_len: torch.Tensor
    origin: torch.Tensor | None
    tree: Tree | None
    spans: torch.Tensor | None  #: i64[n, 3]

    @classmethod
    def of(cls, batch: AttentionBatch, address: KvAddress) -> StepLengths:
        """The lengths of `batch` on the device of its tensors, without a sync."""
        rows = batch.num_rows
        offsets = batch.query_offsets[: rows + 1].to(torch.int64)
        return cls(
            start=offsets[:-1],
            query_len=offsets[1:] - offsets[:-1],
            kv_len=address.kv_lens[:rows].to(torch.int64),
            origin=None if address.origin is None else address.origin[:rows].to(torch.int64),
            tree=batch.tree,
            spans=None if batch.spans is None or batch.tree is not None else batch.spans.to(torch.int64),
        )

    def on_host(self, batch: AttentionBatch, address: KvAddress) -> StepLengths | None:
        """The same on the host, without waiting for a device; None if the host knows only bounds."""
        if self.kv_len.device.type == "cpu":
            return self
        rows, offsets, kv_lens = batch.num_rows, batch.query_offsets_cpu, address.kv_lens_cpu
        if not batch.cpu_exact or offsets is None or kv_lens is None or self.origin is not None:
            return None
        offsets = offsets[: rows + 1].to(torch.int64)
        return StepLengths(
            offsets[:-1], offsets[1:] - offsets[:-1], kv_lens[:rows].to(torch.int64), None, self.tree, self.spans
        )

    def fetch(self) -> StepLengths:
        """The same on the host, at the price of a sync."""
        origin = None if self.origin is None else self.origin.cpu()
        return StepLengths(self.start.cpu(), self.query_len.cpu(), self.kv_len.cpu(), origin, self.tree, self.spans)


def rows_with_keys(rules: Rules, step: StepLengths) -> torch.Tensor:
    """bool[R]: rows that have queries and a key that one of them may see."""
    low = rules.first_key(step.kv_len - step.query_len, step.spans is not None)
    low = low if step.origin is None else torch.maximum(low, step.origin)
    return (step.query_len > 0) & (low < step.kv_len)


def tokens_of(step: StepLengths, rows: torch.Tensor) -> torch.Tensor | None:
    """i64: all query tokens of `rows` (bool[R], both on the host); None if there are none."""
    chosen = (rows & (step.query_len > 0)).nonzero().flatten()
    if not chosen.numel():
        return None
    lengths = step.query_len[chosen]
    first = torch.repeat_interleave(step.start[chosen] - (lengths.cumsum(0) - lengths), lengths)
    return first + torch.arange(first.numel())


def visible(
    rules: Rules, step: StepLengths, rows: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """bool[n, S, W]: whether query number ``query[S]`` of row ``rows[n]`` sees the key at position ``key[n, W]``.

    Keys outside a row's own range are never visible. Query numbers past the end of a row see what its last query sees.
    """
    kv_len, query_len = step.kv_len[rows], step.query_len[rows]
    prefix = (kv_len - query_len)[:, None]
    exists = key < kv_len[:, None]
    if step.origin is not None:
        exists &= key >= step.origin[rows][:, None]
    number = torch.minimum(query[None, :], (query_len - 1).clamp(min=0)[:, None])
    if step.tree is not None:
        return _visible_in_tree(rules, step.tree, rows, number, key, prefix) & exists[:, None, :]
    position = prefix + number
    keep = rules.allow(position[:, :, None], key[:, None, :])
    if step.spans is not None:
        keep = keep | _same_span(rules, step.spans, rows, position, key)
    return (keep & exists[:, None, :]).expand(len(rows), len(query), key.shape[1])


def _visible_in_tree(
    rules: Rules, tree: Tree, rows: torch.Tensor, number: torch.Tensor, key: torch.Tensor, prefix: torch.Tensor
) -> torch.Tensor:
    """A draft sees the prefix and the drafts of its bits; windows and chunks count tree positions, prefix + depth."""
    drafts = tree.depth.shape[1]
    number = number.clamp(max=drafts - 1)
    depth = tree.depth[rows].to(torch.int64)
    position = prefix + depth.gather(1, number)
    draft = (key - prefix).clamp(0, drafts - 1)
    is_draft = key >= prefix
    place = torch.where(is_draft, prefix + depth.gather(1, draft), key)
    words = tree.mask_bits[rows].to(torch.int64)  # [n, drafts, words]
    words = words.gather(1, number[:, :, None].expand(-1, -1, words.shape[2]))
    word = words.gather(2, (draft // 32)[:, None, :].expand(-1, number.shape[1], -1))
    bit = (word >> (draft % 32)[:, None, :]) & 1
    return rules.allow(position[:, :, None], place[:, None, :]) & (~is_draft[:, None, :] | (bit == 1))


def _same_span(
    rules: Rules, spans: torch.Tensor, rows: torch.Tensor, position: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """bool[n, S, W]: query and key lie in one span of their row, nearer than the window."""
    own = rows[:, None] == spans[None, :, 0]
    start, end = spans[:, 1], spans[:, 2]
    asks = (start <= position[:, :, None]) & (position[:, :, None] < end) & own[:, None, :]  # [n, S, spans]
    holds = (start <= key[:, :, None]) & (key[:, :, None] < end)  # [n, W, spans]
    together = torch.matmul(asks.float(), holds.float().transpose(1, 2)) > 0
    if rules.window is not None:
        together &= (position[:, :, None] - key[:, None, :]).abs() < rules.window
    return together
