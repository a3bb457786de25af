# mypy: ignore-errors
# ruff: noqa: RET505 - a return in a compile-time branch needs its else
"""The copying warp of :mod:`attn_triton.kernels.hopper`, and which blocks of keys a tile has."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def ranges(
    part, query_len, kv_len, WINDOW: gl.constexpr, RIGHT: gl.constexpr, CHUNK: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Blocks of one tile: (first block, blocks, masked at the right, masked at the left, first key, end of keys)."""
    low_position = kv_len - query_len + part * 128
    high_position = kv_len - query_len + gl.minimum(query_len, part * 128 + 128) - 1
    # keys that any query sees: [floor, limit); that every query sees: [full_low, full_high)
    floor = part * 0
    full_low = part * 0
    limit = kv_len
    full_high = kv_len
    if RIGHT >= 0:
        limit = gl.minimum(limit, high_position + RIGHT + 1)
        full_high = gl.minimum(full_high, low_position + RIGHT + 1)
    if WINDOW > 0:
        floor = gl.maximum(floor, low_position - WINDOW + 1)
        full_low = gl.maximum(full_low, high_position - WINDOW + 1)
    if CHUNK > 0:
        floor = gl.maximum(floor, low_position // CHUNK * CHUNK)
        full_low = gl.maximum(full_low, high_position // CHUNK * CHUNK)
        limit = gl.minimum(limit, high_position // CHUNK * CHUNK + CHUNK)
        full_high = gl.minimum(full_high, low_position // CHUNK * CHUNK + CHUNK)
    limit = gl.maximum(limit, 0)
    floor = gl.minimum(floor, limit)
    first = floor // BLOCK_N
    count = gl.where(limit > floor, (limit + BLOCK_N - 1) // BLOCK_N - first, 0)
    right = gl.maximum(first + count - gl.maximum(full_high, 0) // BLOCK_N, 1)
    left = (full_low + BLOCK_N - 1) // BLOCK_N - first
    return first, count, right, left, floor, limit


@gluon.jit
def work_of(turn, num_rows, WINDOW: gl.constexpr, CHUNK: gl.constexpr):
    """The `turn`-th work of this program.

    The works of a single row come longest first, so every other round runs backwards: long and short ones are shared out
    evenly. The works of several rows begin anew with each, and would meet that order where it does harm; with a window or chunks
    they are equally long. All rounds run forwards then, and neighbours read the same keys at the same time.
    """
    programs = gl.num_programs(0)
    if WINDOW > 0 or CHUNK > 0:
        back = turn * 0
    else:
        back = gl.where(num_rows == 1, turn % 2, 0)
    return turn * programs + (1 - back) * gl.program_id(0) + back * (programs - 1 - gl.program_id(0))


@gluon.jit
def turns_of(end, num_rows, WINDOW: gl.constexpr, CHUNK: gl.constexpr):
    """How many of the works [0, end) are this program's."""
    rounds = end // gl.num_programs(0)
    return rounds + gl.where(work_of(rounds, num_rows, WINDOW, CHUNK) < end, 1, 0)


@gluon.jit
def item_of(turn, items, end, heads, num_rows, WINDOW: gl.constexpr, CHUNK: gl.constexpr):
    """(row, part, head) of this program's `turn`-th work, of any work past the end."""
    work = gl.minimum(work_of(turn, num_rows, WINDOW, CHUNK), end - 1)
    at = items + 2 * (work // heads)
    return gl.load(at), gl.load(at + 1), work % heads


@gluon.jit
def lengths(row, query_offsets, kv_lens, key_offsets, num_rows, PAGED: gl.constexpr):
    """(first query, queries, keys) of a row; row `num_rows` has no keys."""
    begin = gl.load(query_offsets + row)
    query_len = gl.load(query_offsets + row + 1) - begin
    if PAGED:
        kv_len = gl.load(kv_lens + row)
    else:
        real = row < num_rows
        kv_len = gl.load(key_offsets + row + 1, mask=real, other=0) - gl.load(key_offsets + row, mask=real, other=0)
    return begin, query_len, kv_len


@gluon.jit
def copy_tiles(
    q_desc, k_desc, v_desc, q_low, q_high, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free,
    items, page_ptr, kv_lens, query_offsets, key_offsets, num_rows, nowhere, used, heads, q_head, k_head, v_head,
    RATIO: gl.constexpr, PAGED: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, WINDOW: gl.constexpr,
    RIGHT: gl.constexpr, CHUNK: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: tile after tile, block after block, waiting for a free stage. Boxes without live keys become zeros.

    What a tile needs to know is loaded one tile ahead, and its first keys are copied before its queries, whose place is
    free later: the computing warps finish the tile before meanwhile.
    """
    block = 0
    end = used * heads
    row, part, head = item_of(0, items, end, heads, num_rows, WINDOW, CHUNK)
    begin, query_len, kv_len, pages, key_start = _row(
        row, query_offsets, kv_lens, key_offsets, page_ptr, items, num_rows, PAGED
    )
    for turn in range(turns_of(end, num_rows, WINDOW, CHUNK)):
        next_row, next_part, next_head = item_of(turn + 1, items, end, heads, num_rows, WINDOW, CHUNK)
        first, count, right, left, floor, limit = ranges(part, query_len, kv_len, WINDOW, RIGHT, CHUNK, BLOCK_N)
        k_column = head // RATIO * k_head
        v_column = head // RATIO * v_head
        start = (first + count - 1) * BLOCK_N
        if count > 0:
            _copy_block(k_desc, k_smem, k_ready, k_free, block, start, k_column, pages, key_start, floor, limit, nowhere,
                        PAGED, PAGE, BOX, D, BLOCK_N, STAGES)  # fmt: skip
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        mbarrier.expect(q_ready, 128 * D * 2)
        tma.async_copy_global_to_shared(q_desc, [begin + part * 128, head * q_head], q_ready, q_low)
        tma.async_copy_global_to_shared(q_desc, [begin + part * 128 + 64, head * q_head], q_ready, q_high)
        next_begin, next_query_len, next_kv_len, next_pages, next_key_start = _row(
            next_row, query_offsets, kv_lens, key_offsets, page_ptr, items, num_rows, PAGED
        )
        for i in range(count):
            if i > 0:
                _copy_block(k_desc, k_smem, k_ready, k_free, block + i, start - i * BLOCK_N, k_column, pages, key_start, floor,
                            limit, nowhere, PAGED, PAGE, BOX, D, BLOCK_N, STAGES)  # fmt: skip
            _copy_block(v_desc, v_smem, v_ready, v_free, block + i, start - i * BLOCK_N, v_column, pages, key_start, floor,
                        limit, nowhere, PAGED, PAGE, BOX, DV, BLOCK_N, STAGES)  # fmt: skip
        block += count
        row = next_row
        part = next_part
        head = next_head
        begin = next_begin
        query_len = next_query_len
        kv_len = next_kv_len
        pages = next_pages
        key_start = next_key_start


@gluon.jit
def _row(row, query_offsets, kv_lens, key_offsets, page_ptr, items, num_rows, PAGED: gl.constexpr):
    """:func:`lengths`, and where the keys of the row are: (.., address of its page list i64, first packed key)."""
    begin, query_len, kv_len = lengths(row, query_offsets, kv_lens, key_offsets, num_rows, PAGED)
    if PAGED:
        return begin, query_len, kv_len, gl.load(page_ptr + row), row * 0
    else:
        key_start = gl.load(key_offsets + row, mask=row < num_rows, other=0)
        return begin, query_len, kv_len, row.to(gl.int64), key_start


@gluon.jit
def _copy_block(
    desc, smem, ready, free, block, start, column, pages, key_start, floor, limit, nowhere,
    PAGED: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One block of keys or values, box by box, as the `block`-th of this program."""
    stage = block % STAGES
    mbarrier.wait(free.index(stage), ((block // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), BLOCK_N * D * 2)
    for b in gl.static_range(BLOCK_N // BOX):
        at = _row_of(start + b * BOX, pages, key_start, floor, limit, nowhere, PAGED, PAGE, BOX)
        tma.async_copy_global_to_shared(desc, [at, column], ready.index(stage), smem.index(stage).slice(b * BOX, BOX))


@gluon.jit
def _row_of(key, pages, key_start, floor, limit, nowhere, PAGED: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr):
    """Row of the descriptor that holds `key`; `nowhere` (past its end, reads zeros) for a box without live keys."""
    live = (key < limit) & (key + BOX > floor)
    if PAGED:
        page = gl.load(pages.to(gl.pointer_type(gl.int32)) + key // PAGE, mask=live, other=0)
        row = page * PAGE + key % PAGE
    else:
        row = key_start + key
    return gl.where(live, row, nowhere)
