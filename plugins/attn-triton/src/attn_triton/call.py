"""One layer: tensors of the contract as arguments of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from attn_core.errors import BindError
from attn_triton.kernels.elements import raw_exponent
from attn_triton.launch import HOPPER_BLOCK, HOPPER_STAGES
from attn_triton.metadata import TritonMetadata
from attn_triton.rules import Rules, power_of_two

if TYPE_CHECKING:
    from attn_core.layers import MhaCache, MhaLayer, Scale

#: A tensor as another type, without a copy.
View = Callable[[torch.Tensor], torch.Tensor]
#: Kinds of stored elements, as in :mod:`attn_triton.kernels.elements`.
_KINDS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
#: Fewest columns of a tile, by kind. Narrow kinds are loaded 16 bits at a time and multiplied in 2 (fp8) or 4 parts (fp4) of at
#: least 16 columns. An operand made of 8-bit loads would need 32: it gives each thread 4 neighbours of K twice, and where K has
#: fewer than 32 the compiler hands out some of them again and the sum is wrong.
LEAST_DIM = (16, 32, 32, 64)


def kind_of(cache: MhaCache) -> int:
    """0 plain, 1 e4m3, 2 e5m2, 3 fp4."""
    return 3 if cache.k_blocks is not None else _KINDS.get(cache.k.dtype, 0)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def as_pairs(x: torch.Tensor) -> torch.Tensor:
    """Bytes of an 8- or 4-bit cache as int16, two neighbours along the head dim. Raises :class:`BindError` where they are not aligned."""
    if x.shape[-1] % 2 or x.storage_offset() % 2 or any(stride % 2 for stride in x.stride()[:3]):
        raise BindError(
            "a cache of 8 or 4 bits needs an even number of bytes a head, and even strides", f"strides  {x.stride()}"
        )
    return x.view(torch.int16)


def in_words(x: torch.Tensor) -> bool:
    """Whether the scales of FP4 blocks can be read four at a time: four to a word, and every word aligned."""
    lengths = (x.shape[-1], x.storage_offset(), x.data_ptr(), *x.stride()[:3])
    return all(length % 4 == 0 for length in lengths)


def as_words(x: torch.Tensor) -> torch.Tensor:
    """Scales of FP4 blocks as int32, four to a word."""
    return x.view(torch.int32)


def scale_of(scale: Scale | None, kind: int) -> tuple[torch.Tensor | None, int]:
    """(tensor, 0 none | 1 one value | 2 one a KV head). Unquantised caches have no scales."""
    if scale is None or kind == 0:
        return None, 0
    return scale.tensor, 1 if scale.tensor.numel() == 1 else 2


def check_contiguous(**tensors: torch.Tensor) -> None:
    """The last dimension of every tensor must be contiguous. Raises :class:`BindError`."""
    for name, x in tensors.items():
        if x.numel() and x.stride(-1) != 1 and x.shape[-1] != 1:
            raise BindError(f"{name}: the last dimension must be contiguous", f"strides  {x.stride()}")


class Pages:
    """The tensors of one cache as kernel arguments, made once."""

    __slots__ = ("arguments", "cache", "kind", "page_size", "store_arguments", "words")

    def __init__(self, cache: MhaCache) -> None:
        check_contiguous(**{"cache.k": cache.k, "cache.v": cache.v})
        self.cache, self.kind, self.page_size = cache, kind_of(cache), cache.k.shape[1]
        self.words = self.kind == 3 and all(in_words(x) for x in (cache.k_blocks, cache.v_blocks) if x is not None)
        self.arguments = self._arguments(as_pairs if self.kind else as_bytes, as_words if self.words else as_bytes)
        self.store_arguments = self._arguments(as_bytes, as_bytes)

    def _arguments(self, elements: View, scales: View) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        cache = self.cache
        k, v = elements(cache.k), elements(cache.v)
        kb = k if cache.k_blocks is None else scales(cache.k_blocks)
        vb = v if cache.v_blocks is None else scales(cache.v_blocks)
        return (k, v, kb, vb), (*k.stride()[:3], *kb.stride()[:3], *v.stride()[:3], *vb.stride()[:3])

    @classmethod
    def packed(cls, k: torch.Tensor, v: torch.Tensor) -> Pages:
        """Keys k[Tk, Hk, D] and values without pages."""
        pages = cls.__new__(cls)
        check_contiguous(k=k, v=v)
        pages.kind, pages.page_size, pages.words = 0, 1, False
        ks, vs = (0, k.stride(0), k.stride(1)), (0, v.stride(0), v.stride(1))
        pages.arguments = (k, v, k, v), (*ks, *ks, *vs, *vs)
        return pages


def attend(
    q: torch.Tensor,
    pages: Pages,
    layer: MhaLayer,
    rules: Rules,
    metadata: TritonMetadata,
    out: torch.Tensor,
    arch: str,
    key_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One or two launches: attention, and the merge of shares. ``out[T, Hq, DV]`` is written and returned."""
    from attn_triton.kernels.attention import attention_kernel

    geometry, tile, buffers = layer.geometry, metadata.tile, metadata.buffers
    assert buffers is not None
    check_contiguous(q=q, out=out)
    if metadata.tile.hopper and hopper_fits(q, pages, rules, metadata, out):
        return attend_hopper(q, pages, layer, rules, metadata, out, key_offsets)
    lse = None
    if metadata.needs_lse:
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
    if not metadata.num_items or not out.shape[0]:
        return out, lse
    kind, convert = pages.kind, arch.startswith("sm") and int(arch[2:]) >= 89
    exponent = raw_exponent(kind, convert)
    factor, softcap = rules.factors(exponent)
    v_factor = 2.0**exponent
    k_scale, k_scales = scale_of(layer.k_scale, kind)
    v_scale, v_scales = scale_of(layer.v_scale, kind)
    sinks = None if metadata.partial else layer.sinks
    (k, v, kb, vb), strides = pages.arguments
    heads = geometry.kv_heads * tile.head_blocks
    drafts, words = metadata.tree or (1, 1)
    least = LEAST_DIM[kind]
    block_d, block_dv = power_of_two(geometry.qk_dim, least), power_of_two(geometry.v_dim, least)
    attention_kernel[(heads, metadata.num_items)](
        q, k, v, kb, vb, out, lse if lse is not None else buffers.part_lse, buffers.part_out, buffers.part_lse,
        buffers.items, buffers.page_ptr, buffers.kv_lens, buffers.origins, buffers.query_offsets,
        key_offsets if key_offsets is not None else buffers.kv_lens,
        buffers.splits, buffers.sizes, buffers.trees, buffers.span_low, buffers.span_high,
        sinks, k_scale, v_scale, metadata.rows, factor, softcap, v_factor,
        q.stride(0), q.stride(1), *strides, out.stride(0), out.stride(1), drafts, words, heads,
        rules.window, rules.right, rules.chunk, int(lse is not None),
        RATIO=geometry.ratio, GROUP=tile.group, HEAD_BLOCKS=tile.head_blocks, SPLIT=metadata.split,
        ASM=convert, WORDS=pages.words, AHEAD=tile.ahead and metadata.paged, ONE_LOOP=arch.startswith("gfx"), PAGED=metadata.paged, PAGE=pages.page_size, KIND=kind, V_DTYPE=triton_dtype(v.dtype if kind == 0 else torch.float16),
        WINDOW=rules.window > 0, RIGHT=rules.right >= 0, CHUNK=rules.chunk > 0, TREE=metadata.tree is not None, SPANS=metadata.has_spans,
        ORIGIN=metadata.has_origin, SOFTCAP=softcap != 0, SINKS=sinks is not None, K_SCALES=k_scales, V_SCALES=v_scales,
        PRECISION="ieee",
        D=geometry.qk_dim, DV=geometry.v_dim, BLOCK_D=block_d, BLOCK_DV=block_dv,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if metadata.split:
        merge(metadata, layer, sinks, out, lse, heads, block_dv)
    return out, lse


def merge(
    metadata: TritonMetadata, layer: MhaLayer, sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None,
    heads: int, block_dv: int,
) -> None:  # fmt: skip
    """Join the shares of every row that has more than one."""
    from attn_triton.kernels.merge import merge_kernel

    geometry, tile, buffers = layer.geometry, metadata.tile, metadata.buffers
    assert buffers is not None
    merge_kernel[(metadata.rows * metadata.max_query_len, geometry.q_heads)](
        buffers.part_out, buffers.part_lse, out, lse if lse is not None else buffers.part_lse, buffers.splits,
        buffers.query_offsets, sinks, out.stride(0), out.stride(1), heads,
        tile.block_m, metadata.max_query_len, int(lse is not None),
        RATIO=geometry.ratio, GROUP=tile.group, HEAD_BLOCKS=tile.head_blocks, SINKS=sinks is not None,
        DV=geometry.v_dim, BLOCK_DV=block_dv, BLOCK_S=16, num_warps=4,
    )  # fmt: skip


def triton_dtype(dtype: torch.dtype) -> object:
    """The triton type of a torch type."""
    import triton.language as tl

    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def hopper_fits(q: torch.Tensor, pages: Pages, rules: Rules, metadata: TritonMetadata, out: torch.Tensor) -> bool:
    """Whether the warp-specialised kernel serves this call; everything else goes through the portable one."""
    (k, v, _, _), strides = pages.arguments
    dims = (q.shape[2], v.shape[-1])
    if metadata.split or metadata.tree or metadata.has_spans or metadata.has_origin or pages.kind:
        return False
    if q.dtype == torch.float32 or any(dim not in (64, 128) for dim in dims) or rules.scale <= 0:
        return False
    if any(x % 8 for x in (*strides, q.stride(0), q.stride(1), out.stride(0), out.stride(1))):
        return False
    if k.data_ptr() % 16 or v.data_ptr() % 16 or q.data_ptr() % 16 or q.stride(0) < q.stride(1):
        return False
    if metadata.paged:
        return _pages_are_rows(pages)
    return strides[1] >= strides[2] and strides[7] >= strides[8]


def _pages_are_rows(pages: Pages) -> bool:
    """Pages of 8 and more tokens whose tokens are evenly spaced over the whole pool: a pool is a matrix of slots."""
    size = pages.page_size
    if size < 8 or size & (size - 1):
        return False
    _, strides = pages.arguments
    return all(page == size * token and token >= head for page, token, head in (strides[0:3], strides[6:9]))


def attend_hopper(
    q: torch.Tensor, pages: Pages, layer: MhaLayer, rules: Rules, metadata: TritonMetadata, out: torch.Tensor,
    key_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Prefill by :mod:`attn_triton.kernels.hopper`; one launch."""
    from triton.experimental.gluon.language import bfloat16, float16
    from triton.experimental.gluon.language._layouts import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from attn_triton.kernels.hopper import hopper_kernel

    geometry, buffers = layer.geometry, metadata.buffers
    assert buffers is not None
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device) if metadata.needs_lse else None
    if not metadata.num_items or not out.shape[0]:
        return out, lse
    (k, v, _, _), strides = pages.arguments
    box = min(pages.page_size, HOPPER_BLOCK) if metadata.paged else HOPPER_BLOCK
    slots = k.shape[0] * (pages.page_size if metadata.paged else 1)
    element = bfloat16 if q.dtype == torch.bfloat16 else float16

    def describe(x: torch.Tensor, rows: int, heads: int, token: int, head: int, box: int) -> TensorDescriptor:
        dim = x.shape[-1]
        layout = NVMMASharedLayout.get_default_for([64, dim], element)
        return TensorDescriptor(x, [rows, (heads - 1) * head + dim], [token, 1], [box, dim], layout)

    factor, softcap = rules.factors(0)
    sinks = None if metadata.partial else layer.sinks
    hopper_kernel[(min(metadata.tile.processors, geometry.q_heads * metadata.num_items),)](
        describe(q, q.shape[0], geometry.q_heads, q.stride(0), q.stride(1), 64),
        describe(k, slots, geometry.kv_heads, strides[1], strides[2], box),
        describe(v, slots, geometry.kv_heads, strides[7], strides[8], box), out,
        lse if lse is not None else buffers.part_lse, sinks if sinks is not None else buffers.part_lse,
        buffers.items, buffers.page_ptr, buffers.kv_lens, buffers.query_offsets,
        key_offsets if key_offsets is not None else buffers.kv_lens, buffers.splits, metadata.rows, slots,
        factor, softcap, out.stride(0), out.stride(1), q.stride(1), strides[2], strides[8], geometry.q_heads,
        RATIO=geometry.ratio, PAGED=metadata.paged, PAGE=pages.page_size, BOX=box,
        WINDOW=rules.window, RIGHT=rules.right, CHUNK=rules.chunk, SOFTCAP=softcap != 0, SINKS=sinks is not None,
        NEEDS_LSE=lse is not None, D=geometry.qk_dim, DV=geometry.v_dim, BLOCK_N=HOPPER_BLOCK, STAGES=HOPPER_STAGES, num_warps=4,
    )  # fmt: skip
    return out, lse
