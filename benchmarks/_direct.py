"""The libraries behind the backends of ``adapter_overhead.py``, called directly on the tensors of a case: no contract, no router.

Each entry of :data:`DIRECT` takes a :class:`Case` and returns a function without arguments that makes one attention call and
returns out[T, Hq, D]. Whatever a library plans once a step is done before that function is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One step of one layer with data on the device: `rows` requests of `kv_len` keys, the last `new` of them are queries.

    q and out bf16[T, Hq, D]; k and v bf16[pages, P, Hk, D]; table i32[R, W]; kv_lens i32[R]; query_offsets i32[R + 1].
    ``*_cpu`` are host copies. Causal, aligned bottom-right; the cache holds the new tokens.
    """

    rows: int
    kv_len: int
    new: int
    page: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    table: torch.Tensor
    kv_lens: torch.Tensor
    query_offsets: torch.Tensor
    kv_lens_cpu: torch.Tensor
    query_offsets_cpu: torch.Tensor
    scale: float

    @property
    def name(self) -> str:
        """``decode B=32`` or ``prefill 8192``."""
        return f"decode B={self.rows}" if self.new == 1 else f"prefill {self.new}"


def direct_fa3(case: Case) -> Call:
    """tokenspeed-fa3's ``flash_attn_with_kvcache``; sgl_kernel's where only that is installed."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

    def call() -> torch.Tensor:
        out: torch.Tensor = flash_attn_with_kvcache(
            case.q, case.k, case.v, cache_seqlens=case.kv_lens, page_table=case.table, cu_seqlens_q=case.query_offsets,
            max_seqlen_q=case.new, softmax_scale=case.scale, causal=True,
        )  # fmt: skip
        return out

    return call


def direct_fa4(case: Case) -> Call:
    """flash-attn-4's ``flash_attn_varlen_func`` over pages."""
    from flash_attn.cute import flash_attn_varlen_func

    def call() -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(
            case.q, case.k, case.v, cu_seqlens_q=case.query_offsets, max_seqlen_q=case.new, seqused_k=case.kv_lens,
            page_table=case.table, softmax_scale=case.scale, causal=True,
        )[0]  # fmt: skip
        return out

    return call


def _pages(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr i32[R + 1], indices i32[n], last_page_len i32[R], all on the device."""
    lens, page = case.kv_lens_cpu, case.page
    counts = (lens + page - 1) // page
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    indices = torch.cat([case.table[row, : int(counts[row])] for row in range(case.rows)])
    last = lens - (counts - 1) * page
    return indptr.to(case.q.device), indices, last.int().to(case.q.device)


def _workspace(case: Case) -> torch.Tensor:
    return torch.zeros(128 << 20, dtype=torch.uint8, device=case.q.device)


def _decode_wrapper(case: Case, graph: bool) -> tuple[Any, Callable[[], None]]:
    """A tensor-core decode wrapper and the function that plans it: with `graph` on fixed buffers."""
    import flashinfer

    indptr, indices, last = _pages(case)
    fixed: dict[str, Any] = {}
    if graph:
        fixed = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": indptr.clone(),
            "paged_kv_indices_buffer": indices.clone(),
            "paged_kv_last_page_len_buffer": last.clone(),
        }
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(case), "NHD", use_tensor_cores=True, backend="fa2", **fixed
    )
    heads, kv_heads, dim = case.q.shape[1], case.k.shape[2], case.q.shape[2]

    def plan() -> None:
        wrapper.plan(
            indptr, indices, last, heads, kv_heads, dim, case.page, q_data_type=case.q.dtype, kv_data_type=case.k.dtype,
            sm_scale=case.scale,
        )  # fmt: skip

    return wrapper, plan


def direct_flashinfer(case: Case) -> Call:
    """Decode: the tensor-core wrapper (the fixed-buffer one inside a capture, as a server would); prefill: FA3 over pages."""
    import flashinfer

    if case.new == 1:
        eager, plan = _decode_wrapper(case, graph=False)
        fixed, plan_fixed = _decode_wrapper(case, graph=True)
        plan()
        plan_fixed()

        def call() -> torch.Tensor:
            wrapper = fixed if torch.cuda.is_current_stream_capturing() else eager
            return wrapper.run(case.q, (case.k, case.v), out=case.out)  # type: ignore[no-any-return]

        return call
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(case), "NHD", backend="fa3")
    heads, kv_heads, dim = case.q.shape[1], case.k.shape[2], case.q.shape[2]
    wrapper.plan(
        case.query_offsets, *_pages(case), heads, kv_heads, dim, case.page, causal=True, sm_scale=case.scale,
        q_data_type=case.q.dtype, kv_data_type=case.k.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(case.q, (case.k, case.v), out=case.out)


def naive_plan_flashinfer(case: Case) -> Callable[[], object]:
    """``plan()`` of a decode step with tensors on the device, as the documentation shows it."""
    wrapper, plan = _decode_wrapper(case, graph=False)
    plan()
    return plan


def _two_pools(case: Case) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """((lower, upper), table i32[R, 2, W]) of K and V that lie whole pages apart; copied into one allocation where they do not."""
    k, v = case.k, case.v
    block = k[0].numel() * k.element_size()
    if (v.data_ptr() - k.data_ptr()) % block:
        both = torch.cat((k, v))
        k, v = both[: len(k)], both[len(k) :]
    distance = (v.data_ptr() - k.data_ptr()) // block
    lower, upper = (k, v) if distance > 0 else (v, k)
    table = torch.stack((case.table + max(-distance, 0), case.table + max(distance, 0)), dim=1)
    return (lower, upper), table


def direct_trtllm(case: Case) -> Call:
    """Decode: ``xqa_batch_decode_with_kv_cache``; prefill: ``trtllm_fmha_v2_prefill`` over pages."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache
    from flashinfer.prefill import trtllm_fmha_v2_prefill

    workspace = torch.zeros(136 << 20, dtype=torch.uint8, device=case.q.device)
    if case.new == 1:

        def decode() -> torch.Tensor:
            return xqa_batch_decode_with_kv_cache(  # type: ignore[no-any-return]
                case.q, (case.k, case.v), workspace, case.table, case.kv_lens, case.kv_len, bmm1_scale=case.scale,
                bmm2_scale=1.0, out=case.out, kv_layout="NHD",
            )  # fmt: skip

        return decode
    pools, table = _two_pools(case)
    offsets = torch.zeros(case.rows + 1, dtype=torch.int32)
    offsets[1:] = case.kv_lens_cpu.cumsum(0)
    key_offsets = offsets.to(case.q.device)

    def prefill() -> torch.Tensor:
        return trtllm_fmha_v2_prefill(  # type: ignore[no-any-return]
            (case.q, pools), "Q_PAGED_KV_NHD", workspace, case.kv_lens, case.new, case.kv_len, case.scale, 1.0, case.rows,
            case.query_offsets, key_offsets, block_tables=table, out=case.out, mask_mode="causal",
        )  # fmt: skip

    return prefill


#: By the id of the backend.
DIRECT: dict[str, Callable[[Case], Call]] = {
    "mha/flashinfer": direct_flashinfer,
    "mha/trtllm_mha": direct_trtllm,
    "mha/fa3": direct_fa3,
    "mha/fa4": direct_fa4,
}
#: Libraries that plan on the host: a function that plans a decode step of the case as their documentation shows it.
NAIVE_PLAN: dict[str, Callable[[Case], Callable[[], object]]] = {"mha/flashinfer": naive_plan_flashinfer}
