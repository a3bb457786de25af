"""Published element formats of a cache: quantise and dequantise, vectorised, without a host sync.

``plain`` stores one element type (fp32, bf16, fp16, fp8_e4m3, fp8_e5m2). ``fp4_block16`` stores e2m1, two values a byte
with the *low* nibble first, and one e4m3 scale for each 16 values along the head dim; there is no further scale but the
layer's own. Everywhere **real = stored * scale** (for fp4: code * block * scale), computed in fp32. Rounding is to
nearest, ties to even. The 8-bit and 4-bit types saturate at their finite range: an overflow never becomes inf or NaN.
A NaN stays a NaN (in fp4 it makes its block NaN).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attn_core.dtypes import canonical
from attn_core.errors import BindError

if TYPE_CHECKING:
    from attn_core.layers import Scale

#: Values that share one scale in ``fp4_block16``.
BLOCK = 16
#: The largest e2m1 magnitude.
FP4_MAX = 6.0

_TORCH: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp4": torch.uint8,
}
_FINITE_MAX: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# Between two neighbouring e2m1 magnitudes: a tie goes to the one with an even code, so half of the limits are inclusive.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def torch_dtype(name: str) -> torch.dtype:
    """The torch type that stores elements called `name` (``fp4`` is packed in uint8). Raises :class:`UsageError`."""
    return _TORCH[canonical(name)]


def dtype_name(dtype: torch.dtype) -> str:
    """The canonical name of a torch type: ``bf16`` for torch.bfloat16. Raises :class:`UsageError` for other types."""
    return canonical(str(dtype))


def scale_tensor(scale: Scale | torch.Tensor | float | None, x: torch.Tensor) -> torch.Tensor | float | None:
    """`scale` in a shape that broadcasts over x[.., Hk, D]: a float, f32[1], or f32[Hk, 1].

    Raises :class:`BindError` if it has neither one value nor one a KV head.
    """
    tensor = getattr(scale, "tensor", scale)
    if tensor is None or isinstance(tensor, int | float):
        return tensor
    assert isinstance(tensor, torch.Tensor)
    if tensor.numel() == 1:
        return tensor.reshape(1)
    if x.dim() < 2 or tensor.shape != (x.shape[-2],):
        raise BindError(
            "a scale does not fit the tensor it belongs to",
            f"scale    f32{list(tensor.shape)}",
            f"tensor   {list(x.shape)} as [.., kv heads, head dim]",
            fix="give one value (f32[1]) or one value a KV head (f32[kv heads])",
        )
    return tensor[:, None]


def quantize(
    x: torch.Tensor, dtype: str, scale: Scale | torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x[.., D] as (data, blocks): stored elements, and for fp4 the block scales (None otherwise).

    `scale` is one value or one a KV head of x[.., Hk, D]; it is divided out in fp32. ``fp4`` gives data u8[.., D / 2] and
    blocks e4m3[.., D / 16]. An `x` that is of the stored type already and has no scale is returned as it is.
    Raises :class:`BindError` for a width that fp4 cannot hold or a scale that does not fit.
    """
    name = canonical(dtype)
    target = _TORCH[name]
    factor = scale_tensor(scale, x)
    if factor is None and x.dtype == target and name != "fp4":
        return x, None
    if factor is not None or x.dtype.itemsize == 1:
        x = x.to(torch.float32)
    if factor is not None:
        x = x / factor
    if name == "fp4":
        return _quantize_fp4(x.to(torch.float32))
    limit = _FINITE_MAX.get(target)
    if limit is not None:
        x = x.clamp(-limit, limit)
    return x.to(target), None


