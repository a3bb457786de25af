"""How a cache lies in memory, for kernels that know one base address, one block size and no strides.

``stacked``: K and V of a page side by side, [pages, 2, ...]. ``apart``: two contiguous pools whose distance is a whole
number of blocks, so that one block table can name blocks of both. ``scattered``: anything else; the pages of a step are
copied together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_core.layers import MhaCache
from attn_trtllm.tails import Tails

INT32 = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a cache lies, in blocks (one page of K, or one of V) from the lower of its two pools.

    ``layout`` is NHD or HND. K's page p is block ``first[0] + step * p``, V's ``first[1] + step * p``. ``pool`` is
    [pages, 2, ...] if stacked, else (lower, upper) [pages, ...].
    """

    cache: MhaCache
    kind: str
    layout: str = "NHD"
    pool: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
    first: tuple[int, int] = (0, 0)
    step: int = 1


def place(cache: MhaCache) -> Placement:
    """The placement of a cache; looked at once, because caches never move."""
    for layout in ("NHD", "HND"):
        k, v = (tensor if layout == "NHD" else tensor.transpose(1, 2) for tensor in (cache.k, cache.v))
        block = k[0].numel() if len(k) else 0
        if not block or not (dense(k) and dense(v)) or k.shape != v.shape:
            continue
        distance, rest = divmod(v.data_ptr() - k.data_ptr(), block * k.element_size())
        if k.stride(0) == v.stride(0) == 2 * block and (distance, rest) == (1, 0) and 2 * len(k) < INT32:
            inner = standard_strides(k)
            pool = k.as_strided((len(k), 2, *k.shape[1:]), (2 * block, block, *inner))
            return Placement(cache, "stacked", layout, pool, (0, 1), 2)
        if k.stride(0) == v.stride(0) == block and not rest and abs(distance) + len(k) < INT32:
            tensors = [t.as_strided(t.shape, (block, *standard_strides(t))) for t in (k, v)]
            lower, upper = tensors if distance > 0 else tensors[::-1]
            return Placement(cache, "apart", layout, (lower, upper), (max(-distance, 0), max(distance, 0)))
    return Placement(cache, "scattered")


def dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of each page follow each other without gaps; the stride of an axis of length 1 is free."""
    wanted = standard_strides(tensor)
    return all(
        n == 1 or have == want for n, have, want in zip(tensor.shape[1:], tensor.stride()[1:], wanted, strict=True)
    )


def standard_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a contiguous page."""
    found: list[int] = []
    step = 1
    for n in reversed(tensor.shape[1:]):
        found.insert(0, step)
        step *= n
    return tuple(found)


def expand(table: torch.Tensor, first: tuple[int, int], step: int) -> torch.Tensor:
    """i32[R, 2, W]: the K and V blocks of each page of i32[R, W]."""
    scaled = table if step == 1 else table * step
    return torch.stack((scaled + first[0], scaled + first[1]), dim=1)


def with_tails(
    where: Placement, table: torch.Tensor, tails: Tails
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """((lower, upper), table i32[R, 2, W]) with the last page of each row read from a clean copy.

    The copies lie in blocks of the same grid, above or below the cache. None if they lie too far for 32-bit numbers.
    """
    turn = where.layout == "HND"
    k, v = (t.transpose(1, 2) if turn else t for t in (where.cache.k, where.cache.v))
    lower = where.pool if isinstance(where.pool, torch.Tensor) else where.pool[0]  # type: ignore[index]
    clean = tails.clean(k, v, lower.data_ptr(), turn)
    distance = (clean.data_ptr() - lower.data_ptr()) // (clean[0].numel() * clean.element_size())
    shift, at, rows = max(-distance, 0), max(distance, 0), len(table)
    if abs(distance) + 2 * (rows + len(k)) >= INT32:
        return None
    expanded = expand(table, (where.first[0] + shift, where.first[1] + shift), where.step)
    numbers = torch.arange(at, at + 2 * rows, dtype=torch.int32, device=table.device).view(2, rows).T
    expanded.scatter_(2, tails.columns.expand(rows, 2)[..., None], numbers[..., None])
    block = lower.view(-1, *clean.shape[1:])[:1]
    return ((block, clean[:1]) if distance > 0 else (clean[:1], block)), expanded


def collect(cache: MhaCache, table: torch.Tensor, tails: Tails | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of a table copied together: (pool[R * W, 2, P, Hk, D], table i32[R, W] into it), clean with `tails`."""
    pages = table.reshape(-1)
    raw = [t.view(torch.uint8) if t.element_size() == 1 else t for t in (cache.k, cache.v)]
    pool = torch.stack([t.index_select(0, pages) for t in raw], dim=1)
    numbers = torch.arange(pages.numel(), dtype=torch.int32, device=table.device).view(table.shape)
    if tails is not None:
        last = numbers.gather(1, tails.columns)[:, 0].to(torch.int64)
        pool.index_copy_(0, last, pool.index_select(0, last).masked_fill_(tails.drop[:, None], 0))
    return pool.view(cache.k.dtype), numbers
