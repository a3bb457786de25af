"""One step as the kernels see it: offsets, lengths, a page table, and the device memory for what has to be derived from them.

Nothing is copied where the batch has it already: tensors of the batch are read in place. Under a graph the batch is static,
so the same addresses must come back at every replay, which is checked. Derived tensors are filled by
``attn_metadata_in_graph``, inside the graph, into buffers that the graph state owns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attn_core.context import GraphKey, GraphLimits, StepMetadata
from attn_core.errors import GraphError

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, KvAddress, Tree
    from attn_flash.trees import TreeStep


@dataclass(slots=True)
class FlashMetadata(StepMetadata):
    """One step of one group. ``call`` is the library call without q, k, v and what a layer adds."""

    rows: int = 0
    tokens: int = 0
    max_query_len: int = 1
    query_offsets: torch.Tensor | None = None  #: i32[R + 1]
    page: int = 1  #: tokens of a page as the kernel reads it
    address: KvAddress | None = None  #: the view whose pages have that size
    key_lens: torch.Tensor | None = None  #: i32[R] keys that the table holds
    table: torch.Tensor | None = None  #: i32[N, W], rows by ``table_rows`` where given
    table_rows: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None  #: i32[R + 1] packed keys, no cache
    max_key_len: int = 0
    tree: TreeStep | None = None
    masks: Tree | None = None
    splits: torch.Tensor | None = None  #: the plan of splits for all layers, where one is made
    derived: bool = False  #: whether anything is filled in the graph
    call: Any = None


@dataclass(slots=True)
class Buffers:
    """Device memory of a step: i32 each. ``own`` holds lists of slots for trees, ``splits`` the plan of splits."""

    key_lens: torch.Tensor
    prefix: torch.Tensor
    counts: torch.Tensor
    token_offsets: torch.Tensor
    own: torch.Tensor
    table: torch.Tensor
    splits: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(getattr(self, name).nbytes for name in self.__slots__)


def allocate(device: torch.device, rows: int, tokens: int, own: int, table: int, splits: int) -> Buffers:
    """Buffers for `rows` rows and `tokens` tokens; `own`, `table` and `splits` in entries. One allocation."""
    sizes = [rows, rows, tokens, tokens + 1, own, table, splits]
    padded = [-(-size // 4) * 4 for size in sizes]  # kernels read 16 bytes at a time
    whole = torch.zeros(sum(padded), dtype=torch.int32, device=device)
    parts = [part[:size] for part, size in zip(torch.split(whole, padded), sizes, strict=True)]
    if tokens:
        torch.arange(tokens + 1, dtype=torch.int32, device=device, out=parts[3])
    return Buffers(*parts)


@dataclass(slots=True)
class FlashState:
    """Static buffers of one (group, lane), and the metadata object of each key."""

    limits: GraphLimits
    lane: int
    buffers: Buffers
    pad_kv_len: int = 0
    metadata: dict[GraphKey, FlashMetadata] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers."""
        return self.buffers.nbytes


def key_of(batch: AttentionBatch, phase: str) -> GraphKey:
    """What a captured step is looked up by."""
    kind = f"{'lse' if batch.needs_lse else ''}{'partial' if batch.partial else ''}" or None
    return GraphKey(phase, batch.padded_rows, batch.padded_tokens, batch.max_query_len, None, kind)


def check_replayed(
    metadata: FlashMetadata, batch: AttentionBatch, address: KvAddress | None, tree: Tree | None
) -> None:
    """A replayed batch must bring the tensors that were captured, rewritten in place. Raises :class:`GraphError`."""
    pairs: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = [
        ("query_offsets", metadata.query_offsets, batch.query_offsets)
    ]
    if address is not None and metadata.address is not None:
        pairs += [
            (name, getattr(metadata.address, name), getattr(address, name))
            for name in ("kv_lens", "table", "table_rows", "origin", "local_lens")
        ]
    if tree is not None or metadata.masks is not None:
        pairs += [
            (name, getattr(metadata.masks, name, None), getattr(tree, name, None)) for name in ("mask_bits", "depth")
        ]
    if metadata.key_offsets is not None:
        pairs.append(("key_offsets", metadata.key_offsets, batch.key_offsets))
    for name, captured, found in pairs:
        if captured is found:
            continue
        if captured is None or found is None or captured.data_ptr() != found.data_ptr():
            raise GraphError(
                f"{name} of the batch is not the tensor that was captured",
                f"captured {_place(captured)}",
                f"found    {_place(found)}",
                fix="replay with a static batch: copy a step into the captured one (attn_core.paging.copy_batch)",
            )


def _place(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{list(tensor.shape)} at {tensor.data_ptr():#x}"
