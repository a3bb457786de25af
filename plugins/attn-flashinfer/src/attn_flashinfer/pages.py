"""Page numbers of a step on the device, packed row after row as the library wants them."""

from __future__ import annotations

import torch

from attn_core.batch import KvAddress
from attn_core.paging import lookup_slots
from attn_flashinfer.lengths import Lengths, on_host


def pack_pages(
    address: KvAddress,
    lengths: Lengths,
    out: torch.Tensor,
    offsets: torch.Tensor | None = None,
    last_page: torch.Tensor | None = None,
) -> None:
    """Write the pages of all rows to ``out`` i32[>= lengths.pages]. Nothing waits for the device.

    `offsets` i32[n + 1] are ``lengths.page_offsets`` on the device, where they are there already. The lengths of last pages
    go to `last_page` i32[n], if it is given: on a GPU from the lengths there, which spares a copy from the host.
    """
    if out.device.type == "cuda":
        if lengths.pages:
            _launch(address, lengths, out, offsets, last_page)
        elif last_page is not None:
            last_page.zero_()
        return
    if last_page is not None:
        last_page.copy_(on_host(lengths.last_page))
    if lengths.pages:
        _gather(address, lengths, out)


def _launch(
    address: KvAddress,
    lengths: Lengths,
    out: torch.Tensor,
    offsets: torch.Tensor | None,
    last_page: torch.Tensor | None,
) -> None:
    from attn_flashinfer.kernels import gather_pages

    if offsets is None:
        offsets = on_host(lengths.page_offsets).to(out.device, non_blocking=True)
    first = None if lengths.first_page is None else on_host(lengths.first_page).to(out.device, non_blocking=True)
    dense = address.table is not None
    entries = address.table if dense else address.indices
    assert entries is not None
    starts = address.table_rows if dense else address.indptr
    parts = min(max(1, -(-lengths.most_pages // 2048)), 64)
    gather_pages[(lengths.rows, parts)](
        out, offsets, first if first is not None else offsets, entries, starts if starts is not None else offsets,
        address.origin if address.origin is not None else offsets,
        address.table.stride(0) if dense else 0, address.page_size, parts,  # type: ignore[union-attr]
        address.kv_lens, last_page if last_page is not None else offsets,
        DENSE=dense, ROWS=starts is not None, FIRST=first is not None, ORIGIN=address.origin is not None,
        LAST=last_page is not None, BLOCK=512, num_warps=4,
    )  # fmt: skip


def _gather(address: KvAddress, lengths: Lengths, out: torch.Tensor) -> None:
    """The same in torch, by the paging functions of core: for CPUs."""
    counts = on_host(lengths.page_offsets).long().diff()
    rows = torch.repeat_interleave(torch.arange(lengths.rows), counts)
    column = torch.arange(lengths.pages) - on_host(lengths.page_offsets).long()[rows]
    if lengths.first_page is not None:
        column = column + on_host(lengths.first_page).long()[rows]
    slots = lookup_slots(address, rows, column * address.page_size)
    out[: lengths.pages].copy_(slots // address.page_size)
