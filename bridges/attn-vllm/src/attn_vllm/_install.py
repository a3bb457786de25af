"""What is put into vLLM when it loads its plugins: one function around ``create_engine_config``, one or two class paths.

Everything here runs in every process of every server on the machine that has this package, asked for or not. So it imports
nothing of attn-core, and the classes are given as dotted paths that vLLM resolves only when it builds an attention layer.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
from typing import Any

log = logging.getLogger("vllm.attn_vllm")

#: Set by the parent for its workers: the slot of vLLM's registry that the planned backends take.
SLOT_VARIABLE = "ATTN_VLLM_SLOT"
#: Slot of vLLM's registry -> the class that serves it.
CLASSES = {"CUSTOM": "attn_vllm.backend.CustomSlot", "CPU_ATTN": "attn_vllm.backend.CpuSlot"}
_MARK = "_attn_vllm_wrapped"


def install() -> None:
    """Wrap the engine's configuration (where engines are made) and register the slots. Idempotent."""
    # vLLM's own children do not need the former; a user's child that makes an engine has the module already.
    if "vllm.engine.arg_utils" in sys.modules or multiprocessing.parent_process() is None:
        wrap_engine_arguments()
    register_slot("CUSTOM")
    slot = os.environ.get(SLOT_VARIABLE)
    if slot:
        register_slot(slot)


def wrap_engine_arguments() -> None:
    """After ``EngineArgs.create_engine_config`` a plan is made, if one is asked for; before any process is started.

    This is the one place where vLLM's parent process knows model, device and cache. Without a request the configuration
    passes through untouched. An error of the planner reaches the user from here, before any weight is loaded.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        if is_asked(config):
            from attn_vllm.parent import adopt

            adopt(config)
        else:
            release_slot()
        return config

    setattr(create_engine_config, _MARK, True)
    EngineArgs.create_engine_config = create_engine_config


def is_asked(config: Any) -> bool:
    """Whether anybody asks for an attn-core backend, cheaply: four environment variables, two fields."""
    names = ("ATTN_BACKEND", "ATTN_PREFILL_BACKEND", "ATTN_DECODE_BACKEND", "ATTN_OPTIONS")
    if any(os.environ.get(name) for name in names):
        return True
    extra = getattr(config, "additional_config", None)
    if isinstance(extra, dict) and extra.get("attn"):
        return True
    chosen = getattr(getattr(config, "attention_config", None), "backend", None)
    return getattr(chosen, "name", None) == "CUSTOM" and not _taken_by_another("CUSTOM")


def register_slot(name: str) -> None:
    """Point a slot of vLLM's registry at this package; a slot that another plugin has taken is left alone."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if _taken_by_another(name):
        log.warning("slot %s of vLLM's attention registry belongs to another plugin; attn-vllm leaves it alone", name)
        return
    register_backend(AttentionBackendEnum[name], CLASSES[name])


def release_slot() -> None:
    """Undo the override of an earlier engine of this process, so that one without a request gets vLLM's own backend."""
    slot = os.environ.pop(SLOT_VARIABLE, None)
    if slot and slot != "CUSTOM":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        AttentionBackendEnum[slot].clear_override()


def slot_is_ours(name: str) -> bool:
    """Whether a slot points at this package."""
    return _path_of(name) == CLASSES[name]


def _taken_by_another(name: str) -> bool:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name].is_overridden() and _path_of(name) != CLASSES[name]


def _path_of(name: str) -> str | None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum[name]
    return member.get_path() if member.is_overridden() else None
