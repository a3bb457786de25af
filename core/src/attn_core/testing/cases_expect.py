"""The expectations of case files: one small check for every word of their vocabulary.

Where two readings are possible:

- ``error``: there is no plan, for whatever reason (a wrong flag counts).
- ``*_mentions`` are substrings without regard to case, one or a list. ``error_mentions`` reads the message with its facts
  and advice; ``explain_mentions`` and ``log_mentions`` the whole explanation of a plan or an error.
- ``rejected``: one of the backend's reasons (ineligible, or outranked by a rule) contains the text, and it does not serve
  the group and phase that this reason is about.
- ``first``: who comes first: the prefill backend of a plan, the nearest miss of an error.
- ``variant``: the path that serves at least one phase of the main group.
- ``error_or_other_backend``: no plan, or the main group is not served by the backend that was named, or that is limited.
- ``kv_bytes_*`` are bytes a token and layer on this rank; ``…_per_rank_bf16`` sums over all layers.
- ``warmup_routes``: all of these are among the plan's routes; ``verify`` and ``target_verify`` are one word.
- ``padded_heads``: query heads as the decode kernel sees them, padded or not.
- ``suggest_tp``: sizes that the advice names; null, false or [] if it must name none.
- ``pools``: the pools in order, each with the facts that are given (``page``, ``model``, ``kind``, ``format``, ``dtype``).
- ``workspace_bytes_ge``: scratch memory of all chosen variants together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attn_core.capabilities import PHASES
from attn_core.geometry import MhaGeometry
from attn_core.planner.routes import warmup_routes
from attn_core.testing.cases_facts import FACTS, group_matches, main_bytes, padded_heads, state_bytes_of
from attn_core.testing.cases_outcome import Outcome
from attn_core.testing.cases_words import CaseError, listed

Check = Callable[[Outcome, Any], Iterator[str]]


def check(outcome: Outcome) -> Iterator[str]:
    """Every expectation of a row that is not met."""
    expect = outcome.row.expect
    if not isinstance(expect, Mapping):
        raise CaseError(f"unknown expectation {expect!r}")
    for key, wanted in expect.items():
        if key == "facts":
            yield from _facts(outcome, wanted)
        elif key in CHECKS:
            try:
                yield from CHECKS[key](outcome, wanted)
            except CaseError as error:
                yield f"{key}: {error}"
        elif key in FACTS:
            yield from _facts(outcome, {key: wanted})
        else:
            yield f"unknown key {key!r} of expect"


def _facts(outcome: Outcome, facts: Any) -> Iterator[str]:
    """What is expected of one model: facts (qk, v, cache …), layer lists by kind, or ordinary expectations."""
    for key, wanted in facts.items():
        if key in FACTS:
            found = FACTS[key](outcome)
        elif key in CHECKS:
            yield from CHECKS[key](outcome, wanted)
            continue
        else:
            groups = [g for g in outcome.model.groups if key in (g.kind, g.name)]
            if not groups:
                yield f"no group of kind {key!r} (kinds: {[g.kind for g in outcome.model.groups]})"
                continue
            found = sorted(layer for group in groups for layer in group.layers)
        if found != wanted:
            yield f"{key}: expected {wanted}, found {found}"


# --- makers of checks ---------------------------------------------------------------------------------------------------


def _equal(find: Callable[[Outcome], Any]) -> Check:
    def run(outcome: Outcome, wanted: Any) -> Iterator[str]:
        found = find(outcome)
        if found != wanted:
            yield f"expected {wanted!r}, found {found!r}"

    return run


def _one_of(find: Callable[[Outcome], Any]) -> Check:
    def run(outcome: Outcome, wanted: Any) -> Iterator[str]:
        found = find(outcome)
        if found not in listed(wanted):
            yield f"expected one of {wanted}, found {found!r}"

    return run


def _mentions(find: Callable[[Outcome], str]) -> Check:
    def run(outcome: Outcome, wanted: Any) -> Iterator[str]:
        text = find(outcome)
        for word in listed(wanted):
            if str(word).lower() not in text.lower():
                yield f"{word!r} is not mentioned in: {text[:1500]}"

    return run


def _backend(phase: str, kind: str = "", model: str = "target") -> Check:
    """The backend of a phase; ``NAME:VARIANT`` names the path, too."""

    def run(outcome: Outcome, wanted: Any) -> Iterator[str]:
        found = outcome.phase(phase, kind, model)
        names = (found.backend, f"{found.backend}:{found.variant}")
        if not any(str(name) in names for name in listed(wanted)):
            yield f"{phase}: expected {wanted}, found {names[1]}"

    return run


# --- single checks ------------------------------------------------------------------------------------------------------


def _ok(outcome: Outcome, wanted: Any) -> Iterator[str]:
    if (outcome.found is not None) is not bool(wanted):
        yield f"ok: expected {wanted}, found {'a plan' if outcome.found else outcome.error}"


def _error(outcome: Outcome, wanted: Any) -> Iterator[str]:
    if (outcome.error is not None) is not bool(wanted):
        yield f"error: expected {wanted}, found {'a plan' if outcome.found else outcome.error}"


def _error_text(outcome: Outcome) -> str:
    if outcome.error is None:
        raise CaseError(
            f"there is a plan: {[(g.group.name, {p: q.backend for p, q in g.phases.items()}) for g in outcome.plan.groups]}"
        )
    return "\n".join([str(outcome.error), outcome.error.fix or "", *getattr(outcome.error, "suggestions", ())])


def _error_lists(outcome: Outcome, wanted: Any) -> Iterator[str]:
    text = _error_text(outcome)
    names = {item.backend for item in outcome.rejected}
    for name in listed(wanted):
        if name not in names and name not in text:
            yield f"error_lists: {name!r} is not listed"


def _rejected(outcome: Outcome, wanted: Any) -> Iterator[str]:
    serving = {
        (g.group.model, g.group.name, phase, name)
        for g, phase, p in (outcome.found.phase_plans() if outcome.found else ())
        for name in (p.backend, f"{p.backend}:{p.variant}")
    }
    for name, texts in wanted.items():
        mine = [item for item in outcome.rejected if name in (item.backend, f"{item.backend}:{item.variant}")]
        for text in listed(texts):
            matching = [i for i in mine if any(str(text).lower() in f"{r} {r.fix}".lower() for r in i.reasons)]
            if not matching:
                said = list(dict.fromkeys(str(reason) for item in mine for reason in item.reasons))
                yield f"rejected: no reason of {name} contains {text!r}: {said[:6]}"
            elif all((i.model, i.group, i.phase, name) in serving for i in matching):
                yield f"rejected: {name} is chosen all the same"


def _not_any_phase(outcome: Outcome, wanted: Any) -> Iterator[str]:
    for group, phase, found in outcome.found.phase_plans() if outcome.found else ():
        for name in listed(wanted):
            if name in (found.backend, f"{found.backend}:{found.variant}"):
                yield f"not_any_phase: {name} serves {group.group.name} {phase}"


def _not_imported(outcome: Outcome, wanted: Any) -> Iterator[str]:
    modules = outcome.result[2]
    for name in listed(wanted):
        own = {str(name), *(m.package.replace("-", "_") for m in outcome.world.manifests if m.name == name)}
        if own & {module.partition(".")[0] for module in modules}:
            yield f"not_imported: {sorted(own)} was imported while planning"


def _no_weights(outcome: Outcome, wanted: Any) -> Iterator[str]:
    loaded = {"torch", "safetensors", "transformers"} & {module.partition(".")[0] for module in outcome.result[2]}
    if wanted and loaded:
        yield f"no_weights_loaded: planning imported {sorted(loaded)}"


def _variant(outcome: Outcome, wanted: Any) -> Iterator[str]:
    group = next(
        g for g in outcome.plan.groups if (g.group.model, g.group.name) == (outcome.main.model, outcome.main.name)
    )
    if isinstance(wanted, Mapping):
        for phase, name in wanted.items():
            found = group.phases[phase]
            if name not in (found.variant, f"{found.backend}:{found.variant}"):
                yield f"variant: {phase} is served by {found.backend}:{found.variant}, not {name}"
        return
    found_all = {f"{p.backend}:{p.variant}" for p in group.phases.values()} | {p.variant for p in group.phases.values()}
    for name in listed(wanted):
        if name not in found_all:
            yield f"variant: expected {name}, found {sorted(found_all)}"


def _groups(outcome: Outcome, wanted: Any) -> Iterator[str]:
    for item in listed(wanted):
        failures = [group_matches(group, item) for group in outcome.plan.groups]
        if not any(not lines for lines in failures):
            nearest = min(failures, key=len)
            yield f"groups: nothing like {item}: {nearest}"


def _no_group_kind(outcome: Outcome, wanted: Any) -> Iterator[str]:
    kinds = {group.kind for group in outcome.model.groups} | {group.backend_kind for group in outcome.model.groups}
    for kind in listed(wanted):
        if kind in kinds:
            yield f"no_group_kind: the model has a group of kind {kind}"


def _pools(outcome: Outcome, wanted: Any) -> Iterator[str]:
    pools = [pool for pool in outcome.plan.pools if pool.kind not in ("state", "index")]
    names = {"page": "page_size", "page_size": "page_size"}
    if len(wanted) > len(pools):
        yield f"pools: expected {len(wanted)}, found {len(pools)}"
    for item, pool in zip(wanted, pools, strict=False):
        for key, value in item.items():
            if not hasattr(pool, names.get(key, key)):
                yield f"unknown key {key!r} of pools"
            elif getattr(pool, names.get(key, key)) != value:
                yield f"pools: {pool.name} has {key} {getattr(pool, names.get(key, key))}, not {value}"


def _json_keys(outcome: Outcome, wanted: Any) -> Iterator[str]:
    table = outcome.plan.to_dict()
    for key in listed(wanted):
        if key not in table:
            yield f"json_keys: the plan has no {key!r}"


def _plan_options(outcome: Outcome, wanted: Any) -> Iterator[str]:
    stored = outcome.plan.options.get("backend_options", {})
    for name, values in wanted.items():
        if stored.get(name) != values:
            yield f"plan_options: {name} is {stored.get(name)}, not {values}"


def _buffer(outcome: Outcome, wanted: Any) -> Iterator[str]:
    if outcome.error is None and outcome.plan.limits["max_tokens_per_extend"] < wanted:
        yield f"error_or_buffer_ge: the plan is ready for {outcome.plan.limits['max_tokens_per_extend']} tokens"


def _other_backend(outcome: Outcome, wanted: Any) -> Iterator[str]:
    if not wanted or outcome.error is not None:
        return
    named = {str(v).partition(":")[0] for k, v in outcome.row.flags.items() if k.endswith("attention_backend")}
    toys = outcome.row.installed or {}
    named = named or {name for name, toy in toys.items() if "deny" in (toy or {})} or set(list(toys)[:1])
    for phase in ("prefill", "decode"):
        if outcome.phase(phase).backend in named:
            yield f"error_or_other_backend: {phase} is served by {outcome.phase(phase).backend}"


def _workspace(outcome: Outcome, wanted: Any) -> Iterator[str]:
    if outcome.plan.limits["workspace_bytes"] < wanted:
        yield f"workspace_bytes_ge: {outcome.plan.limits['workspace_bytes']} < {wanted}"


def _suggest_tp(outcome: Outcome, wanted: Any) -> Iterator[str]:
    text = outcome.advice
    named = {
        int(n) for said in re.findall(r"--tp-size (?:can be \[)?([\d ,or]+)", text) for n in re.findall(r"\d+", said)
    }
    if wanted in (None, False, []) and named:
        yield f"suggest_tp: expected none, the advice names {sorted(named)}"
    for size in listed(wanted) if wanted not in (None, False, []) else ():
        if size is True and not named:
            yield "suggest_tp: the advice names none"
        elif size is not True and size not in named:
            yield f"suggest_tp: {size} is not among {sorted(named)}"


def _routes(outcome: Outcome, wanted: Any) -> Iterator[str]:
    found = {route.name for route in warmup_routes(outcome.plan)}
    words = {"target_verify": "verify", "draft_decode": "draft", "prefill": "extend_no_prefix"}
    missing = [name for name in listed(wanted) if words.get(name, name) not in found]
    if missing:
        yield f"warmup_routes: {missing} are not among {sorted(found)}"


def _multiple(outcome: Outcome, wanted: Any) -> Iterator[str]:
    for group, phase, found in outcome.plan.phase_plans():
        pool = next((p for p in outcome.plan.pools if p.name in group.group.pools.values() and p.kind != "state"), None)
        if wanted and pool is not None and pool.page_size % found.kernel_page_size:
            yield f"{group.group.name} {phase}: pool page {pool.page_size}, kernel page {found.kernel_page_size}"


def _kernel_pages(outcome: Outcome, wanted: Any) -> Iterator[str]:
    for phase in ("prefill", "decode"):
        page = outcome.phase(phase).kernel_page_size
        if page not in listed(wanted):
            yield f"kernel_page_in: {phase} reads pages of {page}, not {wanted}"


def _adapter(outcome: Outcome, wanted: Any) -> Iterator[str]:
    changes = [a for a in outcome.plan.adjustments if "padded" in a.reason]
    if wanted in (None, False, "none") and changes:
        yield f"adapter: expected none, found {[a.reason for a in changes]}"
    elif wanted not in (None, False, "none"):
        texts = [f"{a.field} {a.reason}".lower() for a in changes]
        for word in listed(wanted):
            said = "pad" if word is True else str(word).lower().replace("_", " ")
            if not any(said in text for text in texts):
                yield f"adapter: {word!r} is not among {texts}"


def _first(outcome: Outcome, wanted: Any) -> Iterator[str]:
    if isinstance(wanted, Mapping):
        for phase, name in wanted.items():
            yield from _backend(phase)(outcome, name)
    elif outcome.found is not None:
        yield from _backend("prefill")(outcome, wanted)
    else:
        names = (
            [fact.split()[0].partition(":")[0] for fact in outcome.error.facts if "  " in fact] if outcome.error else []
        )
        rivals = [name for name in names if name in {item.backend for item in outcome.rejected}]
        if not rivals or rivals[0] not in listed(wanted):
            yield f"first: the nearest miss is {rivals[:1]}, not {wanted}"


def _sliding_layers(outcome: Outcome) -> int:
    return sum(
        len(group.layers)
        for group in outcome.model.groups
        if isinstance(group.geometry, MhaGeometry) and group.geometry.window and group.model == "target"
    )


def _eligible_on(outcome: Outcome, wanted: Any) -> Iterator[str]:
    yield from ()  # over all rows of the entry: see cases.py


_PHASE_CHECKS: Mapping[str, Check] = {
    name: check_
    for phase in PHASES
    for name, check_ in (
        (phase, _backend(phase)),
        (f"{phase}_in", _backend(phase)),
        (f"target_{phase}", _backend(phase)),
    )
}
CHECKS: Mapping[str, Check] = {
    **_PHASE_CHECKS,
    "draft_decode": _backend("draft", model="draft"),
    "draft_decode_in": _backend("draft", model="draft"),
    "linear_prefill": _backend("prefill", "gdn"),
    "linear_decode": _backend("decode", "gdn"),
    "linear_verify": _backend("verify", "gdn"),
    "vision": _backend("prefill", "mm"),
    "ok": _ok,
    "error": _error,
    "error_mentions": _mentions(_error_text),
    "error_lists": _error_lists,
    "error_or_buffer_ge": _buffer,
    "error_or_other_backend": _other_backend,
    "explain_mentions": _mentions(lambda o: o.text),
    "log_mentions": _mentions(lambda o: o.text),
    "warning_mentions": _mentions(lambda o: "\n".join([*o.plan.warnings, *(a.reason for a in o.plan.adjustments)])),
    "advice_mentions": _mentions(lambda o: o.advice),
    "problem_mentions": _mentions(lambda o: "\n".join(o.world.problems)),
    "rejected": _rejected,
    "not_any_phase": _not_any_phase,
    "not_imported": _not_imported,
    "no_weights_loaded": _no_weights,
    "variant": _variant,
    "groups": _groups,
    "no_group_kind": _no_group_kind,
    "pools": _pools,
    "json_keys": _json_keys,
    "plan_options": _plan_options,
    "workspace_bytes_ge": _workspace,
    "suggest_tp": _suggest_tp,
    "warmup_routes": _routes,
    "pool_page_multiple_of_kernel_page": _multiple,
    "kernel_page_in": _kernel_pages,
    "adapter": _adapter,
    "first": _first,
    "eligible_on": _eligible_on,
    "page_size": _equal(lambda o: o.plan.page_size),
    "page_size_in": _one_of(lambda o: o.plan.page_size),
    "layout": _one_of(lambda o: o.plan.kv_layout),
    "cuda_graph": _one_of(lambda o: o.plan.cuda_graph["mode"]),
    "mixed_batch": _equal(lambda o: o.plan.mixed_batch),
    "spec_topk": _equal(lambda o: o.plan.options.get("speculative_eagle_topk", 1 if o.read_options().topk else 0)),
    "padded_heads": _equal(padded_heads),
    "sliding_layers": _equal(_sliding_layers),
    "kv_heads_per_rank": _equal(FACTS["kv_heads_per_rank"]),
    "kv_bytes_full_layer": _equal(lambda o: FACTS["bytes_per_layer"](o, "full")),
    "kv_bytes_sliding_layer": _equal(lambda o: FACTS["bytes_per_layer"](o, "sliding")),
    "kv_bytes_per_token_per_rank_bf16": _equal(main_bytes),
    "state_bytes_per_seq_per_layer_ssm": _equal(state_bytes_of),
}
