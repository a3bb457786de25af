"""The first use of a kernel: said beforehand, compiled by one process at a time, and never inside a capture.

FlashInfer compiles a kernel at its first call and keeps the result on disk. A stamp of our own, in core's cache directory,
remembers which kernels this machine has compiled, so that only a real compilation is announced and waited for.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_core.errors import GraphError
from attn_core.jit_cache import JitCache, cache_directory
from attn_trtllm.library import DISTRIBUTION

#: Kernels that this process has run: a loaded library stays loaded.
loaded: set[str] = set()
_lock = threading.Lock()


def run(
    key: str, seconds: str, log: logging.Logger, capturing: Callable[[], bool], call: Callable[..., Any], arguments: Any
) -> Any:
    """``call(**arguments)``, which compiles the kernel `key` if this machine has not; `seconds` is how long that takes.

    Raises :class:`GraphError` inside a capture if this process has not run the kernel yet.
    """
    if key in loaded:
        return call(**arguments)
    if capturing():
        raise GraphError(
            f"the kernel {key} is not loaded, and a capture cannot compile it",
            fix="attn warmup PLAN, or one eager step, before the capture",
        )
    with _lock:
        result = call(**arguments) if key in loaded else _first(key, seconds, log, call, arguments)
        loaded.add(key)
    return result


def _first(key: str, seconds: str, log: logging.Logger, call: Callable[..., Any], arguments: Any) -> Any:
    """The first call in this process; under the machine's lock if the machine has not compiled the kernel."""
    results: list[Any] = []

    def compile_into(folder: Path) -> None:
        log.warning("trtllm: compiling %s with nvcc, once a machine: about %s", key, seconds)
        start = time.perf_counter()
        results.append(call(**arguments))
        took = time.perf_counter() - start
        (folder / "compiled.txt").write_text(f"{key}\n{took:.1f} s\n", encoding="utf-8")
        log.info("trtllm: %s is ready after %.1f s", key, took)

    cache = JitCache(cache_directory() / "attn-trtllm")
    cache.build(f"{key}-{_library()}", compile_into)
    return results[0] if results else call(**arguments)


def _library() -> str:
    """The release and where it keeps compiled kernels: another release or folder compiles again."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        version = "unknown"
    return f"{version}-{os.environ.get('FLASHINFER_WORKSPACE_BASE', str(Path.home()))}"
