"""The tensors of the reference cache: one set per layer and pool, as the contract's logical views. Public through ``cache``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attn_core.errors import CacheError
from attn_core.formats import BLOCK, torch_dtype
from attn_core.geometry import DsaGeometry, GdnGeometry, Geometry, LayerGroup, MhaGeometry, MlaGeometry
from attn_core.layers import Cache, DsaCache, GdnCache, IndexCache, MhaCache, MlaCache
from attn_core.plan import Pool

#: Bytes of one token's indexer key: 128 fp8 values and one fp32 scale.
_INDEX_BYTES = 132
_MLA_FORMATS = ("mla_plain", "mla_plain_fp8", "mla_split")


def allocate_layers(
    pools: Sequence[Pool], groups: Sequence[LayerGroup], num_pages: Sequence[int], device: torch.device
) -> dict[tuple[str, int], Cache]:
    """The cache of every layer, by (model, layer index). A layer with ``kv_from`` gets its owner's cache.

    Page 0 (slot 0) is zero in every pool; the rest is zero only where ``Pool.zero_init`` asks for it.
    Raises :class:`CacheError` for a pool that a group names and nobody planned, or a format that only its backend knows.
    """
    numbers = {(pool.model, pool.name): number for number, pool in enumerate(pools)}
    layers: dict[tuple[str, int], Cache] = {}
    for group in groups:
        if not group.pools or group.geometry is None or group.backend_kind in ("external", "mm"):
            continue
        parts: dict[str, tuple[Pool, int]] = {}
        for role, name in group.pools.items():
            number = numbers.get((group.model, name))
            if number is None:
                raise CacheError(
                    f"group {group.name!r} keeps its {role!r} cache in pool {name!r}, which does not exist"
                )
            parts[role] = pools[number], num_pages[number]
        for layer in group.layers:
            if layer not in group.kv_from:
                layers[group.model, layer] = _layer_cache(group, parts, device)
    for group in groups:
        for layer, owner in group.kv_from.items():
            if (group.model, owner) in layers:
                layers[group.model, layer] = layers[group.model, owner]
    return layers


def page_count(pool: Pool, num_pages: int | Mapping[str, int], max_requests: int) -> int:
    """Pages of a pool, page 0 included."""
    if pool.kind == "state":
        return max_requests + 1
    if isinstance(num_pages, Mapping):
        if pool.name not in num_pages:
            raise CacheError(f"num_pages names no pool {pool.name!r}; it names {sorted(num_pages)}")
        count = num_pages[pool.name]
    else:
        count = num_pages
    if count * pool.page_size >= 2**31:
        raise CacheError(
            f"pool {pool.name!r}: {count} pages of {pool.page_size} tokens have more slots than a 32-bit index can name"
        )
    return count


def copy_page(cache: Cache, role: str, source: int, target: int) -> None:
    """Copy one page of a layer: the tensors of its ``index`` pool, or those of the others."""
    if isinstance(cache, DsaCache):
        copy_page(cache.index if role == "index" else cache.latent, role, source, target)
        return
    tensors: tuple[torch.Tensor | None, ...]
    if isinstance(cache, MhaCache):
        tensors = cache.k, cache.v, cache.k_blocks, cache.v_blocks
    elif isinstance(cache, MlaCache):
        tensors = (cache.c_kv, cache.k_pe) if cache.format == "mla_split" else (cache.data,)
    elif isinstance(cache, IndexCache):
        tensors = (cache.data,)
    else:
        tensors = ()
    for tensor in tensors:
        if tensor is not None:
            tensor[target] = tensor[source]


def _layer_cache(group: LayerGroup, parts: Mapping[str, tuple[Pool, int]], device: torch.device) -> Cache:
    geometry = group.geometry
    assert geometry is not None
    if "state" in parts:
        return _state_cache(geometry, *parts["state"], device)
    if "attend" not in parts:
        raise CacheError(
            f"group {group.name!r} has only pools {sorted(parts)}, which the reference cache does not serve",
            fix="a server brings its own cache for cross attention",
        )
    pool, pages = parts["attend"]
    if isinstance(geometry, MhaGeometry):
        return _mha_cache(geometry, pool, pages, device)
    latent = _latent_cache(geometry, pool, pages, device)
    if "index" not in parts:
        return latent
    pool, pages = parts["index"]
    return DsaCache(latent, IndexCache(_zeroed((pages, pool.page_size * _INDEX_BYTES), torch.uint8, pool, device)))


def _mha_cache(geometry: MhaGeometry, pool: Pool, pages: int, device: torch.device) -> MhaCache:
    element = torch_dtype(pool.dtype)
    if pool.format not in ("plain", "fp4_block16") or pool.layout not in ("NHD", "HND"):
        raise _private(pool)

    def tensor(width: int, dtype: torch.dtype) -> torch.Tensor:
        if pool.layout == "HND":
            return _zeroed((pages, geometry.kv_heads, pool.page_size, width), dtype, pool, device).transpose(1, 2)
        return _zeroed((pages, pool.page_size, geometry.kv_heads, width), dtype, pool, device)

    widths = (geometry.qk_dim, geometry.v_dim)
    if pool.format == "plain":
        return MhaCache(tensor(geometry.qk_dim, element), tensor(geometry.v_dim, element))
    if any(width % BLOCK for width in widths):
        raise CacheError(
            f"pool {pool.name!r}: fp4_block16 needs head dims that are multiples of {BLOCK}, have {widths}"
        )
    k, v = (tensor(width // 2, torch.uint8) for width in widths)
    k_blocks, v_blocks = (tensor(width // BLOCK, torch.float8_e4m3fn) for width in widths)
    return MhaCache(k, v, k_blocks, v_blocks, pool.format)


def _latent_cache(geometry: Geometry, pool: Pool, pages: int, device: torch.device) -> MlaCache:
    mla = geometry.mla if isinstance(geometry, DsaGeometry) else geometry
    if not isinstance(mla, MlaGeometry) or pool.format not in _MLA_FORMATS:
        raise _private(pool)
    dtype, widths = torch_dtype(pool.dtype), (mla.latent_dim, mla.rope_dim)
    if pool.format == "mla_split":
        c_kv, k_pe = (_zeroed((pages, pool.page_size, width), dtype, pool, device) for width in widths)
        return MlaCache(c_kv, c_kv, k_pe, pool.format)
    data = _zeroed((pages, pool.page_size, sum(widths)), dtype, pool, device)
    return MlaCache(data, data[..., : widths[0]], data[..., widths[0] :], pool.format)


def _state_cache(geometry: Geometry, pool: Pool, slots: int, device: torch.device) -> GdnCache:
    if not isinstance(geometry, GdnGeometry) or pool.format != "state_vk":
        raise _private(pool)
    conv = torch.zeros(
        slots, geometry.conv_dim, geometry.conv_width - 1, dtype=torch_dtype(geometry.conv_dtype), device=device
    )
    shape = (slots, geometry.v_heads, geometry.v_dim, geometry.k_dim)
    return GdnCache(conv, torch.zeros(shape, dtype=torch_dtype(pool.dtype), device=device), format=pool.format)


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype, pool: Pool, device: torch.device) -> torch.Tensor:
    """A tensor whose page 0 is zero; all of it where the pool asks for that."""
    if pool.zero_init:
        return torch.zeros(shape, dtype=dtype, device=device)
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor[0].zero_()
    return tensor


def _private(pool: Pool) -> CacheError:
    return CacheError(
        f"the reference cache cannot allocate pool {pool.name!r}",
        f"found    format {pool.format!r}, layout {pool.layout!r}, kind {pool.kind!r}",
        f"known    plain, fp4_block16 (NHD, HND), {', '.join(_MLA_FORMATS)}, state_vk",
        fix="a private format comes with the backend that defines it",
    )
