"""Element types for the kit: torch dtypes by name, and an fp8/fp4 codec of its own that shares no code with the store.

fp4 is e2m1 (OCP Microscaling Formats 1.0, section 5.3.3): sign, two exponent bits, one mantissa bit; the magnitudes are
0, 0.5, 1, 1.5, 2, 3, 4, 6. Two values share a byte, the even one in the low nibble, and 16 values share one e4m3 scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

#: Values of one FP4 block scale.
FP4_BLOCK = 16
#: Magnitudes of the eight e2m1 codes without sign; code + 8 is the negative value.
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp4": torch.uint8,
}

_NAN_BYTE = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7F}
_BIG = {"fp32": 1e30, "bf16": 1e30, "fp16": 6e4}
_BIG_BYTE = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}
_INF_BYTE = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7C}  # e4m3fn has no infinity: NaN stands in


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that stores elements of `name` (``uint8`` for fp4, two values a byte)."""
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The contract's name of a torch dtype: ``dtype_name(torch.bfloat16) == "bf16"``. Raises KeyError for others."""
    for name, candidate in TORCH_DTYPES.items():
        if candidate == dtype and name != "fp4":
            return name
    raise KeyError(f"{dtype} has no name in the contract")


def poison_bytes(name: str, poison: str) -> int | float:
    """The value that fills unused slots: a byte for fp8, a number otherwise. ``poison``: nan, inf, big or zero."""
    if poison == "zero":
        return 0
    if name in _NAN_BYTE:
        return {"nan": _NAN_BYTE, "inf": _INF_BYTE, "big": _BIG_BYTE}[poison][name]
    return {"nan": float("nan"), "inf": float("inf"), "big": _BIG.get(name, 0.0)}[poison]


def fill_poison(tensor: torch.Tensor, name: str, poison: str) -> None:
    """Fill `tensor` (elements of type `name`) with `poison`, in place; fp4 codes become 6.0 and the scales do the harm."""
    value = poison_bytes("fp8_e4m3" if name == "fp4" else name, poison)
    if name == "fp4":
        tensor.fill_(0x77 if poison != "zero" else 0)
    elif name in _NAN_BYTE:
        tensor.view(torch.uint8).fill_(int(value))
    else:
        tensor.fill_(value)


def random_values(shape: tuple[int, ...], name: str, generator: torch.Generator) -> torch.Tensor:
    """Random stored values of type `name` around unit size, on the CPU. fp4 has its own function."""
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    return values.to(TORCH_DTYPES[name])


def random_fp4(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random packed codes u8[..., D/2] and block scales e4m3[..., D/16] for values [..., D].

    Every block holds a magnitude of 6, so that a quantiser that scales by amax/6 finds the same block scale again and
    the round trip is exact. Scales have at most two significant bits: products stay exact in bf16.
    """
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    blocks = codes.view(*shape[:-1], shape[-1] // FP4_BLOCK, FP4_BLOCK)
    blocks[..., 3] = blocks[..., 3] | 7  # code 7 or 15: plus or minus 6
    choices = torch.tensor([0.125, 0.1875, 0.25, 0.375, 0.5])
    index = torch.randint(0, len(choices), blocks.shape[:-1], generator=generator)
    return pack_fp4(codes), choices[index].to(torch.float8_e4m3fn)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Codes u8[..., D] packed two a byte, even element in the low nibble: u8[..., D/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """The e2m1 numbers f64[..., D] of packed bytes u8[..., D/2], without block scales."""
    table = torch.tensor([*FP4_MAGNITUDES, *(-m for m in FP4_MAGNITUDES)], dtype=torch.float64, device=packed.device)
    low, high = table[(packed & 15).long()], table[(packed >> 4).long()]
    return torch.stack((low, high), dim=-1).flatten(-2)


def dequantise(values: torch.Tensor, blocks: torch.Tensor | None = None) -> torch.Tensor:
    """Stored values as float64, before the layer's scale: fp4 when `blocks` are given, else a plain conversion."""
    if blocks is None:
        return values.float().double() if values.dtype != torch.float64 else values
    spread = blocks.float().double().repeat_interleave(FP4_BLOCK, dim=-1)
    return unpack_fp4(values) * spread
