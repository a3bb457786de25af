"""Names of element types and cache formats, without torch.

``fp4`` is e2m1, two values a byte (low nibble first), with one e4m3 scale for 16 values (format ``fp4_block16``).
"""

from __future__ import annotations

from collections.abc import Mapping

from attn_core.errors import UsageError

#: Canonical element types and their width in bits.
BITS: Mapping[str, int] = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "fp4": 4}

_ALIASES: Mapping[str, str] = {
    "float32": "fp32", "float": "fp32", "torch.float32": "fp32",
    "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "float8_e4m3fn": "fp8_e4m3", "fp8": "fp8_e4m3", "torch.float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2", "torch.float8_e5m2": "fp8_e5m2",
    "fp4_e2m1": "fp4", "nvfp4": "fp4", "fp4_block16": "fp4",
}  # fmt: skip

#: The published name users read and write on the command line.
LONG_NAMES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def canonical(name: str) -> str:
    """The canonical name of a dtype: ``canonical("torch.bfloat16") == "bf16"``. Raises :class:`UsageError`."""
    short = _ALIASES.get(name, name)
    if short not in BITS:
        raise UsageError(f"unknown dtype {name!r}; known are {sorted(BITS)} and the aliases {sorted(_ALIASES)}")
    return short


def aliases() -> tuple[str, ...]:
    """Every other spelling that :func:`canonical` understands."""
    return tuple(_ALIASES)


def default_format(kv_dtype: str, kind: str = "mha") -> str:
    """The published format that a pool of `kind` uses for elements of `kv_dtype` when nobody asks for another."""
    if kind in ("mla", "dsa"):
        return "mla_plain_fp8" if kv_dtype.startswith("fp8") else ("fp4_block16" if kv_dtype == "fp4" else "mla_plain")
    if kind == "gdn":
        return "state_vk"
    return "fp4_block16" if kv_dtype == "fp4" else "plain"


def row_bytes(width: int, kv_dtype: str) -> int:
    """Bytes of `width` elements, block scales included for fp4 (one byte for 16 elements)."""
    size = width * BITS[kv_dtype] // 8
    return size + width // 16 if kv_dtype == "fp4" else size
