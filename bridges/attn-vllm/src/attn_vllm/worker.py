"""In a vLLM worker: the parent's plan, checked once, and what vLLM asks about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from attn_core.capabilities import graph_rank
from attn_core.context import GraphLimits
from attn_core.errors import BindError
from attn_core.plan import Plan, load_plan
from attn_vllm.asked import KEY, PLAN

log = logging.getLogger("vllm.attn_vllm")

#: The plan of this process. A process of vLLM serves one model.
_active: Plan | None = None

#: What may be asked of a layer, and is not served when it is true.
_UNSERVED = {
    "use_mla": "multi-head latent attention",
    "use_sparse": "sparse attention",
    "use_mm_prefix": "bidirectional image tokens",
    "use_per_head_quant_scales": "quantisation scales per head",
    "use_non_causal": "non-causal decoding",
    "use_pcp": "prefill context parallelism",
    "use_dcp": "decode context parallelism",
    "use_rswa": "reference sliding windows",
    "use_adaptive_verification": "adaptive verification (query lengths known on the device only)",
}
#: Properties that the plan has decided about, or that do not matter.
_DECIDED = {"dtype", "kv_cache_dtype", "device_capability", "use_kv_connector", "num_heads"}


def active_plan(config: Any = None) -> Plan:
    """The parent's plan, from the configuration that vLLM gave to this process.

    The first call checks that this process has every planned package in the planned version and raises
    :class:`attn_core.errors.WorkerMismatch` if not; :class:`BindError` where there is no plan at all.
    """
    global _active
    if config is None and _active is not None:
        return _active
    document = _document(config if config is not None else _current_config())
    if _active is not None and _active.fingerprint == document["fingerprint"]:
        return _active
    from attn_core.discovery import discover, verify_plan

    plan = load_plan(document)
    verify_plan(plan, discover())
    log.info("attn-vllm: plan %s checked in this worker", plan.fingerprint[:19])
    _active = plan
    return plan


def _current_config() -> Any:
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def _document(config: Any) -> Mapping[str, Any]:
    extra = getattr(config, "additional_config", None)
    table = extra.get(KEY) if isinstance(extra, dict) else None
    document = table.get(PLAN) if isinstance(table, dict) else None
    if document is None:
        raise BindError(
            "this vLLM process has no plan",
            "plans are made by EngineArgs.create_engine_config, in the process that starts the engine",
            fix="make the engine with vllm serve, LLM(…) or AsyncEngineArgs; do not build a VllmConfig by hand",
        )
    return document  # type: ignore[no-any-return]


def verify_length(config: Any, plan: Plan) -> int:
    """Tokens of a row that verifies a full chain of drafts; 0 where the plan verifies as prefill."""
    speculative = config.speculative_config
    steps = getattr(speculative, "num_speculative_tokens", None) or 0
    return steps + 1 if steps and all("verify" in item.phases for item in plan.groups) else 0


def graph_support(plan: Plan, verify_len: int) -> str:
    """Name of vLLM's ``AttentionCGSupport`` for the plan: rows of one token, rows of one length, or none.

    Mixed batches (``ALWAYS``) are run in pieces: attn-core captures decode and verify.
    """
    if plan.cuda_graph.get("mode") == "off":
        return "NEVER"
    phases = plan.cuda_graph.get("phases", {})
    if graph_rank(phases.get("decode", "none")) < graph_rank("uniform_decode"):
        return "NEVER"
    if verify_len and graph_rank(phases.get("verify", "none")) >= graph_rank("uniform_query"):
        return "UNIFORM_BATCH"
    return "UNIFORM_SINGLE_TOKEN_DECODE"


def graph_limits(config: Any, plan: Plan) -> GraphLimits:
    """The sizes that static buffers are made for: vLLM's capture sizes, as rows of one token and of one chain."""
    most = config.scheduler_config.max_num_seqs
    query_len = max(verify_length(config, plan), 1)
    sizes = config.compilation_config.cudagraph_capture_sizes or [1]
    rows = sorted({size // width for size in sizes for width in {1, query_len} if 0 < size // width <= most} | {most})
    pages = config.cache_config.num_gpu_blocks or 0
    block = config.cache_config.block_size or 1
    smallest = min(pool.page_size for pool in plan.pools)
    return GraphLimits(
        rows=tuple(rows),
        max_tokens=most * query_len,
        max_query_len=query_len,
        max_kv_len=config.model_config.max_model_len,
        max_pages=pages * max(block // smallest, 1),
    )


def reasons_against(plan: Plan, asked: Mapping[str, Any]) -> list[str]:
    """Why a layer that vLLM describes with `asked` is not served: one text a reason, none if it is.

    ``asked`` are the keywords of ``AttentionBackend.validate_configuration``. An unknown one that is set is a reason.
    """
    geometries = [item.group.geometry for item in plan.groups]
    reasons = []
    for name, value in asked.items():
        if name in _UNSERVED:
            if value:
                reasons.append(f"{_UNSERVED[name]} not served by attn-vllm")
        elif name == "head_size":
            planned = sorted({g.qk_dim for g in geometries})  # type: ignore[union-attr]
            if value not in planned:
                reasons.append(f"head_size {value}; planned {planned}")
        elif name == "has_sink":
            if value and not any(g.sinks for g in geometries):  # type: ignore[union-attr]
                reasons.append("attention sinks; planned without")
        elif name == "has_sliding_window":
            if value and not any(g.window for g in geometries):  # type: ignore[union-attr]
                reasons.append("sliding window; planned without")
        elif name == "block_size":
            pages = sorted({pool.page_size for pool in plan.pools})
            if value and any(value % page for page in pages):
                reasons.append(f"block_size {value}; needed is a multiple of {pages}")
        elif name == "use_batch_invariant":
            if value and not plan.batch_invariant:
                reasons.append("batch invariance; planned without")
        elif name == "attn_type":
            if value != "decoder":
                reasons.append(f"attention type {value}; only decoder layers are served")
        elif name not in _DECIDED and value:
            reasons.append(f"{name}={value!r}, which this version of attn-vllm does not know")
    return reasons
