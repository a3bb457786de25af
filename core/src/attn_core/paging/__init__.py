"""Addresses: from one form and page size to another, and batches from plain lists.

``convert`` is what ``AttentionBatch.view`` calls once a step: a page is split into pages that a kernel takes (tokens are
the limit), a table becomes CSR or CSR a table. It runs on the address's own device and never waits for it: where a size
depends on lengths, it comes from host lengths or from ``max_kv_len``, and the surplus entries are 0 (the dummy page).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_core.batch import Form, KvAddress
from attn_core.errors import BatchError
from attn_core.paging._build import PHASE_ORDER, PoolRows, build_batch
from attn_core.paging._drafts import DraftStates, branch_batch, step_batches
from attn_core.paging._slice import copy_batch, overwrite, refresh_views, slice_batch

__all__ = [
    "DraftStates",
    "PHASE_ORDER",
    "PoolRows",
    "branch_batch",
    "build_batch",
    "convert",
    "copy_batch",
    "lookup_slots",
    "packed_rows",
    "refresh_views",
    "slice_batch",
    "step_batches",
]


def convert(
    address: KvAddress, form: Form, page_size: int, *, out: KvAddress | None = None, static: bool = False
) -> KvAddress:
    """`address` in `form` (``table``, ``csr``, ``slots``) with pages of `page_size` tokens.

    ``page_size`` must divide the address's own; ``slots`` is CSR with page size 1. Slot numbers stay the same, so
    ``new_slots``, ``kv_lens``, ``local_lens`` and ``origin`` are shared with the source. An address that has the form
    already is returned unchanged, its ``table_rows`` included; otherwise row r of the result is ``table[r]``, or
    ``indices[indptr[r]:indptr[r + 1]]`` with exactly the pages that its keys need. Index tensors are int32; products are
    computed in 64 bits.

    `static` sizes the result by ``max_kv_len`` alone, so that every step gives the same shapes. `out` is a former static
    result whose tensors are overwritten in place and returned (a replayed graph reads the same memory).
    Raises :class:`BatchError` for a page size that does not divide, for ``slots`` with another page size than 1, for a
    table or CSR too short for its lengths (checked on a CPU only), and for an `out` that is too small.
    """
    _check_request(address, form, page_size)
    dense = form == "table"
    if out is None and page_size == address.page_size and dense == (address.table is not None):
        return address
    if address.kv_lens.device.type == "cpu":
        _check_lengths(address)
    if dense:
        table = _split_table(address, page_size) if address.table is not None else _csr_to_table(address, page_size)
        result = replace(address, page_size=page_size, table=table, table_rows=None, indices=None, indptr=None)
    else:
        indices, indptr = _to_csr(address, page_size, static or out is not None)
        result = replace(address, page_size=page_size, table=None, table_rows=None, indices=indices, indptr=indptr)
    return result if out is None else _rewrite(out, result)


def packed_rows(offsets: torch.Tensor, bound: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Entry i of a packed axis: (row i64[n], place within the row i64[n], valid bool[n] or None for "all").

    `offsets` i32[R + 1] are the starts of the rows. On a CPU n is ``offsets[R]``; elsewhere n is `bound`, and entries from
    ``offsets[R]`` on are not valid.
    """
    starts = offsets.to(torch.int64)
    rows = offsets.numel() - 1
    if offsets.device.type == "cpu":
        row = torch.repeat_interleave(torch.arange(rows), starts.diff())
        return row, torch.arange(row.numel()) - starts[row], None
    return _bounded_rows(starts, bound)


