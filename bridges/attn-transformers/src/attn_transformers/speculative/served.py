"""One model of a speculative plan (the target, or its draft): its layers, its paged cache, and packed forwards.

Where :class:`attn_transformers.AttnModel` follows what ``generate`` passes, this one is led: the caller makes the batch (phase,
tree, positions) and runs the model on packed tokens ``[1, T]``. No ``transformers.Cache`` takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attn_core.batch import AttentionBatch
from attn_core.cache import PagedKVCache
from attn_core.errors import BatchError, UsageError
from attn_core.layers import MhaInputs, MhaLayer
from attn_core.plan import Plan
from attn_core.router import Router, Step
from attn_transformers.binding import attention_modules, make_layers, text_config
from attn_transformers.checks import Signature, check_call, signature
from attn_transformers.interface import BRIDGE, register

if TYPE_CHECKING:
    from attn_core.discovery import Registry


class ServedModel:
    """A transformers model whose attention runs through ``role`` ("target" or "draft") of a plan. One step at a time."""

    def __init__(self, model: Any, plan: Plan, role: str, max_tokens: int) -> None:
        """Allocate pages for `max_tokens` tokens and switch the model's attention; :meth:`detach` gives it back."""
        modules = attention_modules(model)
        if any(getattr(module, BRIDGE, None) is not None for module in modules):
            raise UsageError("this model is served by attn-core already", fix="detach() it first")
        self.model, self.plan, self.role = model, plan, role
        groups = tuple(group for group in plan.groups if group.group.model == role)
        self.layers: dict[int, MhaLayer] = make_layers(model, replace(plan, groups=groups))
        numbers = [number for number, pool in enumerate(plan.pools) if pool.model == role]
        self._first_pool = numbers[0]
        pools = [plan.pools[number] for number in numbers]
        pages = {pool.name: 1 + -(-max_tokens // pool.page_size) for pool in pools}
        described = [group.stored for group in groups]
        self.kv = PagedKVCache(pools, described, num_pages=pages, device=model.device, prefix_sharing=False)
        self.router: Router | None = None
        config = text_config(model)
        if config is not model.config:
            raise UsageError(
                f"{type(model).__name__} wraps its language model; speculate with the language model itself"
            )
        self._former = config._attn_implementation
        self._accepted: dict[int, Signature] = {}
        self._step: Step | None = None
        name = register()
        for module in modules:
            setattr(module, BRIDGE, self)
        model.set_attn_implementation(name)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    def detach(self) -> None:
        """Give the model its own attention back."""
        self.model.set_attn_implementation(self._former)
        for module in attention_modules(self.model):
            setattr(module, BRIDGE, None)

    # --- steps ----------------------------------------------------------------------------------------------------------

    def addressed(self, batch: AttentionBatch) -> AttentionBatch:
        """`batch` with its addresses where the plan has this model's pools; those before them belong to another model."""
        if self._first_pool and len(batch.addresses) == len(self.kv.pools):
            # nobody reads the places of the other model's pools; they hold an address because every place must
            batch.addresses = (batch.addresses[0],) * self._first_pool + batch.addresses
        return batch

    def begin(self, batch: AttentionBatch) -> Step:
        """A step of this model's groups."""
        assert self.router is not None
        return self.router.begin(self.addressed(batch), model=self.role)

    def logits(
        self, step: Step, ids: Sequence[int] | torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the model on packed tokens: `ids` and `positions` i64[T] to logits [n, V], n = T or those of `keep` i64[n]."""
        tokens = ids if isinstance(ids, torch.Tensor) else torch.tensor(ids, dtype=torch.int64)
        tokens = tokens.to(self.device, non_blocking=True)
        self._step = step
        try:
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=torch.ones_like(tokens)[None],  # no padding; without it packed rows are looked for
                use_cache=False,
                logits_to_keep=0 if keep is None else keep.to(self.device, non_blocking=True),
            )
        finally:
            self._step = None
        result: torch.Tensor = output.logits[0]
        return result

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """What the attention interface calls: query ``[1, Hq, T, D]``, key and value ``[1, Hk, T, D]`` to ``[1, T, Hq, D]``."""
        step = self._step
        if step is None:
            raise BatchError(
                f"layer {module.layer_idx} was called outside a speculative step",
                "this model runs on batches that the speculator makes",
                fix="detach() the speculator first",
            )
        layer = self.layers[module.layer_idx]
        seen = signature(query, key, kwargs)
        if self._accepted.get(layer.index) != seen:
            check_call(layer, query, key, kwargs)
            self._accepted[layer.index] = seen
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        return step.attend(layer, MhaInputs(q, k, v)).unsqueeze(0)


def bind(plan: Plan, *models: ServedModel, registry: Registry | None = None) -> Router:
    """One router for all models of a plan; `registry` None: what is installed."""
    first = models[0]
    router = Router(plan, registry, device=first.device, dtype=first.model.dtype)
    layers = [layer for served in models for layer in served.layers.values()]
    caches = [cache for served in models for cache in served.kv.caches(served.layers.values())]
    router.bind(layers, caches)
    for served in models:
        served.router = router
    return router
