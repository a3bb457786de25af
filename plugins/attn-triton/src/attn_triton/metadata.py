"""What one step needs: buffers, the choice of kernel and tile, and the launch that fills them on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attn_core.context import GraphKey, GraphLimits, StepMetadata
from attn_core.errors import GraphError
from attn_triton.rules import Tile, power_of_two

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, KvAddress

#: Larger than any length, small enough to be added to one.
FAR = 1 << 30


@dataclass(slots=True)
class Buffers:
    """Device memory of one step: i32 tensors of R + 2 entries, work items i32[n, 2], i64 page lists and tree addresses."""

    kv_lens: torch.Tensor
    origins: torch.Tensor
    query_offsets: torch.Tensor
    splits: torch.Tensor
    sizes: torch.Tensor
    items: torch.Tensor
    page_ptr: torch.Tensor
    trees: torch.Tensor
    span_low: torch.Tensor
    span_high: torch.Tensor
    part_out: torch.Tensor
    part_lse: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        tensors = (getattr(self, name) for name in self.__slots__)
        return sum(tensor.nbytes for tensor in tensors)


def aligned(length: int, step: int = 4) -> int:
    """`length` rounded up, so that what follows it begins at a multiple of 16 bytes: kernels are compiled anew where it does not."""
    return -(-length // step) * step


def allocate(rows: int, items: int, spans: int, parts: int, width: int, device: torch.device) -> Buffers:
    """Buffers for `rows` rows and `items` items; `spans` tokens with spans; `parts` partial result rows of `width`."""
    lengths = [aligned(n) for n in (*(rows + 2,) * 5, 2 * max(items, 1), max(spans, 1), max(spans, 1))]
    whole = torch.empty(sum(lengths), dtype=torch.int32, device=device)
    kv_lens, origins, offsets, splits, sizes, work, low, high = torch.split(whole, lengths)
    pages = aligned(rows + 2, 2)
    wide = torch.empty(pages + 2, dtype=torch.int64, device=device)
    lengths = [aligned(max(parts, 1) * width), max(parts, 1)]
    part_out, part_lse = torch.split(torch.empty(sum(lengths), dtype=torch.float32, device=device), lengths)
    return Buffers(
        kv_lens,
        origins,
        offsets,
        splits,
        sizes,
        work,
        wide[:pages],
        wide[pages:],
        low,
        high,
        part_out,
        part_lse,
    )


@dataclass(slots=True)
class TritonMetadata(StepMetadata):
    """One step of one group. ``split`` chooses the kernel; buffers may be shared by all keys of a graph state."""

    split: bool = False
    paged: bool = True
    tile: Tile = field(default_factory=lambda: Tile(16, 16, 1, 1, 4, 1))
    num_items: int = 0
    rows: int = 0
    tokens: int = 0
    page_size: int = 1
    max_query_len: int = 1
    has_origin: bool = False
    has_spans: bool = False
    tree: tuple[int, int] | None = None  #: (drafts, words of the mask)
    key_offsets: torch.Tensor | None = None
    buffers: Buffers | None = None
    held: Any = None  #: what device addresses point into must live as long as this


@dataclass(slots=True)
class TritonState:
    """Static buffers of one (group, lane), and the metadata object of each key."""

    limits: GraphLimits
    lane: int
    buffers: Buffers
    max_items: int
    pad_kv_len: int = 0
    metadata: dict[GraphKey, TritonMetadata] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers."""
        return self.buffers.nbytes


def describe(metadata: TritonMetadata, batch: AttentionBatch, address: KvAddress | None) -> None:
    """What of the batch decides which kernel is compiled."""
    metadata.rows, metadata.tokens, metadata.paged = batch.padded_rows, batch.padded_tokens, address is not None
    metadata.max_query_len = max(1, batch.max_query_len)
    metadata.page_size = 1 if address is None else address.page_size
    metadata.has_origin = address is not None and address.origin is not None
    metadata.has_spans = has_spans(batch)
    if batch.tree is not None:
        metadata.tree = (batch.tree.mask_bits.shape[1], batch.tree.mask_bits.shape[2])


def has_spans(batch: AttentionBatch) -> bool:
    """Whether spans decide anything: not under a tree."""
    return batch.spans is not None and batch.tree is None and len(batch.spans) > 0


