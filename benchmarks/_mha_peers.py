"""The other kernels of ``benchmarks/mha.py``: torch SDPA, FlashInfer, FA3, FA4, and SGLang's and vLLM's Triton kernels.

An adapter takes a world and returns programs: ways to run the same kernel (numbers of splits, say), of which the fastest
counts. What is not installed, does not load or refuses a shape raises, and becomes a row "unavailable".
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from _mha_load import Missing, load_sglang, load_vllm
from _mha_world import Shape, World

#: Microseconds of the better of SGLang's 0.5.23 and vLLM's 0.32 Triton kernels (page 16, best split count, H200, 2026-11-29):
#: what a run without those wheels is compared with.
RECORDED_DECODE = {
    str(Shape(32, 8192)): 293.0, str(Shape(1, 131072)): 190.0, str(Shape(1, 8192)): 89.0, str(Shape(8, 4096)): 76.0,
    str(Shape(128, 2048)): 294.0, str(Shape(256, 1024)): 299.0, str(Shape(32, 8192, 32, 32)): 1118.0,
    str(Shape(32, 8192, 64, 8, 64)): 169.0, str(Shape(16, 8192, 16, 8, 256)): 286.0, str(Shape(32, 8192, 8, 1)): 64.0,
}  # fmt: skip
#: The kernels that our own are to beat.
TRITON_PEERS = ("sglang", "vllm")


@dataclass
class Program:
    """One way to run a kernel: a call for each copy of the cache, and where the results lie, [T, Hq, D] each."""

    choice: str
    calls: list[Callable[[], Any]]
    outs: list[torch.Tensor]


Make = Callable[[World], list[Program]]


def peers(shape: Shape, wheels: Path | None) -> dict[str, Make]:
    """The kernels that are made for this shape, installed or not."""
    found: dict[str, Make] = {}
    if shape.kv != "bf16":
        return found
    found["sglang"] = lambda world: _sglang(world, wheels)
    found["vllm"] = lambda world: _vllm(world, wheels)
    if shape.dim == 128:
        found |= {"flashinfer": _flashinfer, "fa3": _fa3, "fa4": _fa4}
    if shape.phase == "prefill" and shape.rows == 1 and shape.new == shape.kv_len and shape.window is None:
        from torch.nn.attention import SDPBackend

        found["torch-cudnn"] = lambda world: _sdpa(world, SDPBackend.CUDNN_ATTENTION)
        found["torch-flash"] = lambda world: _sdpa(world, SDPBackend.FLASH_ATTENTION)
    return found


def peer_versions(wheels: Path | None) -> dict[str, str]:
    """Versions of the peers that are there."""
    found = {}
    for name in ("flashinfer-python", "tokenspeed-fa3", "flash-attn-4", "flash-attn-3"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, load in (("sglang", load_sglang), ("vllm", load_vllm)):
        try:
            found[name] = load(wheels)[-1]  # type: ignore[operator]
        except Missing:
            continue
    return found


def installed(module: str) -> Any:
    """The imported module. Raises :class:`Missing` with the reason."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # libraries raise anything when something they need is not there
        raise Missing(f"{module} does not import: {type(error).__name__}: {error}") from error


# --- libraries ------------------------------------------------------------------------------------------------------------


def _sdpa(world: World, backend: Any) -> list[Program]:
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

    return [Program("dense", [call], [call()[0].transpose(0, 1)])]


def _flashinfer(world: World) -> list[Program]:
    flashinfer = installed("flashinfer")
    shape, address = world.shape, world.batch.kv(0)
    width = -(-shape.kv_len // shape.page)
    indptr = torch.arange(0, shape.rows * width + 1, width, dtype=torch.int32, device=world.device)
    indices = address.table[:, :width].flatten().contiguous()
    last = torch.full((shape.rows,), (shape.kv_len - 1) % shape.page + 1, dtype=torch.int32, device=world.device)
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=world.device)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    sizes = (shape.q_heads, shape.kv_heads, shape.dim, shape.page)
    window = -1 if shape.window is None else shape.window - 1
    if shape.phase == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *sizes, window_left=window, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(world.batch.query_offsets, indptr, indices, last, *sizes, causal=True, window_left=window, **types)
    outs = world.outs()
    calls = [
        lambda i=inputs, c=cache, o=out: wrapper.run(i.q, (c.k, c.v), out=o)
        for inputs, cache, out in zip(world.inputs, world.caches, outs, strict=True)
    ]
    return [Program("wrapper", calls, outs)]


def _fa3(world: World) -> list[Program]:
    attend = installed("flash_attn_interface").flash_attn_with_kvcache
    shape, address = world.shape, world.batch.kv(0)
    window = (-1, -1) if shape.window is None else (shape.window - 1, 0)
    outs = world.outs()

    def call(number: int) -> None:
        inputs, cache = world.inputs[number], world.caches[number]
        q = inputs.q.view(shape.rows, shape.new, shape.q_heads, shape.dim)
        out = attend(q, cache.k, cache.v, cache_seqlens=address.kv_lens, page_table=address.table, causal=True, window_size=window)  # fmt: skip
        outs[number] = (out[0] if isinstance(out, tuple) else out).flatten(0, 1)

    return [Program("kvcache", [lambda n=n: call(n) for n in range(len(world.caches))], outs)]


