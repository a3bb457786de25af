"""Faults between calls: state where there must be none, and graphs that remember too much or too little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_core.testing import reference_plain
from attn_core.testing.reference_backend import ReferenceBackend
from kit_faults._registry import fault

T = torch.Tensor
_SHARED: dict[str, Any] = {}


def _hook(name: str) -> Any:
    """The mark of the reference's hook, for a method that replaces it."""
    return getattr(ReferenceBackend, name).attn_impl


@fault("lengths stale at replay", "graph_replay")
class StaleLengths(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        old = None if state is None else state.kv_lens.clone()
        fresh = state is not None and not state.metadata
        metadata = super().new_metadata(batch, phase, state)
        if old is not None and not fresh:
            state.kv_lens.copy_(old)
        return metadata


@fault("page table stale at replay", "graph_replay", page_size=2)
class StaleTable(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        if state is not None and state.metadata:
            kept = state.table.clone()
            metadata = super().new_metadata(batch, phase, state)
            state.table.copy_(kept)
            return metadata
        return super().new_metadata(batch, phase, state)


@fault("length captured as a number", "graph_captured_small", page_size=16)
class CapturedLength(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        metadata = super().new_metadata(batch, phase, state)
        if state is not None:
            longest = int(metadata.kv_lens.max())
            metadata.max_kv_len = longest
        return metadata


@fault("a new metadata object for every replay", "graph_replay")
class NewObject(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        return replace(super().new_metadata(batch, phase, state))


@fault("tensors made anew at replay", "graph_replay")
class NewTensors(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        for known in state.metadata.values() if state is not None else ():
            known.kv_lens = state.kv_lens[: batch.padded_rows]
        metadata = super().new_metadata(batch, phase, state)
        metadata.kv_lens = metadata.kv_lens.clone()
        return metadata


@fault("query offsets of padding left over from a fuller step", "graph_padding")
class StaleOffsets(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        metadata = super().new_metadata(batch, phase, state)
        if state is not None:
            lens = batch.kv(self.context.address_index()).kv_lens
            state.kv_lens[: len(lens)] = torch.where(lens > 0, lens, 1)
        return metadata


@fault("one static buffer for all lanes", "graph_lanes")
class LanesShareState(ReferenceBackend):
    state: Any = None

    def attn_graph_state(self, group: Any, phases: Any, limits: Any, lane: int) -> Any:
        if self.state is None:
            self.state = super().attn_graph_state(group, phases, limits, lane)
        return replace(self.state, lane=lane, metadata={})

    attn_graph_state.attn_impl = _hook("attn_graph_state")  # type: ignore[attr-defined]


@fault("workspace grows after capture", "graph_allocates_once")
class GrowingWorkspace(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        self.context.workspace("partials", 1024 * (1 + batch.num_tokens))
        return super().new_metadata(batch, phase, state)


@fault("metadata kept in the module", "steps_do_not_interfere")
class ModuleState(ReferenceBackend):
    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        metadata = super().new_metadata(batch, phase, state)
        _SHARED["kv_lens"] = metadata.kv_lens
        return metadata

    def attend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        lens = _SHARED["kv_lens"][: len(metadata.kv_lens)]
        padded = torch.ones(len(metadata.kv_lens), dtype=torch.int32)
        padded[: len(lens)] = lens
        return super().attend(inputs, layer, cache, replace(metadata, kv_lens=padded), out)


@fault("one workspace for all lanes", "lanes")
class LanesShareWorkspace(ReferenceBackend):
    """Keeps the lengths in a workspace, as kernels do with their plans, and always in that of lane 0."""

    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        metadata = super().new_metadata(batch, phase, state)
        buffer = self.context.workspace("lengths", 256, 0).view(torch.int32)[: len(metadata.kv_lens)]
        buffer.copy_(metadata.kv_lens)
        metadata.kv_lens = buffer
        return metadata


@fault("workspace taken as zero", "workspaces")
class WorkspaceZero(ReferenceBackend):
    def softmax(self, logits: Any, values: Any, layer: Any, metadata: Any, out: Any) -> Any:
        total = self.context.workspace("accumulator", 4096)[:4].view(torch.float32)
        result, lse = super().softmax(logits, values, layer, metadata, out)
        return result.add_(total.to(result.dtype)), lse


@fault("scale of the first layer kept for all layers", "metadata_serves_all_layers")
class FirstLayerCache(ReferenceBackend):
    first: Any = None

    def attend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        self.first = self.first or cache
        return super().attend(inputs, layer, self.first, metadata, out)


@fault("keys of the step's first layer kept in its metadata", "two_layers", phase="prefill")
class KeysInMetadata(ReferenceBackend):
    """The metadata's owner gathers keys and values once a step, as if the group had one layer."""

    kept: Any = None

    def attend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        if self.kept is None or self.kept[0] is not metadata:
            self.kept = metadata, cache
        return super().attend(inputs, layer, self.kept[1], metadata, out)


@fault("sinks of the first layer kept for all layers", "two_layers", turn=1)
class FirstLayerSinks(ReferenceBackend):
    first: Any = None

    def attend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        self.first = self.first or layer
        return super().attend(inputs, replace(layer, sinks=self.first.sinks), cache, metadata, out)


@fault("metadata used up by the first layer", "two_layers")
class UsedUp(ReferenceBackend):
    def attend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        result = super().attend(inputs, layer, cache, metadata, out)
        metadata.kv_lens = (metadata.kv_lens - 1).clamp(min=0)
        return result


@fault("a shortcut for groups of more than one layer is wrong", "two_layers")
class SharedPlanWrong(ReferenceBackend):
    """What pays for itself from two layers on is not even reached by a group of one."""

    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        metadata = super().new_metadata(batch, phase, state)
        if len(self.context.group.layers) > 1:
            metadata.kv_lens = (metadata.kv_lens - 1).clamp(min=1)
        return metadata


@fault("a plan for all layers of a graph is not made again at replay", "graph_two_layers")
class SharedPlanStale(ReferenceBackend):
    plan: Any = None

    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        metadata = super().new_metadata(batch, phase, state)
        if state is not None and len(self.context.group.layers) > 1:
            self.plan = metadata.kv_lens.clone() if self.plan is None else self.plan
            metadata.kv_lens.copy_(self.plan)
        return metadata


@fault("the router's second layer reads the first one's cache", "through_the_router")
class FirstCacheOfGroup(ReferenceBackend):
    first: Any = None

    def attend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        self.first = self.first or cache
        return super().attend(inputs, layer, self.first, metadata, out)


@fault("sums in an order that depends on the batch, declared batch-invariant", "batch_invariance")
class BatchDependent(ReferenceBackend):
    def logits(self, q: T, k: T, visible: T, geometry: Any) -> T:
        pieces = 4 if len(q) > 2 else 1
        parts = [
            torch.einsum("tgrd,tbgd->tgrb", a, b) for a, b in zip(q.chunk(pieces, -1), k.chunk(pieces, -1), strict=True)
        ]
        scores = sum(parts[1:], parts[0]) * geometry.scale
        return scores.masked_fill(~visible[:, None, None, :], float("-inf"))


@fault("every draft step sees the first step's keys only", "draft_steps", "draft")
class DraftStepsEqual(ReferenceBackend):
    def attn_draft_metadata(self, batch: Any, group: Any, draft: Any, state: Any) -> Any:
        from attn_core.paging import step_batches

        one = step_batches(batch, draft)[0]
        return tuple(self.attn_metadata(one, group, "draft", state, False) for _ in range(draft.steps))

    attn_draft_metadata.attn_impl = _hook("attn_metadata")  # type: ignore[attr-defined]


@fault("scratch memory shared by threads", "threads")
class ThreadScratch(ReferenceBackend):
    scratch: Any = None

    def queries(self, q: T, layer: Any) -> T:
        import time

        self.scratch = super().queries(q, layer)
        time.sleep(0.002)
        return self.scratch


@fault("blocks counted from the number of rows", "attend_numbers")
class BlocksByRows(ReferenceBackend):
    def attend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        limited = replace(metadata, max_kv_len=min(metadata.max_kv_len, reference_plain.BLOCK // 8))
        narrow = replace(limited, kv_lens=metadata.kv_lens.clamp(max=8))
        return super().attend(inputs, layer, cache, narrow, out)
