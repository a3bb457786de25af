"""One forward of continuous batching as an attention batch: transformers' page pool, read in place as token slots.

transformers hands every layer the same arguments: packed tokens, cumulative lengths, and for each allocator (one for each
layer type) where the new tokens are written and where the keys lie. The batch is built from them once a forward. Rows are
sorted into the contract's phase order (decode before prefill); tokens follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment


@dataclass(frozen=True, slots=True)
class PoolSource:
    """Where a pool of the plan lies in transformers' cache: allocator, its layer type, and the ring of a window."""

    allocator: int
    layer_type: str
    window: int | None
    sentinel: int


@dataclass(frozen=True, slots=True)
class PoolStep:
    """A batch with the token order that differs from transformers' (None: the same), and the pools that were staged."""

    batch: AttentionBatch
    order: torch.Tensor | None
    staged: frozenset[int]

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """``[1, H, T, D]`` as contiguous ``[num_tokens, H, D]`` in the batch's order."""
        tokens = states[0].transpose(0, 1)
        if self.order is not None:
            return tokens[self.order]
        return tokens[: self.batch.num_tokens].contiguous()

    def unpack(self, out: torch.Tensor, length: int) -> torch.Tensor:
        """``[num_tokens, H, D]`` back to ``[1, length, H, D]`` in transformers' order; padded tokens are 0."""
        if self.order is None and length == out.shape[0]:
            return out.unsqueeze(0)
        full = out.new_zeros((1, length, *out.shape[1:]))
        full[0, slice(out.shape[0]) if self.order is None else self.order] = out
        return full


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows in the batch's order: their place in transformers' order, and how many decode rows come first."""

    order: list[int]
    decodes: int

    @property
    def moved(self) -> bool:
        return self.order != sorted(self.order)

    def pick(self, values: Sequence[int]) -> list[int]:
        return [values[row] for row in self.order]


def must_stage(source: PoolSource, kwargs: Mapping[str, Any]) -> bool:
    """Whether a window's ring cannot be read in place: a row's new tokens overwrite keys that its first ones still see.

    A ring holds `window` slots. One new token replaces exactly the key that leaves the window; several are safe only while
    the ring has not been filled.
    """
    if source.window is None or kwargs["max_length_q"] == 1:
        return False
    return bool(kwargs["max_length_k"][source.layer_type] > source.window)


def build_step(kwargs: Mapping[str, Any], sources: Sequence[PoolSource]) -> PoolStep:
    """The batch of one forward from the arguments of its first attention call; ``sources`` in the order of the plan's pools.

    A staged pool is addressed as ``slot 1 + i`` for key i of all rows: the caller copies the keys there.
    """
    offsets = kwargs["cu_seq_lens_q"].tolist()
    queries = [length for length in _lengths(offsets) if length]
    keys = [_lengths(kwargs["cu_seq_lens_k"][source.layer_type].tolist())[: len(queries)] for source in sources]
    rows = _sort_rows(queries, keys)
    device = kwargs["cu_seq_lens_q"].device
    tokens = _ranges(queries, rows, device) if rows.moved else None
    staged = frozenset(number for number, source in enumerate(sources) if must_stage(source, kwargs))
    addresses = [
        _address(source, kwargs, keys[number], rows, tokens, sum(queries), number in staged)
        for number, source in enumerate(sources)
    ]
    query_lens = rows.pick(queries)
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    positions = kwargs["position_ids"].flatten()[: sum(queries)].to(torch.int64)
    batch = AttentionBatch(
        num_rows=len(queries),
        num_tokens=sum(queries),
        segments=_segments(query_lens, rows.decodes),
        query_offsets=starts.to(device),
        query_offsets_cpu=starts,
        max_query_len=max(queries, default=0),
        addresses=tuple(addresses),
        positions=positions if tokens is None else positions[tokens],
    )
    return PoolStep(batch, tokens, staged)


def _lengths(offsets: Sequence[int]) -> list[int]:
    return [end - start for start, end in zip(offsets, offsets[1:], strict=False)]


def _sort_rows(queries: Sequence[int], keys: Sequence[Sequence[int]]) -> _Rows:
    """Rows with one new token and a past first; otherwise the order stays."""
    decode = [row for row, length in enumerate(queries) if length == 1 and any(lengths[row] > 1 for lengths in keys)]
    known = set(decode)
    return _Rows([*decode, *(row for row in range(len(queries)) if row not in known)], len(decode))


def _segments(query_lens: Sequence[int], decodes: int) -> tuple[Segment, ...]:
    segments = []
    if decodes:
        segments.append(Segment("decode", slice(0, decodes), slice(0, decodes), 1))
    rest = query_lens[decodes:]
    if rest:
        tokens = slice(decodes, sum(query_lens))
        uniform = rest[0] if len(set(rest)) == 1 else None
        segments.append(Segment("prefill", slice(decodes, len(query_lens)), tokens, uniform))
    return tuple(segments)


def _ranges(lengths: Sequence[int], rows: _Rows, device: torch.device) -> torch.Tensor:
    """i64[sum]: the entries of a packed axis, row after row in the batch's order."""
    starts = [0, *accumulate(lengths)]
    parts = [torch.arange(starts[row], starts[row + 1]) for row in rows.order]
    return torch.cat(parts).to(device)


def _address(
    source: PoolSource,
    kwargs: Mapping[str, Any],
    keys: Sequence[int],
    rows: _Rows,
    tokens: torch.Tensor | None,
    count: int,
    staged: bool,
) -> KvAddress:
    write = kwargs["write_index"][source.allocator][:count]
    slots = _key_slots(source, kwargs, sum(keys), write, staged)
    if tokens is not None:
        slots, write = slots[_ranges(keys, rows, slots.device)], write[tokens]
    lens = torch.tensor(rows.pick(keys), dtype=torch.int32)
    indptr = torch.tensor([0, *accumulate(rows.pick(keys))], dtype=torch.int32)
    return KvAddress(
        page_size=1,
        kv_lens=lens.to(slots.device),
        kv_lens_cpu=lens,
        new_slots=torch.full_like(write, -1) if staged else write,
        max_kv_len=max(keys, default=0),
        indices=slots.to(torch.int32),
        indptr=indptr.to(slots.device),
    )


def _key_slots(
    source: PoolSource, kwargs: Mapping[str, Any], total: int, write: torch.Tensor, staged: bool
) -> torch.Tensor:
    """i64[total]: the slot of every key, row after row in transformers' order."""
    if staged:
        return torch.arange(1, total + 1, device=write.device)
    read: torch.Tensor = kwargs["read_index"][source.allocator]
    if not read.numel():  # nothing is cached yet: all keys are new
        return write
    read = read[:total]
    if source.window is None:
        return read
    return read.masked_scatter(read == source.sentinel, write)
