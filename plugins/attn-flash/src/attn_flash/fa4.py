"""FlashAttention 4 over pages: compiled by CuTe DSL for the device it meets, Hopper or data-centre Blackwell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from attn_core.context import Context, GraphLimits
from attn_core.errors import BatchError
from attn_core.geometry import LayerGroup
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.store import default_gather
from attn_flash import cutedsl
from attn_flash.paged import FlashBackend, Result, empty_result
from attn_flash.rules import OFF, Rules, largest_part
from attn_flash.steps import FlashMetadata

if TYPE_CHECKING:
    from attn_core.batch import KvAddress


class Fa4Backend(FlashBackend):
    """Decode, prefill, chains and trees (by a mask that is compiled in)."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.forward = cutedsl.load(context.log)
        self.function = self.forward.function
        self.inner = self.forward.has(*cutedsl.INNER_ARGUMENTS)
        place = self.forward.place
        self.q_at, self.k_at, self.v_at = place["q"], place["k"], place["v"]
        self.out_at, self.sinks_at, self.lse_at = place.get("out", -1), place["learnable_sink"], place["return_lse"]
        self.progress = cutedsl.Progress(context.log)
        self.family = device_family(context.device)
        # keys are split over processors on Blackwell only: the Hopper kernel knows no splits
        self.splits = 1 if self.family == 9 or context.batch_invariant else 0
        pool = context.pools.get("attend")
        self.unpacks = (
            pool is not None and pool.dtype == "fp4"
        )  #: 4-bit pools are read back into packed keys, layer by layer

    # --- once a step ------------------------------------------------------------------------------------------------------

    def page_to_read(self, address: KvAddress, planned: int, query_len: int, tree: bool) -> int:
        """The pool's own page on Hopper, which reads any; a part of it where pages would be loaded whole, NaN included."""
        if self.unpacks:
            return address.page_size
        page = address.page_size if self.family == 9 and planned == 1 and not tree else planned
        tiles = key_tiles(self.family, self.geometry.qk_dim, self.geometry.v_dim)
        while not self.finite and page in tiles:
            page = largest_part(page, page // 2)
        return page

    def make_call(self, metadata: FlashMetadata) -> None:
        """The call over pages, or over what is read back from a 4-bit pool."""
        if self.unpacks:
            self._describe_unpacked(metadata)
            return
        given: dict[str, Any] = {
            "cu_seqlens_q": metadata.query_offsets,
            "seqused_k": metadata.key_lens,
            "max_seqlen_q": metadata.max_query_len,
            "page_table": metadata.table,
            "return_lse": metadata.needs_lse,
            "num_splits": self.splits,
            **self._mask(self.rules),
        }
        tree = metadata.masks
        if tree is not None:
            from attn_flash.masks import tree_mask

            given |= self._mask(self.rules.without_mask())
            given["mask_mod"] = tree_mask(self.rules.left)
            given["aux_tensors"] = [tree.mask_bits, tree.depth]
        metadata.call = self.forward.template(**given)
        self.progress.note(
            ("pages", metadata.page, metadata.needs_lse, tree is not None, metadata.max_query_len > 1),
            f"{metadata.phase}, pages of {metadata.page}, {self._shape()}{', tree' if tree is not None else ''}",
        )  # fmt: skip

    def _describe_unpacked(self, metadata: FlashMetadata) -> None:
        """Where each row's keys will stand once they are read back."""
        address = metadata.address
        assert address is not None
        assert metadata.key_lens is not None
        if address.origin is not None or address.local_lens is not None:
            raise BatchError(
                "4-bit pools are read back whole: fa4 serves no trimmed or sharded pool",
                fix="--prefill-attention-backend triton, or a pool that keeps all keys",
            )
        offsets = metadata.key_lens.new_zeros(metadata.rows + 1)
        torch.cumsum(metadata.key_lens, 0, out=offsets[1:])
        metadata.key_offsets, metadata.max_key_len = offsets, max(1, address.max_kv_len)

    def _shape(self) -> str:
        g = self.geometry
        return f"{g.q_heads}/{g.kv_heads} heads, dims {g.qk_dim}/{g.v_dim}, {self.context.dtype}"

    def _mask(self, rules: Rules) -> dict[str, Any]:
        """The library's words for a mask; None, not -1, is a side without a limit."""
        left, right = (None if side == OFF else side for side in (rules.left, rules.right))
        window: dict[str, Any] = {"window_size": (left, right)}
        if self.inner:
            window = {"window_size_left": left, "window_size_right": right}
        given: dict[str, Any] = {"softmax_scale": rules.scale, "causal": rules.causal, **window}
        if rules.softcap:
            from attn_flash.masks import soft_cap

            given["score_mod"] = soft_cap(rules.softcap)
        return given

    @hookimpl
    def attn_warmup(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits) -> None:
        """Compile, or load from the cache, what the phases need: one tiny step of each, thrown away."""
        from attn_flash.warmup import warm_up

        warm_up(self, phases, limits)

    # --- once a layer -----------------------------------------------------------------------------------------------------

    def attend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: FlashMetadata, out: torch.Tensor | None
    ) -> Result:
        """One call."""
        q = inputs.q
        if not metadata.tokens:
            return empty_result(q, self.geometry.v_dim, self.context.dtype)
        if self.unpacks:
            return self._attend_unpacked(q, layer, cache, metadata, out)
        k, v = self.views.of(cache, metadata.page)
        return self._run(metadata.call.copy(), q, k, v, self._sinks(layer, metadata), out, metadata.needs_lse)

    @staticmethod
    def _sinks(layer: MhaLayer, metadata: FlashMetadata) -> torch.Tensor | None:
        """The layer's sinks where they belong into this step's result."""
        return None if metadata.partial else layer.sinks

    def _attend_unpacked(
        self, q: torch.Tensor, layer: MhaLayer, cache: MhaCache, metadata: FlashMetadata, out: torch.Tensor | None
    ) -> Result:
        """Read the rows' keys and values back, then attend to them packed. What follows the last key must be finite."""
        assert metadata.address is not None
        assert metadata.key_offsets is not None
        k, v = default_gather(cache, metadata.address, None, layer, self.context.dtype)
        if not k.shape[0]:
            result, lse = empty_result(q, self.geometry.v_dim, self.context.dtype)
            return (result if out is None else out.zero_()), lse
        known = torch.arange(len(v), device=v.device) < metadata.key_offsets[-1]
        v = torch.where(known[:, None, None], v, 0.0)
        self.progress.note(("unpacked", metadata.needs_lse), f"4-bit pool, {self._shape()}")
        call = self._packed_call(self.rules, metadata, metadata.key_offsets, metadata.max_key_len, metadata.needs_lse)
        return self._run(call, q, k, v, self._sinks(layer, metadata), out, metadata.needs_lse)

    def _packed_call(
        self, rules: Rules, metadata: FlashMetadata, offsets: torch.Tensor, max_key_len: int, with_lse: bool
    ) -> list[Any]:
        return self.forward.template(
            cu_seqlens_q=metadata.query_offsets, cu_seqlens_k=offsets, max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=max_key_len, return_lse=with_lse, num_splits=1, **self._mask(rules),
        )  # fmt: skip

    def _run(
        self,
        arguments: list[Any],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        with_lse: bool,
    ) -> Result:
        arguments[self.q_at], arguments[self.k_at], arguments[self.v_at] = q, k, v
        if self.inner:
            arguments[self.out_at] = out
        arguments[self.sinks_at] = sinks
        found = self.function(*arguments)
        result: torch.Tensor = found[0]
        if out is not None and not self.inner:
            result = out.copy_(result)
        return result, found[1].t() if with_lse else None

    def attend_packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        sinks: torch.Tensor | None,
        rules: Rules,
        metadata: FlashMetadata,
        offsets: torch.Tensor,
        max_key_len: int,
        with_lse: bool,
    ) -> Result:
        """Packed keys."""
        self.progress.note(("packed", rules.causal, with_lse), f"packed keys, {self._shape()}")
        call = self._packed_call(rules, metadata, offsets, max_key_len, with_lse)
        return self._run(call, q, k, v, sinks, None, with_lse)


def device_family(device: torch.device) -> int:
    """9 for Hopper, 10 for data-centre Blackwell; the library's own variable decides where it compiles for another device."""
    import os

    named = os.environ.get("FLASH_ATTENTION_ARCH", "").lower().lstrip("sm_").rstrip("af")
    if named.isdecimal():
        return int(named) // 10
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0]
    return 9


def key_tiles(family: int, qk_dim: int, v_dim: int) -> frozenset[int]:
    """Keys in a tile: a page of that size is loaded whole, past the end of its row. A superset of what a release may choose."""
    if family != 9:
        return frozenset({64, 128})
    if max(qk_dim, v_dim) <= 128:
        return frozenset({128, 144})
    return frozenset({96, 112, 128}) if qk_dim <= 192 else frozenset({64, 80})
