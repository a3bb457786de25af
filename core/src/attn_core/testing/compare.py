"""Comparing a backend's answer with the oracle's: relative error per (token, head), never a flat ``allclose``.

The error of one (token, head) is the largest absolute difference over the largest magnitude of the oracle's row, so that a
small row is judged as strictly as a large one. The log-sum-exp is judged absolutely. Tolerances, with what they allow for:

================================  =======  =======  ================================================================
query, keys                       out      lse      allows for
================================  =======  =======  ================================================================
fp32, any                         2e-5     2e-5     sums in another order
fp16, fp16                        2e-3     2e-3     rounding of the result and of the weights to fp16 (2^-11)
bf16, bf16                        1.6e-2   2e-3     the same in bf16 (2^-8); logits are products of exact inputs
16 bit, fp8 or fp4                3e-2     5e-3     kernels that keep the weights in e4m3 (2^-4, averaged over keys)
fp8, fp8                          9.4e-2   2e-2     weights in e4m3 (2^-4), half as much more where few keys cancel
================================  =======  =======  ================================================================

A result in a narrower type than the query's counts with the tolerance of that type. A row without keys must be exactly 0,
with an LSE of exactly -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attn_core.testing.oracle_mha import Answer

_OUT = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 1.6e-2, "fp8": 9.4e-2}
_LSE = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 2e-3, "fp8": 2e-2}
_NARROW_KV = (3e-2, 5e-3)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative error of ``out`` and largest absolute error of ``lse`` (relative above a magnitude of 1)."""

    out: float
    lse: float


def tolerance(q_dtype: str, kv_dtype: str, out_dtype: str = "") -> Tolerance:
    """The tolerance for a query, cache and result type; see the table above."""
    kinds = [name.split("_")[0] for name in (q_dtype, kv_dtype, out_dtype or q_dtype)]
    q, kv, out = kinds
    widest = max(_OUT[q], _OUT.get(out, 0.0)), _LSE[q]
    if q in ("fp16", "bf16") and kv in ("fp8", "fp4"):
        widest = max(widest[0], _NARROW_KV[0]), max(widest[1], _NARROW_KV[1])
    return Tolerance(*widest)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The worst difference found. ``error`` is in the units of the tolerance; inf for NaN or a wrong empty row."""

    what: str
    error: float
    limit: float
    index: tuple[int, ...]
    have: float
    want: float
    wrong_rows: int
    rows: int

    def __str__(self) -> str:
        if not self.rows:  # the form is wrong already
            return self.what
        place = ", ".join(f"{name} {i}" for name, i in zip(("token", "head", "element"), self.index, strict=False))
        return (
            f"{self.what}: error {self.error:.3g}, allowed {self.limit:.3g}; worst at {place}: "
            f"have {self.have:.6g}, want {self.want:.6g}; {self.wrong_rows} of {self.rows} (token, head) rows are wrong"
        )


def compare_out(have: torch.Tensor, want: Answer, limit: float, tokens: int) -> Mismatch | None:
    """The worst (token, head) row of ``have[T, H, Dv]`` among the first `tokens`, or None if all are within `limit`."""
    if have.shape != want.out.shape:
        return _shape_mismatch("out", have, want.out)
    got, ref = have.detach().double().cpu()[:tokens], want.out[:tokens]
    if got.numel() == 0:
        return None
    empty = want.lse[:tokens] == -math.inf
    difference = (got - ref).abs()
    size = ref.abs().amax(dim=-1).clamp(min=1e-30)
    error = torch.where(empty, torch.where(difference.amax(-1) == 0, 0.0, math.inf), difference.amax(-1) / size)
    error = torch.where(got.isfinite().all(dim=-1), error, math.inf)
    return _worst("out", error, difference, got, ref, limit)


def compare_lse(have: torch.Tensor | None, want: Answer, limit: float, tokens: int) -> Mismatch | None:
    """The worst element of ``have f32[T, H]``, or None. The error is absolute, relative above a magnitude of 1."""
    if have is None or have.shape != want.lse.shape:
        return _shape_mismatch("lse", have, want.lse)
    got, ref = have.detach().double().cpu()[:tokens], want.lse[:tokens]
    if got.numel() == 0:
        return None
    if have.dtype != torch.float32:
        return Mismatch(f"lse has type {have.dtype}, needs float32", math.inf, limit, (), 0.0, 0.0, 0, 0)
    empty = ref == -math.inf
    error = (got - ref).abs() / ref.abs().clamp(min=1.0)
    error = torch.where(empty, torch.where(got == -math.inf, 0.0, math.inf), error)
    error = torch.where(got.isnan(), math.inf, error)
    return _worst("lse", error, error, got, ref, limit)


def _worst(
    what: str, error: torch.Tensor, difference: torch.Tensor, got: torch.Tensor, ref: torch.Tensor, limit: float
) -> Mismatch | None:
    wrong = ~(error <= limit)
    if not bool(wrong.any()):
        return None
    row = tuple(int(i) for i in torch.unravel_index(torch.where(wrong, error, -1.0).argmax(), error.shape))
    index = row
    if difference.dim() > error.dim():
        bad = torch.where(difference[row].isnan(), math.inf, difference[row])
        index = (*row, int(bad.argmax()))
    return Mismatch(
        what, float(error[row]), limit, index, float(got[index]), float(ref[index]), int(wrong.sum()), error.numel()
    )


def _shape_mismatch(what: str, have: torch.Tensor | None, want: torch.Tensor) -> Mismatch:
    found = "nothing" if have is None else f"shape {list(have.shape)}"
    return Mismatch(f"{what}: {found} instead of {list(want.shape)}", math.inf, 0.0, (), math.nan, math.nan, 0, 0)