def dequantize(
    data: torch.Tensor,
    blocks: torch.Tensor | None,
    dtype: str,
    scale: Scale | torch.Tensor | float | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The real values of stored elements, in `out_dtype`: the inverse of :func:`quantize` up to rounding.

    data[.., D] of the stored type, or u8[.., D / 2] with blocks e4m3[.., D / 16] for ``fp4``. The product with `scale` is
    made in fp32 and rounded once. Raises :class:`BindError` if blocks are missing or of the wrong shape.
    """
    name = canonical(dtype)
    if name == "fp4":
        values = _unpack_fp4(data, _check_blocks(data, blocks))
    elif data.dtype in _FINITE_MAX and data.device.type == "cpu":
        return _lookup_fp8(data, scale, out_dtype)
    elif scale is None:
        return data.to(out_dtype)
    else:
        values = data.to(torch.float32)
    factor = scale_tensor(scale, values)
    return (values if factor is None else values * factor).to(out_dtype)


# --- fp8 ----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _fp8_table(dtype: torch.dtype) -> torch.Tensor:
    """f32[256]: the value of each byte. On a CPU a look-up is several times faster than torch's own conversion."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)


def _lookup_fp8(data: torch.Tensor, scale: Scale | torch.Tensor | float | None, out_dtype: torch.dtype) -> torch.Tensor:
    index = data.view(torch.uint8).to(torch.int32).reshape(-1)
    factor = scale_tensor(scale, data)
    table = _fp8_table(data.dtype)
    if isinstance(factor, torch.Tensor) and factor.numel() > 1:
        values = table.index_select(0, index).view(data.shape)
        return (values * factor).to(out_dtype)
    if factor is not None:
        table = table * factor  # one value for all: scale the 256 entries instead
    return table.to(out_dtype).index_select(0, index).view(data.shape)


# --- fp4 ----------------------------------------------------------------------------------------------------------------


def _quantize_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f32[.., D] -> (u8[.., D / 2], e4m3[.., D / 16])."""
    width = x.shape[-1]
    if width % BLOCK:
        raise BindError(
            f"format fp4_block16 needs a head dim that is a multiple of {BLOCK}; have {width}",
            fix="use --kv-cache-dtype fp8_e4m3 for this model",
        )
    grouped = x.reshape(*x.shape[:-1], width // BLOCK, BLOCK)
    limit = _FINITE_MAX[torch.float8_e4m3fn]
    blocks = (grouped.abs().amax(-1) / FP4_MAX).clamp(max=limit).to(torch.float8_e4m3fn)
    divisor = blocks.to(torch.float32)[..., None]
    unit = torch.where(divisor > 0, grouped / divisor, torch.zeros((), device=x.device))
    codes = _encode_e2m1(unit).view(*x.shape[:-1], width // 2, 2)
    return codes[..., 0] | (codes[..., 1] << 4), blocks


def _encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The 4-bit code of each value as uint8: sign, two exponent bits, one mantissa bit."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for limit in _TIES_DOWN:
        code += magnitude > limit
    for limit in _TIES_UP:
        code += magnitude >= limit
    return code


def _check_blocks(data: torch.Tensor, blocks: torch.Tensor | None) -> torch.Tensor:
    needed = [*data.shape[:-1], data.shape[-1] * 2 // BLOCK]
    if blocks is None or list(blocks.shape) != needed:
        have = "none" if blocks is None else str(list(blocks.shape))
        raise BindError(
            "format fp4_block16 needs one e4m3 scale for 16 values",
            f"data     u8{list(data.shape)} (two values a byte)",
            f"blocks   needs {needed}, have {have}",
        )
    return blocks


@lru_cache(maxsize=1)
def _fp4_table() -> torch.Tensor:
    """i64[256]: the two fp32 values of a byte side by side, so that one look-up moves both."""
    return _decode_e2m1(torch.arange(256, dtype=torch.uint8, device="cpu")).view(torch.int64).view(256)


def _decode_e2m1(data: torch.Tensor) -> torch.Tensor:
    """u8[..] -> f32[.., 2] by arithmetic: an e2m1 code is an fp16 number whose exponent is too small by 14."""
    codes = torch.stack((data & 15, data >> 4), dim=-1).to(torch.int16)
    half = ((codes & 7) << 9) | ((codes & 8) << 12)
    return half.view(torch.float16).to(torch.float32) * 16384.0


def _unpack_fp4(data: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """u8[.., D / 2], e4m3[.., D / 16] -> f32[.., D]."""
    if data.device.type == "cpu":
        pairs = _fp4_table().index_select(0, data.to(torch.int32).reshape(-1)).view(torch.float32)
        factors = _lookup_fp8(blocks, None, torch.float32)
    else:
        pairs, factors = _decode_e2m1(data), blocks.to(torch.float32)
    values = pairs.view(*blocks.shape, BLOCK) * factors[..., None]
    return values.view(*data.shape[:-1], data.shape[-1] * 2)