def check_captured(metadata: TritonMetadata, batch: AttentionBatch, address: KvAddress | None) -> None:
    """A replayed batch may bring nothing that was not captured. Raises :class:`GraphError`."""
    origin = address is not None and address.origin is not None
    tree = None if batch.tree is None else (batch.tree.mask_bits.shape[1], batch.tree.mask_bits.shape[2])
    for name, have, captured in (
        ("spans", has_spans(batch), metadata.has_spans),
        ("a trimmed pool", origin, metadata.has_origin),
        ("a tree of another shape", tree != metadata.tree, False),
    ):
        if have and not captured:
            raise GraphError(f"the batch has {name}, which the captured graph had not", f"captured {metadata.tree}")


def trailing_tokens(batch: AttentionBatch) -> int:
    """Most tokens that can lie behind the last row (0 where every padded row has its tokens)."""
    lens = {segment.query_len for segment in batch.segments}
    if len(lens) == 1 and None not in lens:
        return max(0, batch.padded_tokens - batch.padded_rows * (lens.pop() or 0))
    return batch.padded_tokens


def count_items(batch: AttentionBatch, tile: Tile, split: bool, max_kv_len: int, floor: int, target: int | None) -> int:
    """Upper bound of the work items of a step, from host data alone. `target` None: shares of `floor` keys, always."""
    rows, tokens = batch.padded_rows, batch.padded_tokens
    if split:
        most = rows * max(1, -(-max_kv_len // floor))
        return (most if target is None else min(most, target + rows)) + -(-trailing_tokens(batch) // tile.tokens)
    return min(
        -(-tokens // tile.tokens) + rows + 1, rows * -(-batch.max_query_len // tile.tokens) + -(-tokens // tile.tokens)
    )


def fill(
    metadata: TritonMetadata,
    batch: AttentionBatch,
    address: KvAddress | None,
    window: int,
    floor: int,
    target: int | None,
) -> None:
    """The step's one launch (two with spans): everything in ``metadata.buffers``. Nothing waits for the device."""
    from attn_triton.kernels.prepare import prepare_kernel, span_kernel

    buffers, rows, tree = metadata.buffers, batch.padded_rows, batch.tree
    assert buffers is not None
    none, block_r = buffers.items, power_of_two(rows + 1, 16)
    entries = none if address is None else (address.table if address.table is not None else address.indices)
    dense = address is not None and address.table is not None
    prepare_kernel[(1,)](
        none if address is None else address.kv_lens,
        batch.query_offsets,
        none if address is None or address.origin is None else address.origin,
        entries,
        address.table_rows if dense and address.table_rows is not None else none,  # type: ignore[union-attr]
        none if dense or address is None else address.indptr,
        none if tree is None else tree.mask_bits,
        none if tree is None else tree.depth,
        buffers.kv_lens, buffers.query_offsets, buffers.origins, buffers.page_ptr, buffers.splits, buffers.sizes,
        buffers.items, buffers.trees,
        rows, batch.padded_tokens, metadata.num_items,
        address.table.stride(0) if dense else 0,  # type: ignore[union-attr]
        metadata.page_size, window or FAR, FAR if target is not None else floor, floor, target or 1, metadata.tile.tokens,
        SPLIT=metadata.split, PAGED=metadata.paged, DENSE=dense, ROWS=dense and address.table_rows is not None,  # type: ignore[union-attr]
        ORIGIN=address is not None and address.origin is not None, TREE=tree is not None, STEP=metadata.tile.block_n,
        BLOCK_R=block_r, BLOCK_I=512, SEARCH=block_r.bit_length(),
        num_warps=8,
    )  # fmt: skip
    metadata.held = (batch.addresses, tree)
    if metadata.has_spans:
        spans = batch.spans if batch.spans is not None else buffers.items
        count = 0 if batch.spans is None else len(batch.spans)
        span_kernel[(-(-batch.padded_tokens // 128),)](
            spans, count, buffers.query_offsets, buffers.kv_lens, buffers.span_low, buffers.span_high,
            batch.padded_tokens, 128, block_r.bit_length(), rows,
        )  # fmt: skip
