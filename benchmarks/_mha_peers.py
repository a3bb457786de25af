"""The other kernels of ``benchmarks/mha.py``: torch SDPA, FlashInfer, FA3, FA4 where installed, and recorded figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from _mha_world import Shape, World

#: Microseconds of the better of SGLang's 0.5.23 and vLLM's 0.32 Triton kernels (page 16, best split count, H200, 2026-11-29).
RECORDED_DECODE = {
    str(Shape(32, 8192)): 293.0, str(Shape(1, 131072)): 190.0, str(Shape(1, 8192)): 89.0, str(Shape(8, 4096)): 76.0,
    str(Shape(128, 2048)): 294.0, str(Shape(256, 1024)): 299.0, str(Shape(32, 8192, 32, 32)): 1118.0,
    str(Shape(32, 8192, 64, 8, 64)): 169.0, str(Shape(16, 8192, 16, 8, 256)): 286.0, str(Shape(32, 8192, 8, 1)): 64.0,
}  # fmt: skip
#: TFLOP/s of the same kernels: 8192 new tokens, 512 new on 32k, 4096 on 4096.
RECORDED_PREFILL = {
    "sglang": {"8192 new": 190, "512 on 32k": 133, "4096 on 4096": 183},
    "vllm": {"8192 new": 73, "512 on 32k": 71, "4096 on 4096": 73},
    "fa4": {"8192 new": 694}, "fa3": {"8192 new": 637}, "flashinfer fa3 paged": {"8192 new": 521},
}  # fmt: skip

Make = Callable[[World], list[Callable[[], Any]]]


def peers(shape: Shape) -> dict[str, Make]:
    """The kernels that are installed and take this shape."""
    found: dict[str, Make] = {}
    if shape.phase == "prefill" and shape.rows == 1 and shape.new == shape.kv_len and shape.window is None:
        from torch.nn.attention import SDPBackend

        found["torch-cudnn"] = lambda world: _sdpa(world, SDPBackend.CUDNN_ATTENTION)
        found["torch-flash"] = lambda world: _sdpa(world, SDPBackend.FLASH_ATTENTION)
    if shape.kv == "bf16" and _has("flashinfer"):
        found["flashinfer"] = _flashinfer
    if shape.kv == "bf16" and _has("flash_attn_interface"):
        found["fa3"] = _fa3
    if shape.kv == "bf16" and shape.page >= 64 and _has("flash_attn.cute"):
        found["fa4"] = _fa4
    return found


def _has(module: str) -> bool:
    """Whether a module, or one inside a package, can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _sdpa(world: World, backend: Any) -> list[Callable[[], Any]]:
    """Dense causal attention over the packed keys: no pages, so an upper bound for what it would reach with them."""
    from torch.nn.attention import sdpa_kernel

    from attn_core.store import default_gather

    k, v = default_gather(world.caches[0], world.batch.kv(0), None, world.layer, torch.bfloat16)
    q, k, v = (x[: world.shape.kv_len].transpose(0, 1)[None].contiguous() for x in (world.inputs[0].q, k, v))
    ratio = world.shape.q_heads // world.shape.kv_heads
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    world.kept["out"] = [call()[0].transpose(0, 1)]
    return [call]


def _flashinfer(world: World) -> list[Callable[[], Any]]:
    import flashinfer

    shape, address = world.shape, world.batch.kv(0)
    width = -(-shape.kv_len // shape.page)
    indptr = torch.arange(0, shape.rows * width + 1, width, dtype=torch.int32, device=world.device)
    indices = address.table[:, :width].flatten().contiguous()
    last = torch.full((shape.rows,), (shape.kv_len - 1) % shape.page + 1, dtype=torch.int32, device=world.device)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=world.device)
    if shape.phase == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, shape.q_heads, shape.kv_heads, shape.dim, shape.page,
                     q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)  # fmt: skip
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        window = -1 if shape.window is None else shape.window - 1
        wrapper.plan(world.batch.query_offsets, indptr, indices, last, shape.q_heads, shape.kv_heads, shape.dim, shape.page,
                     causal=True, window_left=window, q_data_type=torch.bfloat16)  # fmt: skip
    outs = world.kept["out"] = [torch.empty_like(inputs.q) for inputs in world.inputs]
    return [
        lambda i=inputs, c=cache, o=out: wrapper.run(i.q, (c.k, c.v), out=o)
        for inputs, cache, out in zip(world.inputs, world.caches, outs, strict=True)
    ]


def _fa3(world: World) -> list[Callable[[], Any]]:
    from flash_attn_interface import flash_attn_with_kvcache

    shape, address = world.shape, world.batch.kv(0)
    window = (-1, -1) if shape.window is None else (shape.window - 1, 0)
    world.kept["out"] = [torch.empty(0)]

    def call(inputs: Any, cache: Any) -> None:
        q = inputs.q.view(shape.rows, shape.new, shape.q_heads, shape.dim)
        out = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=address.kv_lens, page_table=address.table,
                                      causal=True, window_size=window)  # fmt: skip
        world.kept["out"][0] = out.flatten(0, 1)

    return [lambda i=inputs, c=cache: call(i, c) for inputs, cache in zip(world.inputs, world.caches, strict=True)]


def _fa4(world: World) -> list[Callable[[], Any]]:
    from flash_attn.cute import flash_attn_varlen_func

    shape, address = world.shape, world.batch.kv(0)
    window = (None, None) if shape.window is None else (shape.window - 1, 0)
    world.kept["out"] = [torch.empty(0)]

    def call(inputs: Any, cache: Any) -> None:
        out = flash_attn_varlen_func(inputs.q, cache.k, cache.v, cu_seqlens_q=world.batch.query_offsets, max_seqlen_q=shape.new,
                                     seqused_k=address.kv_lens, page_table=address.table, causal=True, window_size=window)  # fmt: skip
        world.kept["out"][0] = out[0] if isinstance(out, tuple) else out

    return [lambda i=inputs, c=cache: call(i, c) for inputs, cache in zip(world.inputs, world.caches, strict=True)]
