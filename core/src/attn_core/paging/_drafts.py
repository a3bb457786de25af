"""Draft steps as ordinary steps of one token a row: what core does where a backend has no ``attn_draft_metadata``.

Step s of a branch sees the row's prefix, the branch's drafts before it, and its own token. Each branch of a tree gets a row of
its own. Public through :mod:`attn_core.paging`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from attn_core.batch import AttentionBatch, DraftSteps, KvAddress, Segment, StateAddress
from attn_core.context import GraphLimits, GraphState
from attn_core.errors import BatchError, GraphError
from attn_core.paging._slice import copy_batch

Address = KvAddress | StateAddress


def branch_batch(batch: AttentionBatch, draft: DraftSteps) -> AttentionBatch:
    """`batch`, whose keys are the prefix, with a row and a token for each branch: rows r * topk to r * topk + topk - 1 are row r's.

    A dense table is read as it is for a chain (topk 1): it reaches the last draft, as a server's own table does. Branches of a
    tree, and rows of a CSR (which holds the pages of its keys and no others), get tables of their own: pages that lie wholly in
    the prefix are shared, the rest are those of the branch's slots. Where a branch begins inside a page, its page must hold the
    prefix's tokens of that page too. Recurrent states stay as they are, a row each: no branch can have one of its own.

    Raises :class:`BatchError` for rows of more than one token, slots of another shape, and lengths of one rank's share.
    """
    _check(batch, draft)
    addresses = tuple(_branch_address(address, draft) for address in batch.addresses)
    if draft.topk == 1:
        return replace(batch, addresses=addresses, _views={})
    times, host = draft.topk, batch.query_offsets_cpu
    return replace(
        batch,
        num_rows=batch.num_rows * times,
        num_tokens=batch.num_tokens * times,
        padded_rows=batch.padded_rows * times,
        padded_tokens=batch.padded_tokens * times,
        segments=tuple(_branch_segment(segment, times) for segment in batch.segments),
        query_offsets=_branch_offsets(batch.query_offsets, times),
        query_offsets_cpu=None if host is None else _branch_offsets(host, times),
        positions=None if batch.positions is None else batch.positions.repeat_interleave(times),
        addresses=addresses,
        _views={},
    )


def step_batches(batch: AttentionBatch, draft: DraftSteps) -> tuple[AttentionBatch, ...]:
    """The batch of every draft step, one token a branch. Raises what :func:`branch_batch` raises."""
    wide = branch_batch(batch, draft)
    slots = draft.slots.reshape(-1, draft.steps)
    return tuple(_step_batch(wide, slots, number) for number in range(draft.steps))


@dataclass
class DraftStates:
    """Static state of all draft steps of one (group, lane): a GraphState and a static batch for each step.

    One state would not do: ``attn_metadata`` returns the same object for the same key, and all steps have the same. ``limits``
    count branches as rows, and the drafts as keys.
    """

    states: tuple[GraphState, ...]
    limits: GraphLimits
    topk: int
    _batches: dict[tuple[int, int], tuple[AttentionBatch, ...]] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers of the states."""
        return sum(state.nbytes for state in self.states)

    @property
    def pad_kv_len(self) -> int:
        """The kv_len that padded rows must have."""
        return max(state.pad_kv_len for state in self.states)

    def load(self, batch: AttentionBatch, draft: DraftSteps) -> tuple[tuple[AttentionBatch, ...], bool]:
        """The static batches of all steps with the contents of `batch`, and whether they were made now (a capture).

        Raises :class:`GraphError` for more steps or another breadth than the limits say, :class:`BatchError` for a batch that
        does not fit the static one.
        """
        if draft.steps > len(self.states) or draft.topk != self.topk:
            raise GraphError(
                f"{draft.steps} draft steps with topk {draft.topk} do not fit the graph's",
                f"limits   {len(self.states)} steps, topk {self.topk} (GraphLimits.draft)",
            )
        fresh = [_flat(step, self.limits) for step in step_batches(batch, draft)]
        key = batch.padded_rows, draft.steps
        kept = self._batches.get(key)
        if kept is None:
            kept = self._batches[key] = tuple(_static(step, self.limits) for step in fresh)
            return kept, True
        for step, static in zip(fresh, kept, strict=True):
            copy_batch(step, static)
        return kept, False


# --- branches -------------------------------------------------------------------------------------------------------------


def _check(batch: AttentionBatch, draft: DraftSteps) -> None:
    if batch.max_query_len > 1 or batch.num_tokens != batch.num_rows:
        raise BatchError(
            "draft steps have one token a row",
            f"found    {batch.num_tokens} tokens in {batch.num_rows} rows, up to {batch.max_query_len} a row",
        )
    needed = batch.padded_rows, draft.topk, draft.steps
    if tuple(draft.slots.shape) != needed:
        raise BatchError(
            f"DraftSteps.slots has shape {tuple(draft.slots.shape)}; needed is {needed} (rows, topk, steps)"
        )


def _branch_segment(segment: Segment, times: int) -> Segment:
    rows, tokens = (slice(part.start * times, part.stop * times) for part in (segment.rows, segment.tokens))
    return replace(segment, rows=rows, tokens=tokens)


