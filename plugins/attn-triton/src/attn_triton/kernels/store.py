# mypy: ignore-errors

"""Writing new keys and values: scatter to slots, quantising on the way. Slot -1 writes nothing."""

import triton
import triton.language as tl

from attn_triton.kernels.elements import encode_e2m1, encode_e4m3, encode_e5m2, widen


@triton.jit
def _write(x, x_st, x_sh, pages, s_p, s_t, s_h, blocks, b_p, b_t, b_h, scale, token, page, place, first_head, heads,
           KIND: tl.constexpr, SCALES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    h = first_head + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    live = (h[:, None] < heads) & (d[None, :] < D)
    values = tl.load(x + token * x_st + h[:, None] * x_sh + d[None, :], mask=live, other=0.0)
    base = pages + page * s_p + place * s_t + h[:, None].to(tl.int64) * s_h
    if KIND == 0:
        tl.store(base + d[None, :], values.to(pages.dtype.element_ty), mask=live)
    else:
        values = values.to(tl.float32)
        if SCALES != 0:
            at = h if SCALES == 2 else tl.zeros_like(h)
            factor = tl.load(scale + at, mask=h < heads, other=1.0)
            values = tl.math.div_rn(values, tl.broadcast_to(factor[:, None], (BLOCK_H, BLOCK_D)))
        if KIND == 1:
            tl.store(base + d[None, :], encode_e4m3(values).to(tl.uint8), mask=live)
        elif KIND == 2:
            tl.store(base + d[None, :], encode_e5m2(values).to(tl.uint8), mask=live)
        else:
            grouped = values.reshape(BLOCK_H, BLOCK_D // 16, 16)
            sixth = tl.full([BLOCK_H, BLOCK_D // 16], 6.0, tl.float32)
            code = encode_e4m3(tl.math.div_rn(tl.max(tl.abs(grouped), 2), sixth)).to(tl.uint8)
            step = widen(code, 1).to(tl.float32) * 256.0
            divisor = tl.broadcast_to(tl.where(step > 0, step, 1.0)[:, :, None], (BLOCK_H, BLOCK_D // 16, 16))
            unit = tl.math.div_rn(grouped, divisor)
            unit = tl.where((step > 0)[:, :, None], unit, 0.0)
            pairs = encode_e2m1(unit).reshape(BLOCK_H, BLOCK_D // 2, 2)
            low, high = tl.split(pairs)
            half = tl.arange(0, BLOCK_D // 2)
            tl.store(base + half[None, :], (low | (high << 4)).to(tl.uint8),
                     mask=(h[:, None] < heads) & (half[None, :] < D // 2))  # fmt: skip
            b = tl.arange(0, BLOCK_D // 16)
            at = blocks + page * b_p + place * b_t + h[:, None].to(tl.int64) * b_h + b[None, :]
            tl.store(at, code, mask=(h[:, None] < heads) & (b[None, :] < D // 16))


@triton.jit(do_not_specialize=["heads"])
def store_kernel(
    k, v, to_k, to_v, k_blocks, v_blocks, slots, k_scale, v_scale, heads,
    k_st, k_sh, v_st, v_sh, tk_sp, tk_st, tk_sh, tv_sp, tv_st, tv_sh, kb_sp, kb_st, kb_sh, vb_sp, vb_st, vb_sh,
    PAGE: tl.constexpr, KIND: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """k[T, Hk, D], v[T, Hk, DV] -> pages[slot // PAGE, slot % PAGE]. Grid: (T, ceil(Hk / BLOCK_H))."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    page = slot // PAGE
    place = slot % PAGE
    first_head = tl.program_id(1) * BLOCK_H
    _write(k, k_st, k_sh, to_k, tk_sp, tk_st, tk_sh, k_blocks, kb_sp, kb_st, kb_sh, k_scale, token, page, place,
           first_head, heads, KIND, K_SCALES, D, BLOCK_D, BLOCK_H)  # fmt: skip
    _write(v, v_st, v_sh, to_v, tv_sp, tv_st, tv_sh, v_blocks, vb_sp, vb_st, vb_sh, v_scale, token, page, place,
           first_head, heads, KIND, V_SCALES, DV, BLOCK_DV, BLOCK_H)  # fmt: skip
