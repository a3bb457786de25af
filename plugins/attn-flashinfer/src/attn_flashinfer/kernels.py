# mypy: ignore-errors

"""The two small kernels of this adapter: page numbers and tree masks. Attention itself is the library's."""

import triton
import triton.language as tl


@triton.jit
def gather_pages(out, offsets, first, entries, starts, origin, stride, page, parts, lens, last_page,
                 DENSE: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, ORIGIN: tl.constexpr, LAST: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """out[offsets[r] + c] = page in column c (from the row's first page on) of row r; last_page[r] = keys in its last page."""
    row = tl.program_id(0)
    begin = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - begin
    column = 0
    if FIRST:
        column = tl.load(first + row)
    if LAST:
        keys = tl.load(lens + row) - (column + tl.maximum(count - 1, 0)) * page
        tl.store(last_page + row, keys, mask=tl.program_id(1) == 0)
    if ORIGIN:
        column -= tl.load(origin + row) // page
    if DENSE:
        line = row
        if ROWS:
            line = tl.load(starts + row)
        base = entries + line.to(tl.int64) * stride
    else:
        base = entries + tl.load(starts + row)
    for at in range(tl.program_id(1) * BLOCK, count, parts * BLOCK):
        c = at + tl.arange(0, BLOCK)
        tl.store(out + begin + c, tl.load(base + column + c, mask=c < count), mask=c < count)


@triton.jit
def tree_mask(mask, mask_offsets, page_offsets, last_page, bits, depths, rows, page, drafts, words, window,
              WINDOW: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Eight (draft, key) pairs a byte; bytes past the last row's are left alone."""
    byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = byte < tl.load(mask_offsets + rows)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + rows
    for _ in range(STEPS):  # the last row that begins at or before the byte
        middle = (low + high) // 2
        right = tl.load(mask_offsets + middle, mask=live, other=0) <= byte
        low = tl.where(right & (high - low > 1), middle, low)
        high = tl.where(right | (high - low <= 1), high, middle)
    pages = tl.load(page_offsets + low + 1, mask=live, other=0) - tl.load(page_offsets + low, mask=live, other=0)
    keys = (pages - 1) * page + tl.load(last_page + low, mask=live, other=1)
    keys = tl.maximum(keys, 1)
    bit = (byte - tl.load(mask_offsets + low, mask=live, other=0)) * 8
    value = tl.zeros([BLOCK], tl.int32)
    for b in tl.static_range(8):
        draft = (bit + b) // keys
        key = (bit + b) % keys - (keys - drafts)
        inside = live & (draft < drafts)
        other = tl.maximum(key, 0)
        word = tl.load(bits + (low.to(tl.int64) * drafts + draft) * words + other // 32, mask=inside, other=0)
        depth = tl.load(depths + low.to(tl.int64) * drafts + draft, mask=inside, other=0)
        place = tl.load(depths + low.to(tl.int64) * drafts + other, mask=inside, other=0)
        place = tl.where(key < 0, key, place)
        sees = ((key < 0) | (((word >> (other % 32)) & 1) == 1)) & (place <= depth)
        if WINDOW:
            sees = sees & (place > depth - window)
        value = value | ((inside & sees).to(tl.int32) << b)
    tl.store(mask + byte, value.to(tl.uint8), mask=live)
