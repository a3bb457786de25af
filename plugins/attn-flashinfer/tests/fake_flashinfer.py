"""A stand-in for flashinfer on CPUs: the documented behaviour of its wrappers, computed with torch in float64.

It keeps what matters of the real ones: plans are copied and overwritten by the next plan, fixed-shape wrappers read the
buffers they were made with when they run, LSEs are in base 2, windows do not count the query, packed masks are bytes of
little-endian bits at byte offsets, and shapes that the real library would read past are refused. Every call is recorded.
"""

from __future__ import annotations

import math
import types

import torch

LN2 = math.log(2.0)
CALLS: list[tuple[str, tuple, dict]] = []
__version__ = "fake"


def _record(name, args, kwargs):
    CALLS.append((name, args, kwargs))


def _softmax(q, k, v, visible, scale, cap, sink=None):
    """q[s, H, D], k[l, Hk, D], v[l, Hk, Dv], visible[s, l] -> out f64[s, H, Dv], lse f64[s, H] in base 2."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(ratio, 1) for x in (k, v))
    scores = torch.einsum("shd,lhd->shl", q.double(), k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible[:, None, :], -math.inf)
    if sink is not None:
        column = sink.double()[None, :, None].expand(scores.shape[0], -1, 1)
        scores = torch.cat([scores, column], dim=-1)
        v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, torch.exp(scores - lse[..., None]))
    weights = torch.where(scores == -math.inf, 0.0, weights)
    return torch.einsum("shl,lhd->shd", weights, v), lse / LN2


def _visible(queries, keys, causal, window_left):
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window_left >= 0:
        seen &= key >= position - window_left
    return seen


class _Wrapper:
    """What all wrappers share."""

    def _init(self, name, workspace, backend, layout):
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= 1 << 20
        assert backend in ("fa2", "fa3"), "the adapter names the kernel family"
        assert layout == "NHD"
        self.name, self.fixed, self.rows = name, None, None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        _record(f"{self.name}.reset_workspace_buffer", (), {})
        assert float_workspace_buffer.numel() >= 1 << 20
        assert int_workspace_buffer.numel() >= 1 << 20

    def _plan(self, q, pages, indices, last, shape, words):
        for tensor in (q, pages, last):
            assert tensor.dtype == torch.int32
            assert tensor.device.type == "cpu", "plan() would wait for the device"
        assert indices.dtype == torch.int32
        assert len(indices) == int(pages[-1])
        assert (words["seq_lens"] is None) or words["seq_lens"].tolist() == self._lens(pages, last, shape[3]).tolist()
        self.shape, self.words, self.planned_tokens = shape, words, int(q[-1])
        if self.fixed is None:
            self.state = [x.clone() for x in (q, pages, indices, last)]
            return
        assert len(last) == self.rows, "the number of rows is fixed"
        if self.most is None:
            self.most = self.planned_tokens
        assert self.planned_tokens <= self.most
        buffers = self.fixed
        assert len(indices) <= len(buffers[2])
        if buffers[0] is not None:
            buffers[0].copy_(q)
        buffers[1].copy_(pages)
        buffers[3].copy_(last)
        buffers[2][: len(indices)].copy_(indices.clone())

    @staticmethod
    def _lens(pages, last, page):
        return (pages.diff() - 1).clamp(min=0) * page + last

    def _run(self, q, cache, causal, out, lse, return_lse, scale, v_scale, sink=None):
        heads, kv_heads, dim, page = self.shape
        words = self.words
        assert q.shape[0] == self.planned_tokens, "the real library refuses another number of tokens"
        assert q.shape[1:] == (heads, dim), "the real library would read past its plan"
        assert q.dtype == words["q_data_type"]
        k_cache, v_cache = cache
        assert k_cache.dtype == v_cache.dtype == words["kv_data_type"]
        assert k_cache.shape[1:3] == (page, kv_heads)
        assert out.is_contiguous()
        assert out.dtype == q.dtype
        offsets, pages, indices, last = self.state if self.fixed is None else self.fixed
        if offsets is None:
            offsets = torch.arange(len(last) + 1, dtype=torch.int32)
        result_lse = torch.zeros(q.shape[:2], dtype=torch.float32)
        for row in range(len(last)):
            a, b = int(offsets[row]), int(offsets[row + 1])
            count = int(pages[row + 1] - pages[row])
            keys = max(count - 1, 0) * page + int(last[row]) if count else 0
            own = indices[int(pages[row]) : int(pages[row + 1])].long()
            k, v = (x[own].flatten(0, 1)[:keys] for x in (k_cache, v_cache))
            seen = _visible(b - a, keys, causal, words["window_left"])
            if getattr(self, "mask", None) is not None:
                seen = _visible(b - a, keys, False, words["window_left"]) & self._unpack(row, b - a, keys)
            cap = words["logits_soft_cap"] or 0.0
            got, got_lse = _softmax(q[a:b], k.double(), v.double(), seen, scale, cap, sink)
            out[a:b].copy_(got if v_scale is None else got * v_scale)
            result_lse[a:b].copy_(got_lse)
        return (out, result_lse) if return_lse else out

    def _unpack(self, row, queries, keys):
        start, stop = int(self.mask_at[row]), int(self.mask_at[row + 1])
        packed = self.mask[start:stop].long()
        bits = (packed[:, None] >> torch.arange(8)) & 1
        return bits.flatten()[: queries * keys].view(queries, keys).bool()


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
    ):  # fmt: skip
        _record("decode.__init__", (float_workspace_buffer,), {"use_tensor_cores": use_tensor_cores})
        self._init("decode", float_workspace_buffer, backend, kv_layout)
        self.tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self.fixed = [None, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer]
            self.rows, self.most = len(paged_kv_last_page_len_buffer), None

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left=-1,
        logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None, sm_scale=None, seq_lens=None,
        disable_split_kv=False, non_blocking=True,
    ):  # fmt: skip
        words = {
            "window_left": window_left, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type,
            "kv_data_type": kv_data_type, "sm_scale": sm_scale, "seq_lens": seq_lens,
        }  # fmt: skip
        _record("decode.plan", (indptr, indices, last_page_len), words)
        if not self.tensor_cores:
            assert num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(rows, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size), words)

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False):
        _record("decode.run", (q,), {"k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse})
        scale = self.words["sm_scale"] * (1.0 if k_scale is None else k_scale)
        return self._run(q, paged_kv_cache, False, out, lse, return_lse, scale, v_scale)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None,
        backend="auto", max_total_num_rows=None,
    ):  # fmt: skip
        _record("prefill.__init__", (float_workspace_buffer,), {"backend": backend})
        self._init("prefill", float_workspace_buffer, backend, kv_layout)
        self.backend, self.mask, self.mask_at = backend, custom_mask_buf, mask_indptr_buf
        if use_cuda_graph:
            self.fixed = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
            self.rows, self.most = len(paged_kv_last_page_len_buf), max_total_num_rows

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, sm_scale=None,
        window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, seq_lens=None, disable_split_kv=False, uniform_q_len=None,
    ):  # fmt: skip
        words = {
            "window_left": window_left, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type,
            "kv_data_type": kv_data_type, "sm_scale": sm_scale, "seq_lens": seq_lens, "causal": causal,
            "uniform_q_len": uniform_q_len,
        }  # fmt: skip
        _record("prefill.plan", (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), words)
        assert custom_mask is None
        assert packed_custom_mask is None, "the real library takes its offsets for bits where bytes are meant"
        assert self.backend == "fa2" or self.mask is None, "fa3 has no custom masks"
        if uniform_q_len:
            assert set(qo_indptr.diff().tolist()) == {uniform_q_len}
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, shape, words)

    def run(self, q, paged_kv_cache, *args, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False):
        _record("prefill.run", (q,), {"k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse})
        scale = self.words["sm_scale"] * (1.0 if k_scale is None else k_scale)
        if self.backend == "fa3":
            assert paged_kv_cache[0].stride()[:2] == paged_kv_cache[1].stride()[:2], (
                "K and V must have the same strides"
            )
        return self._run(q, paged_kv_cache, self.words["causal"], out, lse, return_lse, scale, v_scale)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None,
        backend="auto", q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, head_dim_qk=128, head_dim_vo=128,
        window_left=-1,
    ):  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
            paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
        )  # fmt: skip
        self.name = "sink"
        self.made_for = (q_data_type, kv_data_type, head_dim_qk, window_left)

    def run(self, q, paged_kv_cache, sinks, sm_scale, *, out=None, lse=None, return_lse=False):
        _record("sink.run", (q, sinks), {"sm_scale": sm_scale})
        words = self.words
        assert self.made_for[:2] == (words["q_data_type"], words["kv_data_type"])
        assert (self.made_for[3] >= 0) == (words["window_left"] >= 0)
        assert sinks.dtype == torch.float32
        return self._run(q, paged_kv_cache, words["causal"], out, lse, return_lse, sm_scale, None, sinks)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        _record("ragged.__init__", (float_workspace_buffer,), {"backend": backend})
        self._init("ragged", float_workspace_buffer, backend, kv_layout)

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
        window_left=-1, logits_soft_cap=None, sm_scale=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, disable_split_kv=False,
    ):  # fmt: skip
        words = {"causal": causal, "window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        _record("ragged.plan", (qo_indptr, kv_indptr), words)
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        assert qo_indptr.device.type == "cpu"
        assert kv_data_type == q_data_type
        self.q_at, self.k_at, self.words = qo_indptr.tolist(), kv_indptr.tolist(), words
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)

    def run(self, q, k, v, *, out=None, lse=None, return_lse=False):
        _record("ragged.run", (q, k, v), {"return_lse": return_lse})
        assert q.shape[0] == self.q_at[-1]
        assert q.shape[1:] == (self.heads[0], self.heads[2])
        assert k.shape[0] >= self.k_at[-1]
        words = self.words
        result_lse = torch.zeros(q.shape[:2], dtype=torch.float32)
        for row in range(len(self.q_at) - 1):
            a, b, c, d = *self.q_at[row : row + 2], *self.k_at[row : row + 2]
            seen = _visible(b - a, d - c, words["causal"], words["window_left"])
            got, got_lse = _softmax(q[a:b], k[c:d], v[c:d], seen, words["sm_scale"], words["logits_soft_cap"] or 0.0)
            out[a:b].copy_(got)
            result_lse[a:b].copy_(got_lse)
        return (out, result_lse) if return_lse else out


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    _record("merge_state_in_place", (v, s, v_other, s_other), {})
    top = torch.maximum(s, s_other)
    a, b = torch.exp2(s - top), torch.exp2(s_other - top)
    v.copy_((v * a[..., None] + v_other * b[..., None]) / (a + b)[..., None])
    s.copy_(top + torch.log2(a + b))


attention = types.SimpleNamespace(BatchAttentionWithAttentionSinkWrapper=BatchAttentionWithAttentionSinkWrapper)