def _fa4(world: World) -> list[Program]:
    attend = installed("flash_attn.cute").flash_attn_varlen_func
    shape, address = world.shape, world.batch.kv(0)
    window = (None, None) if shape.window is None else (shape.window - 1, 0)
    outs = world.outs()

    def call(number: int, splits: int) -> None:
        inputs, cache = world.inputs[number], world.caches[number]
        out = attend(inputs.q, cache.k, cache.v, cu_seqlens_q=world.batch.query_offsets, max_seqlen_q=shape.new,
                     seqused_k=address.kv_lens, page_table=address.table, causal=True, window_size=window, num_splits=splits)  # fmt: skip
        outs[number] = out[0] if isinstance(out, tuple) else out

    splits = 0 if shape.phase == "decode" else 1
    try:
        call(0, splits)
    except AssertionError as error:  # its own choice can be one that this architecture has no kernel for
        if not splits and "SplitKV" in str(error):
            splits = 1
        else:
            raise
    choice = "its own splits" if splits == 0 else "one split"
    return [Program(choice, [lambda n=n: call(n, splits) for n in range(len(world.caches))], outs)]


# --- Triton kernels from wheels -----------------------------------------------------------------------------------------------


def _slots(world: World, length: int) -> torch.Tensor:
    """Slots of the first `length` keys of every row, i64[rows * length]."""
    shape, table = world.shape, world.batch.kv(0).table
    inside = torch.arange(shape.page, device=world.device)
    return (table.long()[:, :, None] * shape.page + inside).flatten(1)[:, :length].flatten().contiguous()


def _offsets(world: World, length: int) -> torch.Tensor:
    return torch.arange(world.shape.rows + 1, dtype=torch.int32, device=world.device) * length


def _sglang(world: World, wheels: Path | None) -> list[Program]:
    decode, extend, _ = load_sglang(wheels)
    shape, device = world.shape, world.device
    pools = [tuple(x.view(-1, shape.kv_heads, shape.dim) for x in (cache.k, cache.v)) for cache in world.caches]
    scale = shape.dim**-0.5
    if shape.phase == "prefill":
        old = shape.kv_len - shape.new
        indptr, indices = _offsets(world, old), _slots(world, old)
        news = [tuple(pool[world.batch.kv(0).new_slots] for pool in pair) for pair in pools]
        outs, window = world.outs(), -1 if shape.window is None else shape.window - 1

        def prefill(n: int) -> None:
            extend.extend_attention_fwd(
                world.inputs[n].q, *news[n], outs[n], *pools[n], world.batch.query_offsets, indptr, indices, None, True, None,
                shape.new, 1.0, 1.0, sm_scale=scale, sliding_window_size=window, page_size=shape.page,
            )  # fmt: skip

        return [Program("extend", [lambda n=n: prefill(n) for n in range(len(pools))], outs)]
    indptr, indices = _offsets(world, shape.kv_len), _slots(world, shape.kv_len)
    programs = []
    for splits, page in product(_split_counts(shape), (1, shape.page)):
        outs = world.outs()
        logits = torch.empty(shape.rows, shape.q_heads, splits, shape.dim, dtype=torch.float32, device=device)
        lse = torch.empty(shape.rows, shape.q_heads, splits, dtype=torch.float32, device=device)
        counts = torch.full((shape.rows,), splits, dtype=torch.int32, device=device)

        def step(
            n: int, outs: Any = outs, logits: Any = logits, lse: Any = lse, counts: Any = counts, page: int = page
        ) -> None:
            decode.decode_attention_fwd(
                world.inputs[n].q, *pools[n], outs[n], indptr, indices, logits, lse, counts, logits.shape[2], scale, 1.0, 1.0,
                page_size=page,
            )  # fmt: skip

        programs.append(
            Program(f"{splits} splits, pages of {page}", [lambda n=n, s=step: s(n) for n in range(len(pools))], outs)
        )
    return programs


def _split_counts(shape: Shape) -> tuple[int, ...]:
    """Numbers of splits that can be best: enough programs for the device and not too many, no share under 128 keys."""
    rows = shape.rows * shape.kv_heads
    wanted = (1 << n for n in range(8))
    return tuple(n for n in wanted if n == 1 or (shape.kv_len // n >= 128 and 132 <= rows * n <= 132 * 32))


def _vllm(world: World, wheels: Path | None) -> list[Program]:
    unified, _ = load_vllm(wheels)
    shape, address, device = world.shape, world.batch.kv(0), world.device
    window = (-1, -1) if shape.window is None else (shape.window - 1, 0)
    choices = (0,) if shape.phase == "prefill" else (0, 16, 64) if shape.rows < 64 else (0,)
    programs = []
    for segments in choices:
        more: dict[str, Any] = {}
        if segments:
            size = (shape.rows, shape.q_heads, segments)
            padded = 1 << (shape.dim - 1).bit_length()
            more = {
                "seq_threshold_3D": shape.rows, "num_par_softmax_segments": segments,
                "softmax_segm_output": torch.empty(*size, padded, dtype=torch.float32, device=device),
                "softmax_segm_max": torch.empty(size, dtype=torch.float32, device=device),
                "softmax_segm_expsum": torch.empty(size, dtype=torch.float32, device=device),
            }  # fmt: skip
        outs = world.outs()

        def step(n: int, outs: Any = outs, more: Any = more) -> None:
            cache = world.caches[n]
            unified.unified_attention(
                world.inputs[n].q, cache.k, cache.v, outs[n], world.batch.query_offsets, shape.new, address.kv_lens, shape.kv_len,
                shape.dim**-0.5, True, window, address.table, 0.0, None, None, None, **more,
            )  # fmt: skip

        label = f"{segments} segments" if segments else "2D"
        programs.append(Program(label, [lambda n=n, s=step: s(n) for n in range(len(world.caches))], outs))
    return programs
