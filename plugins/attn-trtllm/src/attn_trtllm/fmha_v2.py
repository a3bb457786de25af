"""FMHA v2: prefill on Hopper and consumer Blackwell.

The kernel takes scales as host numbers. Those that only the device knows are multiplied into its operands there: what scales
the logits into the query, what scales the result into the output. An e4m3 query has no digits left for that, so its pages are
read as bfloat16 then.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core.context import Context
from attn_core.errors import BindError
from attn_core.formats import quantize
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_trtllm.backend import Result, TrtllmBackend, factor, product
from attn_trtllm.placement import Placement, collect, expand, place, with_tails
from attn_trtllm.steps import TrtllmMetadata
from attn_trtllm.tails import Tails


class FmhaV2(TrtllmBackend):
    """Queries of any length against pages; over an fp8 cache the queries are fp8, too."""

    variant = "fmha_v2"
    capabilities = ((9, 0), (12, 0), (12, 1))
    workspace_bytes = 16 << 20

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        g = self.geometry
        self.mask: dict[str, Any] = {"mask_mode": "causal", "window_left": -1, "chunked_attention_size": 0}
        if g.window is not None:
            self.mask = {"mask_mode": "sliding_window", "window_left": self.window_left, "chunked_attention_size": 0}
        if g.chunk is not None:
            if g.chunk & (g.chunk - 1) or self.capability[0] != 9 or g.window is not None:
                raise BindError(
                    "trtllm_mha:fmha_v2 takes chunks of a power of two, on sm90, without a window",
                    f"have     chunk {g.chunk}, window {g.window}, sm{self.capability[0]}{self.capability[1]}",
                )
            self.mask = {"mask_mode": "chunked", "window_left": -1, "chunked_attention_size": g.chunk}
        self._places: dict[int, Placement] = {}
        self._told: set[str] = set()
        self._kernels: dict[tuple[torch.dtype, torch.dtype, str], str] = {}

    @hookimpl
    def attn_extend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor | None
    ) -> Result:
        """The last tokens of each row against all of its keys: q[T, Hq, D] -> out[T, Hq, D], no LSE."""
        return self.attend(inputs, layer, cache, metadata, out)

    def launch(
        self, q: torch.Tensor, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor
    ) -> None:
        """See :meth:`TrtllmBackend.launch`."""
        fp8 = cache.k.dtype == torch.float8_e4m3fn
        logits = product(self.geometry.scale, factor(layer.k_scale, "k_scale"))
        if fp8:
            q = quantize(q, "fp8_e4m3", None if q.dtype == cache.k.dtype else layer.q_scale)[0]
            logits = product(logits, factor(layer.q_scale, "q_scale"))
        wide = False
        if isinstance(logits, torch.Tensor):
            q, logits, wide = (q.to(torch.float32) * logits).to(self.dtype), 1.0, fp8
        layout, pool, table = self.addresses(cache, metadata, wide)
        result = factor(layer.v_scale, "v_scale")
        self.call(
            "trtllm_fmha_v2_prefill",
            self.kernel(q, out, layout),
            "2 to 4 minutes",
            qkv=(q, pool),
            input_layout=f"Q_PAGED_KV_{layout}",
            workspace_buffer=metadata.workspace,
            seq_lens=metadata.kv_lens,
            max_q_len=metadata.query_len,
            max_kv_len=max(metadata.max_kv_len, metadata.query_len),
            bmm1_scale=logits,
            bmm2_scale=1.0 if isinstance(result, torch.Tensor) else result,
            batch_size=metadata.rows,
            cum_seq_lens_q=metadata.query_offsets,
            cum_seq_lens_kv=metadata.key_offsets,
            block_tables=table,
            out=out,
            sinks=layer.sinks,
            logits_soft_cap_scale=self.geometry.softcap,
            **self.mask,
        )
        if isinstance(result, torch.Tensor):
            out.mul_(result)

    def kernel(self, q: torch.Tensor, out: torch.Tensor, layout: str) -> str:
        """The name of the compiled library: it holds all head dims and masks. Written once for each: layers ask for it."""
        key = q.dtype, out.dtype, layout
        name = self._kernels.get(key)
        if name is None:
            types = "/".join(str(dtype).removeprefix("torch.") for dtype in key[:2])
            name = self._kernels[key] = f"fmha_v2 sm{self.capability[0]}{self.capability[1]} {types} {layout}"
        return name

    def addresses(self, cache: MhaCache, metadata: TrtllmMetadata, wide: bool = False) -> tuple[str, Any, torch.Tensor]:
        """(layout, pool, block table) of a cache in one of the forms of :mod:`attn_trtllm.placement`.

        `wide` asks for pages of the model's type, whatever the cache's: those of the step are copied.
        """
        where, table, tails = self.placement(cache), metadata.table, self.tails(cache, metadata)
        assert table is not None
        if wide:
            self.tell("of an e4m3 cache as bfloat16: its k_scale or q_scale has no value on the host (Scale.value)")
            pool, numbers = collect(cache, table, tails)
            return "NHD", pool.to(self.dtype), numbers
        if where.kind != "scattered" and tails is not None:
            found = with_tails(where, table, tails)
            if found is not None:
                return where.layout, *found
        elif where.kind == "stacked":
            return where.layout, where.pool, table
        elif where.kind == "apart":
            expanded = metadata.expanded.get(where.first)
            if expanded is None:
                expanded = metadata.expanded[where.first] = expand(table, where.first, where.step)
            return where.layout, where.pool, expanded
        return "NHD", *collect(cache, table, tails)

    def tails(self, cache: MhaCache, metadata: TrtllmMetadata) -> Tails | None:
        """The step's last pages, where the pool may hold anything after a row's last key."""
        if self.finite:
            return None
        if metadata.tails is None:
            assert metadata.table is not None
            assert metadata.kv_lens is not None
            metadata.tails = Tails.of(metadata.table, metadata.kv_lens, cache.k.shape[1])
        return metadata.tails

    def placement(self, cache: MhaCache) -> Placement:
        """The cache's place, looked at once. Copying pages is legal but slow: the log says so, once."""
        found = self._places.get(id(cache))
        if found is None or found.cache is not cache:
            found = self._places[id(cache)] = place(cache)
            if found.kind == "scattered":
                self.tell(": K and V are neither stacked [pages, 2, ...] nor contiguous at a distance of whole pages")
        return found

    def tell(self, why: str) -> None:
        """Log, once for each reason, that pages are copied."""
        if why not in self._told:
            self._told.add(why)
            joined = why if why.startswith(":") else f" {why}"
            self.context.log.warning(f"trtllm: fmha_v2 copies the pages of every prefill step{joined}")
