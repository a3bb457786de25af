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

    ``pages`` [n * W / P, Hk, P, D] is where pages are read to, ``padding`` what lies beside them if rows are wider,
    ``keys`` is the same with the n * W keys along dimension ``key_dim``, ``heads`` [n, Hk, W, D] is what engines take.
    """

    pages: torch.Tensor
    padding: torch.Tensor | None
    keys: torch.Tensor
    key_dim: int
    heads: torch.Tensor


#: Pages of at least this many tokens are taken apart by heads while they are copied, for nothing; fused kernels run up to
#: a third faster when the keys of a head lie together. Smaller pages are copied as they are.
HEAD_MAJOR = 8


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
        keys, wide = units * width, self.width or dim
        flat = buffer[: keys * self.kv_heads * wide * self.dtype.itemsize].view(self.dtype)
        room = self.room_of(flat, units, width)
        if wide != dim:
            room.padding, room.pages = room.pages[..., dim:], room.pages[..., :dim]
        return room

    def room_of(self, flat: torch.Tensor, units: int, width: int) -> Room:
        """The views of a contiguous tensor that is as large as the keys (or values) of `units` units of `width` keys."""
        heads, size, keys = self.kv_heads, self.page_size, units * width
        if size >= HEAD_MAJOR:
            by_head = flat.view(heads, keys, -1)
            pages = by_head.view(heads, keys // size, size, -1).transpose(0, 1)
            return Room(pages, None, by_head, 1, by_head.view(heads, units, width, -1).transpose(0, 1))
        pages = flat.view(keys // size, size, heads, -1).transpose(1, 2)
        return Room(pages, None, flat.view(keys, -1), 0, flat.view(units, width, heads, -1).transpose(1, 2))


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
    if pages.dtype == buffers.dtype:
        _copy(pages, block, buffers.page_size, room.pages)
    else:
        unpacked = buffers.room_of(_unpack(pages, factors, block, buffers), block.units, block.width)
        if room.padding is None:
            room = unpacked  # a new tensor of the right form: no need to copy it
        else:
            room.pages.copy_(unpacked.pages)
    if room.padding is not None:
        room.padding.zero_()
    if block.blank is not None:
        if block.blank.dtype != torch.bool:
            room.keys.index_fill_(room.key_dim, block.blank, 0)
        else:
            room.keys.masked_fill_(block.blank[:, None], 0)
    return room.heads


def _copy(pages: torch.Tensor, block: Block, page_size: int, target: torch.Tensor) -> None:
    """The block's pages to ``target[m, Hk, P, D]``, which may have any strides."""
    if pages.shape[1] != page_size:
        pages = split_pages(pages, page_size)
    torch.index_select(pages.transpose(1, 2), 0, block.pages, out=target)


def _unpack(pages: torch.Tensor, factors: torch.Tensor | None, block: Block, buffers: Buffers) -> torch.Tensor:
    """The block's pages as a new tensor of the buffers' type, in the order of a room.

    8- and 4-bit formats are picked as bytes, which every torch can index.
    """
    picked = _pick(pages, block, buffers)
    if factors is None:
        return dequantize(picked, None, dtype_name(pages.dtype), None, buffers.dtype)
    return dequantize(picked, _pick(factors, block, buffers), "fp4", None, buffers.dtype)


def _pick(pages: torch.Tensor, block: Block, buffers: Buffers) -> torch.Tensor:
    stored = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    flat = torch.empty(
        block.units * block.width * buffers.kv_heads * pages.shape[3], dtype=stored.dtype, device=pages.device
    )
    room = buffers.room_of(flat, block.units, block.width)
    _copy(stored, block, buffers.page_size, room.pages)
    return room.keys.view(pages.dtype).view(-1, pages.shape[3])


def pick_pages(
    pages: torch.Tensor, factors: torch.Tensor | None, index: torch.Tensor, page_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """The pages of `index` as [m, P, Hk, D] of `dtype`, unpacked from 8- and 4-bit formats."""
    pages = split_pages(pages, page_size)
    if pages.dtype == dtype:
        return pages.index_select(0, index)
    stored = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    picked = stored.index_select(0, index).view(pages.dtype)
    if factors is None:
        return dequantize(picked, None, dtype_name(pages.dtype), None, dtype)
    scales = split_pages(factors, page_size).view(torch.uint8).index_select(0, index).view(factors.dtype)
    return dequantize(picked, scales, "fp4", None, dtype)
