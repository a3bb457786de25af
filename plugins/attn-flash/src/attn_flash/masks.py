"""Functions that FlashAttention 4 compiles into its kernel: the mask of a token tree, and the soft cap. Imports the compiler.

Query i of a row is draft i, the drafts are the last keys of the row. A draft sees the whole prefix, and of the drafts those whose
bit is set and whose depth is not greater than its own; with a window, what is less than a window away in positions, where a
draft's position is the prefix's length plus its depth. Auxiliary tensors: mask bits i32[R, S, W], depths i32[R, S].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import cutlass  # type: ignore[import-not-found]
import cutlass.cute as cute  # type: ignore[import-not-found]
from flash_attn.cute import utils  # type: ignore[import-not-found]

LOG2_E = 1.4426950408889634


@lru_cache(maxsize=64)
def tree_mask(left: int) -> Callable[..., Any]:
    """The mask of trees of any size; `left` keys before a query's own are visible (-1: all). One object, one compilation."""
    return _windowed(left) if left >= 0 else _whole_prefix()


def _whole_prefix() -> Callable[..., Any]:
    @cute.jit  # type: ignore[untyped-decorator]
    def mask(batch: Any, head: Any, query: Any, key: Any, lengths: Any, tensors: Any) -> Any:
        row, place = utils.ssa_to_scalar(batch), utils.ssa_to_scalar(key)
        last = lengths.seqlen_q - 1
        prefix = lengths.seqlen_k - lengths.seqlen_q
        i = cutlass.min(utils.ssa_to_scalar(query), last)
        j = cutlass.min(cutlass.max(place - prefix, 0), last)
        bit = (tensors[0][row, i, j // 32] >> (j % 32)) & 1
        above = tensors[1][row, i] - tensors[1][row, j]
        seen = (place < prefix) | ((bit == 1) & (above >= 0))
        return utils.scalar_to_ssa(seen, cutlass.Boolean)

    return mask  # type: ignore[no-any-return]


def _windowed(left: int) -> Callable[..., Any]:
    @cute.jit  # type: ignore[untyped-decorator]
    def mask(batch: Any, head: Any, query: Any, key: Any, lengths: Any, tensors: Any) -> Any:
        row, place = utils.ssa_to_scalar(batch), utils.ssa_to_scalar(key)
        last = lengths.seqlen_q - 1
        prefix = lengths.seqlen_k - lengths.seqlen_q
        i = cutlass.min(utils.ssa_to_scalar(query), last)
        j = cutlass.min(cutlass.max(place - prefix, 0), last)
        bit = (tensors[0][row, i, j // 32] >> (j % 32)) & 1
        above = tensors[1][row, i] - tensors[1][row, j]
        in_prefix = (place < prefix) & (prefix + tensors[1][row, i] - place <= left)
        in_drafts = (place >= prefix) & (bit == 1) & (above >= 0) & (above <= left)
        return utils.scalar_to_ssa(in_prefix | in_drafts, cutlass.Boolean)

    return mask  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def soft_cap(cap: float) -> Callable[..., Any]:
    """cap * tanh(logits / cap), by way of a power of two: the device's approximate tanh, which the library's own soft cap takes,
    is wrong by up to 5e-4 of the cap, and that is an error of the logit."""
    factor = 2.0 * LOG2_E / cap

    @cute.jit  # type: ignore[untyped-decorator]
    def score(
        logits: Any, batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ) -> Any:  # the library passes some of these by name
        power = cute.math.exp2(logits * factor, fastmath=True)
        return cap - 2.0 * cap / (power + 1.0)

    return score  # type: ignore[no-any-return]
