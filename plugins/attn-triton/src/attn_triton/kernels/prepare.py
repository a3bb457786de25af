# mypy: ignore-errors

"""Once a step: everything that the attention kernels need to know about the batch, worked out on the device."""

import triton
import triton.language as tl

#: Numbers of a step: a kernel that were compiled again for some of them would be compiled while serving.
_STEP = [
    "num_rows",
    "num_tokens",
    "num_items",
    "table_width",
    "page_size",
    "window",
    "share_cap",
    "share_floor",
    "target",
    "tokens_per_item",
]


@triton.jit(do_not_specialize=_STEP)
def prepare_kernel(
    kv_lens, query_offsets, origins, table, table_rows, indptr, mask_bits, depth,
    to_kv_lens, to_query_offsets, to_origins, page_ptr, splits, sizes, items, trees,
    num_rows, num_tokens, num_items, table_width, page_size, window, share_cap, share_floor, target, tokens_per_item,
    SPLIT: tl.constexpr, PAGED: tl.constexpr, DENSE: tl.constexpr, ROWS: tl.constexpr, ORIGIN: tl.constexpr,
    TREE: tl.constexpr, STEP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Row data, and the list of work items. One program.

    SPLIT: a row has ceil(keys / share) items, with the smallest share in [share_floor, share_cap] that gives at most
    `target` items; ``sizes`` i32[num_rows + 1] are the keys of each share of a row, a multiple of STEP. Otherwise a row has one item for each block of `tokens_per_item` queries, the last
    block first. Row `num_rows` stands for the tokens behind the last row. splits i32[num_rows + 2] are first items;
    items i32[num_items, 2] = (row, part), -1 past the end; page_ptr i64 are addresses of each row's page list.
    """
    r = tl.arange(0, BLOCK_R)
    in_row = r < num_rows
    in_list = r <= num_rows
    begin = tl.load(query_offsets + r, mask=in_list, other=0)
    end = tl.load(query_offsets + r + 1, mask=in_row, other=0)
    end = tl.where(r == num_rows, tl.maximum(num_tokens, begin), end)
    query_len = tl.where(in_list, end - begin, 0)
    tl.store(to_query_offsets + r, begin, mask=in_list)
    tl.store(to_query_offsets + r + 1, end, mask=r == num_rows)
    blocks = tl.cdiv(query_len, tokens_per_item)
    kv_len = tl.zeros_like(begin)
    if PAGED:
        kv_len = tl.load(kv_lens + r, mask=in_row, other=0)
        tl.store(to_kv_lens + r, kv_len, mask=in_list)
        skipped = tl.zeros_like(begin)
        if ORIGIN:
            skipped = tl.load(origins + r, mask=in_row, other=0)
        tl.store(to_origins + r, skipped, mask=in_list)
        if DENSE:
            line = tl.load(table_rows + r, mask=in_row, other=0) if ROWS else r
            place = line.to(tl.int64) * table_width
        else:
            place = tl.load(indptr + r, mask=in_row, other=0).to(tl.int64)
        place = tl.where(in_row, place - skipped // page_size, 0)
        tl.store(page_ptr + r, (table + place).to(tl.int64), mask=in_list)
    if TREE:
        tl.store(trees, mask_bits.to(tl.int64))
        tl.store(trees + 1, depth.to(tl.int64))
    if SPLIT:
        low = tl.maximum(kv_len - query_len + 1 - window, 0) // STEP * STEP
        keys = tl.maximum(tl.where(in_row & (query_len > 0), kv_len - low, 0), 0)
        # the smallest share with at most `target` items: then all of them run at once
        least = share_floor + tl.zeros_like(tl.max(keys, 0))
        share = tl.minimum(tl.maximum(tl.max(keys, 0), share_floor), share_cap)
        most = tl.maximum(target, num_rows)
        for _ in tl.range(0, 24):
            half = (least + share) // 2
            fits = tl.sum(tl.where(in_row, tl.maximum(tl.cdiv(keys, half), 1), 0), 0) <= most
            share = tl.where(fits, half, share)
            least = tl.where(fits, least, tl.minimum(half + 1, share))
        counts = tl.maximum(tl.cdiv(keys, share), 1)
        tl.store(sizes + r, tl.cdiv(tl.cdiv(keys, counts), STEP) * STEP, mask=in_list)
        counts = tl.where(in_row, counts, blocks)
        counts = tl.where(query_len > 0, counts, 0)
    else:
        counts = blocks
    ends = tl.cumsum(counts, 0)
    tl.store(splits + r + 1, ends, mask=in_list)
    tl.store(splits + r, ends - counts, mask=r == 0)
    tl.debug_barrier()
    used = tl.sum(counts, 0)
    i = tl.arange(0, BLOCK_I)
    for base in tl.range(0, num_items, BLOCK_I):
        item = base + i
        left = tl.zeros_like(item)
        right = tl.zeros_like(item) + num_rows
        for _ in tl.range(0, SEARCH):  # the last row whose first item is not behind this item
            middle = (left + right + 1) // 2
            behind = tl.load(splits + middle) > item
            right = tl.where(behind, middle - 1, right)
            left = tl.where(behind, left, middle)
        part = item - tl.load(splits + left)
        if not SPLIT:
            part = tl.load(splits + left + 1) - 1 - item
        live = item < used
        tl.store(items + 2 * item, tl.where(live, left, -1), mask=item < num_items)
        tl.store(items + 2 * item + 1, tl.where(live, part, 0), mask=item < num_items)


@triton.jit(do_not_specialize=["count", "num_tokens", "num_rows"])
def span_kernel(spans, count, query_offsets, kv_lens, span_low, span_high, num_tokens,
                BLOCK: tl.constexpr, SEARCH: tl.constexpr, num_rows):  # fmt: skip
    """Union of the spans that hold each token, as [low, high) in positions: i32[T] each; (0, 0) outside every span."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.zeros_like(token)
    right = tl.zeros_like(token) + num_rows
    for _ in tl.range(0, SEARCH):
        middle = (left + right + 1) // 2
        behind = tl.load(query_offsets + middle) > token
        right = tl.where(behind, middle - 1, right)
        left = tl.where(behind, left, middle)
    begin = tl.load(query_offsets + left)
    query_len = tl.load(query_offsets + left + 1) - begin
    position = tl.load(kv_lens + left) - query_len + token - begin
    low = tl.full([BLOCK], 2147483647, tl.int32)
    high = tl.zeros([BLOCK], tl.int32)
    for n in tl.range(0, count):
        start = tl.load(spans + 3 * n + 1)
        stop = tl.load(spans + 3 * n + 2)
        inside = (tl.load(spans + 3 * n) == left) & (start <= position) & (position < stop) & (left < num_rows)
        low = tl.where(inside, tl.minimum(low, start), low)
        high = tl.where(inside, tl.maximum(high, stop), high)
    tl.store(span_low + token, tl.where(high > 0, low, 0), mask=token < num_tokens)
    tl.store(span_high + token, high, mask=token < num_tokens)
