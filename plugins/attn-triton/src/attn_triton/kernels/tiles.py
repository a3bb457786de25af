# mypy: ignore-errors
# ruff: noqa: RET505 - a return in a compile-time branch needs its else
"""Blocks of keys and values from pages or packed rows: page numbers, elements, and the scales of FP4."""

import triton
import triton.language as tl

from attn_triton.kernels.elements import unpack_fp4, widen_pair


@triton.jit
def page_numbers(start, floor, limit, pages, key_start, PAGED: tl.constexpr, PAGE: tl.constexpr,
                  BLOCK_N: tl.constexpr):  # fmt: skip
    """Pages of keys start .. start + BLOCK_N, as they are listed: a scalar where one page holds the block, else [N].

    Nothing outside [floor, limit) is read. Packed keys are one page, which begins at `key_start`.
    """
    if PAGED and PAGE % BLOCK_N == 0:
        return tl.load(pages + start // PAGE, mask=start < limit, other=0)
    elif PAGED:
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(pages + keys // PAGE, mask=(keys >= floor) & (keys < limit), other=0)
    else:
        return key_start


@triton.jit
def places(start, PAGED: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Place in its page of each key, i32[N]."""
    if PAGED and PAGE % BLOCK_N == 0:
        return start % PAGE + tl.arange(0, BLOCK_N)
    elif PAGED:
        return (start + tl.arange(0, BLOCK_N)) % PAGE
    else:
        return start + tl.arange(0, BLOCK_N)


@triton.jit
def _read(pointers, live, column, MASKED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """[N, BLOCK] of which COLUMNS exist. Rows that are not `live` and columns that do not exist are zero."""
    if MASKED and COLUMNS != BLOCK:
        return tl.load(pointers, mask=live[:, None] & (column[None, :] < COLUMNS), other=0)
    elif MASKED:
        return tl.load(pointers, mask=live[:, None], other=0)
    elif COLUMNS != BLOCK:
        return tl.load(pointers, mask=column[None, :] < COLUMNS, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _scale_words(beside, live, WORDS: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
                 BLOCK_D: tl.constexpr):  # fmt: skip
    """FP4: the scales of each key, four in a word, i32[N, BLOCK_D / 64]. `beside` [N] are pointers to words (WORDS) or bytes."""
    w = tl.arange(0, BLOCK_D // 64)
    if WORDS:
        return _read(beside[:, None] + w[None, :], live, w, MASKED, D // 64, BLOCK_D // 64)
    else:
        b = 4 * w[:, None] + tl.arange(0, 4)[None, :]
        mask = live[:, None, None] & (b[None, :, :] < D // 16)
        bytes_ = tl.load(beside[:, None, None] + b[None, :, :], mask=mask, other=0)
        # a sum also hides the 8-bit load from the compiler, which would give the operands of the product a layout for it
        return tl.sum(bytes_.to(tl.int32) << (8 * (b % 4))[None, :, :], 2)


@triton.jit
def byte_of_column(anything, num_rows, KIND: tl.constexpr, BLOCK_D: tl.constexpr):
    """FP4: which byte of its word is the scale of column c of four codes, i32[BLOCK_D / 4]. Other kinds: 0.

    It is a load that never reads: the compiler takes the layout of a matrix operand up to loads, but not to ranges.
    """
    if KIND == 3:
        c = tl.arange(0, BLOCK_D // 4)
        return tl.load(anything + c, mask=(c >= 0) & (num_rows < 0), other=c // 4 % 4)
    else:
        return 0


@triton.jit
def load_tile(
    base, blocks, scale_byte, page, place, live, stride_p, stride_t, block_p, block_t,
    KIND: tl.constexpr, ASM: tl.constexpr, KEYS: tl.constexpr, WORDS: tl.constexpr, PAGED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of K or V in 1, 2 or 4 parts, each [N, BLOCK_D / parts]. Rows that are not `live` are zero.

    8- and 4-bit kinds are read as u16 of two or four neighbours: 16-bit elements can be loaded from shared memory in the
    layout of a matrix operand, transposed or not, and are unpacked there.
    """
    PACK: tl.constexpr = (1, 2, 2, 4)[KIND]
    d = tl.arange(0, BLOCK_D // PACK)
    if PAGED:
        offset = page * stride_p + place * stride_t
    else:
        offset = (page + place) * stride_t
    x = _read(base + (offset[:, None] + d[None, :]), live, d, MASKED, D // PACK, BLOCK_D // PACK)
    if KIND == 0:
        return (x,)
    elif KIND == 3:
        beside = blocks + (page * block_p + place * block_t)
        words = _scale_words(beside, live, WORDS, MASKED, BLOCK_N, D, BLOCK_D)
        words = tl.broadcast_to(words[:, :, None], (BLOCK_N, BLOCK_D // 64, 16)).reshape(BLOCK_N, BLOCK_D // 4)
        return unpack_fp4(x, words, tl.broadcast_to(scale_byte[None, :], (BLOCK_N, BLOCK_D // 4)), ASM)
    else:
        return widen_pair(x, KIND, ASM, KEYS)
