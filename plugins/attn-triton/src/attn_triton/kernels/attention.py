# mypy: ignore-errors
# ruff: noqa: SIM102 - loops are compiled
"""The attention kernel: one tile of queries against a range of keys, read from pages or packed.

Everything but a tree is, for each query, an interval of keys ``[low, high)``: causality, windows, chunks, spans and trimmed
pools only move its ends. A tile therefore visits the blocks that every query sees without a mask, and masks the others.

One tile holds BLOCK_M rows: tokens times GROUP query heads that share a KV head. ``SPLIT`` tiles hold all queries of a row
and one share of its keys (decode, verify); the others hold a block of queries and all keys (prefill).
"""

import triton
import triton.language as tl

from attn_triton.kernels.elements import part_column
from attn_triton.kernels.tiles import byte_of_column, load_tile, page_numbers, places


@triton.jit
def _load_i32(address, offsets, mask):
    """i32 values at an address that is a number (i64): AMD's pointer analysis does not follow it through a loop."""
    return tl.load((address + 4 * offsets.to(tl.int64)).to(tl.pointer_type(tl.int32)), mask=mask, other=0)


@triton.jit
def _sees_tree(keys, token, position, row, prefix, kv_len, low, bits, depth, drafts, words, reach,
               WINDOW: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """bool[M, N]: prefix keys by interval, drafts by the mask bits; windows and chunks count tree positions."""
    draft = keys - prefix
    is_draft = (draft >= 0) & (keys < kv_len)
    me = tl.minimum(token, drafts - 1)
    word = _load_i32(bits, ((row * drafts + me) * words)[:, None] + (draft // 32)[None, :], is_draft[None, :])
    seen = ((word >> (draft % 32)[None, :]) & 1) == 1
    if WINDOW or RIGHT or CHUNK:
        place = (prefix + _load_i32(depth, row * drafts + draft, is_draft))[None, :]
        if WINDOW:
            seen &= place > position[:, None] - reach[0]
        if RIGHT:
            seen &= place <= position[:, None] + reach[1]
        if CHUNK:
            seen &= place // reach[2] == position[:, None] // reach[2]
    prefix_seen = (keys < prefix)[None, :] & (keys[None, :] >= low[:, None])
    return prefix_seen | (is_draft[None, :] & seen)


@triton.jit
def _add(acc, alpha, p, y, i: tl.constexpr, PRECISION: tl.constexpr):
    """Part `i` of the result with one more block of values."""
    return tl.dot(p, y[i], acc[i] * alpha[:, None], input_precision=PRECISION)


@triton.jit
def _visit(
    acc, total, top, q, first, last, floor, low, high, token, position, row, prefix, kv_len,
    k, v, k_blocks, v_blocks, k_byte, v_byte, pages, key_start, bits, depth, drafts, words,
    reach, k_strides, v_strides, factor, softcap,
    MASK: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, V_DTYPE: tl.constexpr,
    ASM: tl.constexpr, WORDS: tl.constexpr, AHEAD: tl.constexpr,
    WINDOW: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over key blocks of [first, last). MASK: 0 none, 1 intervals, 2 tree. Logits are in base 2.

    Keys outside [floor, last) are not read: they may be poison. Narrow kinds keep 2 or 4 parts of a head apart, in q and in
    the result. Page numbers are read one block AHEAD, so that no block waits for them. Returns (acc, total, top).
    """
    if AHEAD:
        number = page_numbers(first, floor, last, pages, key_start, PAGED, PAGE, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        live = (keys >= floor) & (keys < last)
        if AHEAD:
            page = number.to(tl.int64)
            number = page_numbers(start + BLOCK_N, floor, last, pages, key_start, PAGED, PAGE, BLOCK_N)
        else:
            page = page_numbers(start, floor, last, pages, key_start, PAGED, PAGE, BLOCK_N).to(tl.int64)
        place = places(start, PAGED, PAGE, BLOCK_N)
        x = load_tile(k, k_blocks, k_byte, page, place, live, k_strides[0], k_strides[1], k_strides[2], k_strides[3],
                      KIND, ASM, True, WORDS, PAGED, MASK != 0, BLOCK_N, D, BLOCK_D)  # fmt: skip
        s = tl.dot(q[0], tl.trans(x[0]), input_precision=PRECISION)
        for i in tl.static_range(1, len(q)):
            s = tl.dot(q[i], tl.trans(x[i]), s, input_precision=PRECISION)
        if SOFTCAP:
            t = s * factor[:, None]  # 2 * log2(e) * logits / cap
            s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(t)))
        else:
            s = s * factor[:, None]
        if MASK == 1:
            s = tl.where((keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None]), s, float("-inf"))
        elif MASK == 2:
            seen = _sees_tree(keys, token, position, row, prefix, kv_len, low, bits, depth, drafts, words, reach,
                              WINDOW, RIGHT, CHUNK)  # fmt: skip
            s = tl.where(seen & live[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        if MASK != 0:
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            safe = new_top
        p = tl.exp2(s - safe[:, None])
        alpha = tl.exp2(top - safe)
        total = total * alpha + tl.sum(p, 1)
        y = load_tile(v, v_blocks, v_byte, page, place, live, v_strides[0], v_strides[1], v_strides[2], v_strides[3],
                      KIND, ASM, False, WORDS, PAGED, MASK != 0, BLOCK_N, DV, BLOCK_DV)  # fmt: skip
        p = p.to(V_DTYPE)
        if KIND == 0:
            acc = (_add(acc, alpha, p, y, 0, PRECISION),)
        elif KIND == 3:
            acc = (_add(acc, alpha, p, y, 0, PRECISION), _add(acc, alpha, p, y, 1, PRECISION),
                   _add(acc, alpha, p, y, 2, PRECISION), _add(acc, alpha, p, y, 3, PRECISION))  # fmt: skip
        else:
            acc = (_add(acc, alpha, p, y, 0, PRECISION), _add(acc, alpha, p, y, 1, PRECISION))
        top = new_top
    return acc, total, top


@triton.jit
def _query(q_at, d, valid, D: tl.constexpr):
    return tl.load(q_at + d[None, :], mask=valid[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _shrink(x, size):
    return (x.to(tl.float32) / size[:, None]).to(tl.float16)


@triton.jit
def _bounds(position, kv_len, origin, prefix, span_low, span_high, index, valid, reach,
            WINDOW: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, TREE: tl.constexpr, SPANS: tl.constexpr):  # fmt: skip
    """Interval [low, high) of each query. Trees: the interval of prefix keys, up to `prefix`. `reach`: window, right, chunk."""
    low = tl.zeros_like(position) + origin
    high = tl.zeros_like(position) + kv_len
    if TREE:
        high = tl.zeros_like(position) + prefix
    elif RIGHT:
        high = tl.minimum(high, position + reach[1] + 1)
    if WINDOW:
        low = tl.maximum(low, position - reach[0] + 1)
    if CHUNK:
        begin = position // reach[2] * reach[2]
        low = tl.maximum(low, begin)
        if not TREE:
            high = tl.minimum(high, begin + reach[2])
    if SPANS:
        left = tl.load(span_low + index, mask=valid, other=0)
        right = tl.load(span_high + index, mask=valid, other=0)
        inside = right > left
        if WINDOW:
            left = tl.maximum(left, position - reach[0] + 1)
            right = tl.minimum(right, position + reach[0])
        low = tl.where(inside, tl.minimum(low, tl.maximum(left, origin)), low)
        high = tl.where(inside, tl.maximum(high, tl.minimum(right, kv_len)), high)
    return low, tl.maximum(high, low)


#: Numbers that decide no layout and no loop: a kernel for each of their values would be compiled while serving.
_NUMBERS = ["num_rows", "drafts", "words", "heads", "window", "right", "chunk", "needs_lse"]


@triton.jit(do_not_specialize=_NUMBERS)
def attention_kernel(
    q, k, v, k_blocks, v_blocks, out, lse, part_out, part_lse,
    items, page_ptr, kv_lens, origins, query_offsets, key_offsets, splits, sizes, trees, span_low, span_high,
    sinks, k_scale, v_scale, num_rows,
    factor, softcap, v_factor,
    q_st, q_sh, k_sp, k_st, k_sh, kb_sp, kb_st, kb_sh, v_sp, v_st, v_sh, vb_sp, vb_st, vb_sh, o_st, o_sh,
    drafts, words, heads, window, right, chunk, needs_lse,
    RATIO: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, V_DTYPE: tl.constexpr,
    ASM: tl.constexpr, WORDS: tl.constexpr, AHEAD: tl.constexpr, ONE_LOOP: tl.constexpr, WINDOW: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, TREE: tl.constexpr, SPANS: tl.constexpr,
    ORIGIN: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q[T, Hq, D] against keys of pages or packed rows -> out[T, Hq, DV], lse f32[T, Hq].

    Grid: (KV heads * HEAD_BLOCKS, items). ``items`` i32[n, 2] is (row, part), row -1 = nothing to do; row `num_rows` stands
    for tokens of no row, whose result is zero. SPLIT: part = share of the keys, of ``sizes[row]`` keys each; a row with more
    than one share leaves ``part_out`` f32[n, heads, BLOCK_M, DV] and ``part_lse`` (base 2) for the merge kernel. `lse` is written
    if `needs_lse`; WINDOW, RIGHT and CHUNK say which of `window`, `right` and `chunk` are used.
    """
    head_program = tl.program_id(0)
    item = tl.program_id(1)
    row = tl.load(items + 2 * item)
    if row < 0:
        return
    part = tl.load(items + 2 * item + 1)
    kv_head = head_program // HEAD_BLOCKS
    TOKENS: tl.constexpr = BLOCK_M // GROUP

    begin = tl.load(query_offsets + row)
    query_len = tl.load(query_offsets + row + 1) - begin
    if PAGED:
        kv_len = tl.load(kv_lens + row)
        pages = tl.load(page_ptr + row).to(tl.pointer_type(tl.int32))
        key_start = row * 0
    else:
        in_row = row < num_rows
        key_start = tl.load(key_offsets + row, mask=in_row, other=0)
        kv_len = tl.load(key_offsets + row + 1, mask=in_row, other=0) - key_start
        pages = items
    origin = tl.load(origins + row) if ORIGIN else 0
    prefix = kv_len - query_len

    m = tl.arange(0, BLOCK_M)
    first_token = part * TOKENS if (not SPLIT) else tl.where(row == num_rows, part * TOKENS, 0)
    token = first_token + m // GROUP
    member = (head_program % HEAD_BLOCKS) * GROUP + m % GROUP
    head = kv_head * RATIO + member
    valid = (token < query_len) & (member < RATIO)
    index = (begin + token).to(tl.int64)

    position = prefix + token
    bits = trees
    depth = trees
    if TREE:
        bits = tl.load(trees)
        depth = tl.load(trees + 1)
        in_tree = valid & (row < num_rows)
        position = prefix + _load_i32(depth, row * drafts + tl.minimum(token, drafts - 1), in_tree)
    reach = (window, right, chunk)
    low, high = _bounds(position, kv_len, origin, prefix, span_low, span_high, index, valid, reach,
                        WINDOW, RIGHT, CHUNK, TREE, SPANS)  # fmt: skip
    BIG: tl.constexpr = 2147483647
    first = tl.min(tl.where(valid, low, BIG), 0)
    last = kv_len if TREE else tl.max(tl.where(valid, high, 0), 0)
    last = tl.where(row == num_rows, 0, last)
    first = tl.minimum(first, last)

    PARTS: tl.constexpr = (1, 2, 2, 4)[KIND]  # elements of a head that are multiplied apart
    d = part_column(tl.arange(0, BLOCK_D // PARTS), KIND, ASM)
    step: tl.constexpr = 2 if ASM and PARTS == 2 else 1
    q_at = q + index[:, None] * q_st + head[:, None] * q_sh
    factor = tl.zeros([BLOCK_M], tl.float32) + factor
    if PARTS == 1:
        x = (_query(q_at, d, valid, D),)
    elif PARTS == 2:
        x = (_query(q_at, d, valid, D), _query(q_at, d + step, valid, D))
    else:
        x = (_query(q_at, d, valid, D), _query(q_at, d + 1, valid, D),
             _query(q_at, d + 2, valid, D), _query(q_at, d + 3, valid, D))  # fmt: skip
    if PARTS != 1:
        # keys are fp16: bring each query into its range by a power of two, exactly
        size = tl.zeros([BLOCK_M], tl.float32) + 1e-30
        for i in tl.static_range(PARTS):
            size = tl.maximum(size, tl.max(tl.abs(x[i].to(tl.float32)), 1))
        size = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 0.0625
        if PARTS == 2:
            x = (_shrink(x[0], size), _shrink(x[1], size))
        else:
            x = (_shrink(x[0], size), _shrink(x[1], size), _shrink(x[2], size), _shrink(x[3], size))
        factor *= size
    if K_SCALES != 0:
        factor = factor * tl.load(k_scale + (kv_head if K_SCALES == 2 else 0))
    k_at = k + kv_head.to(tl.int64) * k_sh
    v_at = v + kv_head.to(tl.int64) * v_sh
    kb_at = k_blocks + kv_head.to(tl.int64) * kb_sh
    vb_at = v_blocks + kv_head.to(tl.int64) * vb_sh
    k_strides = (k_sp, k_st, kb_sp, kb_st)
    v_strides = (v_sp, v_st, vb_sp, vb_st)

    k_byte = byte_of_column(items, num_rows, KIND, BLOCK_D)
    v_byte = byte_of_column(items, num_rows, KIND, BLOCK_DV)
    zero = tl.zeros([BLOCK_M, BLOCK_DV // PARTS], tl.float32)
    if PARTS == 1:
        acc = (zero,)
    elif PARTS == 2:
        acc = (zero, zero)
    else:
        acc = (zero, zero, zero, zero)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)

    start = first // BLOCK_N * BLOCK_N
    shares = 1
    if SPLIT:
        share = tl.load(sizes + row)
        place = tl.load(splits + row)
        shares = tl.load(splits + row + 1) - place
        start += tl.where(row == num_rows, 0, part) * share
        last = tl.minimum(last, start + share)
        middle = tl.minimum(tl.maximum(prefix // BLOCK_N * BLOCK_N, start), last) if TREE else last
        if ONE_LOOP and TREE:
            middle = start
        else:
            acc, total, top = _visit(
                acc, total, top, x, start, middle, first, low, high, token, position, row, prefix, kv_len,
                k_at, v_at, kb_at, vb_at, k_byte, v_byte, pages, key_start, bits, depth, drafts, words, reach, k_strides, v_strides, factor, softcap,
                1, PAGED, PAGE, KIND, V_DTYPE, ASM, WORDS, AHEAD, WINDOW, RIGHT, CHUNK, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)  # fmt: skip
    else:
        full_low = tl.max(tl.where(valid, low, 0), 0)
        full_high = tl.minimum(tl.min(tl.where(valid, high, BIG), 0), last)
        if WINDOW or CHUNK or ORIGIN or SPANS:
            inner = tl.maximum((full_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N, start)
            acc, total, top = _visit(
                acc, total, top, x, start, tl.minimum(inner, last), first, low, high, token, position, row, prefix, kv_len,
                k_at, v_at, kb_at, vb_at, k_byte, v_byte, pages, key_start, bits, depth, drafts, words, reach, k_strides, v_strides, factor, softcap,
                2 if TREE else 1, PAGED, PAGE, KIND, V_DTYPE, ASM, WORDS, AHEAD, WINDOW, RIGHT, CHUNK, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)  # fmt: skip
        else:
            inner = start
        middle = tl.maximum(full_high // BLOCK_N * BLOCK_N, inner)
        acc, total, top = _visit(
            acc, total, top, x, inner, middle, first, low, high, token, position, row, prefix, kv_len,
            k_at, v_at, kb_at, vb_at, k_byte, v_byte, pages, key_start, bits, depth, drafts, words, reach, k_strides, v_strides, factor, softcap,
            0, PAGED, PAGE, KIND, V_DTYPE, ASM, WORDS, AHEAD, WINDOW, RIGHT, CHUNK, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)  # fmt: skip
    if TREE or (not SPLIT):
        acc, total, top = _visit(
            acc, total, top, x, middle, last, first, low, high, token, position, row, prefix, kv_len,
            k_at, v_at, kb_at, vb_at, k_byte, v_byte, pages, key_start, bits, depth, drafts, words, reach, k_strides, v_strides, factor, softcap,
            2 if TREE else 1, PAGED, PAGE, KIND, V_DTYPE, ASM, WORDS, AHEAD, WINDOW, RIGHT, CHUNK, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)  # fmt: skip

    empty = top == float("-inf")
    if V_SCALES != 0:
        v_factor = v_factor * tl.load(v_scale + (kv_head if V_SCALES == 2 else 0))
    e = tl.arange(0, BLOCK_DV // PARTS) * PARTS
    keep = valid[:, None] & (e[None, :] < DV)
    if SPLIT:
        if (shares > 1) & (row < num_rows):
            share_of = (v_factor / tl.where(empty, 1.0, total))[:, None]
            at = (item.to(tl.int64) * heads + head_program) * BLOCK_M + m
            for i in tl.static_range(PARTS):
                tl.store(part_out + at[:, None] * DV + e[None, :] + i, acc[i] * share_of, mask=keep)
            tl.store(part_lse + at, tl.where(empty, float("-inf"), top + tl.log2(total)), mask=valid)
            return
    shrink = tl.zeros_like(total) + 1.0
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = tl.where(empty, 1.0, total * shrink + tl.exp2(sink - higher))
        top = tl.where(empty, top, higher)
    share_of = (shrink * v_factor / tl.where(empty, 1.0, total))[:, None]
    o_at = out + index[:, None] * o_st + head[:, None] * o_sh + e[None, :]
    for i in tl.static_range(PARTS):
        tl.store(o_at + i, (acc[i] * share_of).to(out.dtype.element_ty), mask=keep)
    value = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + index * (heads // HEAD_BLOCKS * RATIO) + head, value, mask=valid & (needs_lse != 0))
