"""Batches, caches and backends for ``benchmarks/mha.py``: one case is a shape, made once with random data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.context import Context
from attn_core.formats import torch_dtype
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, Scale
from attn_core.plan import PartPlan, PhasePlan, Pool


@dataclass(frozen=True)
class Shape:
    """`rows` requests of `kv_len` keys, of which `new` are new tokens each."""

    rows: int
    kv_len: int
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    new: int = 1
    page: int = 16
    kv: str = "bf16"
    window: int | None = None

    @property
    def phase(self) -> str:
        return "decode" if self.new == 1 else "prefill"

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a decode step must read."""
        seen = self.kv_len if self.window is None else min(self.kv_len, self.window)
        bits = {"bf16": 16, "fp16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "fp4": 4.5}[self.kv]
        return int(2 * self.rows * seen * self.kv_heads * self.dim * bits / 8)

    @property
    def flops(self) -> float:
        """Operations on visible (query, key) pairs: 4 a pair, head and dim."""
        first = self.kv_len - self.new
        pairs = sum(min(first + i + 1, self.window or 1 << 60) for i in range(self.new))
        return 4.0 * self.rows * pairs * self.q_heads * self.dim

    def __str__(self) -> str:
        extra = "" if self.window is None else f" w{self.window}"
        return f"{self.rows}x{self.kv_len}+{self.new} {self.q_heads}/{self.kv_heads} D{self.dim} p{self.page} {self.kv}{extra}"


@dataclass
class World:
    """One shape with data on the device: several copies of the cache, so that the L2 cache holds none of them."""

    shape: Shape
    batch: AttentionBatch
    group: LayerGroup
    layer: MhaLayer
    caches: list[MhaCache]
    inputs: list[MhaInputs]
    pool: Pool
    device: torch.device
    kept: dict[str, Any] = field(default_factory=dict)

    def outs(self) -> list[torch.Tensor]:
        """A result tensor for each copy of the cache, NaN."""
        return [torch.full_like(inputs.q, float("nan")) for inputs in self.inputs]


def build_world(shape: Shape, device: str = "cuda", spread: int = 256 << 20) -> World:
    """Random data with permuted pages; enough copies that all caches together exceed `spread` bytes."""
    dev = torch.device(device)
    torch.manual_seed(0)
    geometry = MhaGeometry(shape.q_heads, shape.kv_heads, shape.dim, shape.dim, shape.dim**-0.5, window=shape.window)
    group = LayerGroup("target", "full", "full", (0,), geometry, {"attend": "main"})
    width = -(-shape.kv_len // shape.page)
    pages = shape.rows * width + 1
    table = (torch.randperm(pages - 1, device=dev) + 1)[: shape.rows * width].view(shape.rows, width).int()
    lens = torch.full((shape.rows,), shape.kv_len, dtype=torch.int32, device=dev)
    tokens = shape.rows * shape.new
    positions = shape.kv_len - shape.new + torch.arange(shape.new, device=dev)
    slots = (table.long()[:, positions // shape.page] * shape.page + positions % shape.page).flatten()
    address = KvAddress(shape.page, lens, slots, shape.kv_len, table=table, kv_lens_cpu=lens.cpu())
    offsets = torch.arange(0, tokens + 1, shape.new, dtype=torch.int32)
    batch = AttentionBatch(
        shape.rows, tokens, (Segment(shape.phase, slice(0, shape.rows), slice(0, tokens), shape.new),),
        offsets.to(dev), shape.new, (address,), query_offsets_cpu=offsets,
    )  # fmt: skip
    copies = max(1, min(16, -(-spread // max(1, shape.kv_bytes))))
    if shape.phase == "prefill":
        copies = 1
    caches = [make_cache(shape, pages, dev) for _ in range(copies)]
    scale = Scale(torch.tensor([0.5], device=dev), 0.5) if shape.kv.startswith("fp8") else None
    layer = MhaLayer(0, group, k_scale=scale, v_scale=scale)

    def new(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, shape.dim, device=dev, dtype=torch.bfloat16)

    inputs = [MhaInputs(new(shape.q_heads), new(shape.kv_heads), new(shape.kv_heads)) for _ in range(copies)]
    pool = Pool(
        "main", "target", (0,), "fp4_block16" if shape.kv == "fp4" else "plain", shape.kv, "NHD", shape.page,
        bytes_per_page=1,
    )  # fmt: skip
    return World(shape, batch, group, layer, caches, inputs, pool, dev)


def make_cache(shape: Shape, pages: int, device: torch.device) -> MhaCache:
    size = (pages, shape.page, shape.kv_heads, shape.dim)
    if shape.kv == "fp4":
        packed = [
            torch.randint(0, 256, (*size[:3], shape.dim // 2), dtype=torch.uint8, device=device) for _ in range(2)
        ]
        blocks = [
            torch.rand((*size[:3], shape.dim // 16), device=device).mul(0.4).add(0.05).to(torch.float8_e4m3fn)
            for _ in range(2)
        ]
        return MhaCache(packed[0], packed[1], blocks[0], blocks[1], "fp4_block16")
    k, v = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    dtype = torch_dtype(shape.kv)
    return MhaCache(k.to(dtype), v.to(dtype))


def make_context(world: World) -> Context:
    part = PartPlan("attend", "triton", "default", "attn-triton", "0")
    plan = PhasePlan("triton", "default", "attn-triton", "0", (part,), kernel_page_size=world.shape.page)
    return Context(
        world.device, torch.bfloat16, world.group, {"attend": world.pool}, {"attend": 0}, {world.shape.phase: plan}
    )


def time_graph(calls: Sequence[Callable[[], Any]], repeats: int = 20, budget_ms: float = 150.0) -> float:
    """Median microseconds of one call: all calls in one CUDA graph, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < repeats:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
        if sum(times) * len(calls) > budget_ms * 1e3 and len(times) >= 5:
            break
    return statistics.median(times)


def triton_calls(world: World) -> list[Callable[[], Any]]:
    """Our own backend, one call a cache copy."""
    from attn_triton.backend import TritonBackend

    backend = TritonBackend(make_context(world))
    phase = world.shape.phase
    metadata = backend.attn_metadata(world.batch, world.group, phase, None, False)
    world.kept["triton"] = backend, metadata
    hook = backend.attn_decode if phase == "decode" else backend.attn_extend
    outs = world.kept["out"] = world.outs()
    return [
        lambda inputs=inputs, cache=cache, out=out: hook(inputs, world.layer, cache, metadata, out)
        for inputs, cache, out in zip(world.inputs, world.caches, outs, strict=True)
    ]


def reference(world: World, row: int = 0) -> torch.Tensor:
    """out f32[new, Hq, D] of one row by plain torch in fp32, on the device."""
    from dataclasses import replace

    from attn_core.store import default_gather

    shape, address = world.shape, world.batch.kv(0)
    one = replace(address, kv_lens=address.kv_lens[row : row + 1], table=address.table[row : row + 1],
                  kv_lens_cpu=None if address.kv_lens_cpu is None else address.kv_lens_cpu[row : row + 1])  # fmt: skip
    k, v = default_gather(world.caches[0], one, None, world.layer, torch.float32)
    k, v = k[: shape.kv_len], v[: shape.kv_len]
    q = world.inputs[0].q[row * shape.new : (row + 1) * shape.new].float()
    ratio = shape.q_heads // shape.kv_heads
    out = torch.empty_like(q)
    position = shape.kv_len - shape.new + torch.arange(shape.new, device=q.device)
    keys = torch.arange(shape.kv_len, device=q.device)
    for head in range(shape.q_heads):
        for start in range(0, shape.new, 1024):
            part = slice(start, start + 1024)
            s = q[part, head] @ k[:, head // ratio].T * shape.dim**-0.5
            hidden = keys[None, :] > position[part, None]
            if shape.window is not None:
                hidden |= keys[None, :] <= position[part, None] - shape.window
            out[part, head] = torch.softmax(s.masked_fill(hidden, float("-inf")), -1) @ v[:, head // ratio]
    return out
