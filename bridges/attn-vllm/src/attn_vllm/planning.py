"""From vLLM's configuration to a plan. Reads configuration objects by attribute; imports nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from attn_core.errors import PlanError, UsageError
from attn_core.geometry import LayerGroup, Model
from attn_core.plan import Plan

log = logging.getLogger("vllm.attn_vllm")

#: vLLM's default block size on GPUs, in tokens.
DEFAULT_BLOCK = 16
#: Speculation without attention layers of its own: only the target's verification concerns attention.
_WITHOUT_DRAFT_LAYERS = ("ngram", "ngram_gpu", "suffix")
#: Element types of vLLM's cache whose bytes mean the same in attn-core. Its others have layouts and scales of their own.
_CACHE_DTYPES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
#: Memory orders of a page.
_LAYOUTS = ("NHD", "HND")


def make_plan(config: Any, device: str, asked: Mapping[str, Any]) -> Plan:
    """The plan of the target model's attention layers for a ``VllmConfig``. Raises :class:`PlanError` if nothing fits.

    Where the planned backends do not declare the verify phase, drafts are verified as short prefills, which is the same
    computation; that is logged. Where vLLM knows lengths on the device only (:func:`lengths_are_exact`), backends that plan from
    exact lengths on the host are left out; one that was asked for is refused, with what to do.
    """
    from attn_core.discovery import discover
    from attn_core.model import parse_model
    from attn_core.options import Options
    from attn_core.planner import plan_for
    from attn_core.platform import detect_platform

    model = served_model(parse_model(config.model_config.hf_config))
    platform, registry = detect_platform(device), discover()
    exact = lengths_are_exact(config, device)
    options = {**server_options(config), **asked, "host_lengths": "exact" if exact else "bound"}
    speculation = {name for name in options if name.startswith("speculative_")}

    def paged(options: Mapping[str, Any]) -> Plan:
        return _runnable(_paged(options, lambda asked: plan_for(model, platform, Options.of(asked), registry)))

    def plan(options: Mapping[str, Any]) -> Plan:
        try:
            return paged(options)
        except PlanError as error:
            if exact or not any(reason.code == "host_lengths" for lost in error.rejected for reason in lost.reasons):
                raise
            needing = _served_with_exact_lengths(paged, options)
            if not needing:
                raise
            raise _needs_exact_lengths(needing, config, error) from error

    try:
        return plan(options)
    except PlanError as error:
        if not speculation:
            raise
        why = error.message
    made = plan({name: value for name, value in options.items() if name not in speculation})
    log.warning("attn-vllm: drafts are verified as short prefills (%s)", why)
    return made


def lengths_are_exact(config: Any, device: str) -> bool:
    """Whether the host knows the length of every row when a step begins.

    With asynchronous scheduling the step after a verification is prepared while its drafts are still being accepted on the
    device: vLLM then gives upper bounds. On a CPU the lengths are host tensors themselves.
    """
    asynchronous = device != "cpu" and bool(getattr(config.scheduler_config, "async_scheduling", False))
    speculative = config.speculative_config
    return not (asynchronous and speculative is not None and speculative.num_speculative_tokens)


def _served_with_exact_lengths(plan: Callable[[Mapping[str, Any]], Plan], options: Mapping[str, Any]) -> list[str]:
    """The backends that would serve if lengths were exact, and need that; none if there is no plan then either."""
    try:
        made = plan({**options, "host_lengths": "exact"})
    except PlanError:
        return []
    return sorted({p.backend for _, _, p in made.phase_plans() if p.host_lengths == "exact"})


def _needs_exact_lengths(needing: list[str], config: Any, error: PlanError) -> PlanError:
    names = " and ".join(needing)
    return PlanError(
        f"{names} cannot be combined with asynchronous scheduling of drafts",
        f"needed   {names}: exact lengths on the host, to plan a step's work",
        f"found    asynchronous scheduling with speculative method {config.speculative_config.method!r}: how many drafts were "
        "accepted is known on the device only",
        fix="--no-async-scheduling, or a backend that takes upper bounds (attn explain --host-lengths bound lists them)",
        rejected=error.rejected,
        suggestions=["--no-async-scheduling"],
    )


def _paged(options: Mapping[str, Any], plan: Callable[[Mapping[str, Any]], Plan]) -> Plan:
    """A plan with pages no smaller than vLLM's own default block, where the choice is free: tables of tokens are long."""
    made = plan(options)
    if "page_size" in options or min(page_sizes(made)) >= DEFAULT_BLOCK:
        return made
    try:
        return plan({**options, "page_size": DEFAULT_BLOCK})
    except PlanError:
        return made


def _runnable(plan: Plan) -> Plan:
    """The plan. Raises :class:`PlanError` for what a plan may hold and vLLM's cache cannot."""
    for pool in plan.pools:
        if pool.format != "plain" or pool.layout not in _LAYOUTS:
            raise PlanError(
                f"pool {pool.name!r} was planned as {pool.format} ({pool.dtype}, {pool.layout})",
                f"served   plain elements, {' or '.join(_LAYOUTS)}: vLLM's cache has no other",
            )
    for group, phase, served in plan.phase_plans():
        wider = sorted(set(served.pads) - {"q_heads"})  # heads of queries are nothing to the cache
        if wider:
            raise PlanError(
                f"{served.backend} needs wider keys and values for {group.group.name!r} ({phase}): {', '.join(wider)}",
                "served   the widths of the model: vLLM's cache has no other",
                fix=f'ATTN_OPTIONS=\'{{"exclude_backends": "{served.backend}"}}\'',
            )
    return plan


