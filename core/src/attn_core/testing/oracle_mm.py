"""The oracle for packed attention without a cache (``mm`` kind, encoders, the ragged role): float64 loops.

Sequence b owns queries ``query_offsets[b]:query_offsets[b+1]`` and keys ``key_offsets[b]:key_offsets[b+1]``. Per query and
head it is the formula of :mod:`attn_core.testing.oracle_mha`; without ``causal`` every query sees every key of its own
sequence (the varlen attention of Dao 2023, "FlashAttention-2", section 3), with it the mask is aligned bottom-right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attn_core.geometry import MhaGeometry
from attn_core.testing.oracle_mha import Answer, _sees, attend_one


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    geometry: MhaGeometry,
    query_offsets: Sequence[int],
    key_offsets: Sequence[int],
    *,
    causal: bool | None = None,
    sinks: torch.Tensor | None = None,
) -> Answer:
    """q[T, Hq, Dk], k[Tk, Hk, Dk], v[Tk, Hk, Dv] packed; `causal` overrides the geometry's. Tokens after the last offset: 0, -inf."""
    causal = geometry.causal if causal is None else causal
    rules = MhaGeometry(
        geometry.q_heads, geometry.kv_heads, geometry.qk_dim, geometry.v_dim, geometry.scale, causal,
        geometry.window, geometry.window_right, geometry.chunk, geometry.softcap, geometry.sinks,
    )  # fmt: skip
    q, k, v = (tensor.float().double().cpu() if tensor.dtype != torch.float64 else tensor.cpu() for tensor in (q, k, v))
    heads, ratio = q.shape[1], q.shape[1] // max(k.shape[1], 1)
    out = torch.zeros(q.shape[0], heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((q.shape[0], heads), -math.inf, dtype=torch.float64)
    for b in range(len(query_offsets) - 1):
        first_key, kv_len = key_offsets[b], key_offsets[b + 1] - key_offsets[b]
        query_len = query_offsets[b + 1] - query_offsets[b]
        for i in range(query_len):
            visible = [first_key + j for j in range(kv_len) if _sees(rules, kv_len - query_len + i, j)]
            for head in range(heads):
                sink = None if sinks is None else float(sinks[head])
                token, kv_head = query_offsets[b] + i, head // ratio
                out[token, head], lse[token, head] = attend_one(
                    q[token, head], k[visible, kv_head], v[visible, kv_head], rules, sink
                )
    return Answer(out, lse)


def merge(parts: Sequence[Answer]) -> Answer:
    """Results over disjoint sets of keys as one: weights exp(lse_part - lse); a part with lse -inf weighs nothing.

    "Online softmax" (Milakov and Gimelshein 2018, section 3), written out for finished parts.
    """
    lse = torch.logsumexp(torch.stack([part.lse for part in parts]), dim=0)
    out = torch.zeros_like(parts[0].out)
    for part in parts:
        weight = torch.where(part.lse == -math.inf, torch.zeros_like(lse), torch.exp(part.lse - lse))
        out += weight[..., None] * torch.where(part.lse == -math.inf, 0.0, 1.0)[..., None] * part.out
    return Answer(out, lse)
