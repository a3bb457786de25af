"""Loading FlashAttention 4: its compile cache, its functions by signature, and a note before anything is compiled.

The library compiles a kernel at the first call with a new combination of types, head dims and options (2 to 10 seconds each),
keeps it in the process, and on disk where its cache is switched on. The adapter switches it on, in attn-core's cache directory,
unless the user has set the library's own variables. That cache is the library's: written to a temporary file, renamed, under a
file lock, keyed by its sources and versions, so that ranks and processes may share it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import threading
from collections.abc import Hashable
from logging import Logger
from typing import Any

from attn_core.availability import Availability
from attn_core.errors import AttnError, BindError
from attn_flash.operators import Bound

DISTRIBUTION, INSTALL = "flash-attn-4", "pip install flash-attn-4"
#: What the library needs to compile, by import name; its metadata names the distributions.
PARTS = {
    "cutlass": "pip install 'nvidia-cutlass-dsl[cu13]'",
    "quack": "pip install quack-kernels",
    "tvm_ffi": "pip install apache-tvm-ffi",
}
CACHE_SWITCH, CACHE_PLACE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"

#: What the adapter gives by name.
ARGUMENTS = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table",
    "softmax_scale", "causal", "score_mod", "learnable_sink", "num_splits", "mask_mod", "aux_tensors", "return_lse",
)  # fmt: skip
#: Only the inner function has these: results in place, windows as two numbers.
INNER_ARGUMENTS = ("out", "window_size_left", "window_size_right")


def probe() -> Availability:
    """Whether the library and what it compiles with are installed; nothing is imported."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return Availability.missing(DISTRIBUTION, INSTALL)
    for module, command in PARTS.items():
        if importlib.util.find_spec(module) is None:
            return Availability.missing(
                module, command, f"not importable: {DISTRIBUTION} {version} compiles its kernels with it"
            )
    return Availability(True, versions={DISTRIBUTION: version, **_version_of("nvidia-cutlass-dsl")})


def _version_of(name: str) -> dict[str, str]:
    try:
        return {name: importlib.metadata.version(name)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def use_cache(log: Logger) -> None:
    """Switch the library's cache on disk on, unless the user has decided. Has an effect only before the first import."""
    if CACHE_SWITCH in os.environ:
        return
    from attn_core.jit_cache import cache_directory

    try:
        place = cache_directory() / "flash-attn-4"
    except AttnError as error:
        log.warning("compiled FlashAttention 4 kernels are not kept: %s", error)
        return
    os.environ.setdefault(CACHE_PLACE, str(place))
    os.environ[CACHE_SWITCH] = "1"


def load(log: Logger) -> Bound:
    """The library's forward function: the inner one where this release has it in the known form, else the public one.

    Raises :class:`BindError` if the library does not load, or takes none of the known forms.
    """
    use_cache(log)
    try:
        module: Any = importlib.import_module("flash_attn.cute.interface")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BindError(
            f"{DISTRIBUTION} does not load: {type(error).__name__}: {error}",
            fix="pip install -U flash-attn-4 'nvidia-cutlass-dsl[cu13]', which have to fit each other",
        ) from error
    inner = getattr(module, "_flash_attn_fwd", None)
    if inner is not None:
        bound = Bound.of_function(inner, f"{DISTRIBUTION}: _flash_attn_fwd")
        if bound.has(*ARGUMENTS, *INNER_ARGUMENTS):
            return bound
    bound = Bound.of_function(module.flash_attn_varlen_func, f"{DISTRIBUTION}: flash_attn_varlen_func")
    bound.require(*ARGUMENTS, "window_size", fix=INSTALL)
    return bound


class Progress:
    """Says what is about to be compiled, once for each combination."""

    __slots__ = ("_lock", "_log", "_seen")

    def __init__(self, log: Logger) -> None:
        self._log, self._seen, self._lock = log, set[Hashable](), threading.Lock()

    def note(self, key: Hashable, what: str) -> None:
        """Log `what` if `key` is new in this object."""
        if key in self._seen:
            return
        with self._lock:
            if key in self._seen:
                return
            self._seen.add(key)
        self._log.info("FlashAttention 4 compiles a kernel, or loads it from its cache (seconds): %s", what)
