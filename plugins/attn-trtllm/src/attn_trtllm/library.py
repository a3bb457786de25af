"""The FlashInfer functions that this package calls: found by name, checked by signature, never by version string.

A function serves if it takes every argument that its variant passes and demands no other. What an older or newer release
lacks, or adds as optional, is decided here, once, when a backend is created.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core.errors import BindError

DISTRIBUTION = "flashinfer-python"
INSTALL = "pip install 'flashinfer-python>=0.7.4'"


@dataclass(frozen=True, slots=True)
class Entry:
    """One public function: where it is, the arguments always passed, and those passed where a release takes them."""

    module: str
    name: str
    passes: tuple[str, ...]
    optional: tuple[str, ...] = ()


_DECODE = (
    "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "bmm2_scale",
    "window_left", "out", "sinks", "kv_layout", "q_len_per_req",
)  # fmt: skip
_PREFILL = (
    "workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale", "batch_size",
    "cum_seq_lens_q", "cum_seq_lens_kv", "block_tables", "out", "sinks", "window_left",
)  # fmt: skip

XQA = Entry("flashinfer.decode", "xqa_batch_decode_with_kv_cache", (*_DECODE, "mask"), ("q_cu_seq_lens", "enable_pdl"))
#: The order in which decode passes arguments without naming them: named ones cost a call of few rows about a microsecond.
XQA_ORDER = (*_DECODE[:9], "out", "sinks", "kv_layout", "enable_pdl", "q_len_per_req")
FMHA_V2 = Entry(
    "flashinfer.prefill",
    "trtllm_fmha_v2_prefill",
    ("qkv", "input_layout", *_PREFILL, "logits_soft_cap_scale", "mask_mode", "chunked_attention_size"),
)
GEN_DECODE = Entry(
    "flashinfer.decode",
    "trtllm_batch_decode_with_kv_cache",
    (*_DECODE, "backend", "kv_cache_sf", "lse", "return_lse"),
    ("multi_ctas_kv_counter_buffer",),
)
GEN_CONTEXT = Entry(
    "flashinfer.prefill",
    "trtllm_batch_context_with_kv_cache",
    ("query", "kv_cache", *_PREFILL, "kv_layout", "kv_cache_sf", "lse", "return_lse"),
    ("multi_ctas_kv_counter_buffer", "backend"),
)

#: The functions of each variant.
ENTRIES: Mapping[str, tuple[Entry, ...]] = {
    "xqa": (XQA,),
    "fmha_v2": (FMHA_V2,),
    "trtllm-gen": (GEN_DECODE, GEN_CONTEXT),
}


@dataclass(frozen=True, slots=True)
class Function:
    """A bound function, which optional arguments it takes, and the order of its arguments."""

    call: Callable[..., Any]
    optional: frozenset[str]
    order: tuple[str, ...] = ()


def bind(entry: Entry) -> Function:
    """Import and check one function. Raises :class:`BindError` if it is not there or its signature does not fit."""
    try:
        module = importlib.import_module(entry.module)
    except ImportError as error:
        raise BindError(f"{entry.module} does not load: {error}", fix=INSTALL) from error
    call = getattr(module, entry.name, None)
    if call is None:
        raise BindError(f"{entry.module} has no function {entry.name}", fix=INSTALL)
    signature = inspect.signature(call)
    problems = misfits(signature, entry)
    if problems:
        raise BindError(f"{entry.module}.{entry.name} has another signature", *problems, fix=INSTALL)
    names = tuple(signature.parameters)
    return Function(call, frozenset(entry.optional) & frozenset(names), names)


def misfits(signature: inspect.Signature, entry: Entry) -> list[str]:
    """Why calls of this package do not fit a signature: one line a fact, empty if they do."""
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    found = [f"missing  {name}" for name in entry.passes if name not in parameters]
    passed = {*entry.passes, *entry.optional}
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in parameters.items():
        if parameter.kind in plain and parameter.default is parameter.empty and name not in passed:
            found.append(f"demands  {name}")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            found.append(f"takes    {name} by position only")
    return found


def signature_in_source(text: str, name: str) -> inspect.Signature | None:
    """The signature of a top-level function, read from source text without running it; None if it is not there."""
    start = re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE)
    if start is None:
        return None
    end = re.compile(r"^\)(?:(?: ->.*?)?):$", re.MULTILINE | re.DOTALL).search(text, start.start())
    if end is None:
        return None
    function = ast.parse(f"{text[start.start() : end.end()]}\n    pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return signature_of(function)


def signature_of(function: ast.FunctionDef) -> inspect.Signature:
    """The :class:`inspect.Signature` of a parsed function: names, kinds and whether there is a default."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = []
    for number, argument in enumerate(positional):
        only = number < len(arguments.posonlyargs)
        kind = inspect.Parameter.POSITIONAL_ONLY if only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        found.append(_parameter(argument.arg, kind, number >= first_default))
    if arguments.vararg is not None:
        found.append(_parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL, False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default is not None))
    if arguments.kwarg is not None:
        found.append(_parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD, False))
    return inspect.Signature(found)


def _parameter(name: str, kind: Any, has_default: bool) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=None if has_default else inspect.Parameter.empty)


def source_of(entry: Entry) -> str | None:
    """The installed source text of an entry's module, found without importing it; None if there is none."""
    package, _, module = entry.module.partition(".")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, f"{module}.py")
        if path.is_file():
            return path.read_text(encoding="utf-8", errors="replace")
    return None
