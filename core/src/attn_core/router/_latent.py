"""MLA in expanded ("ragged") form: new tokens and chunks of the cached prefix as plain attention, merged by their LSE.

The plan says which form a prefill has: ``absorbed``, ``ragged``, or ``by_length(n)``: expanded where no row has more than n
cached keys, absorbed elsewhere. The choice is made once a step from lengths on the host; the caller asks
``Step.segments(model, group)`` for it and brings ``MlaInputs`` of that form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn_core.batch import KvAddress, Part
from attn_core.errors import BatchError, BindError

if TYPE_CHECKING:
    import torch

    from attn_core.batch import AttentionBatch
    from attn_core.binding import BoundBackend, Function
    from attn_core.manifest import Manifest
    from attn_core.plan import PhasePlan

#: Most keys of a prefix that are expanded at once, over all rows: with 128 heads of 192 + 128 bf16 values 2.5 GiB.
CHUNK_KEYS = 1 << 15
_BY_LENGTH = "by_length("


def settled(plan: PhasePlan, batch: AttentionBatch, pool: int | None) -> PhasePlan:
    """The plan of a phase with its form decided for `batch`: ``ragged``, or the plan of its absorbed part.

    Raises :class:`BatchError` where a row has a cached prefix that neither form can serve.
    """
    if plan.form is None or not plan.form.startswith(_BY_LENGTH) or pool is None:
        return plan
    most = int(plan.form.removeprefix(_BY_LENGTH).rstrip(")"))
    if longest_prefix(batch, batch.kv(pool)) <= most:
        return replace(plan, form="ragged")
    return absorbed(plan)


def absorbed(plan: PhasePlan) -> PhasePlan:
    """The plan of the part that serves rows with a cached prefix in latent space."""
    part = next((part for part in plan.parts if part.role == "absorbed"), None)
    if part is None:
        raise BindError(f"{plan.backend}: the form {plan.form} needs an absorbed part, and the plan has none")
    others = tuple(other for other in plan.parts if other.role not in ("ragged", "absorbed"))
    # what the part's row declares about its results is not in the plan: the careful answer is right for every row
    return replace(
        plan, backend=part.backend, variant=part.variant, package=part.package, version=part.version,
        parts=(part, *others), form="absorbed", padded_out="garbage", needs_lse=False, pads={},
    )  # fmt: skip


def strictest_lengths(manifest: Manifest, variant: str) -> str:
    """``exact`` if any row of a variant needs exact lengths on the host, else what the variant says."""
    found = manifest.variant(variant)
    needs = [row.host_lengths or found.host_lengths for row in found.allow]
    return "exact" if "exact" in needs else found.host_lengths


def longest_prefix(batch: AttentionBatch, address: KvAddress) -> int:
    """An upper bound, from the host, of the cached keys before a row's new tokens; exact where host lengths are."""
    lens, offsets = address.kv_lens_cpu, batch.query_offsets_cpu
    rows = batch.num_rows
    if lens is None or offsets is None:
        return address.max_kv_len
    prefix = lens[:rows].to(offsets.dtype) - offsets[: rows + 1].diff()
    return max(int(prefix.max()), 0) if rows else 0


def with_key_offsets(batch: AttentionBatch) -> AttentionBatch:
    """The batch of the expanded form: the new keys are packed like the new tokens."""
    return replace(batch, key_offsets=batch.query_offsets, max_key_len=batch.max_query_len, _views={})


def ragged_attend(bound: BoundBackend, batch: AttentionBatch, address: KvAddress) -> Function:
    """attn_extend for ``MlaInputs`` in expanded form: q[T, H, nope], q_pe[T, H, rope], c_kv[T, latent], k_pe[T, rope].

    ``batch`` is the step's own; the metadata belongs to :func:`with_key_offsets` of it. Result: out[T, H, Dv], lse f32[T, H] or
    None. The cache is read only where a row has a prefix.
    """

    def attend(inputs: Any, layer: Any, cache: Any, metadata: Any, out: torch.Tensor | None) -> Any:
        import torch

        if inputs.q is None or inputs.c_kv is None or inputs.k_pe is None or layer.expand is None:
            raise BatchError(
                f"layer {layer.index}: the expanded form needs q, c_kv and k_pe, and a layer with expand",
                "found    "
                + (
                    "inputs in absorbed form"
                    if inputs.q is None
                    else "no new keys"
                    if inputs.c_kv is None
                    else "no expand"
                ),
                fix="step.segments(model, group) says which form each segment has",
            )
        q = torch.cat([inputs.q, inputs.q_pe], -1)
        results = [bound.attn_ragged(q, *_expanded(layer, inputs.c_kv, inputs.k_pe), layer, metadata, None)]
        for part in prefix_parts(batch, address):
            latent, rope = bound.attn_gather(cache, address, part, layer)
            k, v = _expanded(layer, latent.to(q.dtype), rope.to(q.dtype))
            results.append(bound.attn_ragged(q, k, v, layer, metadata, part))
        if len(results) == 1:
            made, lse = results[0]
            return (made if out is None else out.copy_(made)), lse
        from attn_core.merge import merge_many

        if any(lse is None for _, lse in results):
            raise BindError(f"{bound.manifest.id}:{bound.variant} returned no lse for a chunk of a prefix")
        return merge_many(results, out)

    return attend


def _expanded(layer: Any, c_kv: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k[n, H, nope + rope] and v[n, H, Dv] of latent rows."""
    import torch

    k_nope, v = layer.expand(c_kv)
    shared = k_pe.flatten(1)[:, None].expand(-1, k_nope.shape[1], -1)
    return torch.cat([k_nope, shared], -1), v


def prefix_parts(batch: AttentionBatch, address: KvAddress) -> Iterator[Part]:
    """The cached prefixes in chunks of at most :data:`CHUNK_KEYS` keys over all rows; nothing waits for the device."""
    import torch

    longest, rows = longest_prefix(batch, address), batch.padded_rows
    if not longest:
        return
    length = max(1, min(longest, CHUNK_KEYS // max(rows, 1)))
    prefix = (address.kv_lens - batch.query_offsets.diff()).clamp(min=0)
    for index in range(-(-longest // length)):
        lens = (prefix - index * length).clamp(0, length)
        offsets = torch.zeros(rows + 1, dtype=torch.int32, device=lens.device)
        torch.cumsum(lens, 0, dtype=torch.int32, out=offsets[1:])
        start = torch.full((rows,), index * length, dtype=torch.int32, device=lens.device)
        yield Part(index, offsets, start, length, has_empty=True, causal=False)
