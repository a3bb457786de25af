"""One forward step: what ``Router.begin`` returns and what a model's layers call. Valid until the next begin of its lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attn_core.errors import BatchError, BindError

if TYPE_CHECKING:
    import torch

    from attn_core.batch import AttentionBatch, KvAddress, Part, Segment
    from attn_core.binding import BoundBackend
    from attn_core.context import Metadata
    from attn_core.layers import Cache, Layer
    from attn_core.plan import PhasePlan

Attend = Callable[..., Any]


class Run:
    """One call per layer: a backend's bound function with this step's metadata, for the whole batch or one segment."""

    __slots__ = (
        "address",
        "attend",
        "batch",
        "bound",
        "calls",
        "index",
        "metadata",
        "phase",
        "plan",
        "store",
        "tokens",
    )

    def __init__(
        self,
        phase: str,
        plan: PhasePlan,
        bound: BoundBackend,
        attend: Attend,
        store: Attend | None,
        metadata: Metadata,
        batch: AttentionBatch,
        address: KvAddress | None,
        tokens: slice | None,
    ) -> None:
        self.phase, self.plan, self.bound = phase, plan, bound
        self.attend, self.store, self.metadata = attend, store, metadata
        self.batch, self.address, self.tokens = batch, address, tokens
        self.index: tuple[BoundBackend, Metadata] | None = None
        self.calls = 0


class Step:
    """The calls of one step. Not thread-safe: one step belongs to one lane; two lanes have two steps."""

    __slots__ = ("_bound", "_count", "_lse_runs", "_make_lse", "_runs", "batch", "capture", "group_names")

    def __init__(
        self,
        batch: AttentionBatch,
        bound: Sequence[tuple[int, Cache | None]],
        runs: Sequence[tuple[Run, ...]],
        group_names: Mapping[tuple[str, str], int],
        make_lse: Callable[[int], tuple[Run, ...]],
        count: Callable[[Run], None],
        capture: bool = False,
    ) -> None:
        self.batch, self._bound, self._runs = batch, bound, runs
        self.group_names, self._make_lse, self._count = group_names, make_lse, count
        self._lse_runs: dict[int, tuple[Run, ...]] = {}
        self.capture = capture

    def attend(
        self, layer: Layer, inputs: Any, out: torch.Tensor | None = None, segment: int | None = None
    ) -> torch.Tensor:
        """Attention of one layer: out[T, Hq, Dv]. New keys and values are stored first where the inputs ask for it.

        ``segment`` restricts the call to one segment (inputs then hold its tokens only); MLA callers use it where the
        form differs between segments.
        """
        group, cache = self._bound[layer.slot]
        runs = self._runs[group]
        if len(runs) == 1 and segment is None:
            run = runs[0]
            run.calls += 1
            if run.store is not None and inputs.store:
                run.store(inputs, layer, cache, run.address)
            result: torch.Tensor = run.attend(inputs, layer, cache, run.metadata, out)[0]
            if run.plan.padded_out == "garbage" and self.batch.padded_tokens != self.batch.num_tokens:
                result[self.batch.num_tokens :].zero_()
            return result
        return self._attend_parts(layer, inputs, cache, runs, out, segment)[0]

    def attend_lse(
        self, layer: Layer, inputs: Any, out: torch.Tensor | None = None, segment: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`attend` that also returns the LSE f32[T, Hq] (natural log, -inf without keys).

        Raises :class:`BindError` if the planned backend does not declare ``lse``.
        """
        group, cache = self._bound[layer.slot]
        runs = self._lse_runs.get(group)
        if runs is None:
            runs = self._lse_runs[group] = self._make_lse(group)
        result, lse = self._attend_parts(layer, inputs, cache, runs, out, segment)
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
        cache = self._bound[layer.slot][1]
        result: tuple[torch.Tensor, torch.Tensor] = run.bound.attn_gather(cache, run.address, part)
        return result

    def index(self, layer: Layer, inputs: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Indices i32[T, topk] of a sparse layer's keys, -1 where there is none; they go into ``MlaInputs.indices``."""
        run = self._single(layer)
        if run.index is None:
            raise BindError(f"the plan of layer {layer.index} has no index part")
        bound, metadata = run.index
        result: torch.Tensor = bound.attn_index(inputs, layer, self._bound[layer.slot][1], metadata, out)
        return result

    def segments(self, group: tuple[str, str]) -> tuple[tuple[Segment, str | None], ...]:
        """The batch's segments with the MLA form of each, for the group (model, name)."""
        runs = self._runs[self.group_names[group]]
        forms = {run.phase: getattr(run.metadata, "form", None) or run.plan.form for run in runs}
        whole = next(iter(forms.values()), None)
        return tuple((segment, forms.get(segment.phase, whole)) for segment in self.batch.segments)

    def runs(self) -> tuple[Run, ...]:
        """All runs of the step, group by group."""
        return tuple(run for runs in self._runs for run in runs)

    def _single(self, layer: Layer) -> Run:
        runs = self._runs[self._bound[layer.slot][0]]
        if len(runs) != 1:
            raise BatchError("this call needs a batch of one segment, or a backend that takes mixed batches")
        return runs[0]

    def _attend_parts(
        self,
        layer: Layer,
        inputs: Any,
        cache: Cache | None,
        runs: tuple[Run, ...],
        out: torch.Tensor | None,
        segment: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not runs:
            return _nothing(inputs, layer, out)
        if segment is not None:
            chosen = runs[segment] if len(runs) > 1 else runs[0]
            return _call(chosen, layer, inputs, cache, out)
        if len(runs) == 1:
            return self._zeroed(runs[0], _call(runs[0], layer, inputs, cache, out))
        return _split_call(self.batch, runs, layer, inputs, cache, out)

    def _zeroed(
        self, run: Run, result: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if run.plan.padded_out == "garbage" and self.batch.padded_tokens != self.batch.num_tokens:
            result[0][self.batch.num_tokens :].zero_()
        return result


def _call(
    run: Run, layer: Layer, inputs: Any, cache: Cache | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    run.calls += 1
    if run.store is not None and inputs.store:
        run.store(inputs, layer, cache, run.address)
    result: tuple[torch.Tensor, torch.Tensor | None] = run.attend(inputs, layer, cache, run.metadata, out)
    return result


def _split_call(
    batch: AttentionBatch,
    runs: tuple[Run, ...],
    layer: Layer,
    inputs: Any,
    cache: Cache | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Each segment through its own backend into its slice of one output."""
    whole, lse = out, None
    for run in runs:
        tokens = run.tokens or slice(0, batch.padded_tokens)
        part_out = None if whole is None else whole[tokens]
        part, part_lse = _call(run, layer, slice_inputs(inputs, tokens), cache, part_out)
        if whole is None:
            whole = part.new_zeros((batch.padded_tokens, *part.shape[1:]))
        if part_out is None or part.data_ptr() != part_out.data_ptr():
            whole[tokens].copy_(part)
        if part_lse is not None:
            if lse is None:
                lse = part_lse.new_full((batch.padded_tokens, *part_lse.shape[1:]), float("-inf"))
            lse[tokens].copy_(part_lse)
    assert whole is not None
    last = runs[-1].tokens
    if last is not None and last.stop < batch.padded_tokens:
        whole[last.stop :].zero_()
    return whole, lse


def slice_inputs(inputs: Any, tokens: slice) -> Any:
    """The inputs of a run of tokens: every tensor field is cut along its first axis (views)."""
    return type(inputs)(*(value[tokens] if hasattr(value, "data_ptr") else value for value in inputs))


def _nothing(inputs: Any, layer: Layer, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An idle rank: no hook is called and an empty output comes back."""
    if out is not None:
        return out, None
    q = inputs.q if inputs.q is not None else inputs[1]
    width = getattr(layer.group.geometry, "v_dim", None) or q.shape[-1]
    return q.new_zeros((0, q.shape[1], width)), None
