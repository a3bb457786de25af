# mypy: ignore-errors

"""Page tables of another page size: for kernels that take smaller pages than the pool has. Ours read tables where they lie."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "width"])
def expand_kernel(
    entries, table_rows, indptr, kv_lens, origins, to_table, columns, width,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, DENSE: tl.constexpr, ROWS: tl.constexpr, ORIGIN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Pages of PAGE tokens as SPLIT pages each: to_table i32[rows, columns], 0 past the pages that a row's keys need.

    Grid: (rows, ceil(columns / BLOCK)). `entries` are a table of `width` columns (DENSE) or CSR indices with `indptr`.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(kv_lens + row)
    if ORIGIN:
        keys = tl.maximum(keys - tl.load(origins + row), 0)
    if DENSE:
        line = tl.load(table_rows + row) if ROWS else row
        first = line.to(tl.int64) * width
    else:
        first = tl.load(indptr + row).to(tl.int64)
    live = column < tl.cdiv(keys, PAGE // SPLIT)
    page = tl.load(entries + first + column // SPLIT, mask=live, other=0)
    small = tl.where(live, page * SPLIT + column % SPLIT, 0)
    tl.store(to_table + row.to(tl.int64) * columns + column, small, mask=column < columns)
