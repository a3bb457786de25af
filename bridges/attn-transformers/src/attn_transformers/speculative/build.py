"""From a model and a way to draft to a speculator: one plan for target and draft, one router, two caches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attn_core.errors import UsageError
from attn_transformers.speculative.draft_model import ModelDrafter, truncated
from attn_transformers.speculative.drafts import Drafter, NgramDrafter
from attn_transformers.speculative.engine import Speculator
from attn_transformers.speculative.served import ServedModel, bind
from attn_transformers.speculative.trees import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from attn_core.discovery import Registry
    from attn_core.plan import Plan

#: How drafts are made, and the speculative algorithm that the plan is told.
DRAFTS = {"ngram": "NGRAM", "truncated": "STANDALONE"}


def make_plan(
    config: Any, draft_config: Any, dtype: torch.dtype, device: torch.device, shape: Shape, options: Mapping[str, Any]
) -> Plan:
    """Plan target and draft together, before any weight is loaded. `draft_config` None: no draft model."""
    from attn_transformers.binding import plan_config

    speculation = {
        "speculative_algorithm": DRAFTS["ngram" if draft_config is None else "truncated"],
        "speculative_eagle_topk": shape.topk,
        "speculative_num_steps": shape.steps,
        "speculative_num_draft_tokens": shape.width,
    }
    return plan_config(config, dtype, device, {**speculation, **options}, draft=draft_config)


def truncated_config(config: Any, layers: int) -> Any:
    """The config of a model's first layers."""
    import copy

    made = copy.deepcopy(config)
    made.num_hidden_layers = layers
    if getattr(made, "layer_types", None):
        made.layer_types = list(made.layer_types[:layers])
    return made


@contextmanager
def build(
    model: Any,
    shape: Shape,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    plan: Plan | None = None,
    draft: str = "ngram",
    draft_layers: int = 0,
    drafter: Drafter | None = None,
    copies: int = 1,
    registry: Registry | None = None,
    **options: Any,
) -> Iterator[Speculator]:
    """A speculator for `model` with room for these prompts; the model has its own attention again afterwards.

    `draft` is ``ngram`` or ``truncated`` (the first `draft_layers` layers); `drafter` is one of your own. There is room for
    `copies` of all rows, which :meth:`Speculator.check` can take. `options` are the planner's (``speculative_attention_mode="decode"``, ``decode_attention_backend="triton"``, …).
    Raises :class:`PlanError` if no backend can serve a phase, :class:`UsageError` for an unknown draft.
    """
    if draft not in DRAFTS:
        raise UsageError(f"--draft {draft}: known are {', '.join(DRAFTS)}")
    small = truncated(model, draft_layers) if draft == "truncated" and drafter is None else None
    if plan is None:
        config = model.config
        plan = make_plan(config, None if small is None else small.config, model.dtype, model.device, shape, options)
    longest = [len(prompt) + max_new_tokens + shape.width for prompt in prompts]
    served = [ServedModel(model, plan, "target", copies * _room(plan, "target", longest))]
    try:
        if small is not None:
            page = next(pool.page_size for pool in plan.pools if pool.model == "draft")
            more = len(prompts) * ModelDrafter.room(shape, page)
            served.append(ServedModel(small, plan, "draft", more + _room(plan, "draft", longest)))
        bind(plan, *served, registry=registry)
        if drafter is None:
            drafter = NgramDrafter(shape) if small is None else ModelDrafter(served[1], shape)
        yield Speculator(served[0], drafter, shape)
    finally:
        for one in served:
            one.detach()


def _room(plan: Plan, role: str, lengths: Sequence[int]) -> int:
    """Tokens in whole pages of the largest page size that the model's pools have."""
    size = max(pool.page_size for pool in plan.pools if pool.model == role)
    return sum(-(-length // size) * size for length in lengths)
