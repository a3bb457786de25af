"""Checks at bind and begin: what the plan promised against what it is given. Exceptions, never asserts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attn_core.batch import KvAddress
from attn_core.capabilities import graph_rank
from attn_core.errors import BatchError, BindError, GraphError
from attn_core.layers import MhaCache, MhaLayer, MlaCache, MlaLayer

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch
    from attn_core.context import GraphLimits
    from attn_core.geometry import MhaGeometry
    from attn_core.layers import Cache, Layer, Scale
    from attn_core.plan import GroupPlan, PhasePlan, Plan, Pool
    from attn_core.router._groups import Group


# --- bind ---------------------------------------------------------------------------------------------------------------


def drop_scales(layer: Layer, cache: Cache | None) -> None:
    """Take key and value scales off a layer whose cache holds 16-bit or wider elements; no kernel would apply them."""
    if isinstance(layer, MhaLayer) and isinstance(cache, MhaCache) and cache.k.dtype.itemsize > 1:
        layer.k_scale = layer.v_scale = None
    if isinstance(layer, MlaLayer) and isinstance(cache, MlaCache) and cache.data.dtype.itemsize > 1:
        layer.k_scale = None


def check_layers(
    layers: Sequence[Layer],
    caches: Sequence[Cache | None],
    groups: Sequence[Group],
    names: Mapping[tuple[str, str], int],
    plan: Plan,
) -> list[tuple[Layer, int, Cache | None]]:
    """Every layer with the number of its group and its cache (the owner's where a cache is shared).

    Raises :class:`BindError` for the first thing that does not fit; nothing is changed.
    """
    if len(layers) != len(caches):
        raise BindError(f"{len(layers)} layers and {len(caches)} caches")
    if len({id(layer) for layer in layers}) != len(layers):
        raise BindError("a layer is given twice")
    owners = {(x.group.model, x.index, x.group.name): cache for x, cache in zip(layers, caches, strict=True)}
    found: list[tuple[Layer, int, Cache | None]] = []
    for layer, given in zip(layers, caches, strict=True):
        number = names.get((layer.group.model, layer.group.name))
        if number is None or not groups[number].backends:
            raise BindError(f"layer {layer.index}: the plan serves no group {layer.group.model}/{layer.group.name}")
        owner = getattr(layer, "kv_from", None)
        cache = given if owner is None else _owner_cache(layer, owner, owners)
        pool_number = groups[number].pool
        check_layer(layer, cache, groups[number].plan, plan.pools[pool_number] if pool_number is not None else None)
        found.append((layer, number, cache))
    return found


def _owner_cache(layer: Layer, owner: int, owners: Mapping[tuple[str, int, str], Cache | None]) -> Cache | None:
    for (model, index, _), cache in owners.items():
        if (model, index) == (layer.group.model, owner):
            return cache
    raise BindError(f"layer {layer.index} shares the cache of layer {owner}, which was not given")


def check_layer(layer: Layer, cache: Cache | None, plan: GroupPlan, pool: Pool | None) -> None:
    """A layer and its cache against the group's geometry and the pool. Raises :class:`BindError`."""
    where = f"layer {layer.index} ({layer.group.name})"
    if layer.group != plan.group:
        raise BindError(
            f"{where}: its group is not the planned one",
            f"planned  {plan.group.geometry}",
            f"layer    {layer.group.geometry}",
        )
    if layer.index not in plan.group.layers:
        raise BindError(f"{where}: the group has layers {list(plan.group.layers)}")
    if isinstance(layer, MhaLayer):
        _check_mha_layer(layer, where)
    if pool is not None and cache is None:
        raise BindError(f"{where}: no cache was given for pool {pool.name!r}")
    if isinstance(cache, MhaCache) and isinstance(layer, MhaLayer) and pool is not None:
        stored = plan.stored.geometry
        _check_mha_cache(stored, cache, pool, where)  # type: ignore[arg-type]


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
    for name, scale in (("k_scale", layer.k_scale), ("v_scale", layer.v_scale)):
        _check_scale(name, scale, geometry.kv_heads, where)


def _check_scale(name: str, scale: Scale | None, heads: int, where: str) -> None:
    if scale is not None and scale.tensor.numel() not in (1, heads):
        raise BindError(
            f"{where}: {name} has {scale.tensor.numel()} values; needed is 1, or one for each of {heads} KV heads"
        )


def _check_mha_cache(geometry: MhaGeometry, cache: MhaCache, pool: Pool, where: str) -> None:
    from attn_core.formats import torch_dtype

    if cache.format != pool.format:
        raise BindError(f"{where}: cache format {cache.format!r}; pool {pool.name!r} was planned as {pool.format!r}")
    packed = 2 if cache.format == "fp4_block16" else 1
    for name, tensor, width in (("k", cache.k, geometry.qk_dim), ("v", cache.v, geometry.v_dim)):
        needed = (pool.page_size, geometry.kv_heads, width // packed)
        if tuple(tensor.shape[1:]) != needed:
            raise BindError(
                f"{where}: cache {name} has shape {list(tensor.shape)}",
                f"needed   [pages, {needed[0]}, {needed[1]}, {needed[2]}] (page size, KV heads, width of pool {pool.name!r})",
            )
        if cache.format == "plain" and tensor.dtype != torch_dtype(pool.dtype):
            raise BindError(
                f"{where}: cache {name} holds {tensor.dtype}; pool {pool.name!r} was planned as {pool.dtype}"
            )
    if cache.k.shape[0] != cache.v.shape[0]:
        raise BindError(f"{where}: cache k has {cache.k.shape[0]} pages and v has {cache.v.shape[0]}")
    if cache.format == "fp4_block16" and (cache.k_blocks is None or cache.v_blocks is None):
        raise BindError(f"{where}: an fp4 cache needs k_blocks and v_blocks")


# --- begin --------------------------------------------------------------------------------------------------------------


def check_batch(batch: AttentionBatch, plan: Plan, model: str) -> None:
    """A batch against the plan: segments that cover its rows in order, and an address of the right sizes for every pool.

    Host data only: nothing waits for a device. Raises :class:`BatchError`.
    """
    if not 0 <= batch.lane < plan.lanes:
        raise BatchError(f"lane {batch.lane}: the plan has {plan.lanes} lane(s)", fix="plan with --lanes")
    if batch.idle:
        return
    _check_segments(batch)
    if tuple(batch.query_offsets.shape) != (batch.padded_rows + 1,):
        raise BatchError(
            f"query_offsets has shape {tuple(batch.query_offsets.shape)}; needed is ({batch.padded_rows + 1},)"
        )
    needed = [number for number, pool in enumerate(plan.pools) if pool.model == model]
    if needed and len(batch.addresses) <= max(needed):
        raise BatchError(
            f"the batch has {len(batch.addresses)} addresses; the plan has pools {[plan.pools[n].name for n in needed]} for {model}",
            fix="give one address per pool of the plan, in the order of plan.pools",
        )
    for number in needed:
        address = batch.addresses[number]
        if isinstance(address, KvAddress):
            _check_address(address, batch, plan.pools[number])


def _check_segments(batch: AttentionBatch) -> None:
    if not batch.segments:
        raise BatchError(f"a batch of {batch.padded_rows} rows needs at least one segment, to say its phase")
    rows = tokens = 0
    for segment in batch.segments:
        if segment.rows.start != rows or segment.tokens.start != tokens:
            raise BatchError(
                f"segment {segment.phase!r} starts at row {segment.rows.start}, token {segment.tokens.start}",
                f"needed   row {rows}, token {tokens}: segments follow each other without gaps",
            )
        rows, tokens = segment.rows.stop, segment.tokens.stop
    if not batch.num_rows <= rows <= batch.padded_rows or not batch.num_tokens <= tokens <= batch.padded_tokens:
        raise BatchError(
            f"segments cover {rows} rows and {tokens} tokens",
            f"needed   {batch.num_rows} rows ({batch.padded_rows} padded), {batch.num_tokens} tokens ({batch.padded_tokens} padded)",
        )


def _check_address(address: KvAddress, batch: AttentionBatch, pool: Pool) -> None:
    if address.page_size != pool.page_size:
        raise BatchError(
            f"pool {pool.name!r}: the address has pages of {address.page_size}; planned are {pool.page_size}"
        )
    if address.kv_lens.shape[0] != batch.padded_rows:
        raise BatchError(
            f"pool {pool.name!r}: kv_lens has {address.kv_lens.shape[0]} rows; the batch has {batch.padded_rows}"
        )
    if pool.kind != "cross" and address.new_slots.shape[0] < batch.num_tokens:
        raise BatchError(
            f"pool {pool.name!r}: new_slots has {address.new_slots.shape[0]} tokens; the batch has {batch.num_tokens}"
        )
    if address.table is not None and address.origin is None and address.kv_lens_cpu is not None:
        longest = int(address.kv_lens_cpu[: batch.num_rows].max()) if batch.num_rows else 0
        reach = address.table.shape[1] * address.page_size
        if longest > reach:
            raise BatchError(
                f"pool {pool.name!r}: a row has {longest} keys and the table reaches {reach}",
                f"table    {address.table.shape[1]} columns of {address.page_size} tokens",
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
    longest = max((a.max_kv_len for a in batch.addresses if isinstance(a, KvAddress)), default=0)
    over = {
        "rows": (batch.padded_rows, limits.max_rows),
        "tokens": (batch.padded_tokens, limits.max_tokens),
        "queries a row": (batch.max_query_len, limits.max_query_len),
        "keys a row": (longest, limits.max_kv_len),
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
