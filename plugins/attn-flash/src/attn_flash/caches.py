"""A layer's cache as the kernels read it: pages of the size they take, without a copy."""

from __future__ import annotations

import torch

from attn_core.errors import BindError
from attn_core.layers import MhaCache


def paged_view(tensor: torch.Tensor, page: int) -> torch.Tensor:
    """tensor[pages, P, Hk, D] as [pages * P / page, page, Hk, D], over the same memory, strides of single entries normal.

    Raises :class:`BindError` if a page cannot be cut without a copy: whole pages must follow each other in memory.
    """
    pages, size, heads, width = tensor.shape
    if tensor.stride(3) != 1:
        raise BindError(
            f"FlashAttention reads heads whose elements are contiguous; this cache has element stride {tensor.stride(3)}",
            fix="allocate the pool token-major: [pages, page_size, kv_heads, head_dim]",
        )
    between, token, head = tensor.stride(0), tensor.stride(1), tensor.stride(2)
    parts = size // page
    if parts > 1 and pages > 1 and between != size * token:
        raise BindError(
            f"pages of {size} tokens are read in parts of {page}, which this cache's strides do not allow",
            f"found    a page every {between} elements, a token every {token}",
            f"needed   a page every {size * token}",
            fix="keep K and V in tensors of their own, or interleave them token by token",
        )
    # strides of dimensions of size 1 are arbitrary in torch and mislead tensor maps: give them the usual value
    head = head if heads > 1 else width
    between = page * token if parts > 1 else between
    token = token if page > 1 else heads * head
    return tensor.as_strided((pages * parts, page, heads, width), (between, token, head, 1))


class Views:
    """Views of bound caches, made once: caches never move."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def of(self, cache: MhaCache, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) of a cache in pages of `page` tokens."""
        found = self._made.get((id(cache), page))
        if found is None or found[0] is not cache.k or found[1] is not cache.v:
            views = paged_view(cache.k, page), paged_view(cache.v, page)
            found = self._made[id(cache), page] = (cache.k, cache.v, *views)
        return found[2], found[3]
