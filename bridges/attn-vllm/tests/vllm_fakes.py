"""Stand-ins for the parts of vLLM that the bridge reads, and a server around them that knows the right answers.

Fields, shapes and paddings are those of vLLM 0.32: ``CommonAttentionMetadata``, attention modules with a cache view
``[pages, heads, page, 2 * dim]`` in either memory order, block 0 unused, rows of one token in front.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from attn_vllm.layers import LayerFacts
from attn_vllm.planning import make_plan
from attn_vllm.service import Service
from attn_vllm.worker import graph_limits, verify_length

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 9}
GPT_OSS = {
    **LLAMA,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
GEMMA2 = {
    **LLAMA,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "sliding_window": 8,
    "attn_logit_softcapping": 20.0,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}


def config(model: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """A ``VllmConfig`` by its fields. ``changes``: block_size, cache_dtype, spec (number of drafts), dtype, max_num_seqs, eager."""
    block = changes.get("block_size")
    spec = changes.get("spec")
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=dict(model or LLAMA),
            dtype=changes.get("dtype", torch.float32),
            max_model_len=256,
            enforce_eager=changes.get("eager", False),
        ),
        cache_config=SimpleNamespace(
            block_size=block or 128,
            user_specified_block_size=block is not None,
            cache_dtype=changes.get("cache_dtype", "auto"),
            enable_prefix_caching=True,
            num_gpu_blocks=64,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=changes.get("max_num_seqs", 8), max_num_batched_tokens=64, async_scheduling=False
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=changes.get("tp", 1), decode_context_parallel_size=changes.get("dcp", 1)
        ),
        speculative_config=None
        if spec is None
        else SimpleNamespace(
            num_speculative_tokens=spec, method=changes.get("method", "ngram"), attention_backend=None
        ),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8], static_forward_context={}),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        additional_config={},
    )


@dataclass
class Common:
    """The fields of ``CommonAttentionMetadata`` that exist for decoder layers."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    causal: Any = True
    encoder_seq_lens: Any = None
    dcp_local_seq_lens: Any = None
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None


@dataclass
class Request:
    """Keys and values so far, by layer [tokens, heads, dim], and its pages."""

    pages: list[int] = field(default_factory=list)
    k: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    v: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    length: int = 0


