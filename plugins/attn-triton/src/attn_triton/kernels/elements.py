"""Element formats inside kernels: 8- and 4-bit values are unpacked with integer operations only.

A byte becomes the bits of a 16-bit float whose exponent is too small by a constant; that constant factor is exact and is
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
def widen(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Stored bytes u8[..] as raw 16-bit floats: real value = raw * 2 ** raw_exponent(KIND, DTYPE)."""
    u = x.to(tl.uint16)
    if KIND == 1 and DTYPE == tl.float16:
        bits = ((u & 0x80) << 8) | ((u & 0x7F) << 7)
    elif KIND == 1:
        bits = ((u & 0x80) << 8) | ((u & 0x7F) << 4)
    elif DTYPE == tl.float16:
        bits = u << 8
    else:
        bits = ((u & 0x80) << 8) | ((u & 0x7F) << 5)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def widen_pair(x, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """u16[..] of two stored bytes as (even, odd) raw 16-bit floats. ``ASM``: two elements an instruction, NVIDIA only."""
    if not ASM:
        return widen(x & 0xFF, KIND, DTYPE), widen(x >> 8, KIND, DTYPE)
    elif KIND == 1 and DTYPE == tl.float16:
        even: tl.constexpr = "{ .reg .b32 a, b; shl.b32 a, $1, 8; shl.b32 b, $1, 7; and.b32 a, a, 0x80008000; lop3.b32 $0, b, 0x3F803F80, a, 0xEA; }"
        odd: tl.constexpr = "{ .reg .b32 a, b; shr.b32 b, $1, 1; and.b32 a, $1, 0x80008000; lop3.b32 $0, b, 0x3F803F80, a, 0xEA; }"
        return _pair(x, even, DTYPE), _pair(x, odd, DTYPE)
    elif KIND == 1:
        even: tl.constexpr = "{ .reg .b32 a, b; shl.b32 a, $1, 8; shl.b32 b, $1, 4; and.b32 a, a, 0x80008000; lop3.b32 $0, b, 0x07F007F0, a, 0xEA; }"
        odd: tl.constexpr = "{ .reg .b32 a, b; shr.b32 b, $1, 4; and.b32 a, $1, 0x80008000; lop3.b32 $0, b, 0x07F007F0, a, 0xEA; }"
        return _pair(x, even, DTYPE), _pair(x, odd, DTYPE)
    elif DTYPE == tl.float16:
        even: tl.constexpr = "{ .reg .b32 a; shl.b32 a, $1, 8; and.b32 $0, a, 0xFF00FF00; }"
        odd: tl.constexpr = "{ and.b32 $0, $1, 0xFF00FF00; }"
        return _pair(x, even, DTYPE), _pair(x, odd, DTYPE)
    else:
        even: tl.constexpr = "{ .reg .b32 a, b; shl.b32 a, $1, 8; shl.b32 b, $1, 5; and.b32 a, a, 0x80008000; lop3.b32 $0, b, 0x0FE00FE0, a, 0xEA; }"
        odd: tl.constexpr = "{ .reg .b32 a, b; shr.b32 b, $1, 3; and.b32 a, $1, 0x80008000; lop3.b32 $0, b, 0x0FE00FE0, a, 0xEA; }"
        return _pair(x, even, DTYPE), _pair(x, odd, DTYPE)


@triton.jit
def _pair(x, CODE: tl.constexpr, DTYPE: tl.constexpr):
    if DTYPE == tl.float16:
        return tl.inline_asm_elementwise(CODE, "=r,r", [x], tl.float16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(CODE, "=r,r", [x], tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def unpack_fp4(codes, blocks, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """codes u8[N, BLOCK_D / 2] and e4m3 bytes u8[N, BLOCK_D / 16] as exact fp16[N, BLOCK_D]."""
    u = codes.to(tl.uint16)
    low = ((u & 7) << 9) | ((u & 8) << 12)
    high = ((u & 0x70) << 5) | ((u & 0x80) << 8)
    values = tl.interleave(low, high).to(tl.float16, bitcast=True) * 16384.0
    factors = widen(blocks, 1, tl.float16) * 256.0
    spread = tl.broadcast_to(factors[:, :, None], (N, BLOCK_D // 16, 16)).reshape(N, BLOCK_D)
    return (values.to(tl.float16) * spread.to(tl.float16)).to(tl.float16)


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


def raw_exponent(kind: int, half: bool) -> int:
    """Exponent of the factor that :func:`widen` leaves out; ``half`` is whether raw values are fp16 (else bf16)."""
    if kind == 1:
        return 8 if half else 120
    if kind == 2:
        return 0 if half else 112
    return 0
