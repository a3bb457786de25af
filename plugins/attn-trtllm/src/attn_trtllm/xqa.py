"""XQA: decode and verification of chains on Hopper and consumer Blackwell.

Over an e4m3 cache FlashInfer has two kernels for sm90. The Hopper one rounds queries to e4m3 and multiplies whole pages; the
generic one keeps queries in 16 bit and loads no key past the end of a row. The generic one is what the contract asks for, and
FlashInfer takes it for ragged queries: so a row's queries are given as a ragged batch of equal lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from attn_core.batch import AttentionBatch
from attn_core.context import Context
from attn_core.errors import BindError
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_trtllm import compiling
from attn_trtllm.backend import Result, TrtllmBackend
from attn_trtllm.library import INSTALL, XQA, XQA_ORDER
from attn_trtllm.steps import TrtllmMetadata, chain_mask


class Xqa(TrtllmBackend):
    """One row of the kernel's batch for each row of the step; queries in 16 bit, also over an fp8 cache."""

    variant = "xqa"
    capabilities = ((9, 0), (12, 0), (12, 1))
    workspace_bytes = 136 << 20  # 8 MiB of semaphores, then scratch

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._views: dict[int, tuple[MhaCache, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._function = self.functions[XQA.name].call
        self._chains: dict[int, torch.Tensor] = {}
        self.generic = self._needs_generic()

    def _needs_generic(self) -> bool:
        """Whether ragged queries must keep FlashInfer from its Hopper kernel. Raises :class:`BindError` if they cannot."""
        pool, options = self.context.pools.get("attend"), self.context.options
        narrow = pool is not None and pool.dtype == "fp8_e4m3"
        if self.capability[0] != 9 or not narrow or self.geometry.qk_dim > 256:  # wider heads have one kernel
            return False
        if options.get("hopper_fp8", False):
            if not self.finite:
                raise BindError(
                    "FlashInfer's Hopper kernel over e4m3 caches multiplies what lies after a row's last key",
                    fix="--backend-option trtllm_mha.finite_pool=true, if the pool is zeroed when it is allocated",
                )
            return False
        if "q_cu_seq_lens" not in self.functions[XQA.name].optional:
            raise BindError(
                "this FlashInfer has no exact kernel over e4m3 caches on sm90: it takes no ragged queries",
                fix=f"{INSTALL}, or --backend-option trtllm_mha.hopper_fp8=true",
            )
        return True

    @hookimpl
    def attn_decode(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor | None
    ) -> Result:
        """One query a row: q[T, Hq, D] -> out[T, Hq, D], no LSE."""
        # the usual call, in one frame: decode of few rows costs what the host takes. Anything else goes the long way
        q, found = inputs.q, self._views.get(id(cache))
        if (
            found is not None
            and found[0] is cache
            and out is not None
            and metadata.exact
            and metadata.before
            and metadata.kernel in compiling.loaded  # has run before: nothing compiles
            and layer.k_scale is None
            and layer.v_scale is None
            and q.dtype is self.dtype
            and out.dtype is self.dtype
            and q.is_contiguous()
            and out.is_contiguous()
        ):
            self._function(q, found[1], *metadata.before, out, layer.sinks, *metadata.after)
            return out, None
        return self.attend(inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_extend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor | None
    ) -> Result:
        """A chain of drafts a row, causal among themselves."""
        return self.attend(inputs, layer, cache, metadata, out)

    def _shape(self, metadata: TrtllmMetadata, batch: AttentionBatch, phase: str) -> None:
        super()._shape(metadata, batch, phase)
        rows, width, device = metadata.rows, metadata.query_len, self.context.device
        if self.generic:
            metadata.query_offsets = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=device)
        if width > 1 or self.generic:
            mask = self.chain(rows, width)
            metadata.mask = mask.view(rows * width, -1) if self.generic else mask

    def chain(self, rows: int, width: int) -> torch.Tensor:
        """The mask of chains, a constant: made once for the most rows that were seen, u16[rows, width, words]."""
        found = self._chains.get(width)
        if found is None or len(found) < rows:
            most = max(rows, self.context.limits.max_rows if self.context.limits else 0)
            found = self._chains[width] = chain_mask(most, width, self.context.device)
        return found[:rows]

    def launch(
        self, q: torch.Tensor, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor
    ) -> None:
        """See :meth:`TrtllmBackend.launch`."""
        pages = self.pages(cache)
        if not metadata.kernel:
            self.fix(metadata, q, pages[0])
        logits, result = self.scales(layer, q)
        call = self._function if metadata.kernel in compiling.loaded else self.announced(metadata.kernel)
        call(
            query=q,
            kv_cache=pages,
            bmm1_scale=logits,
            bmm2_scale=result,
            out=out,
            sinks=layer.sinks,
            **metadata.fixed,
        )

    def fix(self, metadata: TrtllmMetadata, q: torch.Tensor, k: torch.Tensor) -> None:
        """The kernel's name (one for each fact in it), and the arguments that do not change from layer to layer."""
        g, (major, minor), width = self.geometry, self.capability, metadata.query_len
        types = "/".join(str(tensor.dtype).removeprefix("torch.") for tensor in (q, k))
        more = ("-window" if g.window is not None else "") + ("-ragged" if self.generic else "")
        name = f"xqa sm{major}{minor} {types} page {k.shape[1]} dim {g.qk_dim} ratio {g.ratio} queries {width}{more}"
        metadata.fixed = {
            "workspace_buffer": metadata.workspace,
            "block_tables": metadata.table,
            "seq_lens": metadata.kv_lens,
            "max_seq_len": metadata.max_kv_len,
            "window_left": self.window_left,
            "kv_layout": "NHD",
            "q_len_per_req": max(width, 2) if self.generic else width,  # ragged queries are for two and more
            "mask": metadata.mask,
        }
        function = self.functions[XQA.name]
        if "enable_pdl" in function.optional:  # what the library would find out at every call
            metadata.fixed["enable_pdl"] = major >= 9
        if self.generic:
            metadata.fixed["q_cu_seq_lens"] = metadata.query_offsets
        elif width == 1 and function.order[: len(XQA_ORDER)] == XQA_ORDER:
            known = {**metadata.fixed, "bmm1_scale": g.scale, "bmm2_scale": 1.0}
            metadata.before = tuple(known[word] for word in XQA_ORDER[2:9])
            metadata.after = tuple(known[word] for word in XQA_ORDER[11:])
        metadata.kernel = name

    def announced(self, kernel: str) -> Callable[..., object]:
        """The library call for a kernel that this process has not loaded."""
        return partial(self.call, XQA.name, kernel, "10 to 50 s")

    def pages(self, cache: MhaCache) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [pages, P, Hk, D] as the kernel reads them: with any strides, but both with the same ones."""
        found = self._views.get(id(cache))
        if found is not None and found[0] is cache:
            return found[1]
        k, v = plain_strides(cache.k), plain_strides(cache.v)
        if k.stride() != v.stride() or k.stride(-1) != 1:
            raise BindError(
                "trtllm_mha:xqa needs keys and values with the same strides, the last one 1",
                f"k        {tuple(k.stride())}",
                f"v        {tuple(v.stride())}",
            )
        self._views[id(cache)] = cache, (k, v)
        return k, v


def plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    """[pages, P, Hk, D] whose head stride is D where there is one head: descriptors take no other value for it."""
    if tensor.shape[2] != 1 or tensor.stride(2) == tensor.shape[3]:
        return tensor
    page, token, _, dim = tensor.stride()
    return tensor.as_strided(tensor.shape, (page, token, tensor.shape[3], dim))
