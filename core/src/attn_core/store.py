"""What core does for a backend that declares no ``store`` or ``gather``: scatter and gather for the published formats.

Both take caches with any strides, compute slots in 64 bits, and never wait for the device: nothing here depends on a
value that only the device knows. A private format (``"<dist>:<name>"``) needs ``attn_store`` and ``attn_gather`` of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attn_core.errors import BatchError, BindError
from attn_core.formats import dequantize, dtype_name, quantize
from attn_core.layers import DsaCache, MhaCache, MlaCache

if TYPE_CHECKING:
    from attn_core.batch import KvAddress, Part
    from attn_core.layers import Cache, Layer, Scale

_MLA_FORMATS = ("mla_plain", "mla_plain_fp8", "mla_split")


def default_store(inputs: Any, layer: Layer, cache: Cache, address: KvAddress) -> None:
    """Write the new tokens of `inputs` to ``address.new_slots`` of `cache`, quantised with the layer's scales.

    mha: k[T, Hk, Dk] and v[T, Hk, Dv]; mla: c_kv[T, latent] and k_pe[T, rope]. Inputs without keys (the layer reads
    another layer's cache) write nothing. A slot is page * (page size of the *pool*) + offset, whatever page size `address`
    is viewed in. Slot -1 writes nothing: on a CPU such tokens are left out; on a device they are pointed at the dummy slot
    0, with its own content as the value, so that no bit of any slot changes and no length has to be read back.
    Raises :class:`BatchError` if inputs and slots differ in number, :class:`BindError` for a private format.
    """
    if isinstance(cache, MhaCache):
        if inputs.k is None and inputs.v is None:
            return
        k_scale, v_scale = getattr(layer, "k_scale", None), getattr(layer, "v_scale", None)
        parts = _mha_parts(inputs.k, inputs.v, cache, k_scale, v_scale)
    elif isinstance(cache, MlaCache | DsaCache):
        if inputs.c_kv is None and inputs.k_pe is None:
            return
        layer = getattr(layer, "mla", layer)
        parts = _mla_parts(inputs.c_kv, inputs.k_pe, cache, getattr(layer, "k_scale", None))
    else:
        raise BindError(f"the default store does not know caches of type {type(cache).__name__}")
    _scatter(parts, address.new_slots)


def default_gather(
    cache: Cache,
    address: KvAddress,
    part: Part | None = None,
    layer: Layer | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys back, row after row without gaps: (k[n, Hk, Dk], v[n, Hk, Dv]) or (c_kv[n, latent], k_pe[n, rope]).

    With `part` row r gives positions ``start[r]`` to ``start[r] + offsets[r + 1] - offsets[r]``, otherwise all of its
    ``kv_lens[r]`` keys. `layer` supplies the scales; without it values are only unpacked (and multiplied by block scales).
    ``out_dtype`` defaults to the stored type, or bf16 for 8 and 4 bits. Where the number of keys is known only on the
    device, n is an upper bound from host data; the entries after the last key are unspecified (read from the dummy slot).
    Raises :class:`BindError` for a private format.
    """
    layer = getattr(layer, "mla", layer)
    k_scale, v_scale = getattr(layer, "k_scale", None), getattr(layer, "v_scale", None)
    if isinstance(cache, MhaCache):
        slots = gather_slots(address, part, cache.k.shape[1])
        dtype = _mha_dtype(cache)
        return (
            _read(cache.k, cache.k_blocks, slots, dtype, k_scale, out_dtype),
            _read(cache.v, cache.v_blocks, slots, dtype, v_scale, out_dtype),
        )
    if isinstance(cache, MlaCache | DsaCache):
        c_kv, k_pe = _mla_views(cache, None)
        slots = gather_slots(address, part, c_kv.shape[1])
        dtype = dtype_name(c_kv.dtype)
        return _read(c_kv, None, slots, dtype, k_scale, out_dtype), _read(k_pe, None, slots, dtype, k_scale, out_dtype)
    raise BindError(f"the default gather does not know caches of type {type(cache).__name__}")


def gather_slots(address: KvAddress, part: Part | None, pool_page: int) -> torch.Tensor:
    """i64[n]: the slot of each key that :func:`default_gather` reads, in its order; entries past the last key are 0.

    ``pool_page`` is the page size of the cache; the address may be a view in smaller pages (slots are the same numbers).
    """
    from attn_core.paging import lookup_slots, packed_rows

    if pool_page % address.page_size:
        raise BatchError(
            f"an address in pages of {address.page_size} does not belong to a cache in pages of {pool_page}"
        )
    if part is None:
        offsets = torch.zeros(address.kv_lens.numel() + 1, dtype=torch.int32, device=address.kv_lens.device)
        torch.cumsum(address.kv_lens, 0, dtype=torch.int32, out=offsets[1:])
        bound = address.kv_lens.numel() * address.max_kv_len
        if address.kv_lens_cpu is not None:
            bound = min(bound, int(address.kv_lens_cpu.sum()))
        start = None
    else:
        offsets, start = part.offsets, part.start
        bound = (offsets.numel() - 1) * part.max_len
    rows, column, valid = packed_rows(offsets, bound)
    position = column if start is None else column + start.to(torch.int64)[rows]
    return lookup_slots(address, rows, position, valid)


# --- scatter --------------------------------------------------------------------------------------------------------------

_Part = tuple[torch.Tensor, torch.Tensor]  # (target[pages, P, ..], value[T, ..])


def _mha_dtype(cache: MhaCache) -> str:
    if cache.format == "fp4_block16":
        return "fp4"
    if cache.format != "plain":
        raise _private(cache.format)
    return dtype_name(cache.k.dtype)


def _mha_parts(
    k: torch.Tensor | None, v: torch.Tensor | None, cache: MhaCache, k_scale: Scale | None, v_scale: Scale | None
) -> list[_Part]:
    if k is None or v is None:
        raise BatchError("inputs hold only one of k and v", fix="give both, or neither when the layer shares a cache")
    dtype = _mha_dtype(cache)
    parts: list[_Part] = []
    for value, scale, target, blocks in (
        (k, k_scale, cache.k, cache.k_blocks),
        (v, v_scale, cache.v, cache.v_blocks),
    ):
        data, factors = quantize(value, dtype, scale)
        parts.append((target, data))
        if factors is not None:
            if blocks is None:
                raise BindError("a cache of format fp4_block16 needs k_blocks and v_blocks, e4m3[pages, P, Hk, D / 16]")
            parts.append((blocks, factors))
    return parts


def _mla_parts(
    c_kv: torch.Tensor | None, k_pe: torch.Tensor | None, cache: MlaCache | DsaCache, scale: Scale | None
) -> list[_Part]:
    if c_kv is None or k_pe is None:
        raise BatchError("inputs hold only one of c_kv and k_pe", fix="give both, or neither")
    latent, rope = _mla_views(cache, c_kv.shape[-1])
    dtype = dtype_name(latent.dtype)
    return [(latent, quantize(c_kv, dtype, scale)[0]), (rope, quantize(k_pe.flatten(1), dtype, scale)[0])]


def _mla_views(cache: MlaCache | DsaCache, latent_dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(c_kv[pages, P, latent], k_pe[pages, P, rope]) of a plain latent cache."""
    latent = cache.latent if isinstance(cache, DsaCache) else cache
    if latent.format not in _MLA_FORMATS:
        raise _private(latent.format)
    if latent.c_kv is not None and latent.k_pe is not None:
        return latent.c_kv, latent.k_pe
    if latent_dim is None or latent.format == "mla_split":
        raise BindError(
            "the default store and gather need the views c_kv and k_pe of a latent cache",
            f"format   {latent.format}, data {list(latent.data.shape)}",
            fix="set MlaCache.c_kv and MlaCache.k_pe to views of data",
        )
    return latent.data[..., :latent_dim], latent.data[..., latent_dim:]


def _private(name: str) -> BindError:
    return BindError(
        f"core cannot read or write a cache of format {name!r}",
        f"known    plain, fp4_block16, {', '.join(_MLA_FORMATS)}",
        fix="the variant that uses a private format must offer attn_store and attn_gather",
    )


def _scatter(parts: list[_Part], slots: torch.Tensor) -> None:
    """Write value[t] to slot slots[t] of each target; -1 writes nothing."""
    for target, value in parts:
        if value.shape[0] != slots.numel() or value.shape[1:] != target.shape[2:]:
            raise BatchError(
                "new keys or values do not fit the cache and the batch's new slots",
                f"values   {list(value.shape)}",
                f"slots    {slots.numel()}",
                f"cache    {list(target.shape)} as [pages, page size, ..]",
            )
    page_size = parts[0][0].shape[1]
    scatter = _scatter_host if slots.device.type == "cpu" else _scatter_device
    scatter(parts, slots, page_size)


def _scatter_device(parts: list[_Part], slots: torch.Tensor, page_size: int) -> None:
    skipped = slots < 0
    slots = slots.clamp(min=0)
    page, offset = slots // page_size, slots % page_size
    for target, value in parts:
        target, value = _as_bytes(target), _as_bytes(value)
        mask = skipped.view(-1, *[1] * (value.dim() - 1))
        target.index_put_((page, offset), torch.where(mask, target[0, 0], value))


def _scatter_host(parts: list[_Part], slots: torch.Tensor, page_size: int) -> None:
    keep = slots >= 0
    everything = bool(keep.all())
    if not everything:
        slots = slots[keep]
    page, offset = slots // page_size, slots % page_size
    for target, value in parts:
        target.index_put_((page, offset), value if everything else value[keep])


# --- gather ---------------------------------------------------------------------------------------------------------------


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """One-byte types as uint8: indexing kernels exist for it on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _read(
    source: torch.Tensor,
    blocks: torch.Tensor | None,
    slots: torch.Tensor,
    dtype: str,
    scale: Scale | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    if out_dtype is None:
        out_dtype = torch.bfloat16 if source.dtype.itemsize == 1 else source.dtype
    factors = None if blocks is None else _take(blocks, slots)
    return dequantize(_take(source, slots), factors, dtype, scale, out_dtype)


def _take(source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """source[pages, P, ..] at slots i64[n] -> [n, ..], contiguous."""
    page_size = source.shape[1]
    stored = _as_bytes(source)
    if page_size == 1 or source.stride(0) == page_size * source.stride(1):
        return stored.flatten(0, 1).index_select(0, slots).view(source.dtype)
    return stored[slots // page_size, slots % page_size].view(source.dtype)
