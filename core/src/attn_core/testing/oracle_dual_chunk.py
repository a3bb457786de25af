"""The oracle for dual chunk attention (Qwen2.5-1M): float64, one (row, query, head) at a time, nothing clever.

With chunks of L = chunk_size - local_size tokens, query p and key j <= p have a distance that depends on their chunks only
by way of the query's angle ("Training-Free Long-Context Scaling", An et al. 2024, section 3; sizes as in Qwen2.5-1M)::

    key angle      j mod L
    query angle    p mod L                          j in the chunk of p
                   min(p mod L + L, chunk_size)     j in the chunk before
                   min(2 L - 1, chunk_size)         j in an earlier chunk
    s_j            scale * m^2 * (R(query angle - key angle) q . k_j)
    m              max(1, 0.1 ln(kv_len / original) + 1)   where the model states the length it was trained for
    out, lse       as in :mod:`attn_core.testing.oracle_mha`, over all j <= p

:func:`attend_rotated` takes three given rotations of each query and keys as they are stored; :func:`attend_plain` takes
queries and keys without any rotation and turns every pair by its own distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from attn_core.batch import AttentionBatch
from attn_core.layers import MhaCache, MhaLayer
from attn_core.testing.oracle_mha import Answer, read_row


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Sizes as a model's ``dual_chunk_attention_config`` states them; ``original`` 0 switches the scaling off."""

    chunk_size: int
    local_size: int
    original: int = 0

    @property
    def length(self) -> int:
        """Tokens of one chunk."""
        return self.chunk_size - self.local_size

    def version(self, query: int, key: int) -> int:
        """0: the chunk of the query, 1: the one before, 2: an earlier one."""
        return min(query // self.length - key // self.length, 2)

    def query_angle(self, query: int, version: int) -> int:
        """The position by which a query is rotated for keys of a range."""
        if version == 0:
            return query % self.length
        if version == 1:
            return min(query % self.length + self.length, self.chunk_size)
        return min(2 * self.length - 1, self.chunk_size)

    def factor(self, kv_len: int) -> float:
        """m^2 of a row."""
        if not self.original:
            return 1.0
        return max(1.0, 0.1 * math.log(kv_len / self.original) + 1.0) ** 2


#: Logits f64[n] of the first n keys for (row, token, query position, head), before the scale.
_Logits = Callable[[int, int, int, int], torch.Tensor]


def attend_rotated(
    batch: AttentionBatch,
    layer: MhaLayer,
    cache: MhaCache,
    q: torch.Tensor,
    sizes: ChunkSizes,
    *,
    pool: int = 0,
    only: Sequence[int] | None = None,
) -> Answer:
    """q[T, Hq, n, D] holds the rotations for the three ranges first (n >= 3); the cache holds rotated keys.

    `only` restricts the answer to some tokens (the others are 0 and -inf).
    """
    rows = [read_row(cache, batch.kv(pool), row, layer) for row in range(batch.num_rows)]
    queries = q.double().cpu()

    def logits(row: int, token: int, position: int, head: int) -> torch.Tensor:
        keys = rows[row][0][: position + 1, head // layer.geometry.ratio]
        return (queries[token, head][_versions(sizes, position)] * keys).sum(-1)

    return _attend(batch, layer, [values for _, values in rows], logits, sizes, pool, only)


def attend_plain(
    batch: AttentionBatch,
    layer: MhaLayer,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    q: torch.Tensor,
    frequencies: torch.Tensor,
    sizes: ChunkSizes,
    *,
    interleaved: bool = False,
    pool: int = 0,
    only: Sequence[int] | None = None,
) -> Answer:
    """q[T, Hq, D]; keys and values [kv_len, Hk, D] of each row; nothing is rotated yet. frequencies f64[rope_dim / 2]."""
    keys, values = [k.double().cpu() for k in keys], [v.double().cpu() for v in values]
    queries, frequencies = q.double().cpu(), frequencies.double().cpu()

    def logits(row: int, token: int, position: int, head: int) -> torch.Tensor:
        own = keys[row][: position + 1, head // layer.geometry.ratio]
        angles = _distances(sizes, position)
        turned = turn(queries[token, head].expand(position + 1, -1), angles, frequencies, interleaved)
        return (turned * own).sum(-1)

    return _attend(batch, layer, values, logits, sizes, pool, only)


@lru_cache(maxsize=4)  # all heads of a query ask for the same
def _versions(sizes: ChunkSizes, position: int) -> torch.Tensor:
    """i64[position + 1]: which rotation of the query meets each key."""
    return torch.tensor([sizes.version(position, j) for j in range(position + 1)])


@lru_cache(maxsize=4)
def _distances(sizes: ChunkSizes, position: int) -> torch.Tensor:
    """i64[position + 1]: the query's angle less the key's."""
    versions = _versions(sizes, position).tolist()
    return torch.tensor([sizes.query_angle(position, v) - j % sizes.length for j, v in enumerate(versions)])


def turn(x: torch.Tensor, angles: torch.Tensor, frequencies: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x[n, D], row i turned by ``angles[i]`` times each frequency, pair by pair: (i, i + half) or neighbours."""
    half = len(frequencies)
    theta = angles.double()[:, None] * frequencies
    cos, sin = torch.cos(theta), torch.sin(theta)
    first = torch.arange(half) * 2 if interleaved else torch.arange(half)
    second = first + 1 if interleaved else first + half
    result = x.clone()
    result[:, first] = x[:, first] * cos - x[:, second] * sin
    result[:, second] = x[:, second] * cos + x[:, first] * sin
    return result


def _attend(
    batch: AttentionBatch,
    layer: MhaLayer,
    values: Sequence[torch.Tensor],
    logits: _Logits,
    sizes: ChunkSizes,
    pool: int,
    only: Sequence[int] | None,
) -> Answer:
    geometry = layer.geometry
    out = torch.zeros(batch.padded_tokens, geometry.q_heads, geometry.v_dim, dtype=torch.float64)
    lse = torch.full((batch.padded_tokens, geometry.q_heads), -math.inf, dtype=torch.float64)
    offsets, kv_lens = batch.query_offsets.tolist(), batch.kv(pool).kv_lens.tolist()
    wanted = None if only is None else set(only)
    for row in range(batch.num_rows):
        queries = offsets[row + 1] - offsets[row]
        for i in range(queries):
            token, position = offsets[row] + i, kv_lens[row] - queries + i
            if wanted is not None and token not in wanted:
                continue
            for head in range(geometry.q_heads):
                scores = geometry.scale * sizes.factor(kv_lens[row]) * logits(row, token, position, head)
                total = torch.logsumexp(scores, dim=0)
                lse[token, head] = total
                own = values[row][: position + 1, head // geometry.ratio]
                out[token, head] = torch.exp(scores - total) @ own
    return Answer(out, lse)
