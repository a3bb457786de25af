"""trtllm-gen: all phases on data-centre Blackwell. Not run on hardware by us; written against FlashInfer's signatures."""

from __future__ import annotations

import math
from typing import Any

import torch

from attn_core.context import Context
from attn_core.formats import quantize
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_trtllm import device
from attn_trtllm.backend import Result, TrtllmBackend
from attn_trtllm.block_scales import InterleavedScales
from attn_trtllm.steps import TrtllmMetadata

_LN2 = math.log(2.0)


class TrtllmGen(TrtllmBackend):
    """Prebuilt kernels, fetched at first use unless ``flashinfer-cubin`` holds them; LSE in base 2, converted here."""

    variant = "trtllm-gen"
    capabilities = ((10, 0), (10, 3))
    workspace_bytes = 128 << 20

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.processors = device.processors(context.device)
        self._block_scales: dict[int, InterleavedScales] = {}

    @hookimpl
    def attn_decode(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor | None
    ) -> Result:
        """One query a row: q[T, Hq, D] -> out[T, Hq, D], lse f32[T, Hq] if asked for."""
        return self.attend(inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_extend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor | None
    ) -> Result:
        """Prefill, and chains of drafts to verify."""
        return self.attend(inputs, layer, cache, metadata, out)

    def attend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor | None
    ) -> Result:
        """As the base class; the LSE covers padded tokens, too (-inf)."""
        whole, lse = super().attend(inputs, layer, cache, metadata, out)
        if not metadata.needs_lse:
            return whole, None
        if lse is None or len(lse) != len(whole):
            full = torch.full(whole.shape[:2], -math.inf, dtype=torch.float32, device=whole.device)
            if lse is not None:
                full[: len(lse)] = lse
            lse = full
        return whole, lse

    def launch(
        self, q: torch.Tensor, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor
    ) -> torch.Tensor | None:
        """See :meth:`TrtllmBackend.launch`."""
        narrow = cache.k.element_size() == 1
        if narrow and q.dtype != torch.float8_e4m3fn:
            q = quantize(q, "fp8_e4m3", layer.q_scale)[0]
        logits, result = self.scales(layer, q)
        arguments: dict[str, Any] = {
            "query": q,
            "kv_cache": (cache.k.transpose(1, 2), cache.v.transpose(1, 2)),
            "workspace_buffer": metadata.workspace,
            "block_tables": metadata.table,
            "seq_lens": metadata.kv_lens,
            "bmm1_scale": logits,
            "bmm2_scale": result,
            "window_left": self.window_left,
            "out": out,
            "sinks": layer.sinks,
            "kv_layout": "HND",
            "kv_cache_sf": self.block_scales(cache, metadata),
            "lse": None,
            "return_lse": metadata.needs_lse,
        }
        ragged = metadata.query_offsets is not None
        name = "trtllm_batch_context_with_kv_cache" if ragged else "trtllm_batch_decode_with_kv_cache"
        arguments |= self._ragged(metadata) if ragged else self._uniform(metadata)
        optional: dict[str, Any] = {"multi_ctas_kv_counter_buffer": metadata.counters}
        if ragged:
            optional["backend"] = "trtllm-gen"
        arguments |= {key: value for key, value in optional.items() if key in self.functions[name].optional}
        found = self.functions[name].call(**arguments)
        return found[1] * _LN2 if metadata.needs_lse else None

    def _uniform(self, metadata: TrtllmMetadata) -> dict[str, Any]:
        return {"max_seq_len": metadata.max_kv_len, "q_len_per_req": metadata.query_len, "backend": "trtllm-gen"}

    def _ragged(self, metadata: TrtllmMetadata) -> dict[str, Any]:
        return {
            "max_q_len": metadata.query_len,
            "max_kv_len": metadata.max_kv_len,
            "batch_size": metadata.rows,
            "cum_seq_lens_q": metadata.query_offsets,
            "cum_seq_lens_kv": metadata.key_offsets,
        }

    def _scratch(self, metadata: TrtllmMetadata, lane: int) -> None:
        super()._scratch(metadata, lane)
        # one 4-byte counter a row and head, at least one a multiprocessor; room for all rows that a graph may bring
        rows = max(metadata.rows, self.context.limits.max_rows if self.context.limits else 0)
        counters = max(rows * self.geometry.q_heads, self.processors)
        metadata.counters = self.context.workspace("trtllm-gen counters", 4 * (counters + 8), lane, zeroed=True)

    def block_scales(self, cache: MhaCache, metadata: TrtllmMetadata) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(K scales, V scales) [pages, Hk, P, D / 16] of an fp4 cache; those of V in the kernels' own order."""
        if cache.k_blocks is None or cache.v_blocks is None:
            return None
        found = self._block_scales.get(id(cache))
        if found is None or found.cache is not cache:
            found = self._block_scales[id(cache)] = InterleavedScales.of(cache)
        assert metadata.table is not None
        return found.refresh(metadata.table)
