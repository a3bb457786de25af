"""One plan for one model runner: the server's facts as options, the user's choice, and SGLang's page size as a fact.

SGLang has no place where a third party could declare a page size, so the bridge enforces it: a plan that needs another
one is refused at construction, with the flag that makes it work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attn_core.errors import PlanError, UsageError
from attn_core.options import Options

if TYPE_CHECKING:
    from attn_core.discovery import Registry
    from attn_core.geometry import Model
    from attn_core.plan import Plan
    from attn_sglang.facts import ServerFacts

#: Planning options of the user: a JSON object, or ``name=value`` pairs separated by ``;``.
OPTIONS_VARIABLE = "ATTN_SGLANG_OPTIONS"

#: Options that SGLang's own flags decide; naming one of them in :data:`OPTIONS_VARIABLE` is an error.
SERVER_OPTIONS = {
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "kv_layout": "SGLang's KV pool",
    "page_size": "--page-size",
    "chunked_prefill_size": "--chunked-prefill-size",
    "disable_prefix_cache": "--disable-radix-cache",
    "context_length": "--context-length",
    "max_running_requests": "--max-running-requests",
    "async_schedule": "--disable-overlap-schedule",
    "tp_size": "--tp-size",
    "deterministic": "--enable-deterministic-inference",
    "cuda_graph": "--cuda-graph-backend-decode",
    "speculative_algorithm": "--speculative-algorithm",
    "speculative_num_draft_tokens": "--speculative-num-draft-tokens",
    "speculative_eagle_topk": "--speculative-eagle-topk",
    "speculative_attention_mode": "--speculative-attention-mode",
}

_PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)


def user_options(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The options in ``ATTN_SGLANG_OPTIONS``. Raises :class:`UsageError` for text that is neither form, for an option
    that attn-core does not know, and for one that SGLang decides."""
    text = (os.environ if environment is None else environment).get(OPTIONS_VARIABLE, "").strip()
    if not text:
        return {}
    values = _from_json(text) if text.startswith("{") else _from_pairs(text)
    values = {name.strip().replace("-", "_"): value for name, value in values.items()}
    for name in values:
        if name in SERVER_OPTIONS:
            raise UsageError(
                f"{OPTIONS_VARIABLE}: {name} is SGLang's to decide", fix=f"{SERVER_OPTIONS[name]} of the server"
            )
    Options.of(values)  # an unknown name is refused here, with the nearest ones
    return values


def _from_json(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{OPTIONS_VARIABLE} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{OPTIONS_VARIABLE}: a JSON object is needed, found {type(values).__name__}")
    return values


def _from_pairs(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in filter(str.strip, text.split(";")):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"{OPTIONS_VARIABLE}: {part.strip()!r} is not name=value")
        values[name] = _plain(value.strip())
    return values


def _plain(text: str) -> Any:
    """Numbers and truth values as what they are; everything else is a name."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int) else text


def server_options(facts: ServerFacts, layout: str) -> dict[str, Any]:
    """The options that follow from the server. The layers' head counts are those of this rank, so no ``tp_size``."""
    values: dict[str, Any] = {
        "dtype": _word(facts.dtype),
        "kv_cache_dtype": _word(facts.kv_dtype),
        "kv_layout": layout,
        "page_size": facts.page_size,
        "chunked_prefill_size": facts.chunked_prefill_size or -1,
        "disable_prefix_cache": not facts.prefix_cache,
        "context_length": facts.context_length,
        "max_running_requests": facts.max_rows,
        "async_schedule": facts.overlap,
        "deterministic": facts.deterministic,
        "cuda_graph": "decode" if facts.graphs else "off",
    }
    if facts.speculation is not None:
        # only verification happens in the target model, whatever drafts: NGRAM plans that and no draft model
        values |= {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": facts.speculation.draft_tokens,
            "speculative_eagle_topk": 2 if facts.speculation.tree else 1,
            "speculative_attention_mode": facts.speculation.mode,
        }
    return values


def _word(dtype: Any) -> str:
    """``torch.bfloat16`` as attn-core writes it; e4m3fn is the e4m3 of its vocabulary."""
    return str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "fp8_e4m3").replace("float8_e5m2", "fp8_e5m2")


