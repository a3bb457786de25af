"""Reading keys and values out of a paged cache: whole pages at once, unpacked, with everything that is not a key zeroed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attn_core.errors import BindError
from attn_core.formats import dequantize, dtype_name
from attn_core.layers import MhaCache


@dataclass(slots=True)
class Block:
    """Pages to read together: n units of W keys. ``blank`` says which of the n * W keys are none.

    ``pages`` i32[n * W / P] in the order of the keys; ``blank`` is i64[b] (indices, for a CPU), bool[n * W] (a device) or
    None where every key counts.
    """

    units: int
    width: int
    pages: torch.Tensor
    blank: torch.Tensor | None


@dataclass(slots=True)
class Room:
    """Views of one workspace, for the keys (or values) of blocks of one shape.

    ``pages`` [n * W / P, P, Hk, D] is where pages are read to, ``padding`` what lies beside them if rows are wider,
    ``rows`` [n * W, Hk * D] is the same token by token, ``heads`` [n, Hk, W, D] what engines take.
    """

    pages: torch.Tensor
    padding: torch.Tensor | None
    rows: torch.Tensor
    heads: torch.Tensor


@dataclass(slots=True)
class Buffers:
    """Workspaces u8 for the keys and the values of one block, rewritten by every block; their elements and widths.

    Rows are ``width`` elements wide (None: as wide as the cache's); what is beside the cache's elements is zero.
    """

    k: torch.Tensor
    v: torch.Tensor
    dtype: torch.dtype
    page_size: int
    kv_heads: int
    dims: tuple[int, int]
    width: int | None
    _rooms: dict[tuple[int, int], tuple[Room, Room]] = field(default_factory=dict)

    def rooms(self, units: int, width: int) -> tuple[Room, Room]:
        """The views for blocks of `units` units of `width` keys."""
        found = self._rooms.get((units, width))
        if found is None:
            found = self._room(self.k, units, width, self.dims[0]), self._room(self.v, units, width, self.dims[1])
            self._rooms[units, width] = found
        return found

    def _room(self, buffer: torch.Tensor, units: int, width: int, dim: int) -> Room:
        keys, heads, wide = units * width, self.kv_heads, self.width or dim
        flat = buffer[: keys * heads * wide * self.dtype.itemsize].view(self.dtype)
        pages = flat.view(keys // self.page_size, self.page_size, heads, wide)
        return Room(
            pages if wide == dim else pages[..., :dim],
            None if wide == dim else pages[..., dim:],
            flat.view(keys, heads * wide),
            flat.view(units, width, heads, wide).transpose(1, 2),
        )


def split_pages(tensor: torch.Tensor, page_size: int) -> torch.Tensor:
    """``tensor[pages, P, ..]`` seen in smaller pages of `page_size`, without a copy.

    Raises :class:`BindError` where the strides do not allow it (head-major pages).
    """
    pages, size = tensor.shape[:2]
    if size == page_size:
        return tensor
    if size % page_size or tensor.stride(0) != size * tensor.stride(1):
        raise BindError(
            f"a cache in pages of {size} cannot be read in pages of {page_size}",
            f"strides  {list(tensor.stride())}",
            fix="token-major pages (layout NHD) can be split; for others use the pool's own page size",
        )
    shape = (pages * (size // page_size), page_size, *tensor.shape[2:])
    return tensor.as_strided(shape, (page_size * tensor.stride(1), *tensor.stride()[1:]), tensor.storage_offset())


def bytes_per_key(kv_heads: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of one key and its value once read: both `width` wide."""
    return 2 * kv_heads * width * dtype.itemsize


def read_block(cache: MhaCache, block: Block, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
    """k[n, Hk, W, D] and v[n, Hk, W, Dv] of a block, as views of `buffers`, which the next block overwrites.

    Scales of the layer are not applied, those of fp4 blocks are.
    """
    k, v = buffers.rooms(block.units, block.width)
    return _read(cache.k, cache.k_blocks, block, buffers, k), _read(cache.v, cache.v_blocks, block, buffers, v)


def _read(
    pages: torch.Tensor, factors: torch.Tensor | None, block: Block, buffers: Buffers, room: Room
) -> torch.Tensor:
    if pages.shape[1] != buffers.page_size:
        pages = split_pages(pages, buffers.page_size)
    rows, heads = room.rows, room.heads
    if pages.dtype == buffers.dtype:
        torch.index_select(pages, 0, block.pages, out=room.pages)
    else:
        unpacked = _unpack(pages, factors, block.pages, buffers.page_size, buffers.dtype)
        if room.padding is None:  # it is a new tensor of the right shape: no need to copy it
            rows, heads = unpacked.view(rows.shape), unpacked.view(heads.transpose(1, 2).shape).transpose(1, 2)
        else:
            room.pages.copy_(unpacked)
    if room.padding is not None:
        room.padding.zero_()
    if block.blank is not None:
        if block.blank.dtype == torch.bool:
            rows.masked_fill_(block.blank[:, None], 0)
        else:
            rows.index_fill_(0, block.blank, 0)
    return heads


def pick_pages(
    pages: torch.Tensor, factors: torch.Tensor | None, index: torch.Tensor, page_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """The pages of `index` as [m, P, Hk, D] of `dtype`, unpacked from 8- and 4-bit formats."""
    pages = split_pages(pages, page_size)
    return pages.index_select(0, index) if pages.dtype == dtype else _unpack(pages, factors, index, page_size, dtype)


def _unpack(
    pages: torch.Tensor, factors: torch.Tensor | None, index: torch.Tensor, page_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """The pages of `index` as `dtype`: 8- and 4-bit formats are read as bytes, which every torch can index."""
    stored = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    picked = stored.index_select(0, index).view(pages.dtype)
    if factors is None:
        return dequantize(picked, None, dtype_name(pages.dtype), None, dtype)
    scales = split_pages(factors, page_size).view(torch.uint8).index_select(0, index).view(factors.dtype)
    return dequantize(picked, scales, "fp4", None, dtype)
