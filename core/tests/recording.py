"""A backend that records which hooks were called, with every hook of the contract; its attention is the mean of nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.binding import BoundBackend  # noqa: F401  (the recorder is what gets bound)
from attn_core.context import Context, StepMetadata
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache


class RecordingState:
    """A graph state that keeps one metadata object per key."""

    def __init__(self, limits: Any, lane: int) -> None:
        self.limits, self.lane, self.pad_kv_len, self.nbytes = limits, lane, 1, 128
        self.kept: dict[Any, StepMetadata] = {}


class RecordingBackend:
    """Every hook, counted in ``calls``; outputs are filled with ``value`` so that a test sees who wrote what."""

    def __init__(self, context: Context | None = None, value: float = 1.0, *, forget: bool = False) -> None:
        self.context, self.value, self.forget = context, value, forget
        self.calls: Counter[str] = Counter()
        self.batches: list[AttentionBatch] = []

    @hookimpl
    def attn_metadata(self, batch: Any, group: Any, phase: Any, state: Any, capture: Any) -> StepMetadata:
        self.calls["attn_metadata"] += 1
        self.batches.append(batch)
        made = StepMetadata(phase, batch.num_tokens, needs_lse=batch.needs_lse)
        if state is None or self.forget:
            return made
        return state.kept.setdefault((phase, batch.padded_rows, batch.padded_tokens), made)

    @hookimpl
    def attn_metadata_in_graph(self, metadata: Any) -> None:
        self.calls["attn_metadata_in_graph"] += 1

    @hookimpl
    def attn_graph_state(self, group: Any, phases: Any, limits: Any, lane: Any) -> RecordingState:
        self.calls["attn_graph_state"] += 1
        return RecordingState(limits, lane)

    @hookimpl
    def attn_draft_metadata(self, batch: Any, group: Any, draft: Any, state: Any) -> tuple[StepMetadata, ...]:
        self.calls["attn_draft_metadata"] += 1
        return tuple(StepMetadata("draft", batch.num_tokens) for _ in range(draft.steps))

    def _attend(self, inputs: Any, layer: Any, metadata: Any, out: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        geometry = layer.geometry
        if out is None:
            out = inputs.q.new_empty((inputs.q.shape[0], geometry.q_heads, geometry.v_dim))
        out.fill_(self.value)
        lse = torch.zeros(out.shape[:2]) if metadata.needs_lse else None
        return out, lse

    @hookimpl
    def attn_extend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        self.calls["attn_extend"] += 1
        return self._attend(inputs, layer, metadata, out)

    @hookimpl
    def attn_decode(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        self.calls["attn_decode"] += 1
        return self._attend(inputs, layer, metadata, out)

    @hookimpl
    def attn_ragged(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any, part: Any) -> Any:
        self.calls["attn_ragged"] += 1
        return torch.full_like(q, self.value), None

    @hookimpl
    def attn_store(self, inputs: Any, layer: Any, cache: Any, address: Any) -> None:
        self.calls["attn_store"] += 1

    @hookimpl
    def attn_gather(self, cache: Any, address: Any, part: Any, layer: Any) -> Any:
        self.calls["attn_gather"] += 1
        return cache.k, cache.v

    @hookimpl
    def attn_index(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> torch.Tensor:
        self.calls["attn_index"] += 1
        return torch.full((inputs.q.shape[0], 4), -1, dtype=torch.int32)

    @hookimpl
    def attn_commit(self, batch: Any, group: Any, caches: Any, metadata: Any, accepted: Any) -> None:
        self.calls["attn_commit"] += 1

    @hookimpl
    def attn_warmup(self, group: Any, phases: Any, limits: Any) -> None:
        self.calls["attn_warmup"] += 1


class RecordingPlugin:
    """A plugin module stand-in: one recording backend per creation, kept for the test."""

    def __init__(self, value: float = 1.0, **options: Any) -> None:
        self.value, self.options = value, options
        self.made: list[RecordingBackend] = []

    @hookimpl
    def attn_create(self, manifest: Any, variant: Any, context: Any) -> RecordingBackend:
        self.made.append(RecordingBackend(context, self.value, **self.options))
        return self.made[-1]

    @property
    def calls(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for backend in self.made:
            total += backend.calls
        return total


def address_for(kv_lens: list[int], tokens: int, page_size: int = 16, *, pages: int = 8) -> KvAddress:
    """A dense address with distinct pages per row."""
    width = max(1, -(-max([*kv_lens, 1]) // page_size))
    table = torch.arange(1, 1 + len(kv_lens) * width, dtype=torch.int32).reshape(len(kv_lens), width) % pages
    return KvAddress(
        page_size, torch.tensor(kv_lens, dtype=torch.int32), torch.arange(tokens), max(kv_lens, default=0), table=table
    )


def cache_for(geometry: Any, page_size: int = 16, pages: int = 8) -> MhaCache:
    """An fp32 cache of zeros with K and V of their own widths."""
    return MhaCache(
        torch.zeros(pages, page_size, geometry.kv_heads, geometry.qk_dim),
        torch.zeros(pages, page_size, geometry.kv_heads, geometry.v_dim),
    )
