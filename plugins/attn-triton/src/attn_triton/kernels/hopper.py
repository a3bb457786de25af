# mypy: ignore-errors
"""Prefill on Hopper, warp-specialised: one warp copies keys and values (TMA), two warp groups compute 64 queries each.

The result is that of the tile path of :mod:`attn_triton.kernels.attention`, with the same intervals; no trees, spans or
quantised caches. Pages of any power of two from 8 tokens are copied page by page into one block of keys, so that the page
size costs nothing. Blocks are visited from the last to the first: what needs a mask comes first. While the matrix units
multiply weights with values of one block, the softmax of the next block runs. Programs are persistent: the copying warp
fetches the next tile while the last one is finished. Tiles come longest first, round by round; for a single row
without a window every other round of programs runs backwards, so that all end at about the same time.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_triton.kernels.hopper_copy import copy_tiles, item_of, lengths, ranges, turns_of


@gluon.jit
def _logits(s, start, low, high, factor, softcap, MASK: gl.constexpr, SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr,
            LAYOUT: gl.constexpr):  # fmt: skip
    """Logits in base 2, hidden keys at -inf."""
    if SOFTCAP:
        s = softcap * (1.0 - 2.0 / (1.0 + gl.exp2(s * factor)))
    if MASK:
        keys = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _softmax(s, top, factor, MASK: gl.constexpr, SOFTCAP: gl.constexpr):
    """(weights, new top, shrink): ``top`` is scaled to base 2."""
    UNIT: gl.constexpr = SOFTCAP
    highest = gl.max(s, 1)
    new_top = gl.maximum(top, highest if UNIT else highest * factor)
    safe = gl.where(new_top == float("-inf"), 0.0, new_top) if MASK else new_top
    if UNIT:
        p = gl.exp2(s - safe[:, None])
    else:
        p = gl.exp2(s * factor - safe[:, None])
    return p, new_top, gl.exp2(top - safe)


@gluon.jit
def _clean(v_tile, start, limit, half, barrier, phase, ROWS: gl.constexpr, DV: gl.constexpr):
    """Zero the values of keys from `limit` on, which nobody has written: each warp group cleans its half of the block.

    Keys before a window need none of it: they are tokens of the row itself, in a page that has a visible key, or zeros.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    part = v_tile.slice(half * ROWS, ROWS)
    keys = start + half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    x = part.load(LAYOUT)
    live = keys < limit
    part.store(gl.where(live[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, phase)


@gluon.jit
def _step(
    i, block, o, p, total, top, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, start, low, high, factor, softcap,
    MASK: gl.constexpr, IN_ORDER: gl.constexpr, SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Logits of the tile's block `i`, while the values of block i - 1 are added. `start` is the first key of block 0."""
    stage = (block + i) % STAGES
    before = (block + i - 1) % STAGES
    mbarrier.wait(k_ready.index(stage), ((block + i) // STAGES) & 1)
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s_token = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), ((block + i - 1) // STAGES) & 1)
    o_token = warpgroup_mma(p, v_smem.index(before), o, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=1, deps=[s_token])
    mbarrier.arrive(k_free.index(stage), count=1)
    s = _logits(s, start - i * BLOCK_N, low, high, factor, softcap, MASK, SOFTCAP, BLOCK_N, S_LAYOUT)
    w, new_top, shrink = _softmax(s, top, factor, MASK, SOFTCAP)
    total = total * shrink + gl.sum(w, 1)
    if IN_ORDER:
        # waited for above already; without a loop here the assembler moves the softmax behind the products. Short tiles gain
        # by this, long ones, whose two groups of warps overlap each other, lose
        mbarrier.wait(v_ready.index(before), ((block + i - 1) // STAGES) & 1)
    o = warpgroup_mma_wait(num_outstanding=0, deps=[o_token])
    mbarrier.arrive(v_free.index(before), count=1)
    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
    p = gl.convert_layout(w.to(DTYPE), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return o, p, total, new_top


@gluon.jit
def _finish(o, total, top, out, lse, sinks, begin, mine, query_len, head, heads, o_st, o_sh, SINKS: gl.constexpr,
            NEEDS_LSE: gl.constexpr, DV: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):  # fmt: skip
    """Sinks, normalisation, and the result of 64 queries to memory."""
    WRITE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DV, DV // 8], [4, 1], [1, 0])
    empty = top == float("-inf")
    shrink = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if SINKS:
        sink = gl.load(sinks + head) * 1.4426950408889634
        higher = gl.maximum(top, sink)
        shrink = gl.exp2(top - higher)
        total = total * shrink + gl.exp2(sink - higher)
        top = gl.where(empty, top, higher)
    share = gl.where(empty, 0.0, shrink / gl.where(empty, 1.0, total))
    o = gl.where(gl.convert_layout(empty, gl.SliceLayout(1, O_LAYOUT))[:, None], 0.0, o)
    o = o * gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))[:, None]
    result = gl.convert_layout(o.to(out.dtype.element_ty), WRITE)
    row = mine + gl.arange(0, 64, layout=gl.SliceLayout(1, WRITE))
    column = gl.arange(0, DV, layout=gl.SliceLayout(0, WRITE))
    o_at = out + (begin + row).to(gl.int64)[:, None] * o_st + head * o_sh + column[None, :]
    gl.store(o_at, result, mask=(row < query_len)[:, None])
    if NEEDS_LSE:
        token = mine + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        value = gl.where(empty, float("-inf"), (top + gl.log2(total)) * 0.6931471805599453)
        gl.store(lse + (begin + token).to(gl.int64) * heads + head, value, mask=token < query_len)


@gluon.jit
def _compute_tiles(
    out, lse, sinks, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, cleaned,
    items, kv_lens, query_offsets, key_offsets, num_rows, used, heads, factor, softcap, o_st, o_sh,
    HALF: gl.constexpr, PAGED: gl.constexpr, WINDOW: gl.constexpr, RIGHT: gl.constexpr, CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr, SINKS: gl.constexpr, NEEDS_LSE: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """One warp group: 64 queries of one head, tile after tile. What a tile needs to know is loaded one tile ahead."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    block = 0
    cleans = 0
    end = used * heads
    SHORT: gl.constexpr = WINDOW > 0 or CHUNK > 0
    row, part, head = item_of(0, items, end, heads, num_rows, WINDOW, CHUNK)
    begin, query_len, kv_len = lengths(row, query_offsets, kv_lens, key_offsets, num_rows, PAGED)
    next_row, next_part, next_head = item_of(1, items, end, heads, num_rows, WINDOW, CHUNK)
    for turn in range(turns_of(end, num_rows, WINDOW, CHUNK)):
        next_begin, next_query_len, next_kv_len = lengths(
            next_row, query_offsets, kv_lens, key_offsets, num_rows, PAGED
        )
        after_row, after_part, after_head = item_of(turn + 2, items, end, heads, num_rows, WINDOW, CHUNK)
        first, count, masked_right, masked_left, floor, limit = ranges(
            part, query_len, kv_len, WINDOW, RIGHT, CHUNK, BLOCK_N
        )
        mine = part * 128 + HALF * 64
        position = kv_len - query_len + mine + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        low = gl.zeros_like(position)
        high = gl.zeros_like(position) + kv_len
        if RIGHT >= 0:
            high = gl.minimum(high, position + RIGHT + 1)
        if WINDOW > 0:
            low = gl.maximum(low, position - WINDOW + 1)
        if CHUNK > 0:
            low = gl.maximum(low, position // CHUNK * CHUNK)
            high = gl.minimum(high, position // CHUNK * CHUNK + CHUNK)
        o = gl.zeros([64, DV], gl.float32, O_LAYOUT)
        top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        mbarrier.wait(q_ready, turn & 1)
        if count > 0:
            start = (first + count - 1) * BLOCK_N
            stage = block % STAGES
            mbarrier.wait(k_ready.index(stage), (block // STAGES) & 1)
            zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
            s_token = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=0, deps=[s_token])
            mbarrier.arrive(k_free.index(stage), count=1)
            s = _logits(s, start, low, high, factor, softcap, True, SOFTCAP, BLOCK_N, S_LAYOUT)
            w, top, shrink = _softmax(s, top, factor, True, SOFTCAP)
            total = gl.sum(w, 1)
            p = gl.convert_layout(w.to(DTYPE), gl.DotOperandLayout(0, O_LAYOUT, 2))
            if limit < start + BLOCK_N:
                mbarrier.wait(v_ready.index(stage), (block // STAGES) & 1)
                _clean(v_smem.index(stage), start, limit, HALF, cleaned, cleans & 1, BLOCK_N // 2, DV)
                cleans += 1
            one = gl.minimum(gl.maximum(masked_right, 1), count)
            for i in range(1, one):
                o, p, total, top = _step(i, block, o, p, total, top, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, start,
                                         low, high, factor, softcap, True, SHORT, SOFTCAP, BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, DTYPE)  # fmt: skip
            two = count
            if WINDOW > 0 or CHUNK > 0:
                two = gl.maximum(count - gl.maximum(masked_left, 0), one)
            for i in range(one, two):
                o, p, total, top = _step(i, block, o, p, total, top, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, start,
                                         low, high, factor, softcap, False, SHORT, SOFTCAP, BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, DTYPE)  # fmt: skip
            if WINDOW > 0 or CHUNK > 0:
                for i in range(two, count):
                    o, p, total, top = _step(i, block, o, p, total, top, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, start,
                                             low, high, factor, softcap, True, SHORT, SOFTCAP, BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, DTYPE)  # fmt: skip
            mbarrier.arrive(q_free, count=1)
            last = (block + count - 1) % STAGES
            mbarrier.wait(v_ready.index(last), ((block + count - 1) // STAGES) & 1)
            o_token = warpgroup_mma(p, v_smem.index(last), o, is_async=True)
            o = warpgroup_mma_wait(num_outstanding=0, deps=[o_token])
            mbarrier.arrive(v_free.index(last), count=1)
        else:
            mbarrier.arrive(q_free, count=1)
        _finish(
            o,
            total,
            top,
            out,
            lse,
            sinks,
            begin,
            mine,
            query_len,
            head,
            heads,
            o_st,
            o_sh,
            SINKS,
            NEEDS_LSE,
            DV,
            S_LAYOUT,
            O_LAYOUT,
        )
        block += count
        row = next_row
        part = next_part
        head = next_head
        begin = next_begin
        query_len = next_query_len
        kv_len = next_kv_len
        next_row = after_row
        next_part = after_part
        next_head = after_head


@gluon.jit(do_not_specialize=["num_rows"])
def hopper_kernel(
    q_desc, k_desc, v_desc, out, lse, sinks, items, page_ptr, kv_lens, query_offsets, key_offsets, splits, num_rows, nowhere,
    factor, softcap, o_st, o_sh, q_head, k_head, v_head, heads,
    RATIO: gl.constexpr, PAGED: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    WINDOW: gl.constexpr, RIGHT: gl.constexpr, CHUNK: gl.constexpr, SOFTCAP: gl.constexpr,
    SINKS: gl.constexpr, NEEDS_LSE: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """q[T, Hq, D] -> out[T, Hq, DV]. Programs share out (head, item) pairs; an item is 128 tokens of a row.

    Descriptors are matrices of rows (tokens or slots) by heads * dim; `q_head` and the like are columns from head to head.
    """
    used = gl.load(splits + num_rows + 1)
    if gl.program_id(0) >= used * heads:
        return
    DTYPE: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, DV], v_desc.layout)
    q_low = gl.allocate_shared_memory(DTYPE, [64, D], q_desc.layout)
    q_high = gl.allocate_shared_memory(DTYPE, [64, D], q_desc.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    cleaned = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(s), count=1)
        mbarrier.init(v_ready.index(s), count=1)
        mbarrier.init(k_free.index(s), count=2)
        mbarrier.init(v_free.index(s), count=2)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    mbarrier.init(cleaned, count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute_tiles, (out, lse, sinks, q_low, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, cleaned,
                              items, kv_lens, query_offsets, key_offsets, num_rows, used, heads, factor, softcap, o_st, o_sh,
                              0, PAGED, WINDOW, RIGHT, CHUNK, SOFTCAP, SINKS, NEEDS_LSE, DV, BLOCK_N, STAGES, DTYPE)),
            (_compute_tiles, (out, lse, sinks, q_high, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, cleaned,
                              items, kv_lens, query_offsets, key_offsets, num_rows, used, heads, factor, softcap, o_st, o_sh,
                              1, PAGED, WINDOW, RIGHT, CHUNK, SOFTCAP, SINKS, NEEDS_LSE, DV, BLOCK_N, STAGES, DTYPE)),
            (copy_tiles, (q_desc, k_desc, v_desc, q_low, q_high, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free,
                           items, page_ptr, kv_lens, query_offsets, key_offsets, num_rows, nowhere, used, heads, q_head, k_head, v_head,
                           RATIO, PAGED, PAGE, BOX, WINDOW, RIGHT, CHUNK, D, DV, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
