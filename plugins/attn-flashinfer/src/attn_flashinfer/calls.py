"""One layer: calls of planned wrappers, scales, the base of the LSE, rows without keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from attn_core.errors import BindError
from attn_core.merge import merge_states
from attn_flashinfer.library import Library
from attn_flashinfer.rules import Rules

if TYPE_CHECKING:
    from attn_core.layers import MhaCache, MhaLayer, Scale
    from attn_flashinfer.metadata import FlashInferMetadata
    from attn_flashinfer.wrappers import Slot

LN2 = math.log(2.0)
#: The library merges with one thread a vector of 8 elements and head; a block holds 1024.
_MERGE_WIDTH = 8 * 1024


def attend_pages(
    slot: Slot,
    rules: Rules,
    q: torch.Tensor,
    layer: MhaLayer,
    cache: MhaCache,
    out: torch.Tensor,
    needs_lse: bool,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Attention over pages into `out`; returns the LSE f32[T, H] in base 2, if it is needed. `sinks` for sink wrappers."""
    words: dict[str, Any] = {"out": out, "return_lse": needs_lse}
    arguments: tuple[Any, ...] = (q, (cache.k, cache.v))
    after = None
    if sinks is not None:
        arguments = (*arguments, sinks, rules.scale)
    elif rules.quantised:
        arguments, after = _with_scales(arguments, words, rules, layer)
    found = slot.wrapper.run(*arguments, **words)
    if after is not None:
        out.mul_(after)
    return found[1] if needs_lse else None


def _with_scales(
    arguments: tuple[Any, ...], words: dict[str, Any], rules: Rules, layer: MhaLayer
) -> tuple[tuple[Any, ...], torch.Tensor | None]:
    """Scales of a quantised cache. Numbers the host knows go to the library; of the others, the key's go into the query and
    the value's into the result, on the device: asking for them would wait for it."""
    k, v = layer.k_scale, layer.v_scale
    after = None
    if k is not None:
        if k.value is not None:
            words["k_scale"] = k.value
        else:
            q = arguments[0]
            arguments = ((q * _per_head(k, rules)).to(q.dtype), *arguments[1:])
    if v is not None:
        if v.value is not None:
            words["v_scale"] = v.value
        else:
            after = _per_head(v, rules)
    return arguments, after


def _per_head(scale: Scale, rules: Rules) -> torch.Tensor:
    """f32[1, 1] or f32[Hq, 1]: the scale of each query head."""
    values = scale.tensor
    if values.numel() > 1:
        values = values.repeat_interleave(rules.q_heads // rules.kv_heads)
    return values.view(-1, 1)


def attend_packed(
    slot: Slot, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, needs_lse: bool
) -> torch.Tensor | None:
    """Attention over packed keys into `out`; returns the LSE f32[T, H] in base 2, if it is needed."""
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise BindError(f"packed keys are {k.dtype} and {v.dtype}, the query is {q.dtype}")
    found = slot.wrapper.run(q, k, v, out=out, return_lse=needs_lse)
    return found[1] if needs_lse else None


def merge_prefix(
    library: Library, out: torch.Tensor, lse: torch.Tensor, before: torch.Tensor, lse_before: torch.Tensor
) -> torch.Tensor:
    """Merge the result over the prefix into `out`; returns the LSE. All in base 2, the base of the library's own merge."""
    heads, dim = out.shape[1:]
    if library.merge_in_place is not None and heads * dim <= _MERGE_WIDTH and out.is_cuda:
        library.merge_in_place(out, lse, before, lse_before)
        return lse
    _, merged = merge_states(out, lse * LN2, before, lse_before * LN2, out)
    return merged / LN2


def finish(
    given: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    metadata: FlashInferMetadata,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, LSE f32[T, H] in natural logarithms), as the contract wants them; `given` is the caller's tensor."""
    if lse is not None:
        lse = lse.mul_(LN2)
    if metadata.needs_lse and (lse is None or lse.shape[0] != out.shape[0]):
        whole = torch.full(out.shape[:2], -math.inf, dtype=torch.float32, device=out.device)
        if lse is not None:
            whole[:count].copy_(lse)
        lse = whole
    for start, stop in metadata.without_keys:
        out[start:stop].zero_()
        if lse is not None:
            lse[start:stop].fill_(-math.inf)
    if given is not None and given is not out:
        given.copy_(out)
        out = given
    return out, lse
