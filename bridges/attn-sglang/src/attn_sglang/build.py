"""From a model runner to a backend: facts, layers, plan, router, caches, in this order and once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_sglang.backend import make_class
from attn_sglang.batches import BatchMaker
from attn_sglang.counts import Counter
from attn_sglang.layers import Bound, describe, find_layers, make_layers
from attn_sglang.planning import make_plan
from attn_sglang.pools import make_caches, make_sources, memory_layout, sliding_layers

if TYPE_CHECKING:
    from attn_core.discovery import Registry
    from attn_core.plan import Plan
    from attn_core.router import Router
    from attn_sglang.facts import ServerFacts

log = logging.getLogger("attn_sglang")


@dataclass(eq=False, slots=True)
class Built:
    """Everything that one backend object needs."""

    name: str
    facts: ServerFacts
    plan: Plan
    router: Router
    layers: list[Bound]
    maker: BatchMaker
    counter: Counter
    kv_pool: Any
    request_pool: Any
    slots: int
    verify_mask: Any = None

    @property
    def needs_host_lengths(self) -> bool:
        """Whether SGLang must bring lengths to the host: unless no planned backend wants them."""
        return any(phase.host_lengths != "none" for _, _, phase in self.plan.phase_plans())

    @property
    def waits_for_layers(self) -> bool:
        """The pool loads layers one by one from another memory."""
        return getattr(self.kv_pool, "layer_transfer_counter", None) is not None


def build(runner: Any, facts: ServerFacts, name: str, backend: str | None, registry: Registry | None = None) -> Built:
    """Plan and bind `runner`'s attention layers.

    Raises :class:`PlanError` where nothing fits (with the flag that would help), :class:`BindError` for memory that is
    laid out otherwise than planned.
    """
    from attn_core.discovery import discover
    from attn_core.router import Router

    registry = registry or discover()
    pool = runner.token_to_kv_pool
    sliding = sliding_layers(pool)
    layout = memory_layout(pool)
    described = describe(find_layers(runner.model), facts, sliding)
    plan = make_plan(described.model, facts, registry, name, backend, layout)
    router = Router(plan, registry, device=runner.device, dtype=facts.dtype)
    layers = make_layers(plan, described, quantised=facts.kv_dtype.itemsize == 1)
    caches = make_caches(plan, pool, layers, facts.page_size, layout)
    router.bind([bound.layer for bound in layers], caches)
    tree = facts.speculation is not None and facts.speculation.tree
    maker = BatchMaker(
        make_sources(plan, pool), runner.req_to_token_pool.req_to_token, facts.context_length, tree=bool(tree)
    )
    pools = {planned.name: planned.page_size for planned in plan.pools}
    report = {"plan": plan.fingerprint, "backends": served(plan), "page_size": facts.page_size, "pools": pools}
    log.info("%s: %s (plan %s)", name, describe_plan(plan), plan.fingerprint)
    for warning in plan.warnings:
        log.warning("%s", warning)
    counter = Counter(name, router, report)
    slots = max(cache.k.shape[0] * cache.k.shape[1] for cache in caches)
    return Built(name, facts, plan, router, layers, maker, counter, pool, runner.req_to_token_pool, slots)


def create(runner: Any, name: str, backend: str | None) -> Any:
    """The backend object for SGLang: what a registered factory returns."""
    from attn_sglang import _compat

    facts = _compat.server_facts(runner)
    built = build(runner, facts, name, backend)
    spec = facts.speculation
    if spec is not None and spec.tree and spec.algorithm.upper() != "NGRAM":
        built.verify_mask = _compat.verify_mask(min(facts.max_rows, 1024), spec.draft_tokens, runner.device)
        built.maker.own_mask = built.verify_mask.buffer
    return make_class(_compat.backend_base())(built)


def served(plan: Plan) -> dict[str, dict[str, str]]:
    """``{group: {phase: "backend:variant"}}``."""
    return {
        group.group.name: {phase: f"{p.backend}:{p.variant}" for phase, p in group.phases.items()}
        for group in plan.groups
    }


def describe_plan(plan: Plan) -> str:
    """One line: who serves which phase of which group."""
    parts = []
    for group, phases in served(plan).items():
        parts.append(f"{group}: " + ", ".join(f"{phase} {who}" for phase, who in phases.items()))
    return "; ".join(parts)
