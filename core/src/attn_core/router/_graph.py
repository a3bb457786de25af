"""What a router keeps for graphs: static state of a lane, and the keys that captured metadata is looked up by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attn_core.context import GraphKey, GraphLimits, GraphState, Metadata
from attn_core.errors import GraphError
from attn_core.router._groups import Route

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, DraftSteps
    from attn_core.paging import DraftStates
    from attn_core.plan import PhasePlan


@dataclass
class RouterGraphState:
    """Static state of one lane: one GraphState per (group, route), the limits, and the metadata of each key.

    ``drafts`` has a state for every draft step, where the limits name draft steps and core makes their metadata.
    """

    limits: GraphLimits
    lane: int
    states: dict[tuple[int, Route], GraphState]
    metadata: dict[tuple[int, Route, GraphKey], Metadata] = field(default_factory=dict)
    drafts: dict[tuple[int, Route], DraftStates] = field(default_factory=dict)
    draft_metadata: dict[tuple[int, Route, GraphKey, int, int], tuple[Metadata, ...]] = field(default_factory=dict)

    def _all(self) -> Iterator[GraphState | DraftStates]:
        yield from self.states.values()
        yield from self.drafts.values()

    @property
    def pad_kv_len(self) -> int:
        """The kv_len that padded rows must have: the largest that any backend asks for."""
        return max((state.pad_kv_len for state in self._all()), default=1)

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers."""
        return sum(state.nbytes for state in self._all())

    def keep(self, group: int, route: Route, key: GraphKey, metadata: Metadata) -> Metadata:
        """The metadata of a key, which must be the object that was captured. Raises :class:`GraphError` for another one."""
        if self.metadata.setdefault((group, route, key), metadata) is not metadata:
            raise _moved(route, key)
        return metadata

    def keep_drafts(
        self, group: int, route: Route, key: GraphKey, draft: DraftSteps, metadata: tuple[Metadata, ...]
    ) -> None:
        """The same for all draft steps of a key."""
        known = self.draft_metadata.setdefault((group, route, key, draft.steps, draft.topk), metadata)
        if any(a is not b for a, b in zip(known, metadata, strict=True)):
            raise _moved(route, key)


def _moved(route: Route, key: GraphKey) -> GraphError:
    return GraphError(
        f"{route[0]}:{route[1]} made a new Metadata object for a key that was captured",
        f"key      {key}",
        fix="metadata hooks must return the same objects per key and rewrite their contents",
    )


def graph_key(batch: AttentionBatch, phase: str, plan: PhasePlan) -> GraphKey:
    """The key of a step's graph: phase, padded sizes, query length, KV bucket and form."""
    lengths = {segment.query_len for segment in batch.segments}
    query_len = lengths.pop() if len(lengths) == 1 else None
    longest = max((a.max_kv_len for a in batch.addresses if hasattr(a, "max_kv_len")), default=0)
    bucket = next((limit for limit in plan.graph.kv_thresholds if longest <= limit), None)
    return GraphKey(phase, batch.padded_rows, batch.padded_tokens, query_len, bucket, plan.form)
