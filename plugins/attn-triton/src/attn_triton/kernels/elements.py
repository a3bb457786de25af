# mypy: ignore-errors
# ruff: noqa: RET505 - a return in a compile-time branch needs its else; loops are compiled
"""Element formats inside kernels: 8- and 4-bit values are unpacked with integer operations, or conversions where there are any.

A code becomes the bits of a 16-bit float whose exponent is too small by a constant; that constant factor is exact and is
multiplied into the softmax scale (keys) or into the result (values). No conversion instruction is needed, so that every
architecture reads every format. Kinds: 0 plain, 1 fp8_e4m3, 2 fp8_e5m2, 3 fp4 (e2m1 with an e4m3 scale for 16 values).
"""

import triton
import triton.language as tl

PLAIN: tl.constexpr = tl.constexpr(0)
E4M3: tl.constexpr = tl.constexpr(1)
E5M2: tl.constexpr = tl.constexpr(2)
FP4: tl.constexpr = tl.constexpr(3)


@triton.jit
def widen(x, KIND: tl.constexpr):
    """Stored bytes u8[..] as raw fp16[..]: real value = raw * 2 ** raw_exponent(KIND)."""
    u = x.to(tl.uint16)
    if KIND == 1:
        bits = ((u & 0x80) << 8) | ((u & 0x7F) << 7)
    else:
        bits = u << 8
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def widen_pair(x, KIND: tl.constexpr, ASM: tl.constexpr, KEYS: tl.constexpr):
    """u16[N, W] of two stored bytes each, as two fp16[N, W] with all 2 W elements between them.

    The first holds the even and the second the odd bytes, raw (see :func:`widen`). With ``ASM`` (conversion instructions of
    sm89 and newer) values are real, and for KEYS, where neighbouring columns share a register, the first holds bytes
    4 j, 4 j + 1 and the second 4 j + 2, 4 j + 3 of columns 2 j, 2 j + 1: :func:`pair_column` gives the order.
    """
    if not ASM:
        return widen(x & 0xFF, KIND), widen(x >> 8, KIND)
    elif KEYS and KIND == 1:
        return _two(x, "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }")
    elif KEYS:
        return _two(x, "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e5m2x2 $0, l; cvt.rn.f16x2.e5m2x2 $1, h; }")
    elif KIND == 1:
        return _two(
            x,
            "{ .reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h; prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; }",
        )
    else:
        return _two(x, "{ .reg .b32 a; shl.b32 a, $2, 8; and.b32 $0, a, 0xFF00FF00; and.b32 $1, $2, 0xFF00FF00; }")


@triton.jit
def _two(x, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(CODE, "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def part_column(c, KIND: tl.constexpr, ASM: tl.constexpr):
    """Element of a head in column `c` of the first part of keys; part i is i (8 bits with ``ASM``: 2) elements further on."""
    if KIND == 0:
        return c
    elif KIND == 3:
        return c * 4
    elif ASM:
        return c // 2 * 4 + c % 2
    else:
        return c * 2


@triton.jit
def unpack_fp4(x, words, place, ASM: tl.constexpr):
    """i16[N, W] of four codes each; their e4m3 scale is byte `place` of their word, both i32[N, W]. Four fp16[N, W].

    Part i holds elements 4 c + i, exact but for a constant factor, 2 ** raw_exponent(3). A code becomes the upper byte of an
    fp16: sign, and its other three bits across exponent and mantissa, too small by 2 ** 14. Products with a scale have 6 bits
    and none is less than 2 ** -24, so that fp16 holds them all. With ``ASM`` two values of x that share a register are
    unpacked at once: e and o are upper bytes of even and odd codes. The compiler's layout decides which two: they can be
    neighbours in a row, columns far apart or different keys, so that each takes its own byte of its own word.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, e, o, t, u, a, b, c, d; .reg .b16 l, h;
            lop3.b32 s, 0x0F, $7, $8, 0xCA; prmt.b32 s, $5, $6, s; mov.b32 {l, h}, s; cvt.rn.f16x2.e4m3x2 s, l;
            shl.b32 e, $4, 4; shl.b32 t, $4, 1; and.b32 e, e, 0x80808080; and.b32 t, t, 0x0E0E0E0E; or.b32 e, e, t;
            shr.u32 u, $4, 3; and.b32 o, $4, 0x80808080; and.b32 u, u, 0x0E0E0E0E; or.b32 o, o, u;
            prmt.b32 a, e, 0, 0x2404; and.b32 c, e, 0xFF00FF00; prmt.b32 b, o, 0, 0x2404; and.b32 d, o, 0xFF00FF00;
            mul.f16x2 $0, a, s; mul.f16x2 $1, b, s; mul.f16x2 $2, c, s; mul.f16x2 $3, d, s; }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [x, words, place * 0x11 + 0x40],  # 4 bits select from the first word, the next 4 from the second
            (tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        u = x.to(tl.uint16, bitcast=True)
        scale = widen(((words >> (8 * place)) & 0xFF).to(tl.uint8), 1) * 32768.0
        a, b = _code(u << 12, u << 9) * scale, _code(u << 8, u << 5) * scale
        return a, b, _code(u << 4, u << 1) * scale, _code(u, u >> 3) * scale


@triton.jit
def _code(sign, size):
    """e2m1 as fp16, too small by 2 ** 14: the sign is the top bit of `sign`, the rest bits 9 to 11 of `size`, both u16."""
    return ((sign & 0x8000) | (size & 0x0E00)).to(tl.float16, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """f32 -> e4m3 byte as i32: nearest even, saturating at 448, NaN stays NaN."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 960 = (127 - 7) << 3
    tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # the ulp of 2 ** 14 is e4m3's smallest step
    code = tl.where(size < 0.015625, tiny, normal)
    return sign | tl.where(x == x, code, 0x7F)


@triton.jit
def encode_e5m2(x):
    """f32 -> e5m2 byte as i32: nearest even, saturating at 57344, NaN stays NaN."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 57344.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - 448  # 448 = (127 - 15) << 2
    tiny = (size + 128.0).to(tl.int32, bitcast=True) - 0x43000000  # the ulp of 2 ** 7 is e5m2's smallest step
    code = tl.where(size < 0.00006103515625, tiny, normal)
    return sign | tl.where(x == x, code, 0x7F)


@triton.jit
def encode_e2m1(x):
    """f32 -> 4-bit code as i32: nearest, ties to the even code, saturating at 6."""
    size = tl.abs(x)
    code = (x.to(tl.int32, bitcast=True) >> 28) & 8
    code += (size > 0.25).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    code += (size >= 0.75).to(tl.int32) + (size >= 1.75).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code


def raw_exponent(kind: int, asm: bool) -> int:
    """Exponent of the factor that is left out of fp16 values, without and with conversion instructions (``asm``)."""
    return {3: 14}.get(kind, 0) if asm else {1: 8, 3: 7}.get(kind, 0)
