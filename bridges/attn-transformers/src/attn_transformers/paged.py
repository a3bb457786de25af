"""Continuous batching (``generate_batch``) with attn-core's backends, reading transformers' page pool in place.

transformers admits only its own implementations to continuous batching, so :func:`continuous_batching` swaps the global
entry ``paged|eager`` while it is open: modules of the bound model go to the planned backends, all others to the former
function. Keys and values are written to, and read from, transformers' pool as token slots (page size 1, the model's dtype).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attn_core.errors import AttnError, BatchError, UsageError
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.plan import Plan
from attn_core.router import Router
from attn_transformers._compat import pool_layer
from attn_transformers.binding import attention_modules, make_layers, make_plan
from attn_transformers.checks import check_call
from attn_transformers.interface import BRIDGE
from attn_transformers.pool_step import PoolSource, PoolStep, build_step

ENTRY = "paged|eager"
_POOL = "attn_core_pool"


@contextmanager
def continuous_batching(model: nn.Module, plan: Plan | None = None, **options: Any) -> Iterator[PoolBridge]:
    """While open, ``model.generate_batch`` runs through a plan; afterwards everything is as before.

    ``options`` are planning options (``attention_backend=…``); the page size is 1 and the KV dtype the model's. An error in
    the generation thread, which transformers only logs, is raised again at the end of the block.

    Raises :class:`UsageError` for a quantised KV cache or another page size, :class:`PlanError` when nothing fits.

    >>> with continuous_batching(model) as bridge:                                          # doctest: +SKIP
    ...     outputs = model.generate_batch(inputs, continuous_batching_config=config)
    """
    bridge = PoolBridge(model, plan or _plan(model, options))
    with _swapped(model, bridge):
        yield bridge
    if bridge.error is not None:
        raise bridge.error


def _plan(model: nn.Module, options: Mapping[str, Any]) -> Plan:
    own = str(model.dtype).removeprefix("torch.")
    asked = options.get("kv_cache_dtype")
    from attn_core.dtypes import canonical

    if asked not in (None, "auto") and canonical(asked) != canonical(own):
        raise UsageError(
            f"continuous batching keeps keys and values in the model's dtype ({own}); {asked} was asked for",
            "the page pool belongs to transformers, which does not quantise it",
            fix="a quantised cache works with attn_transformers.load(model, kv_cache_dtype=…) and generate()",
        )
    if options.get("page_size") not in (None, 1):
        raise UsageError(
            f"continuous batching addresses tokens (page size 1); page size {options['page_size']} was asked for",
            fix="set page_size in ContinuousBatchingConfig: it is transformers' own and does not matter to the backend",
        )
    return make_plan(model, {**options, "page_size": 1})


class PoolBridge:
    """Serves the attention modules of one model from transformers' page pool. Not thread-safe: one generation at a time."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.error: AttnError | None = None
        self.steps = 0
        self._pool: Any = None
        self._router: Router | None = None
        self._counts: dict[str, dict[str, int]] = {}
        self._layers: dict[int, MhaLayer] = {}
        self._staging: dict[int, MhaLayer] = {}
        self._scratch: dict[int, MhaCache] = {}
        self._sources: list[PoolSource] = []
        self._step: tuple[PoolStep, Any] | None = None
        self._seen: Any = None

    def stats(self) -> dict[str, dict[str, int]]:
        """Calls per backend and phase, over all pools served so far."""
        return _merged(self._counts, self._router.stats() if self._router else {})

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Attend for one module. query ``[1, Hq, T, D]``; key and value hold the new tokens only. The mask is not read."""
        try:
            return self._attention(module, query, key, value, kwargs)
        except AttnError as error:
            self.error = self.error or error
            raise

    def _attention(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        pool = kwargs.get(_POOL, getattr(kwargs.get("cache"), "pool", None))
        if pool is None:
            raise BatchError(f"{type(module).__name__} did not hand its page pool over", fix="use model.generate_batch")
        if pool is not self._pool:
            self._bind(pool)
        if kwargs["write_index"] is not self._seen:
            self._begin(kwargs)
        assert self._step is not None
        packed, step = self._step
        index: int = module.layer_idx  # type: ignore[assignment]
        layer = self._layers[index]
        check_call(layer, query, key, kwargs)
        number = self.plan.pool_index(layer.group.pools["attend"])
        staged = number in packed.staged
        if staged:
            self._stage(number, pool, index, key, value, kwargs)
            layer = self._staging[index]
        inputs = MhaInputs(packed.pack(query), packed.pack(key), packed.pack(value), store=not staged)
        return packed.unpack(step.attend(layer, inputs), query.shape[2])

    def _bind(self, pool: Any) -> None:
        """A new page pool: every layer's rows become a cache of page size 1, in place."""
        self._counts = self.stats()
        router = Router(self.plan, device=pool.cache_tensor.device, dtype=pool.dtype)
        self._layers = make_layers(self.model, self.plan)
        caches: dict[int, MhaCache] = {}
        sources: dict[int, PoolSource] = {}
        for index, layer in self._layers.items():
            rows = pool_layer(pool, index)
            caches[index] = MhaCache(rows.k.unsqueeze(1), rows.v.unsqueeze(1))
            number = self.plan.pool_index(layer.group.pools["attend"])
            sources[number] = PoolSource(rows.allocator, rows.layer_type, rows.window, rows.sentinel)
        self._sources = [sources[number] for number in range(len(self.plan.pools))]
        self._staging, staged = self._make_staging(pool, caches)
        router.bind([*self._layers.values(), *self._staging.values()], [*caches.values(), *staged])
        self._pool, self._router, self._seen = pool, router, None

    def _make_staging(self, pool: Any, caches: Mapping[int, MhaCache]) -> tuple[dict[int, MhaLayer], list[MhaCache]]:
        """For pools with a ring: one scratch cache that their layers take turns in."""
        self._scratch, staging = {}, {}
        for index, layer in self._layers.items():
            number = self.plan.pool_index(layer.group.pools["attend"])
            if self._sources[number].window is None:
                continue
            if number not in self._scratch:
                slots = 1 + pool.max_tokens_read + pool.max_batch_tokens
                own = caches[index]
                self._scratch[number] = MhaCache(
                    own.k.new_zeros((slots, *own.k.shape[1:])), own.v.new_zeros((slots, *own.v.shape[1:]))
                )
            staging[index] = replace(layer, slot=-1)
        return staging, [self._scratch[self.plan.pool_index(layer.group.pools["attend"])] for layer in staging.values()]

    def _begin(self, kwargs: dict[str, Any]) -> None:
        """The first attention call of a forward: build the batch that all layers share."""
        assert self._router is not None
        with self._router.place.use():
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if capturing:
            raise BatchError(
                "a CUDA graph is being captured, which this bridge does not support",
                fix="ContinuousBatchingConfig(use_cuda_graph=False)",
            )
        if kwargs.get("block_table") is not None:
            raise BatchError("transformers chose its block-table fast path, which only its own kernels can take")
        packed = build_step(kwargs, self._sources)
        self._step, self._seen = (packed, self._router.begin(packed.batch)), kwargs["write_index"]
        self.steps += 1

    def _stage(
        self, number: int, pool: Any, index: int, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Let transformers read the ring and then overwrite it; what it gathered goes to the scratch cache."""
        names = ("cu_seq_lens_k", "max_length_k", "read_index", "write_index", "block_table")
        keys, values = pool.update(key, value, index, {name: kwargs.get(name) for name in names})
        scratch, count = self._scratch[number], keys.shape[2]
        scratch.k[1 : 1 + count, 0] = keys[0].transpose(0, 1)
        scratch.v[1 : 1 + count, 0] = values[0].transpose(0, 1)


class _Handover:
    """Stands in for the page pool inside attention modules: hands key and value through and names the pool."""

    __slots__ = ("pool",)

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The signature of ``PagedAttentionCache.update``; nothing is stored here."""
        kwargs[_POOL] = self.pool
        return key_states, value_states


def _hand_over(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of attention modules: the pool in their arguments is replaced by a :class:`_Handover`."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    for name in ("cache", "past_key_values"):
        if isinstance(kwargs.get(name), PagedAttentionCache):
            kwargs[name] = _Handover(kwargs[name])
    return args, kwargs


@contextmanager
def _swapped(model: Any, bridge: PoolBridge) -> Iterator[None]:
    """Bind the model's modules and the global entry; put everything back whatever happens."""
    from transformers import AttentionInterface

    table: dict[str, Any] = AttentionInterface._global_mapping
    former, implementation = table[ENTRY], model.config._attn_implementation

    def paged(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        mine = getattr(module, BRIDGE, None)
        if not isinstance(mine, PoolBridge):
            return former(module, query, key, value, attention_mask, **kwargs)
        return mine.attention(module, query, key, value, attention_mask, kwargs), None

    modules = attention_modules(model)
    before = [getattr(module, BRIDGE, None) for module in modules]
    hooks = [module.register_forward_pre_hook(_hand_over, with_kwargs=True) for module in modules]
    try:
        for module in modules:
            setattr(module, BRIDGE, bridge)
        table[ENTRY] = paged
        model.set_attn_implementation(ENTRY)
        yield
    finally:
        model.set_attn_implementation(implementation)
        table[ENTRY] = former
        for module, bound, hook in zip(modules, before, hooks, strict=True):
            hook.remove()
            setattr(module, BRIDGE, bound)


def _merged(one: Mapping[str, Mapping[str, int]], two: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    merged = {backend: dict(phases) for backend, phases in one.items()}
    for backend, phases in two.items():
        mine = merged.setdefault(backend, {})
        for phase, count in phases.items():
            mine[phase] = mine.get(phase, 0) + count
    return merged
