# mypy: ignore-errors

"""Merging of partial results: the shares of one row (decode), in base 2 with the sink added once; and two whole results."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "block_m", "max_tokens", "needs_lse"])
def merge_kernel(
    part_out, part_lse, out, lse, splits, query_offsets, sinks, o_st, o_sh, heads, block_m, max_tokens, needs_lse,
    RATIO: tl.constexpr, GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr, SINKS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """part_out f32[n, heads, block_m, DV], part_lse f32[n, heads, block_m] -> out[T, Hq, DV], lse f32[T, Hq] if `needs_lse`.

    Grid: (rows * max_tokens, Hq). Rows with one share were finished by the attention kernel and are left alone.
    """
    row = tl.program_id(0) // max_tokens
    token = tl.program_id(0) % max_tokens
    head = tl.program_id(1)
    first = tl.load(splits + row)
    count = tl.load(splits + row + 1) - first
    begin = tl.load(query_offsets + row)
    if (count <= 1) | (begin + token >= tl.load(query_offsets + row + 1)):
        return
    member = head % RATIO
    program = head // RATIO * HEAD_BLOCKS + member // GROUP
    m = token * GROUP + member % GROUP
    e = tl.arange(0, BLOCK_DV)
    s = tl.arange(0, BLOCK_S)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    total = 0.0
    top = float("-inf")
    for start in tl.range(0, count, BLOCK_S):
        live = start + s < count
        at = ((first + start + s).to(tl.int64) * heads + program) * block_m + m
        logs = tl.load(part_lse + at, mask=live, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(logs, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logs - safe)
        values = tl.load(part_out + at[:, None] * DV + e[None, :], mask=live[:, None] & (e[None, :] < DV), other=0.0)
        alpha = tl.exp2(top - safe)
        acc = acc * alpha + tl.sum(weights[:, None] * values, 0)
        total = total * alpha + tl.sum(weights, 0)
        top = new_top
    empty = top == float("-inf")
    if SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = tl.where(empty, 1.0, total * shrink + tl.exp2(sink - higher))
        acc = acc * shrink
        top = tl.where(empty, top, higher)
    result = acc / tl.where(empty, 1.0, total)
    index = (begin + token).to(tl.int64)
    tl.store(out + index * o_st + head * o_sh + e, result.to(out.dtype.element_ty), mask=e < DV)
    if needs_lse:
        value = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse + index * (heads // HEAD_BLOCKS * RATIO) + head, value)


@triton.jit
def merge_states_kernel(
    a, lse_a, b, lse_b, out, lse, a_st, a_sh, b_st, b_sh, o_st, o_sh, heads, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Two whole results over disjoint keys, out[T, H, DV] and natural-log lse f32[T, H], as one. Grid: (T, H).

    An empty part (lse -inf) has no influence, whatever it holds; two empty parts give 0 and -inf. `out` may be a or b.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_DV)
    live = d < DV
    x = tl.load(a + token * a_st + head * a_sh + d, mask=live, other=0.0).to(tl.float32)
    y = tl.load(b + token * b_st + head * b_sh + d, mask=live, other=0.0).to(tl.float32)
    left = tl.load(lse_a + token * heads + head)
    right = tl.load(lse_b + token * heads + head)
    top = tl.maximum(left, right)
    base = tl.where(top == float("-inf"), 0.0, top)
    of_a = tl.exp(left - base)
    of_b = tl.exp(right - base)
    total = of_a + of_b
    # -0.0 is the neutral element of addition: one non-empty part passes through with its bits
    x = tl.where(of_a != 0, x * of_a, -0.0)
    y = tl.where(of_b != 0, y * of_b, -0.0)
    result = tl.where(total == 0, 0.0, (x + y) / tl.where(total == 0, 1.0, total))
    tl.store(out + token * o_st + head * o_sh + d, result.to(out.dtype.element_ty), mask=live)
    tl.store(lse + token * heads + head, tl.where(total == 0, top, base + tl.log(tl.where(total == 0, 1.0, total))))
