"""The ranges of dual chunk attention over FlashAttention 3's paged varlen kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attn_core.geometry import MhaGeometry
from attn_flash.builds import any_build
from attn_flash.dual_chunk.backend import DualChunk
from attn_flash.dual_chunk.parts import Attend, RangeCall
from attn_flash.fa3 import SMALLEST_TILE
from attn_flash.operators import Bound

if TYPE_CHECKING:
    from attn_core.context import Context


def create(context: Context) -> DualChunk:
    """The backend over whichever build of FlashAttention 3 is installed. Raises :class:`BindError` if none is or loads.

    Large pages are read in parts: pages that hold whole key tiles are loaded whole, and what lies behind a row's last key
    (NaN, perhaps) would reach the result.
    """
    forward, _ = any_build().load()
    geometry = context.group.geometry
    widest = max(geometry.qk_dim, geometry.v_dim) if isinstance(geometry, MhaGeometry) else 0
    return DualChunk(context, over_fa3(forward), SMALLEST_TILE if widest <= 192 else SMALLEST_TILE - 1)


def over_fa3(forward: Bound) -> Attend:
    """The kernel function of :class:`DualChunk` over the library's ``fwd``.

    It returns (out[T, Hq, D], lse f32[Hq, T], …) with natural logarithms; a sequence without keys gives 0 and -inf.
    """
    fixed = {
        "window_size_left": -1, "window_size_right": -1, "attention_chunk": 0, "softcap": 0.0, "num_splits": 0,
    }  # fmt: skip
    names = (
        "q", "k", "v", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table", "softmax_scale", "is_causal", *fixed,
    )  # fmt: skip
    forward.require(*names)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: RangeCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = forward.template(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=call.query_offsets,
            seqused_k=call.key_lens,
            max_seqlen_q=call.max_query_len,
            page_table=call.table,
            softmax_scale=scale,
            is_causal=call.causal,
            **fixed,
        )
        out, lse, *_ = forward.function(*arguments)
        return out, lse.t()  # a view: the merge reads any strides

    return attend
