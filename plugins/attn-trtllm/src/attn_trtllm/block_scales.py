"""Block scales of fp4 caches in the order of the trtllm-gen kernels.

K's are read as published (``fp4_block16``), page by head by token. V's must be interleaved: within a page and head, groups of
four tokens are turned, so that ``out[t // 4, block, t % 4] = in[t, block]``. The published cache keeps them in plain order, so
a copy of V's scales (one byte for 16 values) is kept beside the cache, and the pages of a step are brought up to date in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_core.errors import BindError
from attn_core.layers import MhaCache


@dataclass(slots=True, eq=False)
class InterleavedScales:
    """``k`` and ``v`` u8[pages, Hk, P, D / 16], contiguous copies of the cache's scales, V's interleaved."""

    cache: MhaCache
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, cache: MhaCache) -> InterleavedScales:
        """Empty copies for a cache. Raises :class:`BindError` for pages or widths that cannot be interleaved."""
        assert cache.k_blocks is not None
        pages, page, heads, blocks = cache.k_blocks.shape
        if page % 4 or blocks % 4:
            raise BindError(
                "trtllm-gen reads fp4 in pages of a multiple of 4 tokens and head dims of a multiple of 64",
                f"have     pages of {page}, head dim {16 * blocks}",
            )
        k, v = (torch.zeros(pages, heads, page, blocks, dtype=torch.uint8, device=cache.k.device) for _ in range(2))
        return cls(cache, k, v)

    def refresh(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the scales of the pages in i32[R, W]; e4m3 views of both. Shapes are fixed, nothing waits."""
        assert self.cache.k_blocks is not None
        assert self.cache.v_blocks is not None
        pages = table.reshape(-1).to(torch.int64)
        k, v = (
            t.view(torch.uint8).index_select(0, pages).transpose(1, 2)
            for t in (self.cache.k_blocks, self.cache.v_blocks)
        )
        self.k.index_copy_(0, pages, k.contiguous())
        self.v.index_copy_(0, pages, interleave(v))
        return self.k.view(torch.float8_e4m3fn), self.v.view(torch.float8_e4m3fn)


def interleave(scales: torch.Tensor) -> torch.Tensor:
    """[n, Hk, P, S] with every four tokens turned: contiguous, the same shape."""
    n, heads, page, blocks = scales.shape
    turned = scales.reshape(n, heads, page // 4, 4, blocks).transpose(3, 4)
    return turned.reshape(n, heads, page, blocks)