def choice_options(facts: ServerFacts, name: str, backend: str | None) -> dict[str, Any]:
    """Which phases `backend` (None: attn-core chooses) is asked for, under the registered `name`.

    Under SGLang's own split this object serves one side, and only that side is pinned: a decode-only backend is not
    asked whether it could prefill.
    """
    if backend is None:
        return {}
    if not facts.split:
        return {"attention_backend": backend}
    side = "prefill" if facts.prefill_name == name else "decode"
    return {f"{side}_attention_backend": backend}


def make_plan(
    model: Model, facts: ServerFacts, registry: Registry, name: str, backend: str | None, layout: str = "NHD"
) -> Plan:
    """The plan of one runner. Raises :class:`PlanError` with every candidate's reasons; where another page size would do,
    its last line is the flag to pass."""
    if facts.refused:
        raise PlanError(
            f"--attention-backend {name}: " + " and ".join(what for what, _ in facts.refused) + " cannot be served",
            f"model    {facts.model}",
            fix="; ".join(dict.fromkeys(fix for _, fix in facts.refused)),
        )
    mine = {**user_options(), **choice_options(facts, name, backend)}
    values = {**server_options(facts, layout), **mine}
    try:
        plan = _solve(model, facts, registry, values)
    except PlanError as error:
        smaller = _in_smaller_pages(model, facts, registry, values)
        if smaller is None:
            raise _with_page_flag(error, model, facts, registry, values, name) from error
        plan = smaller
    _check_pages(plan, facts)
    return plan


def _in_smaller_pages(model: Model, facts: ServerFacts, registry: Registry, values: Mapping[str, Any]) -> Plan | None:
    """SGLang's pages are runs of slots, so a page of 128 is two pages of 64 for a backend that needs those. In the
    head-major layout a page is one block of memory and stays what it is."""
    if values["kv_layout"] != "NHD":
        return None
    for size in sorted((n for n in _PAGE_SIZES if n < facts.page_size and facts.page_size % n == 0), reverse=True):
        try:
            return _solve(model, facts, registry, {**values, "page_size": size})
        except PlanError:
            continue
    return None


def _solve(model: Model, facts: ServerFacts, registry: Registry, values: Mapping[str, Any]) -> Plan:
    from attn_core.planner import plan_for
    from attn_core.platform import detect_platform

    return plan_for(model, detect_platform(facts.device), Options.of(values), registry)


def _with_page_flag(
    error: PlanError,
    model: Model,
    facts: ServerFacts,
    registry: Registry,
    values: Mapping[str, Any],
    name: str,
) -> PlanError:
    """`error` with the page size that would work, if the page size is all that stands in the way."""
    for size in _PAGE_SIZES:
        if size == facts.page_size:
            continue
        try:
            _solve(model, facts, registry, {**values, "page_size": size})
        except PlanError:
            continue
        return PlanError(
            f"--attention-backend {name} cannot run with SGLang's page size {facts.page_size}",
            f"needed   pages of {size} tokens, for example; SGLang has no way for a plugin to ask for them",
            error.message,
            *error.facts,
            fix=f"--page-size {size}",
            rejected=error.rejected,
        )
    return error


def _check_pages(plan: Plan, facts: ServerFacts) -> None:
    """SGLang has one page size for all its pools; a pool of the plan may have smaller pages that divide it."""
    for pool in plan.pools:
        if facts.page_size % pool.page_size:
            raise PlanError(
                f"pool {pool.name!r} was planned with pages of {pool.page_size} tokens, SGLang has {facts.page_size}",
                "SGLang has one page size for all pools",
                fix=f"--page-size {pool.page_size}",
            )
        if pool.format != "plain":
            raise PlanError(
                f"pool {pool.name!r} was planned in format {pool.format}; SGLang's pool holds plain keys and values",
                fix="--kv-cache-dtype auto, or a backend of SGLang's own",
            )
