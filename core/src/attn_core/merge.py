"""Merging partial results of attention over disjoint sets of keys, by their LSE.

One base only: **natural log**. A kernel that returns log2 is converted at its own boundary (:func:`log2_to_ln`), a
head-major LSE by :func:`token_major`. Shapes: out[T, H, Dv], lse f32[T, H]; a part without keys has lse -inf, and whatever
its out holds (even NaN) has no influence. Sums are made in fp32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attn_core.errors import BatchError

State = tuple[torch.Tensor, torch.Tensor]


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None = None,
) -> State:
    """Two partial results as one: (out[T, H, Dv] of a's dtype, lse f32[T, H]).

    Where one part is empty (lse -inf) the other comes back bit by bit; where both are, out is 0 and lse -inf. `out`
    receives the result and may be one of the inputs. Raises :class:`BatchError` if shapes differ.
    """
    return merge_many(((out_a, lse_a), (out_b, lse_b)), out)


def merge_many(parts: Sequence[State], out: torch.Tensor | None = None) -> State:
    """Any number of partial results as one, in a single pass: nothing is rounded between parts.

    `parts` are (out[T, H, Dv], lse f32[T, H]); the result has the dtype of `out`, or of the first part.
    Raises :class:`BatchError` if there is no part or shapes differ.
    """
    _check(parts)
    first = parts[0][0]
    highest = parts[0][1].to(torch.float32)
    for _, lse in parts[1:]:
        highest = torch.maximum(highest, lse)
    base = torch.where(highest == -math.inf, 0.0, highest)
    total = torch.zeros_like(base)
    # -0.0 is the neutral element of addition: one non-empty part passes through with its bits
    merged = torch.full(first.shape, -0.0, dtype=torch.float32, device=first.device)
    for value, lse in parts:
        weight = torch.exp(lse - base)
        total += weight
        weight = weight[..., None]
        merged = torch.where(weight != 0, merged + weight * value, merged)
    merged = torch.where(total[..., None] == 0, 0.0, merged / total[..., None])
    lse = base + torch.log(total)
    if out is None:
        return merged.to(first.dtype), lse
    out.copy_(merged)
    return out, lse


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, in_place: bool = False) -> State:
    """Add the attention sink to a result that was made without it (partial results are merged first, the sink once).

    out[T, H, Dv], lse f32[T, H], sinks f32[H] (natural-log logits). The sink takes its share of the softmax and adds no
    value. A row without keys stays as it is: out 0, lse -inf. Raises :class:`BatchError` if shapes differ.
    """
    _check(((out, lse),))
    if sinks.shape != lse.shape[-1:]:
        raise BatchError(f"sinks need one logit a query head: have {list(sinks.shape)}, lse is {list(lse.shape)}")
    sinks = sinks.to(torch.float32)
    empty = lse == -math.inf
    share = torch.sigmoid(lse - sinks)
    scaled = torch.where(empty[..., None], 0.0, out.to(torch.float32) * share[..., None])
    with_sink = torch.where(empty, -math.inf, torch.logaddexp(lse.to(torch.float32), sinks.expand_as(lse)))
    if in_place:
        return out.copy_(scaled), with_sink
    return scaled.to(out.dtype), with_sink


def mask_empty(out: torch.Tensor, lse: torch.Tensor, query_offsets: torch.Tensor, key_lens: torch.Tensor) -> State:
    """Force tokens of rows without keys to out 0 and lse -inf: for kernels that return something finite there.

    out[T, H, Dv], lse f32[T, H]; query_offsets i32[R + 1], key_lens i32[R] of the part at hand. Tokens past the last row
    count as empty. Returns new tensors; nothing waits for the device.
    """
    rows = key_lens.numel()
    token = torch.arange(out.shape[0], device=out.device)
    row = torch.searchsorted(query_offsets[1:].to(torch.int64), token, right=True)
    lens = torch.cat((key_lens, key_lens.new_zeros(1)))
    empty = (lens[row.clamp(max=rows)] <= 0)[:, None]
    return torch.where(empty[..., None], 0.0, out).to(out.dtype), torch.where(empty, -math.inf, lse)


def log2_to_ln(lse: torch.Tensor) -> torch.Tensor:
    """An LSE in base 2 as natural log, f32."""
    return lse.to(torch.float32) * math.log(2.0)


def token_major(lse: torch.Tensor) -> torch.Tensor:
    """An LSE [H, T], as many kernels return it, as the contract's [T, H], contiguous f32."""
    return lse.t().to(torch.float32).contiguous()


def _check(parts: Sequence[State]) -> None:
    if not parts:
        raise BatchError("nothing to merge: at least one (out, lse) is needed")
    shape = parts[0][0].shape
    for index, (value, lse) in enumerate(parts):
        if value.shape != shape or lse.shape != shape[:-1]:
            raise BatchError(
                "partial results do not fit together",
                f"part {index}   out {list(value.shape)}, lse {list(lse.shape)}",
                f"needed   out {list(shape)}, lse {list(shape[:-1])}",
                fix="an LSE is [T, H]; attn_core.merge.token_major turns [H, T]",
            )
