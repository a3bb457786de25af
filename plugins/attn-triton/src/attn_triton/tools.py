"""Two small device operations for servers and other backends, one launch each: page-table expansion and merging of states.

They give what :func:`attn_core.paging.convert` and :func:`attn_core.merge.merge_states` give, without a dozen launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attn_core.errors import BatchError
from attn_triton.rules import power_of_two

if TYPE_CHECKING:
    from attn_core.batch import KvAddress


def expand_table(address: KvAddress, page_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Page numbers of `page_size` tokens, i32[R, ceil(max_kv_len / page_size)], 0 past the pages that a row's keys need.

    `page_size` divides the address's own; 1 gives token slots. Nothing waits for the device. `out` i32[R, W] is written in
    place (a replayed graph reads the same memory); it may be wider. Raises :class:`BatchError` for another page size, an
    address without pages or an `out` that is too small.
    """
    from attn_triton.kernels.tables import expand_kernel

    if page_size < 1 or address.page_size % page_size:
        raise BatchError(
            "a page can only be split into pages of a size that divides its own",
            f"have     pages of {address.page_size}",
            f"asked    pages of {page_size}",
            fix=f"ask for a page size that divides {address.page_size}",
        )
    entries = address.table if address.table is not None else address.indices
    if entries is None or (address.table is None and address.indptr is None):
        raise BatchError("an address needs a table, or indices and indptr", "have     neither")
    rows, width = address.kv_lens.numel(), max(1, -(-address.max_kv_len // page_size))
    if out is None:
        out = torch.empty((rows, width), dtype=torch.int32, device=entries.device)
    if out.dtype != torch.int32 or not out.is_contiguous() or out.shape[0] != rows or out.shape[1] < width:
        raise BatchError(
            "the result does not fit",
            f"have     {out.dtype} {list(out.shape)}",
            f"needed   contiguous torch.int32 [{rows}, {width}] or wider",
        )
    if not rows:
        return out
    dense = address.table is not None
    expand_kernel[(rows, -(-out.shape[1] // 256))](
        entries, address.table_rows if dense and address.table_rows is not None else entries,
        entries if dense else address.indptr, address.kv_lens, address.origin if address.origin is not None else entries,
        out, out.shape[1], entries.stride(0) if dense else 0,
        PAGE=address.page_size, SPLIT=address.page_size // page_size, DENSE=dense,
        ROWS=dense and address.table_rows is not None, ORIGIN=address.origin is not None, BLOCK=256, num_warps=4,
    )  # fmt: skip
    return out


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two partial results over disjoint keys as one: (out[T, H, Dv] of a's dtype, lse f32[T, H], natural log).

    Where one part is empty (lse -inf) the other comes back bit by bit; where both are, out is 0 and lse -inf. `out`
    receives the result and may be one of the inputs. Raises :class:`BatchError` if shapes differ or rows are not contiguous.
    """
    from attn_triton.kernels.merge import merge_states_kernel

    target = torch.empty_like(out_a) if out is None else out
    for name, value, lse in (("a", out_a, lse_a), ("b", out_b, lse_b), ("out", target, lse_a)):
        if value.shape != out_a.shape or lse.shape != out_a.shape[:-1] or value.stride(-1) != 1:
            raise BatchError(
                "partial results do not fit together",
                f"part {name}   out {list(value.shape)} strides {value.stride()}, lse {list(lse.shape)}",
                f"needed   out {list(out_a.shape)}, last dimension contiguous, lse {list(out_a.shape[:-1])}",
            )
    tokens, heads, dim = out_a.shape
    merged = torch.empty((tokens, heads), dtype=torch.float32, device=out_a.device)
    if tokens:
        merge_states_kernel[(tokens, heads)](
            out_a, lse_a.float().contiguous(), out_b, lse_b.float().contiguous(), target, merged,
            out_a.stride(0), out_a.stride(1), out_b.stride(0), out_b.stride(1), target.stride(0), target.stride(1), heads,
            DV=dim, BLOCK_DV=power_of_two(dim, 16), num_warps=1 if dim <= 128 else 4,
        )  # fmt: skip
    return target, merged
