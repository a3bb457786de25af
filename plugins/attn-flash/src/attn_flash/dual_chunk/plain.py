"""The kernel function of dual chunk attention in plain torch: what a paged varlen kernel with an LSE computes, to read and to test with."""

from __future__ import annotations

import math

import torch

from attn_flash.dual_chunk.parts import RangeCall


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: RangeCall, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence by sequence in fp32; reads no key beyond ``call.key_lens``. (out[T, Hq, D] of q's dtype, lse f32[T, Hq])."""
    ratio, page = q.shape[1] // k.shape[2], k.shape[1]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    starts = call.query_offsets.tolist()
    for row, count in enumerate(call.key_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if count == 0 or first == last:
            continue
        at = torch.arange(count, device=q.device)
        pages = call.table[row][at // page].long()
        keys, values = (x[pages, at % page].float().repeat_interleave(ratio, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys) * scale
        if call.causal:
            query = at[count - (last - first) :]
            scores = scores.masked_fill(at[None] > query[:, None], -math.inf)
        lse[first:last] = scores.logsumexp(-1).T
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse
