"""Checks at bind and begin: what the plan promised against what it is given. Exceptions, never asserts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.capabilities import graph_rank
from attn_core.errors import BatchError, BindError, GraphError
from attn_core.geometry import MhaGeometry
from attn_core.layers import MhaCache, MhaLayer

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch
    from attn_core.context import GraphLimits
    from attn_core.layers import Cache, Layer
    from attn_core.plan import GroupPlan, PhasePlan, Plan, Pool


def check_layer(layer: Layer, cache: Cache | None, plan: GroupPlan, pool: Pool | None) -> None:
    """A layer and its cache against the group's geometry and the pool. Raises :class:`BindError`."""
    where = f"layer {layer.index} ({layer.group.name})"
    if layer.group != plan.group:
        raise BindError(
            f"{where}: its group is not the planned one",
            f"planned  {plan.group.geometry}",
            f"layer    {layer.group.geometry}",
        )
    if isinstance(layer, MhaLayer):
        _check_mha_layer(layer, where)
    if pool is not None and cache is None:
        raise BindError(f"{where}: no cache was given for pool {pool.name!r}")
    if isinstance(cache, MhaCache) and isinstance(layer, MhaLayer) and pool is not None:
        _check_mha_cache(layer.geometry, cache, pool, where)


def _check_mha_layer(layer: MhaLayer, where: str) -> None:
    geometry = layer.geometry
    if geometry.sinks and layer.sinks is None:
        raise BindError(f"{where}: the group has attention sinks and the layer brings none")
    if layer.sinks is not None:
        if not geometry.sinks:
            raise BindError(f"{where}: the layer brings sinks that were not planned for")
        if tuple(layer.sinks.shape) != (geometry.q_heads,):
            raise BindError(f"{where}: sinks have shape {tuple(layer.sinks.shape)}; needed is ({geometry.q_heads},)")
    if layer.kv_from is not None and "shared_kv" not in layer.group.features:
        raise BindError(
            f"{where}: shares the cache of layer {layer.kv_from}, which the group does not declare (shared_kv)"
        )


def _check_mha_cache(geometry: MhaGeometry, cache: MhaCache, pool: Pool, where: str) -> None:
    packed = 2 if cache.format == "fp4_block16" else 1
    for name, tensor, width in (("k", cache.k, geometry.qk_dim), ("v", cache.v, geometry.v_dim)):
        needed = (pool.page_size, geometry.kv_heads, width // packed)
        if tuple(tensor.shape[1:]) != needed:
            raise BindError(
                f"{where}: cache {name} has shape {list(tensor.shape)}",
                f"needed   [pages, {needed[0]}, {needed[1]}, {needed[2]}] (page size, KV heads, width of pool {pool.name!r})",
            )
    if cache.format != pool.format:
        raise BindError(f"{where}: cache format {cache.format!r}; pool {pool.name!r} was planned as {pool.format!r}")
    if cache.format == "fp4_block16" and (cache.k_blocks is None or cache.v_blocks is None):
        raise BindError(f"{where}: an fp4 cache needs k_blocks and v_blocks")


def check_batch(batch: AttentionBatch, plan: Plan, model: str) -> None:
    """A batch against the plan: addresses for every pool of the model, segments that cover the rows. :class:`BatchError`."""
    needed = [number for number, pool in enumerate(plan.pools) if pool.model == model]
    if needed and not batch.idle and len(batch.addresses) <= max(needed):
        raise BatchError(
            f"the batch has {len(batch.addresses)} addresses; the plan has pools {[plan.pools[n].name for n in needed]} for {model}",
            fix="give one address per pool of the plan, in the order of plan.pools",
        )
    rows = sum(segment.rows.stop - segment.rows.start for segment in batch.segments)
    if rows != batch.num_rows and not batch.idle:
        raise BatchError(f"segments cover {rows} rows of {batch.num_rows}")
    if batch.lane >= plan.lanes:
        raise BatchError(f"lane {batch.lane}: the plan has {plan.lanes} lane(s)", fix="plan with --lanes")
    if not batch.idle and tuple(batch.query_offsets.shape) != (batch.padded_rows + 1,):
        raise BatchError(
            f"query_offsets has shape {tuple(batch.query_offsets.shape)}; needed is ({batch.padded_rows + 1},)"
        )


def graph_allows(batch: AttentionBatch, plan: PhasePlan, phase: str, limits: GraphLimits) -> None:
    """Whether a batch may be captured or replayed under the planned level and limits. Raises :class:`GraphError`."""
    needed = _needed_level(batch)
    if graph_rank(plan.graph.level) < graph_rank(needed):
        raise GraphError(
            f"{plan.backend}:{plan.variant} may not be captured for this batch ({phase})",
            f"declares {plan.graph.level}",
            f"needed   {needed}",
        )
    over = {
        "rows": (batch.padded_rows, limits.max_rows),
        "tokens": (batch.padded_tokens, limits.max_tokens),
        "query length": (batch.max_query_len, limits.max_query_len),
    }
    for name, (have, most) in over.items():
        if have > most:
            raise GraphError(f"{have} {name} exceed the graph's limit of {most}")


def _needed_level(batch: AttentionBatch) -> str:
    phases = {segment.phase for segment in batch.segments}
    if len(phases) > 1:
        return "full"
    lengths = {segment.query_len for segment in batch.segments}
    if lengths == {1}:
        return "uniform_decode"
    if None not in lengths and len(lengths) == 1:
        return "uniform_query"
    return "ragged_query"
