"""SGLang's KV memory as attn-core's caches, in place: K and V buffers of token slots become views of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_core.errors import BindError, PlanError
from attn_core.layers import MhaCache
from attn_sglang.layers import MAIN, SLIDING

if TYPE_CHECKING:
    import torch

    from attn_core.plan import Plan
    from attn_sglang.layers import Bound


@dataclass(frozen=True, eq=False, slots=True)
class PoolSource:
    """How one pool of the plan is addressed: its page size, and SGLang's map from full to sliding-window slots."""

    name: str
    page_size: int
    translate: torch.Tensor | None = None  #: i64[slots + ...] of the sliding-window pool


def sliding_layers(pool: Any) -> frozenset[int]:
    """The layer ids whose keys lie in a sliding-window sub-pool. Empty for every other pool."""
    mapping = getattr(pool, "layers_mapping", None)
    if not mapping or not hasattr(pool, "swa_kv_pool"):
        return frozenset()
    return frozenset(layer for layer, (_, sliding) in mapping.items() if sliding)


def memory_layout(pool: Any) -> str:
    """``NHD`` or ``HND``. Raises :class:`PlanError` for a pool whose pages are neither, or are quantised in blocks."""
    inner = [getattr(pool, name) for name in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, name)] or [pool]
    layouts = {str(getattr(one, "kv_cache_layout", "nhd")) for one in inner}
    if len(layouts) != 1 or not layouts <= {"nhd", "hnd"}:
        raise PlanError(
            f"SGLang's KV pool has the layout {' and '.join(sorted(layouts))}; needed is nhd or hnd",
            fix="SGLANG_AITER_KV_CACHE_LAYOUT=nhd, or a backend of SGLang's own",
        )
    if any(getattr(one, "is_quantized_kv_cache", False) for one in inner):
        raise PlanError(
            "SGLang's KV pool is quantised in blocks (fp4), in a form of its own",
            fix="--kv-cache-dtype auto or fp8_e4m3, or a backend of SGLang's own",
        )
    return layouts.pop().upper()


def page_view(buffer: torch.Tensor, page_size: int, own_page: int, layout: str) -> torch.Tensor:
    """``[pages, page_size, heads, width]`` over a buffer of SGLang's, without a copy.

    NHD buffers are ``[slots, heads, width]``: any `page_size` works. HND buffers are ``[pages, heads, own_page, width]``
    and can be read in pages of their own size only. Raises :class:`BindError` otherwise.
    """
    if layout == "HND":
        if page_size != own_page:
            raise BindError(f"an HND pool with pages of {own_page} cannot be read in pages of {page_size}")
        return buffer.permute(0, 2, 1, 3)
    pages = buffer.shape[0] // page_size  # slots after the last whole page are never handed out
    return buffer[: pages * page_size].view(pages, page_size, *buffer.shape[1:])


def make_sources(plan: Plan, pool: Any) -> tuple[PoolSource, ...]:
    """One source for each pool of the plan, in its order."""
    found = []
    for planned in plan.pools:
        if planned.name not in (MAIN, SLIDING):
            raise BindError(f"the plan has a pool {planned.name!r}, which SGLang does not have")
        translate = pool.full_to_swa_index_mapping if planned.name == SLIDING else None
        found.append(PoolSource(planned.name, planned.page_size, translate))
    return tuple(found)


def make_caches(plan: Plan, pool: Any, layers: list[Bound], own_page: int, layout: str) -> list[MhaCache]:
    """The cache of each layer. ``get_key_buffer`` gives fp8 memory as fp8, whatever it is stored as."""
    caches = []
    for bound in layers:
        page = plan.pools[plan.pool_index(bound.layer.group.pools["attend"])].page_size
        k, v = (read(bound.layer.index) for read in (pool.get_key_buffer, pool.get_value_buffer))
        caches.append(MhaCache(page_view(k, page, own_page, layout), page_view(v, page, own_page, layout)))
    return caches