class FakeServer:
    """Runs steps of several requests through one :class:`Service` and compares every layer with float64 attention."""

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        asked: dict[str, Any] | None = None,
        *,
        device: str = "cpu",
        order: str = "NHD",
        only: str | None = None,
        given: tuple[Any, Any] | None = None,
        **changes: Any,
    ) -> None:
        """``given`` is a (plan, registry) to use instead of planning with what is installed."""
        torch.manual_seed(0)
        self.config = config(model, **changes)
        self.device = torch.device(device)
        self.plan, registry = given or (make_plan(self.config, self.device.type, asked or {}), None)
        self.dtype = self.config.model_config.dtype
        self.page = self.plan.pools[0].page_size
        self.pages = 1536 // self.page
        self.next_page, self.order = 0, torch.randperm(self.pages - 1) + 1
        self.modules: dict[str, Any] = {}
        for item in self.plan.groups:
            if only in (None, item.group.name):
                for index in item.group.layers:
                    self.modules[f"model.layers.{index}.self_attn.attn"] = self._module(
                        index, item.group.geometry, order
                    )
        self.requests: dict[int, Request] = {}
        verify_len = verify_length(self.config, self.plan)
        self.service = Service(
            self.plan,
            self.modules,
            self.device,
            verify_len=verify_len,
            limits=graph_limits(self.config, self.plan) if device != "cpu" or given else None,
            registry=registry,
        )
        self.worst = 0.0

    def _module(self, index: int, geometry: Any, order: str) -> Any:
        shape = (geometry.kv_heads, self.page, geometry.qk_dim + geometry.v_dim)
        fp8 = self.plan.pools[0].dtype.startswith("fp8")
        dtype = torch.uint8 if fp8 else self.dtype
        if order == "HND":
            cache = torch.zeros(self.pages, *shape, dtype=dtype, device=self.device)
        else:
            cache = torch.zeros(self.pages, shape[1], shape[0], shape[2], dtype=dtype, device=self.device).transpose(
                1, 2
            )
        if not fp8:
            cache[1:].fill_(math.nan)  # what nobody wrote may be anything
        sinks = torch.randn(geometry.q_heads, device=self.device, dtype=self.dtype) if geometry.sinks else None
        facts = LayerFacts(
            geometry.q_heads,
            geometry.kv_heads,
            geometry.qk_dim,
            geometry.scale,
            geometry.window,
            geometry.softcap,
            geometry.sinks,
        )
        one = torch.ones((), device=self.device)
        return SimpleNamespace(
            layer_name=f"model.layers.{index}.self_attn.attn",
            impl=SimpleNamespace(facts=facts, sinks=sinks),
            kv_cache=cache,
            kv_sharing_target_layer_name=None,
            geometry=geometry,
            _k_scale=one,
            _v_scale=one,
            _k_scale_float=1.0,
            _v_scale_float=1.0,
        )

    # --- steps -------------------------------------------------------------------------------------------------------

    def common(self, rows: list[tuple[int, int]], padded_rows: int = 0) -> Common:
        """The metadata of a step: (request, new tokens) a row; with padding as for a full CUDA graph."""
        lengths, slots, positions, tables = [], [], [], []
        for number, new in rows:
            request = self.requests.setdefault(number, Request())
            while len(request.pages) * self.page < request.length + new:
                request.pages.append(int(self.order[self.next_page]))
                self.next_page += 1
            for position in range(request.length, request.length + new):
                slots.append(request.pages[position // self.page] * self.page + position % self.page)
                positions.append(position)
            lengths.append(request.length + new)
            tables.append(request.pages)
        width = 256 // self.page
        count = max(padded_rows, len(rows))
        table = torch.zeros(count, width, dtype=torch.int32)
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        starts = [0]
        for _, new in rows:
            starts.append(starts[-1] + new)
        starts += [starts[-1]] * (count - len(rows))
        each = max(new for _, new in rows)
        tokens = count * each if padded_rows else starts[-1]
        missing = tokens - starts[-1]
        offsets = torch.tensor(starts, dtype=torch.int32)
        lens = torch.tensor(lengths + [0] * (count - len(rows)), dtype=torch.int32)
        return Common(
            query_start_loc=offsets.to(self.device),
            query_start_loc_cpu=offsets,
            seq_lens=lens.to(self.device),
            num_reqs=count,
            num_actual_tokens=tokens,
            max_query_len=each,
            max_seq_len=max(lengths),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.tensor(slots + [-1] * missing, dtype=torch.int64, device=self.device),
            seq_lens_cpu_upper_bound=lens,
            positions=torch.tensor(positions + [0] * missing, dtype=torch.int64, device=self.device),
        )

    def inputs(self, tokens: int, total: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Random q, k, v a layer for `tokens` tokens, NaN up to `total`."""
        made = {}
        for name, module in self.modules.items():
            g = module.geometry
            shapes = ((g.q_heads, g.qk_dim), (g.kv_heads, g.qk_dim), (g.kv_heads, g.v_dim))
            made[name] = tuple(torch.randn(total, *shape, device=self.device, dtype=self.dtype) for shape in shapes)
            for tensor in made[name]:
                tensor[tokens:] = math.nan
        return made  # type: ignore[return-value]

    def step(self, rows: list[tuple[int, int]], padded_tokens: int = 0) -> None:
        """One eager step; checks every layer. ``padded_tokens``: the tensors are longer than the batch (piecewise graphs)."""
        common = self.common(rows)
        made = self.inputs(common.num_actual_tokens, max(padded_tokens, common.num_actual_tokens))
        served = self.service.begin(common)
        for name, (q, k, v) in made.items():
            out = torch.full_like(q, 7.0)
            served.attend(name, q, k, v, out)
            assert bool((out[common.num_actual_tokens :] == 7.0).all())
            self.check(name, rows, q, k, v, out)
        self.advance(rows)

    def check(self, name: str, rows: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Compare the real rows of one layer, and remember their keys and values."""
        start = 0
        for number, new in rows:
            request, part = self.requests[number], slice(start, start + new)
            for store, tensor in ((request.k, k), (request.v, v)):
                store.setdefault(name, []).append(self.stored(tensor[part]))
            wanted = attention(self.modules[name], q[part], torch.cat(request.k[name]), torch.cat(request.v[name]))
            self.worst = max(self.worst, float((out[part].double() - wanted).abs().max()))
            start += new

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a cache of the planned dtype keeps of `tensor`."""
        from attn_core.formats import torch_dtype

        kept = torch_dtype(self.plan.pools[0].dtype)
        return tensor.to(kept).double() if kept.itemsize == 1 else tensor.double()

    def advance(self, rows: list[tuple[int, int]]) -> None:
        """The step is over."""
        for number, new in rows:
            self.requests[number].length += new


class Graph:
    """One captured forward of all layers, with inputs and outputs of its own, as vLLM's runner holds it.

    On a CPU, which has no graphs, a replay runs the captured step's calls again: the same objects, new contents.
    """

    def __init__(self, server: FakeServer, rows: int, query_len: int) -> None:
        self.server, self.rows, self.query_len = server, rows, query_len
        self.inputs = server.inputs(0, rows * query_len)
        self.outputs = {name: torch.zeros_like(q) for name, (q, _, _) in self.inputs.items()}
        common = server.common([(1000 + row, query_len) for row in range(rows)])
        common.slot_mapping.fill_(-1)
        common.max_seq_len = 256
        self.forward(server.service.capture(common))
        self.served = server.service.capture(common)
        if server.device.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.forward(self.served)

    def forward(self, served: Any) -> None:
        """All layers into the outputs."""
        for name, (q, k, v) in self.inputs.items():
            served.attend(name, q, k, v, self.outputs[name])

    def replay(self, rows: list[tuple[int, int]]) -> None:
        """One step of real rows: new inputs, new metadata, then what was captured. Checks every layer."""
        server = self.server
        common = server.common(rows, padded_rows=self.rows)
        fresh = server.inputs(sum(new for _, new in rows), self.rows * self.query_len)
        for name, tensors in fresh.items():
            for mine, theirs in zip(self.inputs[name], tensors, strict=True):
                mine.copy_(theirs)
            self.outputs[name].fill_(math.nan)
        server.service.begin(common)
        if server.device.type == "cuda":
            self.graph.replay()
        else:
            self.forward(self.served)
        for name, (q, k, v) in self.inputs.items():
            server.check(name, rows, q, k, v, self.outputs[name])
        server.advance(rows)


def attention(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows in float64: q[new, Hq, D], k and v [all, Hk, D]."""
    g = module.geometry
    keys, new = k.shape[0], q.shape[0]
    k, v = (x.repeat_interleave(g.q_heads // g.kv_heads, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * g.scale
    if g.softcap:
        logits = g.softcap * torch.tanh(logits / g.softcap)
    at = torch.arange(keys - new, keys, device=q.device)[:, None]
    key = torch.arange(keys, device=q.device)[None]
    hidden = key > at
    if g.window:
        hidden = hidden | (key <= at - g.window)
    logits = logits.masked_fill(hidden, -math.inf)
    if module.impl.sinks is not None:
        sink = module.impl.sinks.double()[:, None, None].expand(-1, new, 1)
        logits = torch.cat([logits, sink], -1)
        weights = logits.softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
