"""The arithmetic: softmax attention of a block of queries over a block of keys, by the fastest way a device has.

All engines have one signature. q[n, H, M, D]; k[n, H, W, D] and v[n, H, W, Dv] with any strides whose last dimension is
contiguous; they return out[n, H, M, Dv] in the type of q and lse f32[n, H, M] (natural log; None unless asked for). A query
that sees no key has out 0 and lse -inf. Sinks, value scales and merging belong to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class Mask:
    """``keep`` bool[n, 1, M, W] (or broadcastable) and what engines derive from it, computed once a step."""

    keep: torch.Tensor
    _bias: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    _empty: torch.Tensor | None = None

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """0 where visible, -inf elsewhere."""
        bias = self._bias.get(dtype)
        if bias is None:
            bias = torch.zeros(self.keep.shape, dtype=dtype, device=self.keep.device)
            self._bias[dtype] = bias.masked_fill_(~self.keep, -math.inf)
        return bias

    @property
    def empty(self) -> torch.Tensor:
        """bool[n, 1, M]: queries that see no key."""
        if self._empty is None:
            self._empty = ~self.keep.any(-1)
        return self._empty


Engine = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def flash_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: Mask | None = None,
    causal: bool = False,
    need_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's fused kernel for CPUs; takes strided keys and returns the log-sum-exp. Widths of k and v must be equal.

    `causal` is top-left: only where there are as many keys as queries. The kernel divides by zero without keys or queries
    (the process dies of SIGFPE), so empty blocks never reach it.
    """
    bias = None if mask is None else mask.bias(q.dtype)
    out, lse = _flash_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if not need_lse:
        return out, None
    if mask is not None:  # the kernel gives 0, not -inf, for a query without keys; its out is 0 as it should be
        lse = lse.masked_fill(mask.empty, -math.inf)
    return out, lse


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: Mask | None = None,
    causal: bool = False,
    need_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``scaled_dot_product_attention``: what a device's own kernels are reached by. It returns no LSE: see :func:`naive`."""
    if need_lse:
        return naive(q, k, v, scale=scale, mask=mask, causal=causal)
    keep = None if mask is None else mask.keep
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=causal, scale=scale)
    if mask is not None:  # a query without keys is NaN in some kernels
        out = out.masked_fill(mask.empty[..., None], 0.0)
    return out, None


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: Mask | None = None,
    causal: bool = False,
    need_lse: bool = True,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Written out in fp32: soft caps, and the LSE where no fused kernel gives it. Holds all logits: keep blocks small."""
    logits = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if causal:
        logits.masked_fill_(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    if mask is not None:
        logits.masked_fill_(~mask.keep, -math.inf)
    peak = logits.amax(-1, keepdim=True)
    weights = logits.sub_(peak.clamp(min=-1e30)).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v.float()).div_(total.clamp(min=1e-30)).to(q.dtype)
    lse = total.log_().add_(peak).squeeze(-1) if need_lse else None
    return out, lse


def choose(device: torch.device, softcap: float | None) -> Engine:
    """The engine for a layer group on `device`."""
    if softcap is not None:
        return _Capped(softcap)
    return flash_cpu if device.type == "cpu" else sdpa


@dataclass(frozen=True, slots=True)
class _Capped:
    """:func:`naive` with a soft cap: ``cap * tanh(logits / cap)`` after the scale and before the mask."""

    softcap: float

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        mask: Mask | None = None,
        causal: bool = False,
        need_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return naive(q, k, v, scale=scale, mask=mask, causal=causal, need_lse=need_lse, softcap=self.softcap)
