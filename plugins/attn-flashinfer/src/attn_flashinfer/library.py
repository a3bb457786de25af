"""The functions of flashinfer that this adapter calls, found by their signatures.

Releases differ in which keywords they take, not in what the keywords mean. Nothing here reads a version: a keyword that a
function must take and does not is a :class:`PluginError` when the library is loaded, a keyword that only helps is left out.
Only documented, public names are used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from attn_core.errors import PluginError

#: Wrapper classes by the name this package uses for them: where they live, and what constructor, plan and run must take.
WRAPPERS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        ("kv_layout", "use_cuda_graph", "use_tensor_cores", "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer", "backend"),
        ("window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "sm_scale"),
        ("k_scale", "v_scale", "out", "return_lse"),
    ),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        ("kv_layout", "use_cuda_graph", "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf", "custom_mask_buf", "mask_indptr_buf", "backend"),
        ("head_dim_vo", "causal", "sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"),
        ("k_scale", "v_scale", "out", "return_lse"),
    ),
    "ragged": (
        "BatchPrefillWithRaggedKVCacheWrapper",
        ("kv_layout", "backend"),
        ("head_dim_vo", "causal", "sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"),
        ("out", "return_lse"),
    ),
    "sink": (
        "attention.BatchAttentionWithAttentionSinkWrapper",
        ("kv_layout", "use_cuda_graph", "qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf", "backend", "q_data_type", "kv_data_type", "head_dim_qk", "head_dim_vo", "window_left"),
        ("head_dim_vo", "causal", "window_left", "q_data_type", "kv_data_type"),
        ("out", "return_lse"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Taken:
    """The keywords that a function takes; ``every`` if it takes any."""

    names: frozenset[str]
    every: bool = False

    @classmethod
    def by(cls, function: Callable[..., Any]) -> Taken:
        """What `function` takes."""
        parameters = inspect.signature(function).parameters.values()
        every = any(p.kind is p.VAR_KEYWORD for p in parameters)
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return cls(frozenset(p.name for p in parameters if p.kind in kinds), every)

    def __contains__(self, name: str) -> bool:
        return self.every or name in self.names

    def keep(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `keywords` that may be passed."""
        return dict(keywords) if self.every else {k: v for k, v in keywords.items() if k in self.names}


@dataclass(frozen=True, slots=True)
class WrapperClass:
    """One wrapper class and what its three methods take."""

    make: Callable[..., Any]
    init: Taken
    plan: Taken
    run: Taken


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library: wrapper classes by name, and the in-place merge of two partial results (LSE in base 2)."""

    module: ModuleType
    wrappers: Mapping[str, WrapperClass]
    merge_in_place: Callable[..., Any] | None

    @property
    def version(self) -> str:
        """For messages only."""
        return str(getattr(self.module, "__version__", "unknown"))


_loaded: dict[int, Library] = {}  # an imported module is the same for all backends of a process


def load(needed: tuple[str, ...]) -> Library:
    """The library, with the wrappers `needed` checked. Raises :class:`PluginError` that names what is missing."""
    module = importlib.import_module("flashinfer")
    found = _loaded.get(id(module))
    if found is None:
        wrappers = {name: _wrapper(module, *spec) for name, spec in WRAPPERS.items()}
        merge = getattr(module, "merge_state_in_place", None)
        found = Library(module, {k: w for k, w in wrappers.items() if isinstance(w, WrapperClass)}, merge)
        _loaded.clear()
        _loaded[id(module)] = found
    for name in needed:
        if name not in found.wrappers:
            why = _wrapper(module, *WRAPPERS[name])
            raise PluginError(
                f"flashinfer-python {found.version} has no usable {WRAPPERS[name][0]}",
                f"found    {why}",
                fix="pip install 'flashinfer-python>=0.6.13'",
            )
    return found


def _wrapper(
    module: ModuleType, path: str, init: tuple[str, ...], plan: tuple[str, ...], run: tuple[str, ...]
) -> WrapperClass | str:
    """The class, or why it cannot be used."""
    made: Any = module
    for part in path.split("."):
        made = getattr(made, part, None)
        if made is None:
            return f"flashinfer.{path} does not exist"
    known = WrapperClass(made, Taken.by(made.__init__), Taken.by(made.plan), Taken.by(made.run))
    for method, taken, names in (("__init__", known.init, init), ("plan", known.plan, plan), ("run", known.run, run)):
        lacking = [name for name in names if name not in taken]
        if lacking:
            return f"flashinfer.{path}.{method} does not take {', '.join(lacking)}"
    return known
