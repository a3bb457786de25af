"""One backend's part of a step: its bound functions with this step's metadata, and the rules that the router adds.

Whatever a backend does not declare, core does for it or refuses: rows of padding are cleaned where they are ``garbage``,
`out` is filled where ``writes_out`` is missing, views are made contiguous where ``strided_q`` is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attn_core.errors import BatchError, BindError
from attn_core.layers import Rope

if TYPE_CHECKING:
    import torch

    from attn_core.batch import AttentionBatch, KvAddress
    from attn_core.binding import BoundBackend
    from attn_core.context import Metadata
    from attn_core.layers import Cache, Layer
    from attn_core.plan import PhasePlan

    Result = tuple[torch.Tensor, torch.Tensor | None]

Attend = Callable[..., Any]


class Run:
    """A whole batch, or one segment of it, on one backend. ``rows`` and ``tokens`` say which part of the step it is."""

    __slots__ = (
        "address",
        "attend",
        "batch",
        "bound",
        "calls",
        "index",
        "metadata",
        "phase",
        "plain_inputs",
        "plan",
        "rows",
        "store",
        "tidy",
        "tokens",
        "writes_out",
    )  # fmt: skip

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
        rows: slice,
        tokens: slice,
    ) -> None:
        self.phase, self.plan, self.bound = phase, plan, bound
        self.attend, self.store, self.metadata = attend, store, metadata
        self.batch, self.address, self.rows, self.tokens = batch, address, rows, tokens
        features = plan.parts[0].features
        self.writes_out = "writes_out" in features
        self.plain_inputs = "strided_q" in features
        self.tidy = plan.padded_out == "garbage" and batch.padded_tokens != batch.num_tokens
        self.index: tuple[BoundBackend, Metadata] | None = None
        self.calls = 0

    def call(self, layer: Layer, inputs: Any, cache: Cache | None, out: torch.Tensor | None) -> Result:
        """Store, attend, and what the backend left to the router: (out, lse or None)."""
        self.calls += 1
        if not self.plain_inputs:
            inputs = contiguous(inputs)
        if self.store is not None and inputs.store:
            self.store(inputs, layer, cache, self.address)
        result: Result = self.attend(inputs, layer, cache, self.metadata, out)
        if result.__class__ is not tuple:
            raise BindError(
                f"{self.plan.backend}:{self.plan.variant} returned {type(result).__name__} for layer {layer.index}",
                fix="attn_extend and attn_decode return (out, lse or None)",
            )
        if self.tidy or (out is not None and not self.writes_out):
            return self._tidied(result, out)
        return result

    def _tidied(self, result: Result, out: torch.Tensor | None) -> Result:
        made, lse = result
        if self.tidy:
            made[self.batch.num_tokens :].zero_()
            if lse is not None:
                lse[self.batch.num_tokens :].fill_(-math.inf)
        if out is not None and made is not out and made.data_ptr() != out.data_ptr():
            made = out.copy_(made)
        return made, lse


def contiguous(inputs: Any) -> Any:
    """The inputs with every tensor contiguous; the same object if all are."""
    fixed = [value.contiguous() if hasattr(value, "contiguous") else value for value in inputs]
    return inputs if all(a is b for a, b in zip(fixed, inputs, strict=True)) else type(inputs)(*fixed)


def slice_inputs(inputs: Any, tokens: slice) -> Any:
    """The inputs of a run of tokens: every per-token tensor is cut along its first axis (views)."""

    def cut(value: Any) -> Any:
        if isinstance(value, Rope):
            return value._replace(positions=value.positions[tokens])
        return value[tokens] if hasattr(value, "data_ptr") else value

    return type(inputs)(*(cut(value) for value in inputs))


def call_split(
    batch: AttentionBatch, runs: Sequence[Run], layer: Layer, inputs: Any, cache: Cache | None, out: torch.Tensor | None
) -> Result:
    """Each segment through its own backend into its slice of one output; what no segment covers is 0 (LSE -inf)."""
    whole, lse = out, None
    for run in runs:
        given = None if whole is None else whole[run.tokens]
        part, part_lse = run.call(layer, slice_inputs(inputs, run.tokens), cache, given)
        if whole is None:
            whole = part.new_empty((batch.padded_tokens, *part.shape[1:]))
        if given is None or part.data_ptr() != given.data_ptr():
            whole[run.tokens].copy_(part)
        if part_lse is not None:
            if lse is None:
                lse = part_lse.new_full((batch.padded_tokens, *part_lse.shape[1:]), -math.inf)
            lse[run.tokens].copy_(part_lse)
    assert whole is not None
    whole[batch.num_tokens :].zero_()
    return whole, lse


def nothing(batch: AttentionBatch, layer: Layer, inputs: Any, out: torch.Tensor | None) -> Result:
    """The output of an idle rank: empty tensors of the right width. Raises :class:`BatchError` if the step is not idle."""
    if not batch.idle:
        raise BatchError(
            f"layer {layer.index} of group {layer.group.model}/{layer.group.name} takes no part in this step",
            fix="begin the step for that model: router.begin(batch, model=…)",
        )
    q = inputs.q if inputs.q is not None else inputs[1]
    absorbed = inputs.q is None  # the absorbed form returns latent vectors, as wide as its queries
    width = q.shape[-1] if absorbed else getattr(layer.group.geometry, "v_dim", q.shape[-1])
    lse = q.new_zeros((0, q.shape[1]), dtype=_float32())
    return (out if out is not None else q.new_zeros((0, q.shape[1], width))), lse


def _float32() -> torch.dtype:
    import torch

    return torch.float32
