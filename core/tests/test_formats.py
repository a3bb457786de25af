"""Formats against a slow definition: a table of all values, the nearest one, ties to the even code."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core import formats
from attn_core.errors import BindError, UsageError
from attn_core.formats import dequantize, quantize, torch_dtype
from attn_core.layers import Scale

# --- the slow definition: exponent bits, mantissa bits, bias; magnitudes by code ------------------------------------------
LAYOUT = {"fp8_e4m3": (4, 3, 7), "fp8_e5m2": (5, 2, 15), "fp4": (2, 1, 1)}
SIGN = {"fp8_e4m3": 128, "fp8_e5m2": 128, "fp4": 8}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp4": 6.0}


def value_of(code: int, dtype: str) -> float:
    exponent_bits, mantissa_bits, bias = LAYOUT[dtype]
    sign = -1.0 if code & SIGN[dtype] else 1.0
    code &= SIGN[dtype] - 1
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if dtype == "fp8_e4m3" and code == 127:
        return math.nan
    if dtype == "fp8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    assert exponent < 1 << exponent_bits
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@lru_cache
def magnitudes(dtype: str) -> list[float]:
    return [v for v in (value_of(code, dtype) for code in range(SIGN[dtype])) if math.isfinite(v)]


def encode(x: float, dtype: str) -> int:
    """Nearest magnitude, ties to the even code, saturating."""
    table = magnitudes(dtype)
    size = min(abs(x), table[-1])
    above = bisect_left(table, size)
    code = above
    if above and table[above] != size:
        low, high = size - table[above - 1], table[above] - size
        code = above - 1 if low < high or (low == high and above % 2) else above
    return code | (SIGN[dtype] if math.copysign(1.0, x) < 0 else 0)


def slow_fp4(row: list[float], scale: float) -> tuple[list[int], list[int]]:
    """(codes, e4m3 codes of the blocks) of one row, in fp32 steps."""
    values = np.asarray(row, dtype=np.float32) / np.float32(scale)
    codes, blocks = [], []
    for start in range(0, len(values), 16):
        group = values[start : start + 16]
        block = encode(float(np.abs(group).max() / np.float32(6)), "fp8_e4m3")
        factor = np.float32(value_of(block, "fp8_e4m3"))
        blocks.append(block)
        codes += [encode(float(v / factor), "fp4") if factor else 0 for v in group]
    return codes, blocks


def nibbles(data: torch.Tensor) -> list[int]:
    """Low nibble first."""
    return [code for byte in data.flatten().tolist() for code in (byte & 15, byte >> 4)]


def test_names():
    assert torch_dtype("float8_e4m3fn") is torch.float8_e4m3fn
    assert torch_dtype("fp4") is torch.uint8
    assert formats.dtype_name(torch.bfloat16) == "bf16"
    with pytest.raises(UsageError, match="int3"):
        torch_dtype("int3")


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_reads_every_byte(dtype):
    data = torch.arange(256, dtype=torch.uint8).view(torch_dtype(dtype))
    want = torch.tensor([value_of(code, dtype) for code in range(256)])
    assert torch.equal(dequantize(data, None, dtype).nan_to_num(7e9), want.nan_to_num(7e9))
    assert torch.equal(data.float().nan_to_num(7e9), want.nan_to_num(7e9)), "the path of other devices"


def test_fp4_reads_every_byte_low_nibble_first():
    data = torch.arange(256, dtype=torch.uint8)
    want = torch.tensor([[value_of(b & 15, "fp4"), value_of(b >> 4, "fp4")] for b in range(256)])
    assert torch.equal(formats._decode_e2m1(data), want)
    table = formats._fp4_table().view(torch.float32).view(256, 2)
    assert torch.equal(table, want)
    assert torch.equal(torch.signbit(table), torch.signbit(want))


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_rounds_to_nearest_even_and_saturates(dtype):
    table = magnitudes(dtype)
    points = [
        *table,
        *[(a + b) / 2 for a, b in pairwise(table)],
        1e30,
        math.inf,
        LARGEST[dtype] * 1.01,
    ]
    near = [np.nextafter(np.float32(p), np.float32(side)) for p in points if math.isfinite(p) for side in (0, 1e38)]
    x = torch.tensor([float(p) for p in points] + [float(p) for p in near])
    x = torch.cat((x, -x))
    data, blocks = quantize(x, dtype)
    assert blocks is None
    assert data.view(torch.uint8).tolist() == [encode(v, dtype) for v in x.tolist()]
    assert quantize(torch.tensor([math.nan]), dtype)[0].float().isnan().all(), "NaN stays visible"


def test_fp4_rounds_to_nearest_even():
    table = magnitudes("fp4")
    points = [*table, *[(a + b) / 2 for a, b in pairwise(table)], 6.1, 1e30, math.inf]
    near = [float(np.nextafter(np.float32(p), np.float32(side))) for p in points for side in (0, 1e38)]
    x = torch.tensor(points + near)
    x = torch.cat((x, -x))
    assert formats._encode_e2m1(x).tolist() == [encode(v, "fp4") for v in x.tolist()]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-4e4, max_value=4e4),
        min_size=32,
        max_size=32,
    ),
    st.sampled_from([1.0, 0.02, 3.7]),
)
def test_fp4_block16_equals_the_slow_definition(row, scale):
    data, blocks = quantize(torch.tensor([row]), "fp4", torch.tensor([scale]))
    codes, block_codes = slow_fp4(row, scale)
    assert data.shape == (1, 16)
    assert blocks.shape == (1, 2)
    assert blocks.view(torch.uint8).flatten().tolist() == block_codes
    assert nibbles(data) == codes
    want = [
        np.float32(value_of(code, "fp4") * value_of(block_codes[i // 16], "fp8_e4m3")) * np.float32(scale)
        for i, code in enumerate(codes)
    ]
    assert dequantize(data, blocks, "fp4", torch.tensor([scale])).flatten().tolist() == [float(v) for v in want]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4),
    st.sampled_from(["fp8_e4m3", "fp8_e5m2"]),
    st.sampled_from([0.1, 1.0, 8.0]),
)
def test_fp8_with_a_scale_equals_the_slow_definition(row, dtype, scale):
    data, _ = quantize(torch.tensor(row), dtype, torch.tensor([scale]))
    with np.errstate(over="ignore"):
        want = [encode(float(np.float32(v) / np.float32(scale)), dtype) for v in row]
    assert data.view(torch.uint8).tolist() == want


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp4"])
def test_quantising_real_values_again_changes_nothing(dtype):
    x = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(1)) * 4
    data, blocks = quantize(x, dtype)
    again, more = quantize(dequantize(data, blocks, dtype), dtype)
    assert torch.equal(again.view(torch.uint8), data.view(torch.uint8))
    assert blocks is None or torch.equal(more.view(torch.uint8), blocks.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "fp4"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_scales_a_head_a_tensor_or_a_number(dtype, out):
    x = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(2))
    for value in (0.25, 0.3):
        one, blocks = quantize(x, dtype, torch.tensor([value]))
        for other in (value, Scale(torch.tensor([value]), value), torch.full((3,), value), torch.tensor(value)):
            data, more = quantize(x, dtype, other)
            assert torch.equal(data.view(torch.uint8), one.view(torch.uint8))
            assert torch.equal(
                dequantize(data, more, dtype, other, out), dequantize(one, blocks, dtype, torch.tensor([value]), out)
            )
    per_head = torch.tensor([0.5, 1.0, 4.0])
    data, blocks = quantize(x, dtype, per_head)
    for head in range(3):
        single, part = quantize(x[:, head], dtype, per_head[head : head + 1])
        assert torch.equal(data[:, head].view(torch.uint8), single.view(torch.uint8))
        assert blocks is None or torch.equal(blocks[:, head].view(torch.uint8), part.view(torch.uint8))
    assert (dequantize(data, blocks, dtype, per_head) - x).abs().max() < 0.5


@pytest.mark.parametrize("k_scale", [0.1, 1.0, 8.0])
def test_c64_error_of_fp8_stays_relative_for_every_scale(k_scale):
    """C64: the scale is applied on the way in and out, so the relative error does not depend on it."""
    x = torch.randn(64, 2, 128, generator=torch.Generator().manual_seed(3)) * k_scale * 20
    data, _ = quantize(x, "fp8_e4m3", Scale(torch.tensor([k_scale]), k_scale))
    back = dequantize(data, None, "fp8_e4m3", torch.tensor([k_scale]))
    close = (back - x).abs() <= x.abs() * 2**-4 + k_scale * 2**-9
    assert close.all()
    raw = dequantize(data, None, "fp8_e4m3")
    assert k_scale == 1.0 or not torch.allclose(raw, x, rtol=0.1), "dropping the scale must be visible"


def test_stored_type_passes_through():
    x = torch.ones(2, 1, 16).to(torch.float8_e4m3fn)
    assert quantize(x, "fp8_e4m3")[0] is x
    y = torch.ones(2, 1, 16, dtype=torch.bfloat16)
    assert quantize(y, "bf16")[0] is y


def test_small_and_special_blocks():
    data, blocks = quantize(torch.zeros(1, 16), "fp4")
    assert dequantize(data, blocks, "fp4").eq(0).all()
    data, blocks = quantize(torch.full((1, 16), 1e-8), "fp4")
    assert dequantize(data, blocks, "fp4").eq(0).all(), "below the smallest block scale: zero, not NaN"
    data, blocks = quantize(torch.full((1, 16), math.inf), "fp4")
    assert dequantize(data, blocks, "fp4").eq(448 * 6).all()
    data, blocks = quantize(torch.tensor([[math.nan] + [1.0] * 15 + [1.0] * 16]), "fp4")
    back = dequantize(data, blocks, "fp4")
    assert back[0, :16].isnan().all()
    assert back[0, 16:].isfinite().all()


def test_refusals_say_what_is_needed():
    with pytest.raises(BindError, match="multiple of 16; have 24"):
        quantize(torch.ones(2, 24), "fp4")
    with pytest.raises(BindError, match=r"needs \[2, 2\], have none"):
        dequantize(torch.zeros(2, 16, dtype=torch.uint8), None, "fp4")
    with pytest.raises(BindError, match="kv heads"):
        quantize(torch.ones(2, 3, 16), "fp8_e4m3", torch.ones(2))


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "fp8_e5m2", "fp4"])
def test_nothing_waits_for_the_device(dtype):
    """A meta tensor has no values: whatever needs one raises."""
    x = torch.empty(4, 2, 32, device="meta", dtype=torch.bfloat16)
    scale = torch.empty(1, device="meta")
    data, blocks = quantize(x, dtype, scale)
    assert dequantize(data, blocks, dtype, scale, torch.bfloat16).shape == x.shape
