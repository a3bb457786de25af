"""FP4: every code with every scale comes out exact, and scales are read in words only where every word is aligned."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from attn_triton.call import in_words  # noqa: E402
from attn_triton.kernels.elements import raw_exponent, unpack_fp4  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
#: Sizes of the codes 0 to 7; 8 to 15 are the same, negative.
SIZES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@triton.jit
def _unpack_kernel(codes, out, ASM: tl.constexpr):
    """codes i16[4], four codes each -> out f32[256, 16]: scale byte `row` stands in any byte of its word, the others are 0x3D.

    Bytes differ along rows near and far and along columns: whichever two values share a register, their bytes differ.
    """
    row = tl.arange(0, 256)
    column = tl.arange(0, 4)
    x = tl.load(codes + column[None, :] + 0 * row[:, None])
    place = ((row + row // 4 + row // 16 + row // 64)[:, None] + column[None, :]) % 4
    words = 0x3D3D3D3D ^ ((row ^ 0x3D)[:, None] << (8 * place))
    parts = unpack_fp4(x, words, place, ASM)
    for i in tl.static_range(4):
        tl.store(out + 16 * row[:, None] + 4 * column[None, :] + i, parts[i].to(tl.float32))


@pytest.mark.needs_triton
@pytest.mark.parametrize("asm", [False, True])
def test_every_product_is_exact(asm):
    if asm and not (ON_GPU and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("needs conversion instructions: sm89 and newer")
    codes = torch.arange(16, dtype=torch.int32, device=DEVICE).view(4, 4)
    packed = sum(codes[:, i] << (4 * i) for i in range(4)).to(torch.int16)
    out = torch.empty(256, 16, device=DEVICE)
    _unpack_kernel[(1,)](packed, out, ASM=asm)
    sizes = torch.tensor(SIZES + [-size for size in SIZES], device=DEVICE)
    scales = torch.arange(256, device=DEVICE).to(torch.uint8).view(torch.float8_e4m3fn).float()
    known = ~scales.isnan()
    assert int(known.sum()) == 254
    torch.testing.assert_close(
        (out * 2.0 ** raw_exponent(3, asm))[known], (scales[:, None] * sizes)[known], rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("make", "fits"),
    [
        (lambda: torch.zeros(3, 4, 2, 8, dtype=torch.uint8), True),
        (lambda: torch.zeros(3, 4, 2, 4, dtype=torch.uint8), True),
        (lambda: torch.zeros(3, 4, 2, 5, dtype=torch.uint8), False),
        (lambda: torch.zeros(3, 4, 2, 8, dtype=torch.uint8)[..., 2:6], False),
        (lambda: torch.zeros(3, 4, 2, 10, dtype=torch.uint8)[..., :8], False),
    ],
)
def test_scales_in_words(make, fits):
    assert in_words(make()) is fits
