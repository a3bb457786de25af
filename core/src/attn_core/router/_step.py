"""One forward step: what ``Router.begin`` returns and what a model's layers call. Valid until the next begin of its lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from attn_core.errors import BatchError, BindError
from attn_core.router._run import Run, call_split, nothing

if TYPE_CHECKING:
    import torch

    from attn_core.batch import AttentionBatch, Part, Segment
    from attn_core.layers import Cache, Layer


class BoundLayer(NamedTuple):
    """A layer with the number of its group and its cache."""

    layer: Layer
    group: int
    cache: Cache | None


class Maker(Protocol):
    """What a step asks of its router when a call needs more than begin has prepared."""

    def lse_runs(self, group: int, step: Step) -> tuple[Run, ...]:
        """The group's runs with an LSE."""

    def segment_run(self, group: int, step: Step, segment: int) -> Run:
        """One segment of the batch as a run of its own."""

    def group_number(self, model: str, name: str) -> int:
        """The number of a group."""


class Step:
    """The calls of one step. Not thread-safe: one step belongs to one lane; two lanes have two steps."""

    __slots__ = ("_bound", "_lse_runs", "_maker", "_runs", "_segment_runs", "batch", "graph")

    def __init__(
        self,
        batch: AttentionBatch,
        bound: Sequence[BoundLayer],
        runs: Sequence[tuple[Run, ...]],
        maker: Maker,
        graph: Any = None,
    ) -> None:
        self.batch, self._bound, self._runs, self._maker, self.graph = batch, bound, runs, maker, graph
        self._lse_runs: dict[int, tuple[Run, ...]] = {}
        self._segment_runs: dict[tuple[int, int], Run] = {}

    def attend(
        self, layer: Layer, inputs: Any, out: torch.Tensor | None = None, segment: int | None = None
    ) -> torch.Tensor:
        """Attention of one layer: out[T, Hq, Dv]. New keys and values are stored first where the inputs ask for it.

        ``segment`` restricts the call to one segment (inputs then hold its tokens only); MLA callers use it where the
        form differs between segments. Raises :class:`BindError` for a layer that is not bound to this router.
        """
        bound = self._bound[layer.slot] if self._bound else None
        if bound is None or bound.layer is not layer:
            raise _stranger(layer)
        runs = self._runs[bound.group]
        if segment is None and len(runs) == 1:
            return runs[0].call(layer, inputs, bound.cache, out)[0]
        return self._attend(bound, runs, inputs, out, segment)[0]

    def attend_lse(
        self, layer: Layer, inputs: Any, out: torch.Tensor | None = None, segment: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`attend` that also returns the LSE f32[T, Hq] (natural log, -inf without keys).

        Raises :class:`BindError` if the planned backend does not declare ``lse``.
        """
        bound = self._find(layer)
        runs = self._lse_runs.get(bound.group)
        if runs is None:
            runs = self._lse_runs[bound.group] = () if self.batch.idle else self._maker.lse_runs(bound.group, self)
        result, lse = self._attend(bound, runs, inputs, out, segment)
        if lse is None:
            raise BindError(f"{runs[0].plan.backend} declares lse and returned none for layer {layer.index}")
        return result, lse

    def ragged(
        self, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Packed attention without a cache: (out[T, H, Dv], lse or None)."""
        run = self._single(layer)
        run.calls += 1
        result: tuple[torch.Tensor, torch.Tensor | None] = run.bound.attn_ragged(q, k, v, layer, run.metadata, part)
        return result

    def gather(self, layer: Layer, part: Part | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A part of this layer's cache as plain tensors, packed per row."""
        run = self._single(layer)
        result: tuple[torch.Tensor, torch.Tensor] = run.bound.attn_gather(
            self._bound[layer.slot].cache, run.address, part, layer
        )
        return result

    def index(self, layer: Layer, inputs: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Indices i32[T, topk] of a sparse layer's keys, -1 where there is none; they go into ``MlaInputs.indices``."""
        run = self._single(layer)
        if run.index is None:
            raise BindError(f"the plan of layer {layer.index} has no index part")
        backend, metadata = run.index
        result: torch.Tensor = backend.attn_index(inputs, layer, self._bound[layer.slot].cache, metadata, out)
        return result

    def segments(self, model: str, group: str) -> tuple[tuple[Segment, str | None], ...]:
        """The batch's segments with the MLA form of each (None for other kinds), for one group."""
        runs = self._runs[self._maker.group_number(model, group)]
        forms = {run.phase: getattr(run.metadata, "form", None) or run.plan.form for run in runs}
        whole = next(iter(forms.values()), None)
        return tuple((segment, forms.get(segment.phase, whole)) for segment in self.batch.segments)

    def runs(self) -> tuple[Run, ...]:
        """All runs that were made for this step, group by group."""
        made = [run for runs in (*self._runs, *self._lse_runs.values()) for run in runs]
        return (*dict.fromkeys(made), *self._segment_runs.values())

    def group_runs(self, group: int) -> tuple[Run, ...]:
        """The runs of one group, as begin made them."""
        return self._runs[group]

    def _find(self, layer: Layer) -> BoundLayer:
        bound = self._bound[layer.slot] if self._bound else None
        if bound is None or bound.layer is not layer:
            raise _stranger(layer)
        return bound

    def _single(self, layer: Layer) -> Run:
        runs = self._runs[self._find(layer).group]
        if len(runs) != 1:
            what = "an idle rank" if self.batch.idle else f"a batch of {len(runs)} runs"
            raise BatchError(f"this call needs one run for the whole batch; this is {what}")
        return runs[0]

    def _attend(
        self, bound: BoundLayer, runs: tuple[Run, ...], inputs: Any, out: torch.Tensor | None, segment: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = bound.layer
        if not runs:
            return nothing(self.batch, layer, inputs, out)
        if segment is not None:
            return self._segment(bound.group, runs, segment).call(layer, inputs, bound.cache, out)
        if len(runs) == 1:
            return runs[0].call(layer, inputs, bound.cache, out)
        return call_split(self.batch, runs, layer, inputs, bound.cache, out)

    def _segment(self, group: int, runs: tuple[Run, ...], segment: int) -> Run:
        count = len(self.batch.segments)
        if not 0 <= segment < count:
            raise BatchError(f"segment {segment}: the batch has {count}")
        if len(runs) == count:
            return runs[segment]
        run = self._segment_runs.get((group, segment))
        if run is None:
            run = self._segment_runs[group, segment] = self._maker.segment_run(group, self, segment)
        return run


def _stranger(layer: Layer) -> BindError:
    return BindError(
        f"layer {layer.index} of group {layer.group.model}/{layer.group.name} is not bound to this router",
        fix="router.bind(layers, caches) once; a layer object belongs to one router",
    )
