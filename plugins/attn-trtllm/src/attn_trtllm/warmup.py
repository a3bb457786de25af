"""One small step of a phase on caches of its own: what compiles a kernel before serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attn_core.batch import AttentionBatch
from attn_core.context import GraphLimits
from attn_core.formats import BLOCK, torch_dtype
from attn_core.hookspecs import PHASE_HOOK
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, Scale
from attn_core.paging import PoolRows, build_batch

if TYPE_CHECKING:
    from attn_trtllm.backend import TrtllmBackend


def warm_up(backend: TrtllmBackend, phase: str, limits: GraphLimits) -> None:
    """Run `phase` once over one row, with the plan's page size, types and layout, and the widest verify step."""
    context, geometry = backend.context, backend.geometry
    width = max(1, limits.max_query_len) if phase == "verify" else (1 if PHASE_HOOK[phase] == "attn_decode" else 2)
    batch = _batch(backend, phase, width)
    one = Scale(torch.ones(1, device=context.device), 1.0)
    sinks = torch.zeros(geometry.q_heads, device=context.device) if geometry.sinks else None
    layer = MhaLayer(context.group.layers[0], context.group, sinks, one, one, one)
    q = torch.zeros(width, geometry.q_heads, geometry.qk_dim, dtype=context.dtype, device=context.device)
    metadata = backend.attn_metadata(batch, context.group, phase, None, False)
    getattr(backend, PHASE_HOOK[phase])(MhaInputs(q, store=False), layer, _cache(backend), metadata, None)


def _batch(backend: TrtllmBackend, phase: str, width: int) -> AttentionBatch:
    """One row of `width` tokens in page 1 and following; the address stands where the group's pool is."""
    pool = backend.context.pool
    pages = list(range(1, 1 + -(-width // pool.page_size)))
    rows = PoolRows(pool.page_size, [pages], write=False)
    pools = [rows] * (backend.context.address_index() + 1)
    return build_batch([width], [width], pools, phase, device=backend.context.device)


def _cache(backend: TrtllmBackend) -> MhaCache:
    """A zeroed cache in the pool's format and layout, K and V of a page side by side."""
    context, geometry, pool = backend.context, backend.geometry, backend.context.pool
    pages = 2 + 64 // pool.page_size * 4
    fp4 = pool.format == "fp4_block16"

    def pair(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        inner = (geometry.kv_heads, pool.page_size) if pool.layout == "HND" else (pool.page_size, geometry.kv_heads)
        both = torch.zeros(
            (pages, 2, *inner, width), dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=context.device
        )
        k, v = both.view(dtype).unbind(1)
        return (k.transpose(1, 2), v.transpose(1, 2)) if pool.layout == "HND" else (k, v)

    k, v = pair(geometry.qk_dim // (2 if fp4 else 1), torch_dtype(pool.dtype))
    if not fp4:
        return MhaCache(k, v)
    k_blocks, v_blocks = pair(geometry.qk_dim // BLOCK, torch.float8_e4m3fn)
    return MhaCache(k, v, k_blocks, v_blocks, pool.format)
