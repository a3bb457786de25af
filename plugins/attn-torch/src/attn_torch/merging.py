"""From results of units to results of tokens: merging by log-sum-exp, sinks, value scales, and rows without keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attn_core.layers import MhaLayer


@dataclass(slots=True)
class Results:
    """Where a layer's results go: out[T, Hq, Dv] and lse f32[T, Hq] (None if nobody needs it)."""

    out: torch.Tensor
    lse: torch.Tensor | None

    def grouped(self, kv_heads: int) -> Results:
        """Views by KV head: out[T, Hk, G, Dv] and lse[T, Hk, G]."""
        lse = None if self.lse is None else torch.unflatten(self.lse, 1, (kv_heads, -1))
        return Results(torch.unflatten(self.out, 1, (kv_heads, -1)), lse)

    def blank(self, tokens: torch.Tensor | slice) -> None:
        """Tokens that see no key: out 0, lse -inf."""
        if isinstance(tokens, slice):
            self.out[tokens].zero_()
            if self.lse is not None:
                self.lse[tokens].fill_(-math.inf)
        elif tokens.numel():
            self.out.index_fill_(0, tokens, 0)
            if self.lse is not None:
                self.lse.index_fill_(0, tokens, -math.inf)


def merge_units(
    outs: torch.Tensor, lses: torch.Tensor, member: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Units of several rows as rows: out f32[rows, X, Dv] and lse f32[rows, X] of the keys of all units of a row.

    outs f32[U, X, Dv] (overwritten) and lses f32[U + 1, X], whose last line is -inf; member i64[U] is the row of a unit and
    slots i64[rows, most] the units of a row, padded with U. Units are added in their order, so that a row's result does
    not depend on other rows.
    """
    rows, count = slots.shape[0], outs.shape[0]
    peak = lses[slots].amax(1).clamp(min=-1e30)
    weights = torch.exp(lses[:count] - peak[member])
    total = torch.zeros(rows, lses.shape[1], device=lses.device).index_add_(0, member, weights)
    merged = torch.zeros(rows, *outs.shape[1:], device=outs.device)
    merged.index_add_(0, member, outs.mul_(weights[..., None]))
    merged.div_(total.clamp(min=1e-30)[..., None])
    return merged, total.log_().add_(peak)


def merge_regular(
    outs: torch.Tensor, lses: torch.Tensor, parts: int, need_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`merge_units` where unit i belongs to row ``i // parts``: outs[U, .., Dv], lses f32[U, ..], in larger steps.

    In which order the units of a row are added is left to torch.
    """
    outs, lses = (torch.unflatten(x, 0, (-1, parts)) for x in (outs, lses))
    weights = torch.softmax(lses.clamp(min=-1e30), dim=1)
    return (outs * weights[..., None]).sum(1), torch.logsumexp(lses, 1) if need_lse else None


class Running:
    """A result that grows part by part: out f32[.., Dv] and lse f32[..]."""

    __slots__ = ("lse", "out")

    def __init__(self) -> None:
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the result over further keys; a part with lse -inf changes nothing."""
        if self.out is None or self.lse is None:
            self.out, self.lse = out.float(), lse
            return
        total = torch.logaddexp(self.lse, lse)
        finite = total.clamp(min=-1e30)
        old, new = (torch.exp(part - finite)[..., None] for part in (self.lse, lse))
        self.out, self.lse = self.out * old + out.float() * new, total


def finish(results: Results, layer: MhaLayer, partial: bool) -> None:
    """Apply what belongs to a whole result, in place: the value scale, and the sinks unless it is `partial`.

    A sink adds exp(sink) to the denominator: out shrinks by sigmoid(lse - sink). A token without keys stays 0 and -inf.
    """
    factor: torch.Tensor | None = None
    if layer.sinks is not None and not partial:
        assert results.lse is not None
        sinks = layer.sinks.float()
        factor = torch.sigmoid(results.lse - sinks)
        with_sink = torch.logaddexp(results.lse, sinks)
        results.lse.copy_(torch.where(results.lse == -math.inf, results.lse, with_sink))
    scale = layer.v_scale
    if scale is not None and scale.value != 1.0:
        tensor = scale.tensor.float()
        if tensor.numel() > 1:  # one a KV head
            tensor = tensor.repeat_interleave(layer.geometry.ratio)
        factor = tensor if factor is None else factor * tensor
    if factor is not None:
        results.out.mul_(factor[..., None])
