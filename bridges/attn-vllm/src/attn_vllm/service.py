"""One attention group of vLLM at run time: a router over the planned groups of its layers, bound to vLLM's own cache.

vLLM makes one metadata builder for each set of layers that share a block table; each builder owns one :class:`Service`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.context import GraphLimits
from attn_core.errors import BatchError, BindError
from attn_core.layers import MhaInputs, MhaLayer
from attn_core.plan import GroupPlan, Plan
from attn_core.router import Router, RouterGraphState, Step
from attn_vllm.batch import make_batch
from attn_vllm.layers import group_of, make_cache, make_layer

if TYPE_CHECKING:
    from attn_core.discovery import Registry


def part_of_plan(plan: Plan, names: Mapping[str, Any]) -> tuple[Plan, dict[str, str]]:
    """The part of `plan` that serves the layers in `names` (layer name -> facts), and the group of each layer.

    Groups keep their layers: a worker of a pipeline holds some of them only. All pools of the part share one table.
    """
    groups = {name: group_of(name, facts, plan) for name, facts in names.items()}
    wanted = {group.name for group in groups.values()}
    kept: list[GroupPlan] = [item for item in plan.groups if item.group.name in wanted]
    pools = {item.group.pools["attend"] for item in kept}
    part = replace(plan, groups=tuple(kept), pools=tuple(pool for pool in plan.pools if pool.name in pools))
    if len({pool.page_size for pool in part.pools}) != 1:
        raise BindError(
            f"layers of groups {sorted(wanted)} share a block table in vLLM",
            f"planned  {', '.join(f'{pool.name}: page {pool.page_size}' for pool in part.pools)}",
            fix="--block-size gives all pools one page size",
        )
    return part, {name: group.name for name, group in groups.items()}


class Service:
    """Serves the layers of one builder. One step at a time: vLLM's lanes have builders of their own."""

    def __init__(
        self,
        plan: Plan,
        modules: Mapping[str, Any],
        device: torch.device,
        *,
        verify_len: int = 0,
        exact: bool = True,
        limits: GraphLimits | None = None,
        registry: Registry | None = None,
    ) -> None:
        """``modules`` are vLLM's attention layers by name, each with ``impl.facts``. Checks them; binds at the first step."""
        self.plan, self.groups = part_of_plan(plan, {name: module.impl.facts for name, module in modules.items()})
        self.modules, self.device, self.verify_len, self.exact = dict(modules), device, verify_len, exact
        self.limits, self.registry = limits, registry
        self.phases = frozenset.intersection(*(frozenset(item.phases) for item in self.plan.groups))
        self.page_size = self.plan.pools[0].page_size
        self._router: Router | None = None
        self._layers: dict[str, MhaLayer] = {}
        self._sinks: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._where: tuple[int, ...] = ()
        self._graphs: RouterGraphState | None = None
        self._captured: dict[tuple[str, int, int], AttentionBatch] = {}
        self._former: dict[str, dict[str, int]] = {}
        self.steps = 0

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin(self, common: Any) -> ServedStep:
        """The metadata of one step from vLLM's ``CommonAttentionMetadata``; under a captured size, in the graph's buffers."""
        router = self._bound()
        batch = self._batch(common)
        if self._sinks[0]:  # a weight update writes in place
            torch._foreach_copy_(*self._sinks)
        self.steps += 1
        static = self._captured.get(_key(batch, common.num_reqs)) if self._captured else None
        if static is None:
            return ServedStep(self, router.begin(batch), in_graph=False)
        self._refill(static, batch)
        return ServedStep(self, router.begin(static, self._graphs), in_graph=True)

    def capture(self, common: Any) -> ServedStep:
        """The metadata that a CUDA graph is captured with: rows of one length. Raises :class:`BatchError` for others."""
        router = self._bound()
        batch = self._batch(common)
        key = _key(batch, common.num_reqs)
        if key[0] not in ("decode", "verify") or batch.num_rows != common.num_reqs:
            raise BatchError(
                f"a graph of {common.num_reqs} rows and {common.num_actual_tokens} tokens was asked for",
                "captured are rows of one token, or of one chain of drafts",
                fix='--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\'',
            )
        if self._graphs is None:
            assert self.limits is not None
            router.warmup(self.limits)
            self._graphs = router.graph_state(self.limits)
        static = self._captured.get(key)
        if static is None:
            if self._captured:
                router.freeze()  # a graph has recorded the addresses of all workspaces
            static = self._captured[key] = self._static(key, batch)
        self._refill(static, batch)
        return ServedStep(self, router.begin(static, self._graphs, capture=True), in_graph=True)

    def attend(
        self, step: Step, name: str, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Store and attend for one layer. q[T, Hq, D], k and v [T, Hk, D]; T may exceed the batch's tokens (padding)."""
        tokens = step.batch.padded_tokens
        if k is None or v is None or self.modules[name].kv_sharing_target_layer_name is not None:
            inputs = MhaInputs(q[:tokens], store=False)  # another layer has written the keys
        else:
            inputs = MhaInputs(q[:tokens], k[:tokens], v[:tokens])
        step.attend(self._layers[name], inputs, out[:tokens])

    def in_graph(self, step: Step) -> None:
        """Device work of the metadata, in front of the first layer (inside the capture)."""
        assert self._router is not None
        self._router.in_graph(step)

    def stats(self) -> dict[str, dict[str, int]]:
        """Calls per backend and phase."""
        return _merged(self._former, self._router.stats() if self._router else {})

    # --- set-up --------------------------------------------------------------------------------------------------------

    def _bound(self) -> Router:
        """The router, bound to the cache that vLLM's layers hold now (it is exchanged once, after memory profiling)."""
        where = tuple(module.kv_cache.data_ptr() for module in self.modules.values())
        if self._router is None or where != self._where:
            self._former = self.stats()
            self._router, self._where = self._make(), where
            self._graphs, self._captured = None, {}
        return self._router

    def _make(self) -> Router:
        router = Router(self.plan, self.registry, device=self.device, limits=self.limits)
        caches = []
        self._layers, self._sinks = {}, ([], [])
        for name, module in self.modules.items():
            group = self.plan.group(self.groups[name]).group
            pool = self.plan.pools[self.plan.pool_index(group.pools["attend"])]
            layer = self._layers[name] = make_layer(module, group, quantised=pool.dtype.startswith("fp8"))
            if layer.sinks is not None and layer.sinks.data_ptr() != module.impl.sinks.data_ptr():
                self._sinks[0].append(layer.sinks)
                self._sinks[1].append(module.impl.sinks.detach())
            caches.append(make_cache(module.kv_cache, group.geometry.qk_dim, pool))  # type: ignore[union-attr]
        router.bind(list(self._layers.values()), caches)
        return router

    def _batch(self, common: Any) -> AttentionBatch:
        return make_batch(
            common,
            page_size=self.page_size,
            pools=len(self.plan.pools),
            phases=self.phases,
            verify_len=self.verify_len,
            exact=self.exact,
        )

    # --- graphs --------------------------------------------------------------------------------------------------------

    def _static(self, key: tuple[str, int, int], batch: AttentionBatch) -> AttentionBatch:
        """A batch of padded rows in tensors of its own, which the graph records."""
        phase, rows, query_len = key
        assert self._graphs is not None
        assert self.limits is not None
        device, tokens = self.device, rows * query_len
        address = KvAddress(
            page_size=self.page_size,
            kv_lens=torch.full((rows,), query_len, dtype=torch.int32, device=device),
            new_slots=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            max_kv_len=self.limits.max_kv_len,
            table=torch.zeros(rows, -(-self.limits.max_kv_len // self.page_size), dtype=torch.int32, device=device),
        )
        return AttentionBatch(
            num_rows=rows,
            num_tokens=tokens,
            segments=(Segment(phase, slice(0, rows), slice(0, tokens), query_len),),
            query_offsets=torch.arange(0, tokens + 1, query_len, dtype=torch.int32, device=device),
            max_query_len=query_len,
            addresses=(address,) * len(self.plan.pools),
            positions=None if batch.positions is None else torch.zeros(tokens, dtype=torch.int64, device=device),
            cpu_exact=False,
            static=True,
        )

    def _refill(self, static: AttentionBatch, batch: AttentionBatch) -> None:
        from attn_core.graphs import pad_batch
        from attn_core.paging import copy_batch

        assert self._graphs is not None
        copy_batch(pad_batch(batch, static, self._graphs.pad_kv_len), static)


class ServedStep:
    """What a builder returns as metadata: all layers of the group share it."""

    __slots__ = ("_first", "_in_graph", "service", "step")

    def __init__(self, service: Service, step: Step, in_graph: bool) -> None:
        self.service, self.step, self._in_graph = service, step, in_graph
        self._first: str | None = None

    @property
    def num_actual_tokens(self) -> int:
        """Tokens without padding."""
        return self.step.batch.num_tokens

    def attend(
        self, name: str, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """One layer of this step. In graph buffers the first layer of every forward (warm-up, capture) is preceded by the
        metadata's device work, so that the graph records it.
        """
        if self._in_graph:
            self._first = self._first or name
            if name == self._first:
                self.service.in_graph(self.step)
        self.service.attend(self.step, name, q, k, v, out)


def _key(batch: AttentionBatch, rows: int) -> tuple[str, int, int]:
    """What a captured size is looked up by: phase, rows with padding, tokens a row. ``-`` never matches."""
    if len(batch.segments) != 1 or batch.segments[0].query_len is None:
        return "-", 0, 0
    return batch.segments[0].phase, rows, batch.segments[0].query_len


def _merged(one: Mapping[str, Mapping[str, int]], two: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    merged = {backend: dict(phases) for backend, phases in one.items()}
    for backend, phases in two.items():
        mine = merged.setdefault(backend, {})
        for phase, count in phases.items():
            mine[phase] = mine.get(phase, 0) + count
    return merged


def merged_stats(services: Sequence[Service]) -> dict[str, dict[str, int]]:
    """Calls of several services together."""
    total: dict[str, dict[str, int]] = {}
    for service in services:
        total = _merged(total, service.stats())
    return total