def _branch_offsets(offsets: torch.Tensor, times: int) -> torch.Tensor:
    """i32[R * topk + 1]: the tokens of a row are followed by those of its next branch."""
    branch = torch.arange(times, dtype=offsets.dtype, device=offsets.device)
    starts = offsets[:-1, None] * times + branch * offsets.diff()[:, None]
    return torch.cat([starts.reshape(-1), offsets[-1:] * times])


def _branch_address(address: Address, draft: DraftSteps) -> Address:
    if isinstance(address, StateAddress):
        return address
    if address.local_lens is not None:
        raise BatchError(
            "draft steps over one rank's share of the keys need a backend that implements attn_draft_metadata"
        )
    if draft.topk == 1 and address.table is not None:
        return address

    def each(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.repeat_interleave(draft.topk)

    return replace(
        address,
        table=_reaching_table(address, draft),
        table_rows=None,
        indices=None,
        indptr=None,
        kv_lens=address.kv_lens.repeat_interleave(draft.topk),
        kv_lens_cpu=each(address.kv_lens_cpu),
        origin=each(address.origin),
        new_slots=draft.slots[:, :, 0].reshape(-1),
    )


def _reaching_table(address: KvAddress, draft: DraftSteps) -> torch.Tensor:
    """i32[R * topk, W]: the pages of the prefix, and from the page of the first draft on those of the branch's slots."""
    size, lens = address.page_size, address.kv_lens.to(torch.int64)
    if address.origin is not None:
        lens = (lens - address.origin).clamp(min=0)
    width = -(-(address.max_kv_len + draft.steps) // size)
    prefix = _rows_of(address, width)[:, None, :]
    columns = torch.arange(width, device=lens.device)
    number = columns * size - lens[:, None]  # which draft comes first in this page; negative: the prefix does
    places = number.clamp(0, draft.steps - 1)[:, None, :].expand(-1, draft.topk, -1)
    slots = draft.slots.to(torch.int64).gather(2, places)
    drafted = (number > -size) & (number < draft.steps)
    pages = torch.where(drafted[:, None, :] & (slots >= 0), slots // size, prefix)
    return pages.reshape(-1, width).to(torch.int32)


def _rows_of(address: KvAddress, width: int) -> torch.Tensor:
    """i64[R, width]: the pages of the prefix by row, 0 behind them."""
    from attn_core.paging import convert

    found = address if address.table is not None else convert(address, "table", address.page_size)
    assert found.table is not None
    table = found.table[:, :width]
    table = table[: address.kv_lens.numel()] if found.table_rows is None else table[found.table_rows.long()]
    return torch.nn.functional.pad(table.to(torch.int64), (0, width - table.shape[1]))


# --- steps ----------------------------------------------------------------------------------------------------------------


def _step_batch(wide: AttentionBatch, slots: torch.Tensor, number: int) -> AttentionBatch:
    """Draft step `number`: the prefix, the drafts before it, and its own token. slots i64[R * topk, steps]."""
    more = number + 1
    addresses: list[Address] = []
    for address in wide.addresses:
        if isinstance(address, KvAddress):
            host = address.kv_lens_cpu
            address = replace(
                address,
                kv_lens=address.kv_lens + more,
                kv_lens_cpu=None if host is None else host + more,
                max_kv_len=address.max_kv_len + more,
                new_slots=slots[:, number],
            )
        addresses.append(address)
    positions = None if wide.positions is None else wide.positions + number
    return replace(wide, addresses=tuple(addresses), positions=positions, _views={})


def _flat(batch: AttentionBatch, limits: GraphLimits) -> AttentionBatch:
    """Every row with a table of its own, no wider than the longest row: what a static batch can take over."""
    return replace(batch, addresses=tuple(_flat_address(address, limits) for address in batch.addresses), _views={})


def _flat_address(address: Address, limits: GraphLimits) -> Address:
    if isinstance(address, StateAddress):
        return address
    assert address.table is not None
    table = address.table[:, : -(-limits.max_kv_len // address.page_size)]
    table = table[: address.kv_lens.numel()] if address.table_rows is None else table[address.table_rows.long()]
    return replace(address, table=table, table_rows=None)


def _static(batch: AttentionBatch, limits: GraphLimits) -> AttentionBatch:
    """A copy in tensors of its own, with room for the longest row."""
    return replace(
        batch,
        query_offsets=batch.query_offsets.clone(),
        positions=None if batch.positions is None else batch.positions.clone(),
        addresses=tuple(_static_address(address, limits) for address in batch.addresses),
        static=True,
        _views={},
    )


def _static_address(address: Address, limits: GraphLimits) -> Address:
    copies = {name: value.clone() for name, value in _tensors(address) if not name.endswith("_cpu")}
    if isinstance(address, StateAddress):
        return replace(address, **copies)  # type: ignore[arg-type]
    assert address.table is not None
    width = -(-limits.max_kv_len // address.page_size)
    copies["table"] = torch.nn.functional.pad(address.table, (0, width - address.table.shape[1]))
    return replace(address, max_kv_len=limits.max_kv_len, **copies)  # type: ignore[arg-type]


def _tensors(address: Address) -> Sequence[tuple[str, torch.Tensor]]:
    values = ((name, getattr(address, name)) for name in address.__dataclass_fields__)
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]
