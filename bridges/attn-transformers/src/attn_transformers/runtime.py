"""A transformers model on attn-core: plan, router and paged cache, bound to the model's attention modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attn_core.cache import PagedKVCache
from attn_core.errors import BatchError, BindError, UsageError
from attn_core.layers import MhaLayer, Scale
from attn_core.router import Router
from attn_transformers._compat import cache_argument
from attn_transformers.binding import attention_modules, make_layers, make_plan, text_config
from attn_transformers.checks import Signature, check_call, signature
from attn_transformers.interface import BRIDGE, NAME, register
from attn_transformers.sequences import Sequences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attn_core.plan import Plan
    from attn_transformers.cache import AttnCache


def load(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    max_tokens: int = 4096,
    kv_scales: Mapping[int, tuple[float, float]] | None = None,
    name: str = NAME,
    **options: Any,
) -> AttnModel:
    """Serve `model` by a plan: its own, or one made from its config with the planning `options` (``page_size=16``,
    ``kv_cache_dtype="fp8_e4m3"``, ``prefill_attention_backend="…"``).

    ``max_tokens`` is the room for keys and values, over all sequences, in whole pages. ``kv_scales`` are the quantisation
    scales (k, v) of layers, 1.0 where absent. The model's attention implementation becomes `name` until ``detach()``.

    Raises :class:`PlanError` when no backend can serve a layer group, :class:`BindError` when the plan is another model's.

    >>> attn = load(model, page_size=16)                                                    # doctest: +SKIP
    >>> attn.generate(**tokenizer(["Hello"], return_tensors="pt"), max_new_tokens=20)       # doctest: +SKIP
    """
    modules = attention_modules(model)
    if any(getattr(module, BRIDGE, None) is not None for module in modules):
        raise UsageError("this model is served by attn-core already", fix="attn.detach() first")
    return AttnModel(model, plan or make_plan(model, options), max_tokens, kv_scales or {}, register(name))


class AttnModel:
    """A model whose attention runs through a router. One forward at a time; caches may take turns.

    ``plan``, ``router``, ``kv`` (the paged cache) and ``layers`` are there to look at; ``router.stats()`` counts calls.
    """

    def __init__(
        self, model: Any, plan: Plan, max_tokens: int, kv_scales: Mapping[int, tuple[float, float]], name: str
    ) -> None:
        self.model, self.plan, self.name = model, plan, name
        self._config, self._generate = text_config(model), model.generate
        self._check_dtype()
        self.layers: dict[int, MhaLayer] = make_layers(model, plan)
        for index, (k_scale, v_scale) in kv_scales.items():
            self.layers[index].k_scale = self._scale(k_scale)
            self.layers[index].v_scale = self._scale(v_scale)
        pages = {pool.name: 1 + -(-max_tokens // pool.page_size) for pool in plan.pools}
        self.kv = PagedKVCache.from_plan(plan, num_pages=pages, device=model.device, prefix_sharing=False)
        self.router = Router(plan, device=model.device, dtype=model.dtype)
        layers = list(self.layers.values())
        self.router.bind(layers, self.kv.caches(layers))
        self._accepted: dict[int, Signature] = {}
        self._active: Sequences | None = None
        self._attach()

    # --- use ----------------------------------------------------------------------------------------------------------------

    def new_cache(self) -> AttnCache:
        """An empty cache for one batch, for ``model(…)`` or ``model.generate(…)``."""
        from attn_transformers.cache import AttnCache

        return AttnCache(self)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate`` with a new cache, whose pages are given back unless the result holds it.

        Raises :class:`UsageError` where generation would not use it: ``use_cache=False``, or a ``cache_implementation``.
        """
        self._check_generation(kwargs)
        cache = self.new_cache()
        keep = False
        try:
            result = self._generate(*args, **{cache_argument(): cache}, **kwargs)
            keep = not isinstance(result, torch.Tensor)
            return result
        finally:
            if not keep:
                cache.close()

    def _check_generation(self, kwargs: Mapping[str, Any]) -> None:
        config = kwargs.get("generation_config") or self.model.generation_config
        if kwargs.get("use_cache", getattr(config, "use_cache", True)) is False:
            raise UsageError(
                "use_cache=False cannot be served by attn-core",
                "every step would send all tokens again, beside their keys in the paged cache",
                fix="generate(…, use_cache=True), or set it in the model's generation_config",
            )
        kind = kwargs.get("cache_implementation") or getattr(config, "cache_implementation", None)
        if kind is not None:
            raise UsageError(
                f"cache_implementation={kind!r} would replace the paged cache of attn-core", fix="leave it out"
            )

    def detach(self) -> None:
        """Give the model its own attention back. Caches of this object are of no use afterwards."""
        self._set_implementation(self._former)
        for module in attention_modules(self.model):
            setattr(module, BRIDGE, None)

    # --- what the attention and cache interfaces call -------------------------------------------------------------------------

    def offer(self, sequences: Sequences, layer: int) -> None:
        """A cache announces that the next attention call of `layer` belongs to it."""
        if self._config._attn_implementation != self.name:
            raise BindError(
                "an AttnCache was given to a model whose attention is not attn-core's",
                f"have     attn_implementation={self._config._attn_implementation!r}",
                f"needed   {self.name!r}",
                fix="attn_transformers.load(model)",
            )
        self._active, sequences.offered = sequences, layer

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Attend for one module: query ``[B, Hq, S, D]``, key and value ``[B, Hk, S, D]`` to ``[B, S, Hq, Dv]``."""
        index: int = module.layer_idx  # type: ignore[assignment]
        layer = self.layers[index]
        sequences = self._claim(layer)
        seen = signature(query, key, kwargs)
        if self._accepted.get(index) != seen:
            check_call(layer, query, key, kwargs)
            self._accepted[index] = seen
        if not sequences.waits_for(index):
            sequences.begin(attention_mask, query.shape[0], query.shape[2])
        out = sequences.attend(layer, query, key, value)
        if sequences.finished:
            self._active = None
        return out

    def _claim(self, layer: MhaLayer) -> Sequences:
        """The sequences that offered this layer. Raises :class:`BatchError` where none did."""
        sequences = self._active
        if sequences is None or sequences.offered != layer.index:
            raise BatchError(
                f"layer {layer.index} was called without an AttnCache",
                "attention needs the paged cache that holds the keys of earlier tokens",
                fix=f"attn.generate(…), or model(…, {cache_argument()}=attn.new_cache())",
            )
        sequences.offered = None
        return sequences

    # --- the parts ------------------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        self._former = self._config._attn_implementation
        for module in attention_modules(self.model):
            setattr(module, BRIDGE, self)
        self._set_implementation(self.name)

    def _set_implementation(self, name: str) -> None:
        if self._config is self.model.config:
            self.model.set_attn_implementation(name)
            return
        for key in self.model.config.sub_configs:
            if getattr(self.model.config, key, None) is self._config:
                self.model.set_attn_implementation({key: name})
                return
        raise BindError(f"the text config of {type(self.model).__name__} is not one of its direct sub-configs")

    def _check_dtype(self) -> None:
        from attn_core.dtypes import canonical

        own = canonical(str(self.model.dtype))
        if canonical(self.plan.dtype) != own:
            raise BindError(
                "the plan was made for another dtype than the model has",
                f"plan     {self.plan.dtype}",
                f"model    {own}",
                fix=f"plan with dtype={own!r}",
            )

    def _scale(self, value: float) -> Scale:
        return Scale(torch.tensor([value], dtype=torch.float32, device=self.model.device), value)
