"""``attn warmup``: compile what a backend object will launch, by running small steps over a pool of two empty pages.

What is compiled depends on the pool (type, layout, page size), the geometry, the phase and a few classes of batch sizes. All
keys lie in page 0 and no slot is written, so that nothing but time and a little memory is spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment, Tree
from attn_core.context import GraphLimits
from attn_core.formats import torch_dtype
from attn_core.geometry import LayerGroup
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, Scale
from attn_triton.rules import power_of_two

if TYPE_CHECKING:
    from attn_core.plan import PhasePlan, Pool
    from attn_triton.backend import TritonBackend

#: Query tokens of a row that surely take the prefill kernel.
LONG = 160


def warm(backend: TritonBackend, group: LayerGroup, phases: Sequence[str], limits: GraphLimits) -> int:
    """Run a step of every kind that `limits` allow in `phases`; the number of steps. Waits for nothing but the compiler."""
    pool = backend.context.pools.get("attend") or backend.context.pools.get("cross")
    if pool is None:
        return sum(_packed(backend, group, rows) for rows in row_classes(limits))
    cache, layer, steps = empty_cache(backend, pool), plain_layer(backend, group, pool), 0
    for phase in phases:
        plan = backend.context.phases[phase]
        for rows in row_classes(limits):
            for query_len in query_classes(backend, phase, limits):
                if rows > 1 and rows * query_len > max(limits.max_tokens, query_len):
                    continue
                batch = make_batch(backend, phase, plan, pool, rows, query_len, limits)
                run(backend, group, layer, cache, batch, phase)
                steps += 1
                if batch.kv(backend.address_index()).table is not None:  # tables also come with a list of their rows
                    backend.attn_metadata(with_table_rows(batch), group, phase, None, False)
    return steps


def row_classes(limits: GraphLimits) -> list[int]:
    """The largest bucket of each size that the metadata kernel is compiled for."""
    classes: dict[int, int] = {}
    for rows in (1, *sorted(limits.rows)):
        classes[power_of_two(rows + 1, 16)] = rows
    return list(classes.values())


def query_classes(backend: TritonBackend, phase: str, limits: GraphLimits) -> Iterator[int]:
    """Query lengths that take different tiles: one for decode, the drafts of verify, short and long rows of prefill."""
    if phase in ("decode", "draft"):
        yield 1
        return
    if phase in ("verify", "draft_extend"):
        yield max(1, limits.max_query_len)
        return
    length = 1
    while backend.splits_rows_of(length, phase):
        yield length
        length *= 2
    yield LONG


def empty_cache(backend: TritonBackend, pool: Pool) -> MhaCache:
    """Two pages of zeros with the pool's type and layout."""
    geometry, device = backend.geometry, backend.context.device

    def plane(width: int, dtype: torch.dtype) -> torch.Tensor:
        heads, tokens, turned = geometry.kv_heads, pool.page_size, pool.layout == "HND"
        size = (2, heads, tokens, width) if turned else (2, tokens, heads, width)
        x = torch.zeros(size, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
        return x.transpose(1, 2) if turned else x

    if pool.dtype == "fp4":
        halves = [plane(dim // 2, torch.uint8) for dim in (geometry.qk_dim, geometry.v_dim)]
        scales = [plane(dim // 16, torch.float8_e4m3fn) for dim in (geometry.qk_dim, geometry.v_dim)]
        return MhaCache(halves[0], halves[1], scales[0], scales[1], "fp4_block16")
    dtype = torch_dtype(pool.dtype)
    return MhaCache(plane(geometry.qk_dim, dtype), plane(geometry.v_dim, dtype))


def plain_layer(backend: TritonBackend, group: LayerGroup, pool: Pool) -> MhaLayer:
    """A layer with the sinks and scales that the group's layers have: one scale a tensor."""
    device = backend.context.device
    narrow = pool.dtype.startswith("fp8") or pool.dtype == "fp4"
    scale = Scale(torch.ones(1, device=device), 1.0) if narrow else None
    sinks = torch.zeros(backend.geometry.q_heads, device=device) if backend.geometry.sinks else None
    return MhaLayer(0, group, sinks=sinks, k_scale=scale, v_scale=scale)


def make_batch(
    backend: TritonBackend, phase: str, plan: PhasePlan, pool: Pool, rows: int, query_len: int, limits: GraphLimits
) -> AttentionBatch:
    """`rows` rows of `query_len` tokens, all in page 0 and written nowhere."""
    device, tokens = backend.context.device, rows * query_len
    width = -(-query_len // pool.page_size)
    lens = torch.full((rows,), query_len, dtype=torch.int32, device=device)
    pages = torch.zeros(rows, width, dtype=torch.int32, device=device)
    where: dict[str, torch.Tensor] = {"table": pages}
    if plan.form in ("csr", "slots"):
        where = {
            "indices": pages.flatten(),
            "indptr": torch.arange(rows + 1, dtype=torch.int32, device=device) * width,
        }
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    address = KvAddress(pool.page_size, lens, slots, query_len, **where)
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=device) * query_len
    tree = None
    if phase == "verify" and limits.draft is not None and limits.draft[1] > 1:
        words = -(-query_len // 32)
        mask = torch.full((rows, query_len, words), -1, dtype=torch.int32, device=device)
        flat = torch.zeros(rows, query_len, dtype=torch.int32, device=device)
        tree = Tree(flat - 1, flat, mask)
    spans = None
    if phase == "prefill" and "mm_spans" in backend.context.group.wants | backend.context.group.features:
        spans = torch.zeros(1, 3, dtype=torch.int32, device=device)
    index = backend.address_index()
    return AttentionBatch(
        rows, tokens, (Segment(phase, slice(0, rows), slice(0, tokens), query_len),), offsets, query_len,
        (address,) * (index + 1), tree=tree, spans=spans, needs_lse=plan.needs_lse,
    )  # fmt: skip


def with_table_rows(batch: AttentionBatch) -> AttentionBatch:
    """The same batch, whose tables name the line of each row."""
    addresses = []
    for address in batch.addresses:
        assert isinstance(address, KvAddress)
        rows = torch.zeros_like(address.kv_lens)
        addresses.append(replace(address, table_rows=rows))
    return replace(batch, addresses=tuple(addresses))


def run(
    backend: TritonBackend, group: LayerGroup, layer: MhaLayer, cache: MhaCache, batch: AttentionBatch, phase: str
) -> None:
    """One step: metadata, store, attention."""
    geometry, dtype, device = backend.geometry, backend.context.dtype, backend.context.device
    widths = (
        (geometry.q_heads, geometry.qk_dim),
        (geometry.kv_heads, geometry.qk_dim),
        (geometry.kv_heads, geometry.v_dim),
    )
    q, k, v = (torch.zeros(batch.num_tokens, heads, dim, dtype=dtype, device=device) for heads, dim in widths)
    inputs = MhaInputs(q, k, v)
    metadata = backend.attn_metadata(batch, group, phase, None, False)
    backend.attn_store(inputs, layer, cache, batch.kv(backend.address_index()))
    hook = backend.attn_decode if phase in ("decode", "draft") else backend.attn_extend
    hook(inputs, layer, cache, metadata, None)
    backend.forget(cache)


def _packed(backend: TritonBackend, group: LayerGroup, rows: int) -> int:
    """One step of packed sequences (vision towers)."""
    geometry, dtype, device = backend.geometry, backend.context.dtype, backend.context.device
    tokens = rows * LONG
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=device) * LONG
    segment = Segment("prefill", slice(0, rows), slice(0, tokens), LONG)
    batch = AttentionBatch(rows, tokens, (segment,), offsets, LONG, key_offsets=offsets, max_key_len=LONG)
    metadata = backend.attn_metadata(batch, group, "prefill", None, False)
    widths = (
        (geometry.q_heads, geometry.qk_dim),
        (geometry.kv_heads, geometry.qk_dim),
        (geometry.kv_heads, geometry.v_dim),
    )
    q, k, v = (torch.zeros(tokens, heads, dim, dtype=dtype, device=device) for heads, dim in widths)
    backend.attn_ragged(q, k, v, MhaLayer(0, group), metadata, None)
    return 1
