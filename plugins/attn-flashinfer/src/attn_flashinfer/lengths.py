"""The host side of a step: which pages each row reads, from exact lengths, in numpy.

The library plans on the host. Everything it needs is known there, so nothing waits for the device. Rows of a group with a
window begin at the page of the first key that any of their queries sees: what lies before it is not read, which also makes
the columns of a trimmed pool come out right. Masks are aligned at the end of the keys and do not notice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.errors import BatchError

Array = np.ndarray


@dataclass(slots=True)
class Lengths:
    """int32 arrays on the host: offsets of queries [n + 1], offsets of pages [n + 1], keys in the last page [n] (0 where a
    row has none), first page [n] (None: 0 everywhere), keys from the first page on [n]. Copies: a server re-uses its own.

    ``front`` are the keys before each last page, plus 1, [n]: once :meth:`again` has been asked and every row has keys.
    """

    rows: int
    tokens: int
    query_offsets: Array
    page_offsets: Array
    last_page: Array
    first_page: Array | None
    keys: Array
    front: Array | None = None
    _most: int = -1

    @property
    def pages(self) -> int:
        """Pages of all rows together."""
        return int(self.page_offsets[-1])

    @property
    def most_pages(self) -> int:
        """Pages of the longest row."""
        if self._most < 0:
            self._most = int((self.page_offsets[1:] - self.page_offsets[:-1]).max(initial=0))
        return self._most

    def again(self, offsets: Array, keys: Array, page: int) -> Lengths | None:
        """The lengths of a step with the query offsets [n + 1] and keys [n], if no row has other queries or another number
        of pages than here (what a decode step mostly finds); else None. Only without a first page.
        """
        front = self.front
        if front is None:
            if self.first_page is not None or not self.rows or not self.keys.all():
                return None
            front = self.front = self.keys - self.last_page + 1
        rest = keys - front  # keys in the last page, less 1
        if np.maximum.reduce(rest.view(np.uint32)) >= page or offsets.tobytes() != self.query_offsets.tobytes():
            return None
        same = self.query_offsets, self.page_offsets
        return Lengths(self.rows, self.tokens, *same, rest + 1, None, keys.copy(), front, self._most)

    def same_plan(self, other: Lengths | None) -> bool:
        """Whether the library would make the same plan: it looks at queries and at numbers of pages only."""
        if other is None:
            return False
        if self.page_offsets is other.page_offsets and self.query_offsets is other.query_offsets:
            return True
        return bool(
            np.array_equal(self.page_offsets, other.page_offsets)
            and np.array_equal(self.query_offsets, other.query_offsets)
        )

    def mask_offsets(self) -> Array:
        """int32[n + 1]: first byte of each row's mask; a bit for each (query, key), each row filled up to a byte."""
        queries = (self.query_offsets[1:] - self.query_offsets[:-1]).astype(np.int64)
        return offsets_of((queries * self.keys + 7) // 8)

    def rows_without_keys(self) -> list[tuple[int, int]]:
        """(first token, end) of each row that has queries and no keys."""
        if self.front is not None or self.keys.all():
            return []
        at = self.query_offsets
        return [(int(at[r]), int(at[r + 1])) for r in np.flatnonzero(self.keys == 0) if at[r + 1] > at[r]]


def offsets_of(counts: Array) -> Array:
    """int32[n + 1]: running sums from 0. Raises :class:`BatchError` beyond 2^31 - 1."""
    found = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=found[1:])
    if found[-1] > 2**31 - 1:
        raise BatchError(f"a step of {int(found[-1])} entries; the library counts them in int32")
    return found.astype(np.int32)


def host_offsets(batch: AttentionBatch, rows: int) -> Array:
    """int32[rows + 1]: starts of the queries, the server's own memory where it gave them, else read from the device."""
    given = batch.query_offsets_cpu if batch.query_offsets_cpu is not None else batch.query_offsets
    found: Array = as_array(given)[: rows + 1]
    return found


def host_keys(address: KvAddress) -> Array:
    """int32[R]: keys of the rows, the server's own memory where it gave them, else read from the device."""
    return as_array(address.kv_lens_cpu if address.kv_lens_cpu is not None else address.kv_lens)


def as_array(tensor: torch.Tensor) -> Array:
    """An int32 tensor as an array: a view on a CPU, else a copy that waits for the device."""
    found: Array = (tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()
    return found if found.dtype == np.int32 else found.astype(np.int32)


def lengths_of(
    batch: AttentionBatch, address: KvAddress, window: int, *, padded: bool, last: Lengths | None = None
) -> Lengths:
    """The lengths of a step; of its real rows, or with `padded` of all rows (a captured graph runs them all).

    They follow from `last`, an earlier step of as many rows, where no row has gained a page since.
    Raises :class:`BatchError` for a trimmed pool without a window: its first position is known on the device only.
    """
    rows = batch.padded_rows if padded else batch.num_rows
    page = address.page_size
    offsets = host_offsets(batch, rows)
    keys = host_keys(address)[:rows]
    if last is not None and not window and address.origin is None:
        found = last.again(offsets, keys, page)
        if found is not None:
            return found
    offsets = offsets.copy()
    first = None
    if window:
        queries = offsets[1:] - offsets[:-1]
        first = np.maximum(keys - queries - (window - 1), 0) // page
        keys = keys - first * page
    elif address.origin is not None:
        raise BatchError("a trimmed pool needs a group with a window", fix="give the whole table to groups without one")
    counts = (keys + (page - 1)) // page
    last_page = keys - np.maximum(counts - 1, 0) * page
    return Lengths(rows, int(offsets[-1]), offsets, offsets_of(counts), last_page, first, keys.copy())


def on_host(array: Array) -> torch.Tensor:
    """An int32 array as a tensor, without a copy."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
