"""Metadata of one step, and the static buffers of a graph: dense tables and lengths as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attn_core.context import GraphKey, GraphLimits, StepMetadata
from attn_trtllm.tails import Tails

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, KvAddress


@dataclass(slots=True)
class TrtllmMetadata(StepMetadata):
    """One step. ``rows`` are those the kernel sees: eager steps leave padded rows out, graphs keep them.

    ``table`` i32[rows, W], ``kv_lens`` i32[rows], ``query_offsets`` and ``key_offsets`` i32[rows + 1] (ragged phases),
    ``mask`` u16[rows, S, words] (verify). ``expanded`` keeps block tables that address K and V apart, by their offsets; ``fixed`` are
    the arguments that all layers share, ``kernel`` the name of what they call.
    """

    rows: int = 0
    tokens: int = 0
    exact: bool = True  #: tensors hold these tokens and no more
    query_len: int = 1
    max_kv_len: int = 1
    table: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    query_offsets: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    expanded: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    tails: Tails | None = None
    kernel: str = ""
    fixed: dict[str, Any] = field(default_factory=dict)
    before: tuple[Any, ...] = ()  #: of a plain decode: what stands before and after ``out`` and ``sinks``, by place
    after: tuple[Any, ...] = ()


@dataclass(slots=True)
class TrtllmState:
    """Static table i32[max rows, max pages] and lengths i32[max rows] of one (group, lane), shared by all its keys."""

    limits: GraphLimits
    lane: int
    table: torch.Tensor
    kv_lens: torch.Tensor
    pad_kv_len: int = 1  #: no kernel here takes a row without keys
    metadata: dict[GraphKey, TrtllmMetadata] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the static buffers."""
        return self.table.nbytes + self.kv_lens.nbytes


def query_length(batch: AttentionBatch) -> int:
    """Query tokens of every row of a uniform batch."""
    lengths = {segment.query_len for segment in batch.segments} - {None}
    if len(lengths) == 1:
        return int(lengths.pop() or 1)
    return max(1, batch.padded_tokens // max(1, batch.padded_rows))


def table_of(address: KvAddress, rows: int) -> torch.Tensor:
    """i32[rows, W], contiguous, one line a row, as wide as the longest row needs."""
    assert address.table is not None
    width = min(address.table.shape[1], max(1, -(-address.max_kv_len // address.page_size)))
    table = address.table if address.table.shape[1] == width else address.table[:, :width]
    if address.table_rows is not None:
        table = table.index_select(0, address.table_rows[:rows])
    elif len(table) != rows:
        table = table[:rows]
    return table.contiguous()


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """i32[n + 1]: where each of n packed rows starts."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    return offsets


def chain_mask(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """u16[rows, width, 2 * ceil(width / 32)]: draft i of a chain sees the drafts up to itself; bit j % 16 of word j // 16.

    Made on the device, from nothing but the sizes: nothing is copied, nothing waits.
    """
    words = 2 * -(-width // 32)
    draft = torch.arange(width, device=device)[:, None]
    seen = torch.arange(16 * words, device=device)[None] <= draft
    bits = seen.view(width, words, 16).to(torch.int32) << torch.arange(16, dtype=torch.int32, device=device)
    mask = bits.sum(-1).to(torch.int16).view(torch.uint16)  # 0xFFFF wraps to -1, which has the same bits
    return mask.expand(rows, -1, -1).contiguous()
