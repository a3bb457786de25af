"""What the bridge sees of SGLang, small enough to read: model runner, pools, forward batches, and a float64 reference.

Everything has SGLang's names and shapes: token slots, a request-to-token table, ``RadixAttention`` modules. Pages are
handed out in random order; slot 0's page is the dummy; freed memory holds NaN.
"""

from __future__ import annotations

import math
from enum import IntEnum
from types import SimpleNamespace

import torch
from torch import nn

from attn_sglang.backend import CoreBackend
from attn_sglang.build import build
from attn_sglang.facts import ServerFacts, Speculation


class Mode(IntEnum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2, PREBUILT, SPLIT_PREFILL, DLLM_EXTEND = range(1, 10)

    def is_decode(self):
        return self is Mode.DECODE

    def is_idle(self):
        return self is Mode.IDLE

    def is_target_verify(self):
        return self is Mode.TARGET_VERIFY

    def is_draft_extend_v2(self):
        return self is Mode.DRAFT_EXTEND_V2

    def is_dllm_extend(self):
        return self is Mode.DLLM_EXTEND

    def is_prebuilt(self):
        return self is Mode.PREBUILT


class Radix(nn.Module):
    def __init__(self, index, heads, kv_heads, dim, v_dim=None, window=-1, softcap=0.0, irope=False):
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = heads, kv_heads, kv_heads
        self.qk_head_dim, self.v_head_dim = dim, v_dim or dim
        self.scaling, self.layer_id = dim**-0.5, index
        self.sliding_window_size, self.logit_cap = window, softcap
        self.is_cross_attention, self.use_irope = False, irope
        self.attn_type = SimpleNamespace(value="decoder")
        self.pos_encoding_mode, self.logit_capping_method, self.xai_temperature_len = "NONE", "tanh", -1
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None


class SelfAttention(nn.Module):
    def __init__(self, attn, sinks=None):
        super().__init__()
        self.attn = attn
        if sinks is not None:
            self.sinks = nn.Parameter(sinks, requires_grad=False)


class Pool:
    """``MHATokenToKVPool``: [slots, heads, dim] a layer, or [pages, heads, page, dim] in the HND layout."""

    layer_transfer_counter = None
    is_quantized_kv_cache = False

    def __init__(self, layers, slots, page, heads, dim, v_dim, dtype, device, hnd=False):
        self.kv_cache_layout = "hnd" if hnd else "nhd"

        def make(width):
            shape = (slots // page, heads, page, width) if hnd else (slots, heads, width)
            return torch.full(shape, math.nan, device=device).to(dtype)

        self.k = {layer: make(dim) for layer in layers}
        self.v = {layer: make(v_dim) for layer in layers}

    def get_key_buffer(self, layer):
        return self.k[layer]

    def get_value_buffer(self, layer):
        return self.v[layer]


class SlidingPool:
    """``SWAKVPool``: a sub-pool for the sliding-window layers, with a map from full to sliding slots."""

    layer_transfer_counter = None

    def __init__(self, full, sliding, layers, sliding_layers, mapping):
        self.full_kv_pool, self.swa_kv_pool = full, sliding
        self.layers_mapping = {layer: (layer, False) for layer in layers} | {
            layer: (layer, True) for layer in sliding_layers
        }
        self.full_to_swa_index_mapping = mapping

    def _of(self, layer):
        return self.swa_kv_pool if self.layers_mapping[layer][1] else self.full_kv_pool

    def get_key_buffer(self, layer):
        return self._of(layer).get_key_buffer(layer)

    def get_value_buffer(self, layer):
        return self._of(layer).get_value_buffer(layer)


class Server:
    """A model runner with requests. ``windows`` has one entry per layer (SGLang's: the farthest distance; -1 none)."""

    def __init__(
        self,
        *,
        windows=(-1, -1),
        heads=4,
        kv_heads=2,
        dim=32,
        v_dim=None,
        page=1,
        context=256,
        rows=8,
        dtype=torch.float32,
        kv_dtype=None,
        device="cpu",
        sinks=False,
        softcap=0.0,
        hnd=False,
        swa_pool=False,
        scales=None,
        speculation: Speculation | None = None,
        graphs=False,
        seed=0,
        **facts,
    ):
        self.random = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.page, self.context = torch.device(device), dtype, page, context
        kv_dtype = kv_dtype or dtype
        self.modules = []
        layers = nn.ModuleList()
        for index, window in enumerate(windows):
            attn = Radix(index, heads, kv_heads, dim, v_dim, window, softcap)
            if scales:
                attn.k_scale_float, attn.v_scale_float = scales
                attn.k_scale, attn.v_scale = (torch.tensor(s, device=device) for s in scales)
            self.modules.append(attn)
            layers.append(SelfAttention(attn, torch.randn(heads, device=device) if sinks else None))
        self.layers = layers
        self.model = nn.ModuleDict({"layers": layers})
        reach = context + 16
        slots = page * (2 + rows * (-(-reach // page) + 1))
        sliding = [index for index, window in enumerate(windows) if window > 0] if swa_pool else []
        full = [index for index in range(len(windows)) if index not in sliding]
        make = [kv_heads, dim, v_dim or dim, kv_dtype, device]
        self.mapping = None
        pool = Pool(full, slots, page, *make, hnd=hnd)
        if swa_pool:
            pages = slots // page
            order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(pages - 1, generator=self.random)])
            mapping = (order[:, None] * page + torch.arange(page)).flatten()
            self.mapping = mapping.to(device)
            pool = SlidingPool(pool, Pool(sliding, slots, page, *make, hnd=hnd), full, sliding, self.mapping)
        self.token_to_kv_pool = pool
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.zeros(rows + 1, reach, dtype=torch.int32, device=device), size=rows
        )
        self.free = (1 + torch.randperm(slots // page - 1, generator=self.random)).tolist()
        self.lengths = dict.fromkeys(range(1, rows + 1), 0)
        self.history = {}  # (request, layer) -> (k, v) float64
        self.narrow_queries = False  #: whether the backend computes with queries in e4m3
        self.facts = ServerFacts(
            model="fake", device=str(device), dtype=dtype, kv_dtype=kv_dtype, page_size=page, context_length=context,
            max_rows=rows, speculation=speculation, graphs=graphs, prefill_name="x", decode_name="x", **facts,
        )  # fmt: skip

    # --- batches ----------------------------------------------------------------------------------------------------------

    def _grow(self, request, new):
        """Slots for `new` more tokens of a request."""
        table, length = self.req_to_token_pool.req_to_token, self.lengths[request]
        for place in range(length, length + new):
            if place % self.page == 0:
                self._page = self.free.pop()
                table[request, place : place + self.page] = torch.arange(
                    self._page * self.page, self._page * self.page + self.page, dtype=torch.int32
                )[: table.shape[1] - place]
        return table[request, length : length + new].long()

    def _batch(self, mode, requests, new, lens, spec=None, positions=None, **more):
        slots = torch.cat([self._grow(r, n) for r, n in zip(requests, new, strict=True)])
        if positions is None:
            positions = torch.cat(
                [torch.arange(self.lengths[r], self.lengths[r] + n) for r, n in zip(requests, new, strict=True)]
            )
        host = torch.tensor(lens, dtype=torch.int64)
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=torch.tensor(requests, device=self.device),
            seq_lens=host.to(self.device),
            seq_lens_cpu=host,
            out_cache_loc=slots.to(self.device),
            positions=positions.to(self.device),
            spec_info=spec,
            extend_seq_lens=None,
            extend_seq_lens_cpu=None,
            new=new,
            requests=requests,
            **more,
        )

    def extend(self, new, mode=Mode.EXTEND):
        """`new`: {request: new tokens}."""
        requests, counts = list(new), list(new.values())
        made = self._batch(mode, requests, counts, [self.lengths[r] + n for r, n in new.items()])
        made.extend_seq_lens = torch.tensor(counts, dtype=torch.int32, device=self.device)
        made.extend_seq_lens_cpu = counts
        return made

    def decode(self, requests):
        return self._batch(Mode.DECODE, list(requests), [1] * len(requests), [self.lengths[r] + 1 for r in requests])

    def verify(self, requests, width, parents=None, full_mask=True):
        """Drafts of each request; `parents` gives one tree for all (-1 is the root's parent), None a chain."""
        parents = list(range(-1, width - 1)) if parents is None else parents
        seen = torch.zeros(width, width, dtype=torch.bool)
        for i in range(width):
            node = i
            while node >= 0:
                seen[i, node] = True
                node = parents[node]
        depth = seen.sum(-1) - 1
        lens = [self.lengths[r] for r in requests]
        parts = [
            (torch.cat([torch.ones(width, n, dtype=torch.bool), seen], 1) if full_mask else seen).flatten()
            for n in lens
        ]
        spec = SimpleNamespace(
            draft_token_num=width,
            custom_mask=torch.cat(parts).to(self.device),
            ragged_verify_layout=None,
            positions=None,
        )
        positions = torch.cat([n + depth for n in lens])
        return self._batch(
            Mode.TARGET_VERIFY, list(requests), [width] * len(requests), lens, spec, positions, seen=seen
        )

    # --- running ----------------------------------------------------------------------------------------------------------

    def inputs(self, batch, layer):
        tokens, attn = sum(batch.new), self.modules[layer]

        def draw(heads, width):
            return torch.randn(tokens, heads, width, generator=self.random).to(self.device, self.dtype)

        q = draw(attn.tp_q_head_num, attn.qk_head_dim).flatten(1)
        return q, draw(attn.tp_k_head_num, attn.qk_head_dim), draw(attn.tp_v_head_num, attn.v_head_dim)

    def kwargs(self, layer):
        sinks = getattr(self.layers[layer], "sinks", None)
        return {} if sinks is None else {"sinks": sinks}

    def attend(self, backend, batch, inputs):
        return [backend.forward(*inputs[i], self.modules[i], batch, **self.kwargs(i)) for i in range(len(self.modules))]

    def run(self, backend, batch):
        """One eager forward: outputs and references, layer by layer."""
        inputs = [self.inputs(batch, layer) for layer in range(len(self.modules))]
        backend.init_forward_metadata(batch)
        outs = self.attend(backend, batch, inputs)
        wanted = self.reference(batch, inputs)
        self.advance(batch)
        return outs, wanted

    def advance(self, batch):
        """Verified drafts are thrown away again, as if none was accepted."""
        if batch.forward_mode is not Mode.TARGET_VERIFY:
            for request, new in zip(batch.requests, batch.new, strict=True):
                self.lengths[request] += new

    def reference(self, batch, inputs):
        outs = []
        verify = batch.forward_mode is Mode.TARGET_VERIFY
        for index, (q, k, v) in enumerate(inputs):
            rows, start = [], 0
            for request, new in zip(batch.requests, batch.new, strict=True):
                part = slice(start, start + new)
                start += new
                keys, values = (self._stored(x[part], index, name) for x, name in ((k, "k"), (v, "v")))
                old = self.history.get((request, index))
                if old is not None:
                    keys, values = torch.cat([old[0], keys]), torch.cat([old[1], values])
                if not verify:
                    self.history[request, index] = keys, values
                positions = batch.positions[part].cpu()
                seen = self._seen(new, keys.shape[0], positions, batch.seen if verify else None, index)
                rows.append(self._dense(q[part], keys, values, seen, index))
            outs.append(torch.cat(rows))
        return outs

    def _stored(self, x, index, name):
        """As the pool keeps it: rounded to its dtype, scaled."""
        dtype, scale = self.facts.kv_dtype, getattr(self.modules[index], f"{name}_scale_float") or 1.0
        scale = scale if dtype.itemsize == 1 else 1.0
        return (x.cpu().float() / scale).to(dtype).double() * scale

    def _seen(self, new, keys, positions, drafts, index):
        places = torch.arange(keys)
        old = keys - new
        if drafts is not None:
            places = torch.cat([torch.arange(old), positions])
            seen = torch.cat([torch.ones(new, old, dtype=torch.bool), drafts], 1)
        else:
            seen = places <= positions[:, None]
        window = self.modules[index].sliding_window_size
        return seen & (places >= positions[:, None] - window) if window > 0 else seen

    def _dense(self, q, keys, values, seen, index):
        attn = self.modules[index]
        group = attn.tp_q_head_num // attn.tp_k_head_num
        if self.narrow_queries:  # a kernel of 8-bit queries rounds them first
            q = q.clamp(-448, 448).to(torch.float8_e4m3fn)
        q = q.cpu().double().view(q.shape[0], attn.tp_q_head_num, -1)
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * attn.scaling
        if attn.logit_cap:
            scores = attn.logit_cap * torch.tanh(scores / attn.logit_cap)
        scores = scores.masked_fill(~seen, -math.inf)
        sinks = self.kwargs(index).get("sinks")
        if sinks is not None:
            column = sinks.cpu().double()[:, None, None].expand(-1, scores.shape[1], 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def backend_of(server, name="x", backend="torch_native", registry=None):
    """The bridge's backend for `server`, bound to its layers and memory."""
    return CoreBackend(build(server, server.facts, name, backend, registry))


def worst(outs, wanted):
    """The largest relative error over all layers; infinite where an output is not a number."""
    errors = [
        float((a.cpu().double() - b).abs().max() / b.abs().max().clamp_min(1e-9))
        for a, b in zip(outs, wanted, strict=True)
    ]
    return max(error if math.isfinite(error) else math.inf for error in errors)