def served_model(model: Model) -> Model:
    """`model` with the groups that this bridge serves: causal attention with keys and values.

    Vision towers and recurrent layers are left to vLLM's own. Raises :class:`PlanError` for what it cannot leave.
    """
    served = tuple(group for group in model.groups if group.model == "target" and not _left_to_vllm(group))
    for group in served:
        _refuse_unserved(group, model)
    if not served:
        raise PlanError(
            f"{model.name} ({model.architecture}) has no attention layers that this bridge serves",
            f"groups   {', '.join(f'{g.name} ({g.kind})' for g in model.groups)}",
            fix="start vLLM without ATTN_BACKEND",
        )
    left = [group.name for group in model.groups if group not in served]
    if left:
        log.info("attn-vllm: left to vLLM's own backends: %s", ", ".join(left))
    return replace(model, groups=served)


def _left_to_vllm(group: LayerGroup) -> bool:
    return group.backend_kind in ("mm", "gdn", "external")


def _refuse_unserved(group: LayerGroup, model: Model) -> None:
    why = None
    if group.backend_kind != "mha":
        why = f"is {group.backend_kind}; only keys and values per head (mha) are served"
    elif "cross" in group.pools:
        why = "attends to an encoder"
    elif getattr(group.geometry, "chunk", None) is not None:
        why = "is chunked-local, which vLLM turns into batches of its own"
    if why is not None:
        raise PlanError(
            f"layer group {group.name!r} of {model.name} {why}",
            fix="start vLLM without ATTN_BACKEND: its own backends serve this model",
        )


def server_options(config: Any) -> dict[str, Any]:
    """What vLLM has decided already, as planning options."""
    cache, scheduler, parallel = config.cache_config, config.scheduler_config, config.parallel_config
    options = {
        "dtype": str(config.model_config.dtype),
        "context_length": config.model_config.max_model_len,
        "max_running_requests": scheduler.max_num_seqs,
        "chunked_prefill_size": scheduler.max_num_batched_tokens,
        "disable_prefix_cache": not cache.enable_prefix_caching,
        "tp_size": parallel.tensor_parallel_size,
        "async_schedule": bool(getattr(scheduler, "async_scheduling", False)),
    }
    if cache.cache_dtype not in (None, "auto"):
        if cache.cache_dtype not in _CACHE_DTYPES:
            raise PlanError(
                f"--kv-cache-dtype {cache.cache_dtype} is not served",
                f"served   {', '.join(_CACHE_DTYPES)}",
            )
        options["kv_cache_dtype"] = _CACHE_DTYPES[cache.cache_dtype]
    if getattr(cache, "user_specified_block_size", False):
        options["page_size"] = cache.block_size
    if config.model_config.enforce_eager:
        options["cuda_graph"] = "off"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise PlanError("this bridge does not serve decode context parallelism", fix="leave it at 1")
    return {**options, **_speculation(config.speculative_config)}


def _speculation(speculative: Any) -> dict[str, Any]:
    """Target verify of a chain of drafts. Raises :class:`PlanError` where a draft model would land on this bridge."""
    if speculative is None or not speculative.num_speculative_tokens:
        return {}
    own = getattr(getattr(speculative, "attention_backend", None), "name", None)
    if speculative.method not in _WITHOUT_DRAFT_LAYERS and own in (None, "CUSTOM", "CPU_ATTN"):
        raise PlanError(
            f"the draft model of speculative method {speculative.method!r} has attention layers, which are not planned",
            f"served   {', '.join(_WITHOUT_DRAFT_LAYERS)}",
            fix='on a GPU: --speculative-config \'{…, "attention_backend": "FLASH_ATTN"}\' gives the draft model a backend of vLLM',
        )
    steps = speculative.num_speculative_tokens
    return {
        "speculative_algorithm": "NGRAM",  # for the target every method is the verification of a chain
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": steps + 1,
        "speculative_eagle_topk": 1,
    }


def page_sizes(plan: Plan) -> list[int]:
    """The page sizes of the planned pools, each once."""
    return sorted({pool.page_size for pool in plan.pools})


def fit_block_size(config: Any, plan: Plan) -> None:
    """vLLM's block must be a multiple of the planned page; vLLM splits it. Moves the default, refuses a user's choice."""
    cache = config.cache_config
    pages = page_sizes(plan)
    if all(cache.block_size and cache.block_size % page == 0 for page in pages):
        return
    if getattr(cache, "user_specified_block_size", False):
        raise UsageError(
            f"--block-size {cache.block_size} is not a multiple of the planned page size {pages}",
            fix=f"--block-size {max(pages)}",
        )
    log.info("attn-vllm: block size %s -> %s, the planned page size", cache.block_size, max(pages))
    cache.block_size = max(pages)


def summary(plan: Plan) -> Iterator[str]:
    """One line a layer group: who serves its phases."""
    for group in plan.groups:
        served = ", ".join(
            f"{phase} {p.backend}:{p.variant} ({p.package} {p.version})" for phase, p in group.phases.items()
        )
        yield f"{group.group.name} ({len(group.group.layers)} layers): {served}"
    pools = ", ".join(f"{pool.name}: page {pool.page_size}, {pool.dtype}, {pool.layout}" for pool in plan.pools)
    yield f"{pools}; {plan.fingerprint[:19]}"
