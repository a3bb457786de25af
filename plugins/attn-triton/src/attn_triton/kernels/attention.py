# mypy: ignore-errors
# ruff: noqa: RET505, SIM102 - a return in a compile-time branch needs its else; loops are compiled
"""The attention kernel: one tile of queries against a range of keys, read from pages or packed.

Everything but a tree is, for each query, an interval of keys ``[low, high)``: causality, windows, chunks, spans and trimmed
pools only move its ends. A tile therefore visits the blocks that every query sees without a mask, and masks the others.

One tile holds BLOCK_M rows: tokens times GROUP query heads that share a KV head. ``SPLIT`` tiles hold all queries of a row
and one share of its keys (decode, verify); the others hold a block of queries and all keys (prefill).
"""

import triton
import triton.language as tl

from attn_triton.kernels.elements import pair_column, unpack_fp4, widen_pair


@triton.jit
def _page_numbers(start, floor, limit, pages, key_start, PAGED: tl.constexpr, WHOLE: tl.constexpr, PAGE: tl.constexpr,
                  BLOCK_N: tl.constexpr):  # fmt: skip
    """Pages of keys start .. start + BLOCK_N, as they are listed: a scalar where one page holds the block (and WHOLE), else [N].

    Nothing outside [floor, limit) is read. Packed keys are one page, which begins at `key_start`.
    """
    if PAGED and WHOLE and PAGE % BLOCK_N == 0:
        return tl.load(pages + start // PAGE, mask=start < limit, other=0)
    elif PAGED:
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(pages + keys // PAGE, mask=(keys >= floor) & (keys < limit), other=0)
    else:
        return key_start


@triton.jit
def _places(start, PAGED: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Place in its page of each key, i32[N]."""
    if PAGED and PAGE % BLOCK_N == 0:
        return start % PAGE + tl.arange(0, BLOCK_N)
    elif PAGED:
        return (start + tl.arange(0, BLOCK_N)) % PAGE
    else:
        return start + tl.arange(0, BLOCK_N)


@triton.jit
def _tile(
    base, blocks, page, place, live, stride_p, stride_t, block_p, block_t,
    KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, KEYS: tl.constexpr, PAGED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of K or V: (DTYPE[N, BLOCK_D], same), or (even, odd) [N, BLOCK_D / 2]. Rows that are not `live` are zero.

    8-bit kinds are read as u16[N, BLOCK_D / 2] of two neighbours: 16-bit elements can be loaded from shared memory in the
    layout of a matrix operand, transposed or not, and are unpacked there. 4-bit kinds are read as bytes of two elements,
    and the scale of each byte beside it (8 bytes share one: they come from the same sector).
    """
    PACK: tl.constexpr = 1 if KIND == 0 else 2
    d = tl.arange(0, BLOCK_D // PACK)
    if PAGED:
        offset = page * stride_p + place * stride_t
    else:
        offset = (page + place) * stride_t
    pointers = base + (offset[:, None] + d[None, :])
    if MASKED and D != BLOCK_D:
        x = tl.load(pointers, mask=live[:, None] & (d[None, :] < D // PACK), other=0)
    elif MASKED:
        x = tl.load(pointers, mask=live[:, None], other=0)
    elif D != BLOCK_D:
        x = tl.load(pointers, mask=d[None, :] < D // PACK, other=0)
    else:
        x = tl.load(pointers)
    if KIND == 3:
        beside = blocks + ((page * block_p + place * block_t)[:, None] + d[None, :] // 8)
        factors = tl.load(beside, mask=live[:, None] & (d[None, :] < D // PACK), other=0)
        return unpack_fp4(x, factors, DTYPE)
    elif KIND == 0:
        return x, x
    else:
        return widen_pair(x, KIND, ASM, KEYS)


@triton.jit
def _load_i32(address, offsets, mask):
    """i32 values at an address that is a number (i64): AMD's pointer analysis does not follow it through a loop."""
    return tl.load((address + 4 * offsets.to(tl.int64)).to(tl.pointer_type(tl.int32)), mask=mask, other=0)


@triton.jit
def _sees_tree(keys, token, position, row, prefix, kv_len, low, bits, depth, drafts, words,
               WINDOW: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """bool[M, N]: prefix keys by interval, drafts by the mask bits; windows and chunks count tree positions."""
    draft = keys - prefix
    is_draft = (draft >= 0) & (keys < kv_len)
    me = tl.minimum(token, drafts - 1)
    word = _load_i32(bits, ((row * drafts + me) * words)[:, None] + (draft // 32)[None, :], is_draft[None, :])
    seen = ((word >> (draft % 32)[None, :]) & 1) == 1
    if WINDOW > 0 or RIGHT >= 0 or CHUNK > 0:
        place = (prefix + _load_i32(depth, row * drafts + draft, is_draft))[None, :]
        if WINDOW > 0:
            seen &= place > position[:, None] - WINDOW
        if RIGHT >= 0:
            seen &= place <= position[:, None] + RIGHT
        if CHUNK > 0:
            seen &= place // CHUNK == position[:, None] // CHUNK
    prefix_seen = (keys < prefix)[None, :] & (keys[None, :] >= low[:, None])
    return prefix_seen | (is_draft[None, :] & seen)


@triton.jit
def _visit(
    acc, acc_odd, total, top, q, q_odd, first, last, floor, low, high, token, position, row, prefix, kv_len,
    k, v, k_blocks, v_blocks, pages, key_start, bits, depth, drafts, words,
    k_strides, v_strides, factor, softcap,
    MASK: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr, ASM: tl.constexpr, AHEAD: tl.constexpr,
    WINDOW: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over key blocks of [first, last). MASK: 0 none, 1 intervals, 2 tree. Logits are in base 2.

    Keys outside [floor, last) are not read: they may be poison. Narrow kinds keep even and odd elements of a head apart, in
    q and in the result. Page numbers are read one block AHEAD, so that no block waits for them. Returns (acc, acc_odd,
    total, top).
    """
    if AHEAD:
        number = _page_numbers(first, floor, last, pages, key_start, PAGED, KIND != 3, PAGE, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        live = (keys >= floor) & (keys < last)
        if AHEAD:
            page = number.to(tl.int64)
            number = _page_numbers(start + BLOCK_N, floor, last, pages, key_start, PAGED, KIND != 3, PAGE, BLOCK_N)
        else:
            page = _page_numbers(start, floor, last, pages, key_start, PAGED, KIND != 3, PAGE, BLOCK_N).to(tl.int64)
        place = _places(start, PAGED, PAGE, BLOCK_N)
        x, x_odd = _tile(k, k_blocks, page, place, live, k_strides[0], k_strides[1], k_strides[2], k_strides[3],
                         KIND, DTYPE, ASM, True, PAGED, MASK != 0, BLOCK_N, D, BLOCK_D)  # fmt: skip
        s = tl.dot(q, tl.trans(x), input_precision=PRECISION)
        if KIND != 0:
            s = tl.dot(q_odd, tl.trans(x_odd), s)
        if SOFTCAP:
            t = s * factor[:, None]  # 2 * log2(e) * logits / cap
            s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(t)))
        else:
            s = s * factor[:, None]
        if MASK == 1:
            s = tl.where((keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None]), s, float("-inf"))
        elif MASK == 2:
            seen = _sees_tree(keys, token, position, row, prefix, kv_len, low, bits, depth, drafts, words,
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
        acc = acc * alpha[:, None]
        y, y_odd = _tile(v, v_blocks, page, place, live, v_strides[0], v_strides[1], v_strides[2], v_strides[3],
                         KIND, V_DTYPE, ASM, False, PAGED, MASK != 0, BLOCK_N, DV, BLOCK_DV)  # fmt: skip
        acc = tl.dot(p.to(V_DTYPE), y, acc, input_precision=PRECISION)
        if KIND != 0:
            acc_odd = tl.dot(p.to(V_DTYPE), y_odd, acc_odd * alpha[:, None])
        top = new_top
    return acc, acc_odd, total, top


@triton.jit
def _bounds(position, kv_len, origin, prefix, span_low, span_high, index, valid,
            WINDOW: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, TREE: tl.constexpr, SPANS: tl.constexpr):  # fmt: skip
    """Interval [low, high) of each query. Trees: the interval of prefix keys, up to `prefix`."""
    low = tl.zeros_like(position) + origin
    high = tl.zeros_like(position) + kv_len
    if TREE:
        high = tl.zeros_like(position) + prefix
    elif RIGHT >= 0:
        high = tl.minimum(high, position + RIGHT + 1)
    if WINDOW > 0:
        low = tl.maximum(low, position - WINDOW + 1)
    if CHUNK > 0:
        begin = position // CHUNK * CHUNK
        low = tl.maximum(low, begin)
        if not TREE:
            high = tl.minimum(high, begin + CHUNK)
    if SPANS:
        left = tl.load(span_low + index, mask=valid, other=0)
        right = tl.load(span_high + index, mask=valid, other=0)
        inside = right > left
        if WINDOW > 0:
            left = tl.maximum(left, position - WINDOW + 1)
            right = tl.minimum(right, position + WINDOW)
        low = tl.where(inside, tl.minimum(low, tl.maximum(left, origin)), low)
        high = tl.where(inside, tl.maximum(high, tl.minimum(right, kv_len)), high)
    return low, tl.maximum(high, low)


@triton.jit(do_not_specialize=["num_rows"])
def attention_kernel(
    q, k, v, k_blocks, v_blocks, out, lse, part_out, part_lse,
    items, page_ptr, kv_lens, origins, query_offsets, key_offsets, splits, sizes, trees, span_low, span_high,
    sinks, k_scale, v_scale, num_rows,
    factor, softcap, v_factor,
    q_st, q_sh, k_sp, k_st, k_sh, kb_sp, kb_st, kb_sh, v_sp, v_st, v_sh, vb_sp, vb_st, vb_sh, o_st, o_sh,
    drafts, words, heads,
    RATIO: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, V_DTYPE: tl.constexpr,
    ASM: tl.constexpr, AHEAD: tl.constexpr, ONE_LOOP: tl.constexpr, WINDOW: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr, TREE: tl.constexpr, SPANS: tl.constexpr,
    ORIGIN: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    NEEDS_LSE: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q[T, Hq, D] against keys of pages or packed rows -> out[T, Hq, DV], lse f32[T, Hq].

    Grid: (KV heads * HEAD_BLOCKS, items). ``items`` i32[n, 2] is (row, part), row -1 = nothing to do; row `num_rows` stands
    for tokens of no row, whose result is zero. SPLIT: part = share of the keys, of ``sizes[row]`` keys each; a row with more
    than one share leaves ``part_out`` f32[n, heads, BLOCK_M, DV] and ``part_lse`` (base 2) for the merge kernel.
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
    low, high = _bounds(position, kv_len, origin, prefix, span_low, span_high, index, valid,
                        WINDOW, RIGHT, CHUNK, TREE, SPANS)  # fmt: skip
    BIG: tl.constexpr = 2147483647
    first = tl.min(tl.where(valid, low, BIG), 0)
    last = kv_len if TREE else tl.max(tl.where(valid, high, 0), 0)
    last = tl.where(row == num_rows, 0, last)
    first = tl.minimum(first, last)

    PAIR: tl.constexpr = 1 if KIND == 0 else 2  # even and odd elements apart
    ORDER: tl.constexpr = ASM and KIND != 3
    d = tl.arange(0, BLOCK_D)
    factor = tl.zeros([BLOCK_M], tl.float32) + factor
    if PAIR == 2:
        d = pair_column(tl.arange(0, BLOCK_D // 2), ORDER)
        q_at = q + index[:, None] * q_st + head[:, None] * q_sh + d[None, :]
        x = tl.load(q_at, mask=valid[:, None] & (d[None, :] < D), other=0.0)
        step: tl.constexpr = 2 if ORDER else 1
        x_odd = tl.load(q_at + step, mask=valid[:, None] & (d[None, :] + step < D), other=0.0)
    if KIND == 1 or KIND == 2:
        x = x.to(tl.float32)
        x_odd = x_odd.to(tl.float32)
        # keys are fp16: bring each query into its range by a power of two, exactly
        size = tl.maximum(tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(x_odd), 1)), 1e-30)
        size = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 0.0625
        x = (x / size[:, None]).to(tl.float16)
        x_odd = (x_odd / size[:, None]).to(tl.float16)
        factor *= size
    if PAIR == 1:
        q_at = q + index[:, None] * q_st + head[:, None] * q_sh + d[None, :]
        x = tl.load(q_at, mask=valid[:, None] & (d[None, :] < D), other=0.0)
        x_odd = x
    DTYPE: tl.constexpr = x.dtype
    if K_SCALES != 0:
        factor = factor * tl.load(k_scale + (kv_head if K_SCALES == 2 else 0))
    k_at = k + kv_head.to(tl.int64) * k_sh
    v_at = v + kv_head.to(tl.int64) * v_sh
    kb_at = k_blocks + kv_head.to(tl.int64) * kb_sh
    vb_at = v_blocks + kv_head.to(tl.int64) * vb_sh
    k_strides = (k_sp, k_st, kb_sp, kb_st)
    v_strides = (v_sp, v_st, vb_sp, vb_st)

    acc = tl.zeros([BLOCK_M, BLOCK_DV // PAIR], tl.float32)
    acc_odd = acc if PAIR == 2 else tl.zeros([BLOCK_M], tl.float32)  # carried along, unused without pairs
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
            acc, acc_odd, total, top = _visit(
                acc, acc_odd, total, top, x, x_odd, start, middle, first, low, high, token, position, row, prefix, kv_len,
                k_at, v_at, kb_at, vb_at, pages, key_start, bits, depth, drafts, words, k_strides, v_strides, factor, softcap,
                1, PAGED, PAGE, KIND, DTYPE, V_DTYPE, ASM, AHEAD, WINDOW, RIGHT, CHUNK, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)  # fmt: skip
    else:
        full_low = tl.max(tl.where(valid, low, 0), 0)
        full_high = tl.minimum(tl.min(tl.where(valid, high, BIG), 0), last)
        if WINDOW > 0 or CHUNK > 0 or ORIGIN or SPANS:
            inner = tl.maximum((full_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N, start)
            acc, acc_odd, total, top = _visit(
                acc, acc_odd, total, top, x, x_odd, start, tl.minimum(inner, last), first, low, high, token, position, row, prefix, kv_len,
                k_at, v_at, kb_at, vb_at, pages, key_start, bits, depth, drafts, words, k_strides, v_strides, factor, softcap,
                2 if TREE else 1, PAGED, PAGE, KIND, DTYPE, V_DTYPE, ASM, AHEAD, WINDOW, RIGHT, CHUNK, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)  # fmt: skip
        else:
            inner = start
        middle = tl.maximum(full_high // BLOCK_N * BLOCK_N, inner)
        acc, acc_odd, total, top = _visit(
            acc, acc_odd, total, top, x, x_odd, inner, middle, first, low, high, token, position, row, prefix, kv_len,
            k_at, v_at, kb_at, vb_at, pages, key_start, bits, depth, drafts, words, k_strides, v_strides, factor, softcap,
            0, PAGED, PAGE, KIND, DTYPE, V_DTYPE, ASM, AHEAD, WINDOW, RIGHT, CHUNK, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)  # fmt: skip
    if TREE or (not SPLIT):
        acc, acc_odd, total, top = _visit(
            acc, acc_odd, total, top, x, x_odd, middle, last, first, low, high, token, position, row, prefix, kv_len,
            k_at, v_at, kb_at, vb_at, pages, key_start, bits, depth, drafts, words, k_strides, v_strides, factor, softcap,
            2 if TREE else 1, PAGED, PAGE, KIND, DTYPE, V_DTYPE, ASM, AHEAD, WINDOW, RIGHT, CHUNK, SOFTCAP, PRECISION, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N)  # fmt: skip

    empty = top == float("-inf")
    if V_SCALES != 0:
        v_factor = v_factor * tl.load(v_scale + (kv_head if V_SCALES == 2 else 0))
    e = tl.arange(0, BLOCK_DV // PAIR) * PAIR
    keep = valid[:, None] & (e[None, :] < DV)
    if SPLIT:
        if (shares > 1) & (row < num_rows):
            share_of = (v_factor / tl.where(empty, 1.0, total))[:, None]
            at = (item.to(tl.int64) * heads + head_program) * BLOCK_M + m
            tl.store(part_out + at[:, None] * DV + e[None, :], acc * share_of, mask=keep)
            if PAIR == 2:
                tl.store(part_out + at[:, None] * DV + e[None, :] + 1, acc_odd * share_of, mask=keep)
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
    tl.store(o_at, (acc * share_of).to(out.dtype.element_ty), mask=keep)
    if PAIR == 2:
        tl.store(o_at + 1, (acc_odd * share_of).to(out.dtype.element_ty), mask=keep)
    if NEEDS_LSE:
        value = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse + index * (heads // HEAD_BLOCKS * RATIO) + head, value, mask=valid)
