"""FlashAttention 3 over pages, by either of its builds: the operator is called directly, with arguments placed by name.

Directly, because the Python wrapper of one build has no ``out`` and adds a custom operator's overhead to every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attn_core.context import Context
from attn_core.errors import BindError
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.merge import apply_sinks, merge_states
from attn_flash.builds import Build
from attn_flash.layers import LayerFacts, quantise_query
from attn_flash.paged import FlashBackend, Result, empty_result
from attn_flash.rules import Rules, largest_part
from attn_flash.steps import FlashMetadata

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, KvAddress
    from attn_flash.trees import TreeStep

#: Pages that hold whole key tiles are loaded whole, past the end of a row. No tile of the kernels is smaller than this.
SMALLEST_TILE = 64
#: Up to so many query rows (tokens times heads of a group) of a request, pages are never loaded whole.
FEW_ROWS = 64
#: A bound on query lengths that never changes, for runs whose kernels may not depend on the batch.
ANY_QUERY_LEN = 1 << 16
#: Layers from which a plan of splits, made once a step, pays for itself.
LAYERS_TO_PLAN_FOR = 2


class Fa3Backend(FlashBackend):
    """Decode, prefill, chains and trees. 8-bit caches take 8-bit queries: they are quantised here."""

    reads_table_rows = True
    lists_trees = True

    def __init__(self, context: Context, build: Build) -> None:
        super().__init__(context)
        if self.rules.softcap and not build.softcap:
            raise BindError(
                f"{build.distribution} is built without soft caps; the group has one of {self.rules.softcap}",
                fix="pip install sglang-kernel, or --attention-backend flashinfer or triton",
            )
        self.forward, self.planner = build.load()
        self.function = self.forward.function
        place = self.forward.place
        self.q_at, self.k_at, self.v_at, self.out_at, self.sinks_at = (
            place[n] for n in ("q", "k", "v", "out", "sinks")
        )
        self.splits_at = place["scheduler_metadata"]
        self.descales_at = tuple(place[f"{name}_descale"] for name in "qkv")
        self.facts = LayerFacts(self.geometry.kv_heads)
        self.splits = 1 if context.batch_invariant else 0
        # the kernel takes sinks in bf16, which is not enough for results in fp16: they are applied afterwards
        self.sinks_after = context.dtype == torch.float16
        wanted = context.options.get("plan_splits", len(context.group.layers) >= LAYERS_TO_PLAN_FOR)
        self.may_plan = bool(wanted) and self.planner is not None and not context.batch_invariant

    # --- once a step ------------------------------------------------------------------------------------------------------

    def page_to_read(self, address: KvAddress, planned: int, query_len: int, tree: bool) -> int:
        """The planned page, or a part of it where the kernel would load it whole and unused slots may hold NaN."""
        many = self.context.batch_invariant or query_len * self.geometry.ratio > FEW_ROWS
        if self.finite or planned < SMALLEST_TILE or not many:
            return planned
        if planned == SMALLEST_TILE and max(self.geometry.qk_dim, self.geometry.v_dim) <= 192:
            return planned  # tiles of 64 keys are those of the widest heads only
        return largest_part(planned, SMALLEST_TILE - 1)

    def bound_query_len(self, batch: AttentionBatch) -> int:
        """The batch's bound; where the kernel may not depend on the batch, the same for all, decode rows of mixed steps included."""
        return ANY_QUERY_LEN if self.context.batch_invariant else max(1, batch.max_query_len)

    def make_call(self, metadata: FlashMetadata) -> None:
        """The call over pages; for a tree the calls of its passes."""
        step = metadata.tree
        if step is None:
            metadata.call = self._call(metadata, self.rules)  # a plan of splits is put in once it is made
            return
        plain = self.rules.without_mask()
        if step.cascade:
            step.prefix_call = self._call(metadata, plain, seqused_k=step.prefix)
        step.own_call = self._call(
            metadata, plain, cu_seqlens_q=step.token_offsets, seqused_k=step.counts, page_table=step.slots,
            max_seqlen_q=1, kv_batch_idx=None,
        )  # fmt: skip

    def _call(self, metadata: FlashMetadata, rules: Rules, **changes: Any) -> list[Any]:
        given = {
            "cu_seqlens_q": metadata.query_offsets,
            "seqused_k": metadata.key_lens,
            "max_seqlen_q": metadata.max_query_len,
            "page_table": metadata.table,
            "kv_batch_idx": metadata.table_rows,
            **self._mask(rules),
            "num_splits": self.splits,
            **changes,
        }
        return self.forward.template(**given)

    @staticmethod
    def _mask(rules: Rules) -> dict[str, Any]:
        return {
            "softmax_scale": rules.scale,
            "is_causal": rules.causal,
            "window_size_left": rules.left,
            "window_size_right": rules.right,
            "attention_chunk": rules.chunk,
            "softcap": rules.softcap,
        }

    # --- the plan of splits -----------------------------------------------------------------------------------------------

    def plans_splits(self, metadata: FlashMetadata) -> bool:
        """Short queries without a window over pages: the operator plans once, instead of before every layer."""
        few = metadata.max_query_len * self.geometry.ratio <= FEW_ROWS
        return self.may_plan and few and not self.rules.local and metadata.tree is None and metadata.masks is None

    def split_entries(self, rows: int) -> int:
        """The most that the operator returns for so many rows: four vectors of a multiple of four, and a counter."""
        return 4 * (-(-rows // 4) * 4) + 1 if self.may_plan and not self.rules.local else 0

    def fill_splits(self, metadata: FlashMetadata) -> None:
        """The operator's plan for this step's lengths, copied to where the layers read it. Its size is the library's choice."""
        assert self.planner is not None
        assert metadata.splits is not None
        assert metadata.table is not None
        g, rules = self.geometry, self.rules
        made = self.planner.function(
            *self.planner.template(
                batch_size=metadata.rows, max_seqlen_q=metadata.max_query_len,
                max_seqlen_k=metadata.table.shape[1] * metadata.page, num_heads=g.q_heads, num_heads_k=g.kv_heads,
                headdim=g.qk_dim, headdim_v=g.v_dim, qkv_dtype=torch.float8_e4m3fn if self.narrow else self.context.dtype,
                seqused_k=metadata.key_lens, cu_seqlens_q=metadata.query_offsets, page_size=metadata.page,
                is_causal=rules.causal, window_size_left=rules.left, window_size_right=rules.right,
                has_softcap=bool(rules.softcap), num_splits=self.splits,
            )
        )  # fmt: skip
        if made.numel() > metadata.splits.numel():
            raise BindError(
                f"{self.planner.what} made {made.numel()} entries for {metadata.rows} rows; at most {metadata.splits.numel()} were expected",
                fix="--backend-option fa3.plan_splits=false",
            )
        part = metadata.splits.narrow(0, 0, made.numel())
        metadata.call[self.splits_at] = part.copy_(made)

    # --- once a layer -----------------------------------------------------------------------------------------------------

    def attend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: FlashMetadata, out: torch.Tensor | None
    ) -> Result:
        """One call; two and a merge for a tree without a window."""
        q = inputs.q
        if not metadata.tokens:
            return empty_result(q, self.geometry.v_dim, self.context.dtype)
        k, v = self.views.of(cache, metadata.page)
        step = metadata.tree
        sinks = layer.sinks is not None and not metadata.partial
        if sinks and self.sinks_after:
            assert layer.sinks is not None
            result, lse = self._passes(q, k, v, layer, metadata, step, False, True, out)
            assert lse is not None
            return apply_sinks(result, lse, layer.sinks, in_place=True)
        return self._passes(q, k, v, layer, metadata, step, sinks, metadata.needs_lse, out)

    def _passes(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        metadata: FlashMetadata,
        step: TreeStep | None,
        sinks: bool,
        with_lse: bool,
        out: torch.Tensor | None,
    ) -> Result:
        """The call of a plain step, or those of a tree."""
        if step is None:
            return self._run(metadata.call, q, k, v, layer, metadata.rows, sinks, with_lse, out)
        assert step.own_call is not None
        if not step.cascade:
            return self._run(step.own_call, q, k, v, layer, metadata.tokens, sinks, with_lse, out)
        assert step.prefix_call is not None
        q = quantise_query(q, layer.q_scale, self.geometry.kv_heads) if self.narrow else q
        first = self._run(step.prefix_call, q, k, v, layer, metadata.rows, False, True, None)
        second = self._run(step.own_call, q, k, v, layer, metadata.tokens, sinks, True, None)
        assert first[1] is not None
        assert second[1] is not None
        merged, lse = merge_states(first[0], first[1], second[0], second[1], out)
        return merged, lse if with_lse else None

    def _run(
        self,
        call: list[Any],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        rows: int,
        sinks: bool,
        with_lse: bool,
        out: torch.Tensor | None,
    ) -> Result:
        arguments = call.copy()
        direct = out
        if self.narrow:
            q = quantise_query(q, layer.q_scale, self.geometry.kv_heads)
            for place, value in zip(self.descales_at, self.facts.descales(layer, rows), strict=True):
                arguments[place] = value
            direct = out if self.context.dtype == torch.bfloat16 else None  # the kernel's only type of 8-bit attention
        arguments[self.q_at], arguments[self.k_at], arguments[self.v_at] = q, k, v
        arguments[self.out_at] = direct
        if sinks:
            arguments[self.sinks_at] = self.facts.sinks_bf16(layer)
        found = self.function(*arguments)
        result = found[0]
        if direct is not out:
            assert out is not None
            result = out.copy_(result)
        elif direct is None and self.narrow:
            result = result.to(self.context.dtype)
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
        """Packed keys of the model's own type, whatever the cache's."""
        call = self.forward.template(
            q=q, k=k, v=v, cu_seqlens_q=metadata.query_offsets, cu_seqlens_k=offsets, max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=max_key_len, num_splits=1, **self._mask(rules),
        )  # fmt: skip
        if sinks is not None and not self.sinks_after:
            call[self.sinks_at] = self.facts.sinks_bf16(layer)
        found = self.function(*call)
        if sinks is not None and self.sinks_after:
            return apply_sinks(found[0], found[1].t(), sinks, in_place=True)
        return found[0], found[1].t() if with_lse else None
