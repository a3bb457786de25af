"""Rotations of dual chunk attention. With L = chunk length and S = chunk size, a token at position p is rotated

======================  ==========================  ========================================
key                     p mod L                     as it is written to the cache
query, intra            p mod L                     meets keys of its own chunk
query, succ             min(p mod L + L, S)         meets keys of the chunk before
query, inter            min(2 L - 1, S)             meets keys of all earlier chunks
query, succ critical    p mod L + L                 only to estimate sparse patterns: unused here
query, inter critical   p mod L + S                 only to estimate sparse patterns: unused here
======================  ==========================  ========================================
"""

from __future__ import annotations

import torch

from attn_core.errors import BindError
from attn_core.layers import Rope
from attn_flash.dual_chunk.chunks import NAME, Chunks

#: Versions of a query, in the order in which rotary layers of servers give them.
INTRA, SUCC, INTER = 0, 1, 2
#: How many versions a query may bring: with the critical ones, or without.
COUNTS = (5, 3)


def as_versions(q: torch.Tensor, q_heads: int) -> torch.Tensor:
    """What a dual chunk rotary layer returns, q[T, 5 * Hq * D] (five versions one after the other), as q[T, Hq, 5, D].

    A view: nothing is copied. `q_heads` are those of this rank. Raises :class:`BindError` for another width.
    """
    count = COUNTS[0]
    if q.dim() != 2 or q.shape[1] % (count * q_heads):
        raise BindError(
            f"{NAME}: queries of shape {list(q.shape)} are not {count} versions of {q_heads} heads",
            f"needed   [tokens, {count} * {q_heads} * head dim]",
        )
    return q.view(q.shape[0], count, q_heads, -1).transpose(1, 2)


def query_positions(version: int, positions: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """The position i64[T] by which one version of a query at `positions` i64[T] is rotated."""
    within = positions % chunks.length
    if version == INTRA:
        return within
    if version == SUCC:
        return (within + chunks.length).clamp(max=chunks.chunk_size)
    return torch.full_like(positions, min(2 * chunks.length - 1, chunks.chunk_size))


def rotate(x: torch.Tensor, rope: Rope, positions: torch.Tensor) -> torch.Tensor:
    """x[T, H, D] with its first ``rope_dim`` elements rotated by `positions` i64[T]; made in fp32, of x's dtype.

    ``rope.cos_sin`` [positions, rope_dim] holds the cosines, then the sines, half of the width each.
    """
    width = rope.cos_sin.shape[-1]
    cos, sin = rope.cos_sin[positions].float()[:, None].chunk(2, dim=-1)
    turned, rest = x[..., :width].float(), x[..., width:]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        result = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        result = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((result.to(x.dtype), rest), dim=-1)


def check_rope(rope: Rope, chunks: Chunks, head_dim: int) -> None:
    """Whether the table reaches every rotation. Raises :class:`BindError`."""
    rows, width = rope.cos_sin.shape
    needed = max(chunks.length, min(2 * chunks.length - 1, chunks.chunk_size) + 1)
    if rows < needed or width > head_dim or width % 2:
        raise BindError(
            f"{NAME}: a rotary table of shape {[rows, width]}",
            f"needed   at least {needed} positions (chunk_size {chunks.chunk_size}), an even width up to {head_dim}",
        )