def _bounded_rows(starts: torch.Tensor, bound: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`packed_rows`, with a size that no device value decides. starts i64[R + 1]."""
    place = torch.arange(bound if starts.numel() > 1 else 0, device=starts.device)
    row = torch.searchsorted(starts[1:], place, right=True).clamp(max=starts.numel() - 2)
    valid = place < starts[-1]
    return row, torch.where(valid, place - starts[row], 0), valid


def lookup_slots(
    address: KvAddress, rows: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """i64[n]: the slot of key ``positions[i]`` of row ``rows[i]`` (both i64[n]); 0 where `valid` is False."""
    if address.origin is not None:
        positions = positions - address.origin.to(torch.int64)[rows]
    page = _lookup_pages(address, rows, positions // address.page_size)
    slots = page * address.page_size + positions % address.page_size
    return slots if valid is None else torch.where(valid, slots, 0)


# --- the parts ------------------------------------------------------------------------------------------------------------


def _check_request(address: KvAddress, form: str, page_size: int) -> None:
    if form not in ("table", "csr", "slots"):
        raise BatchError(f"an address has no form {form!r}; known are table, csr and slots")
    if form == "slots" and page_size != 1:
        raise BatchError(
            f"the form slots has page size 1, {page_size} was asked for",
            fix="ask for the form csr, which takes any page size that divides the pool's",
        )
    if page_size < 1 or address.page_size % page_size:
        raise BatchError(
            "an address can only be split into smaller pages of a size that divides its own",
            f"have     pages of {address.page_size} ({address.form})",
            f"asked    pages of {page_size}",
            fix=f"plan a kernel page size that divides {address.page_size}; token slots are never joined into pages",
        )
    if address.table is None and (address.indices is None or address.indptr is None):
        raise BatchError("an address needs a table, or indices and indptr", "have     neither")
    if address.table is not None and address.table_rows is None and len(address.table) < address.kv_lens.numel():
        raise BatchError(
            "a table without table_rows needs a row for each row of the batch",
            f"have     {len(address.table)} rows for {address.kv_lens.numel()}",
        )


def _lengths(address: KvAddress) -> torch.Tensor:
    """i64[R]: keys from column 0 on."""
    lengths = address.kv_lens.to(torch.int64)
    return lengths if address.origin is None else (lengths - address.origin).clamp(min=0)


def _check_lengths(address: KvAddress) -> None:
    """On a CPU: every row has the pages that its length needs."""
    needed = -(-_lengths(address) // address.page_size)
    if address.table is not None:
        have = torch.full_like(needed, address.table.shape[1])
    else:
        assert address.indptr is not None
        have = address.indptr.to(torch.int64).diff()
    short = (needed > have).nonzero()
    if short.numel():
        row = int(short[0])
        raise BatchError(
            f"row {row} has more keys than its pages hold",
            f"keys     {int(address.kv_lens[row])} in pages of {address.page_size}: needs {int(needed[row])} pages",
            f"pages    {int(have[row])} in the {'table' if address.table is not None else 'CSR'}",
        )
    longest = int(address.kv_lens.max()) if address.kv_lens.numel() else 0
    if longest > address.max_kv_len:
        raise BatchError(f"max_kv_len {address.max_kv_len} is no upper bound: a row has {longest} keys")


def _lookup_pages(address: KvAddress, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """i64: the page in column ``columns[i]`` of row ``rows[i]``. A column past the end gives some other entry, no fault."""
    if address.table is not None:
        rows = rows if address.table_rows is None else address.table_rows.to(torch.int64)[rows]
        if not address.table.numel():
            return torch.zeros_like(rows + columns)
        return address.table[rows, columns.clamp(0, address.table.shape[1] - 1)].to(torch.int64)
    assert address.indices is not None
    assert address.indptr is not None
    if not address.indices.numel():
        return torch.zeros_like(rows + columns)
    place = address.indptr.to(torch.int64)[rows] + columns
    return address.indices[place.clamp(0, address.indices.numel() - 1)].to(torch.int64)


def _split_table(address: KvAddress, page_size: int) -> torch.Tensor:
    """i32[R, ceil(max_kv_len / P) * n]: each column as the n = P / page_size columns it holds."""
    assert address.table is not None
    split = address.page_size // page_size
    table = address.table[:, : max(1, -(-address.max_kv_len // address.page_size))]
    if address.table_rows is not None:
        table = table.index_select(0, address.table_rows)
    table = table[: address.kv_lens.numel()].to(torch.int64)
    parts = table[:, :, None] * split + torch.arange(split, device=table.device)
    return parts.flatten(1).to(torch.int32)


def _csr_to_table(address: KvAddress, page_size: int) -> torch.Tensor:
    """i32[R, ceil(max_kv_len / page_size)], 0 past a row's pages."""
    split = address.page_size // page_size
    counts = -(-_lengths(address) // page_size)
    columns = torch.arange(max(1, -(-address.max_kv_len // page_size)), device=counts.device)
    rows = torch.arange(counts.numel(), device=counts.device)
    pages = _lookup_pages(address, rows[:, None], (columns // split)[None, :])
    return torch.where(columns < counts[:, None], pages * split + columns % split, 0).to(torch.int32)


def _to_csr(address: KvAddress, page_size: int, static: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices i32[n], indptr i32[R + 1])."""
    split = address.page_size // page_size
    counts = -(-_lengths(address) // page_size)
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=starts[1:])
    bound = counts.numel() * -(-address.max_kv_len // page_size)
    if address.kv_lens_cpu is not None and not static:
        bound = min(bound, int((-(-address.kv_lens_cpu.to(torch.int64) // page_size)).sum()))
    rows, columns, valid = _bounded_rows(starts, bound) if static else packed_rows(starts, bound)
    indices = _lookup_pages(address, rows, columns // split) * split + columns % split
    if valid is not None:
        indices = torch.where(valid, indices, 0)
    return indices.to(torch.int32), starts.to(torch.int32)


def _rewrite(out: KvAddress, fresh: KvAddress) -> KvAddress:
    """Put the contents of `fresh` into the tensors of `out`; surplus columns and entries become 0."""
    if out.page_size != fresh.page_size or (out.table is None) != (fresh.table is None):
        raise BatchError(
            "the static address has another form",
            f"static   {out.form}, pages of {out.page_size}",
            f"fresh    {fresh.form}, pages of {fresh.page_size}",
        )
    for name in ("table", "indices", "indptr", "kv_lens", "new_slots", "origin", "local_lens"):
        target, source = getattr(out, name), getattr(fresh, name)
        if target is not None and source is not None and target is not source:
            overwrite(target, source, name)
    out.kv_lens_cpu = fresh.kv_lens_cpu
    return out
