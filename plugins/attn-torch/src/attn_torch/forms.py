"""Compiled forms of flex attention, one a shape, shared by the process.

A form costs 5 to 20 seconds to compile on a CPU, so sizes are rounded up to coarse buckets; blocks that a mask leaves out cost
nothing, wherever the bucket ends. Dynamic shapes do not compile on a CPU, and torch stops compiling a function that has
been compiled for eight shapes: every form is a function with code of its own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.attention import flex_attention as flex

#: Queries and keys that flex attention masks as one block.
BLOCK = 128

Modify = Callable[..., torch.Tensor]


class FormKey(NamedTuple):
    """What a compiled form depends on. ``rules`` and ``softcap`` are constants inside its mask and score functions."""

    rows: int
    queries: int
    keys: int
    room: int  #: keys from one row to the next in memory
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype
    device: str
    rules: tuple[Any, ...]
    softcap: float | None
    scale: float


def bucket(length: int, smallest: int) -> int:
    """`length` rounded up to `smallest` times a power of four."""
    size = smallest
    while size < length:
        size *= 4
    return size


def query_bucket(length: int) -> int:
    """Query tokens of a row: 1, 16, 128, 512, 2048, …"""
    return 1 if length == 1 else 16 if length <= 16 else bucket(length, BLOCK)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: flex.BlockMask, modify: Modify | None, scale: float
) -> Any:
    return flex.flex_attention(q, k, v, score_mod=modify, block_mask=mask, scale=scale, enable_gqa=True)


class Form:
    """One compiled form. Compiled by the first call, under a lock; later calls run side by side."""

    def __init__(self, key: FormKey) -> None:
        code = _attend.__code__.replace(co_name=f"flex_form_{abs(hash(key)):x}")
        self.key = key
        self._function: Callable[..., Any] = torch.compile(
            types.FunctionType(code, _attend.__globals__), dynamic=False, fullgraph=True
        )
        self._lock = threading.Lock()
        self._ready = False

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: flex.BlockMask,
        modify: Modify | None,
        log: logging.Logger,
    ) -> torch.Tensor:
        """q[n, Hq, L, D], k[n, Hk, S, D], v[n, Hk, S, Dv] of the form's sizes: out[n, Hq, L, Dv]."""
        if self._ready:
            return self._function(q, k, v, mask, modify, self.key.scale)  # type: ignore[no-any-return]
        with self._lock:
            if not self._ready:
                key = self.key
                log.info(
                    "flex_attention: compiling for %d x %d queries, %d keys, %d/%d heads, dim %d/%d, %s; "
                    "takes some seconds, once",
                    key.rows, key.queries, key.keys, key.q_heads, key.kv_heads, key.qk_dim, key.v_dim, key.dtype,
                )  # fmt: skip
                start = time.perf_counter()
                out: torch.Tensor = self._function(q, k, v, mask, modify, key.scale)
                log.info("flex_attention: compiled in %.1f s", time.perf_counter() - start)
                self._ready = True
                return out
        return self._function(q, k, v, mask, modify, self.key.scale)  # type: ignore[no-any-return]


@cache
def form(key: FormKey) -> Form:
    """The form for `key`, one a process."""
    return Form(key)


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, modify: Modify | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without a compiler: q[n, Hq, L, D], k[n, Hk, S, D], v[n, Hk, S, Dv], seen bool[n, 1, L, S] to out and
    lse f32[n, Hq, L] (natural log, -inf without keys). Holds all logits.

    torch has an uncompiled path of its own. It traces every new shape for a second, and makes its -inf anew on the host,
    for which a GPU is waited for in every layer.
    """
    rows, heads, queries, _ = q.shape
    folded = q.reshape(rows, k.shape[1], -1, q.shape[-1]).float()
    scores = folded @ k.float().transpose(-2, -1)
    scores = scores.view(rows, heads, queries, -1).mul_(scale)
    if modify is not None:
        scores = modify(scores, *grid(scores.shape, scores.device))
    scores = scores.masked_fill_(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill_((lse == -math.inf)[..., None], 0).to(v.dtype)
    out = weights.view(rows, v.shape[1], -1, weights.shape[-1]) @ v
    return out.view(rows, heads, queries, -1), lse


def grid(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Row, head, query and key of every entry of ``[n, H, L, S]``, as i64 tensors that broadcast to these `sizes`."""
    axes = enumerate(sizes)
    return [torch.arange(n, device=device).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in axes]
