"""The running softmax, and reading one block of keys.

With a running maximum m, sum l and output o, a block of scores s and values v gives

    m' = max(m, max s)    c = exp(m - m')    p = exp(s - m')    l' = c l + sum p    o' = c o + p v

(M. Milakov, N. Gimelshein: Online normalizer calculation for softmax, arXiv:1805.02867). A sink is a score without a value: it
is where m and l start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attn_core import MhaCache


class Block(NamedTuple):
    """Keys [N, B, Hk, Dk] and values [N, B, Hk, Dv] of one block, and which of them exist, bool[N, B]."""

    k: torch.Tensor
    v: torch.Tensor
    held: torch.Tensor


def read_block(
    pages: torch.Tensor,
    origin: torch.Tensor,
    keys: torch.Tensor,
    position: torch.Tensor,
    cache: MhaCache,
    page_size: int,
    dtype: torch.dtype,
) -> Block:
    """The keys at `position`[B] of N rows. What lies outside a row may be NaN in the cache and is 0 here."""
    held = (position < keys[:, None]) & (position >= origin[:, None])
    slot = (position - origin[:, None]).clamp(0, pages.shape[1] * page_size - 1)
    page, offset = pages.gather(1, slot // page_size), slot % page_size
    outside = ~held[:, :, None, None]
    k, v = (plane[page, offset].to(dtype).masked_fill_(outside, 0) for plane in (cache.k, cache.v))
    return Block(k, v, held)


@dataclass
class Softmax:
    """Running maximum and sum [N, S, Hk, R] and output [N, S, Hk, R, Dv]; empty rows stay at -inf, 0 and 0."""

    maximum: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor
    seen: torch.Tensor  #: bool[N, S, Hk, R] whether any key was visible

    @classmethod
    def start(
        cls, heads: tuple[int, int, int, int], v_dim: int, sinks: torch.Tensor | None, dtype: torch.dtype
    ) -> Softmax:
        """Nothing seen yet; with `sinks` f32[Hq] the sum starts at exp(sink - sink) = 1."""
        maximum = torch.full(heads, -math.inf, dtype=dtype)
        total = torch.zeros(heads, dtype=dtype)
        if sinks is not None:
            maximum = sinks.to(dtype).reshape(heads[2], heads[3]).expand(heads).clone()
            total = torch.where(maximum == -math.inf, 0.0, 1.0).to(dtype)
        return cls(maximum, total, torch.zeros(*heads, v_dim, dtype=dtype), torch.zeros(heads, dtype=torch.bool))

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """One block: scores [N, S, Hk, R, B] (-inf where hidden) and values [N, B, Hk, Dv]."""
        highest = scores.amax(-1)
        self.seen |= highest > -math.inf
        maximum = torch.maximum(self.maximum, highest)
        shift = torch.where(maximum == -math.inf, 0.0, maximum)
        weights = scores.sub_(shift[..., None]).exp_()
        keep = (self.maximum - shift).exp()
        self.total = self.total * keep + weights.sum(-1)
        self.out = self.out * keep[..., None] + torch.einsum("nsgrb,nbgd->nsgrd", weights, values)
        self.maximum = maximum

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out[N, S, Hk, R, Dv] and lse[N, S, Hk, R]; 0 and -inf for a row without keys."""
        out = self.out / torch.where(self.seen, self.total, 1.0)[..., None]
        lse = torch.where(self.seen, self.maximum + self.total.log(), -math.inf)
        return out, lse
