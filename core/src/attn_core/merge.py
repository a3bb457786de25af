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

#: Most elements of all parts together that are merged at once (fp32: 128 MiB).
BLOCK_ELEMENTS = 1 << 25


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
    """Any number of partial results as one: nothing is rounded between parts, and nothing waits for the device.

    `parts` are (out[T, H, Dv], lse f32[T, H], any strides); the result has the dtype of `out`, or of the first part. `out`
    [T, H, Dv] may be one of the inputs and receives no gradient. Two parts take 8 operations (9 without `out`, if they are
    narrower than fp32) and each further one 2 more, because small steps cost what they launch. Large ones go in blocks of
    tokens, so that what is held in between stays small; equal calls give equal bits, another number of tokens may round otherwise. Raises :class:`BatchError` if there is no part or shapes differ.
    """
    _check(parts, out)
    shape = parts[0][0].shape
    block = max(1, BLOCK_ELEMENTS // max(1, len(parts) * shape[1:].numel()))
    if shape[0] <= block:
        return _merge_block(parts, out)
    blocks = [
        _merge_block(
            [(value[start : start + block], lse[start : start + block]) for value, lse in parts],
            None if out is None else out[start : start + block],
        )
        for start in range(0, shape[0], block)
    ]
    lse = torch.cat([lse for _, lse in blocks])
    return (torch.cat([value for value, _ in blocks]) if out is None else out), lse


def _merge_block(parts: Sequence[State], out: torch.Tensor | None) -> State:
    """:func:`merge_many` in one go."""
    stacked = torch.stack([lse for _, lse in parts]).to(torch.float32)
    empty = (stacked == -math.inf)[..., None]
    first, *others = stacked.unbind()
    # an LSE of thousands has no digits left for weights: those come from the softmax, which subtracts the largest first
    weights = torch.softmax(stacked, 0)[..., None]
    # where a part is empty, or all are, the product is junk. -0.0 is the neutral element of addition: one part that is not
    # empty passes through with its bits
    values = torch.mul(torch.stack([value for value, _ in parts]), weights).masked_fill_(empty, -0.0)
    for other in others:
        first = torch.logaddexp(first, other)
    total, *addends = values.unbind()
    for addend in addends[:-1]:
        total = total + addend
    last = addends[-1] if addends else -0.0
    if out is None:
        return torch.add(total, last).to(parts[0][0].dtype), first
    with torch.no_grad():  # sums in fp32 and rounds as it stores; `out` is written after everything was read
        torch.add(total, last, out=out)
    return out, first


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, in_place: bool = False) -> State:
    """Add the attention sink to a result that was made without it (partial results are merged first, the sink once).

    out[T, H, Dv], lse f32[T, H], sinks f32[H] (natural-log logits). The sink takes its share of the softmax and adds no
    value. A row without keys stays as it is: out 0, lse -inf. Raises :class:`BatchError` if shapes differ.
    """
    _check(((out, lse),), None)
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


def _check(parts: Sequence[State], out: torch.Tensor | None) -> None:
    if not parts:
        raise BatchError("nothing to merge: at least one (out, lse) is needed")
    shape = parts[0][0].shape
    if out is not None and out.shape != shape:
        raise BatchError(
            "the result does not fit into out", f"have     out {list(out.shape)}", f"needed   out {list(shape)}"
        )
    for index, (value, lse) in enumerate(parts):
        if value.shape != shape or lse.shape != shape[:-1]:
            raise BatchError(
                "partial results do not fit together",
                f"part {index}   out {list(value.shape)}, lse {list(lse.shape)}",
                f"needed   out {list(shape)}, lse {list(shape[:-1])}",
                fix="an LSE is [T, H]; attn_core.merge.token_major turns [H, T]",
            )
