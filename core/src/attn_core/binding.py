"""From a backend object to the functions that the router calls.

:func:`bind_backend` checks the object that ``attn_create`` returned and resolves each hook once. What comes out is called
positionally with all arguments of the specification, in its order: the bound method itself where its signature is complete,
a generated adapter where an older plugin takes fewer, core's default where a hook may be left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from attn_core.discovery._hookcheck import implementations, spec_arguments
from attn_core.errors import BindError, GraphError
from attn_core.hookspecs import BACKEND_HOOKS, PHASE_HOOK, REQUIRED, BackendSpec
from attn_core.manifest import Manifest, Variant
from attn_core.predicate import flatten

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, DraftSteps

Function: TypeAlias = Callable[..., Any]

#: Roles whose work is done by attn_extend and attn_decode.
_MAIN_ROLES = frozenset({"attend", "absorbed", "sparse", "scan"})


@dataclass(frozen=True, slots=True)
class BoundBackend:
    """The functions of one backend object. Immutable, so it may be used from several threads as far as the backend may.

    ``own`` are the hooks that the backend implements, ``adapted`` those of them that take fewer arguments than the
    specification. A hook that is neither implemented nor has a default raises :class:`BindError` when it is called.
    """

    backend: object
    manifest: Manifest
    variant: str
    own: frozenset[str]
    adapted: frozenset[str]
    attn_metadata: Function
    attn_metadata_in_graph: Function
    attn_graph_state: Function
    attn_draft_metadata: Function
    attn_extend: Function
    attn_decode: Function
    attn_ragged: Function
    attn_store: Function
    attn_gather: Function
    attn_index: Function
    attn_commit: Function
    attn_warmup: Function
    attend_ragged: Function = field(repr=False)  #: attn_ragged in the form of attn_extend, for kinds without a cache

    def provides(self, hook: str) -> bool:
        """Whether the backend implements `hook` itself."""
        return hook in self.own

    def with_functions(self, wrap: Callable[[Function], Function]) -> BoundBackend:
        """The same backend with every function replaced by ``wrap(function)``, which must pass its arguments on by position."""
        wrapped: dict[str, Any] = {name: wrap(getattr(self, name)) for name in (*BACKEND_HOOKS, "attend_ragged")}
        return replace(self, **wrapped)


def bind_backend(backend: object, manifest: Manifest, variant: str, phases: Iterable[str]) -> BoundBackend:
    """Check `backend` against the contract and resolve its hooks for `phases`.

    Raises :class:`BindError` with every fault at once: unknown or defaulted arguments, keyword-only parameters, misspelt or
    undecorated hooks, hooks that the kind, the variant's roles or the phases need and that are missing.
    """
    hooks, faults = implementations(backend, BackendSpec)
    needed = _required(manifest, manifest.variant(variant), frozenset(phases))
    broken = {fault.hook for fault in faults}
    missing = {hook: why for hook, why in needed.items() if hook not in hooks and hook not in broken}
    if faults or missing:
        facts = [line for fault in faults for line in fault.facts()]
        for hook, why in missing.items():
            facts += [
                f"hook       {hook}({', '.join(spec_arguments(BackendSpec)[hook])})",
                f"problem    missing: {why}",
            ]
        raise BindError(
            f"the backend object of {manifest.id}:{variant} does not fit the contract",
            f"plugin     {manifest.package or 'unknown'} {manifest.version}".rstrip(),
            f"object     {type(backend).__module__}.{type(backend).__qualname__}",
            *facts,
            fix="correct the plugin; docs/vendor-guide.md lists the hooks and their arguments",
        )
    functions = {name: adapt(name, function) for name, function in hooks.items()}
    adapted = frozenset(name for name, function in functions.items() if function is not hooks[name])
    functions = {**_defaults(functions, manifest, variant), **functions}
    ragged = _as_extend(functions["attn_ragged"])
    return BoundBackend(backend, manifest, variant, frozenset(hooks), adapted, **functions, attend_ragged=ragged)


def adapt(hook: str, function: Function) -> Function:
    """`function` itself if it takes all arguments of `hook` in their order, else a function that does and passes a subset.

    pluggy drops arguments in its own call path only; calling an older plugin's method directly would be a TypeError.
    """
    expected = spec_arguments(BackendSpec)[hook]
    taken = tuple(inspect.signature(function).parameters)
    if taken == expected:
        return function
    # Generated once, because a generic *args adapter would cost a tuple and a loop on every layer of every step.
    source = f"def {hook}({', '.join(expected)}):\n    return function({', '.join(taken)})\n"
    namespace: dict[str, Any] = {"function": function}
    exec(compile(source, f"<adapter of {hook}>", "exec"), namespace)
    return namespace[hook]  # type: ignore[no-any-return]


# --- what must be there -------------------------------------------------------------------------------------------------


def _required(manifest: Manifest, variant: Variant, phases: frozenset[str]) -> dict[str, str]:
    """Hooks that must be implemented, with the reason."""
    needed = dict.fromkeys(REQUIRED[manifest.kind], f"every {manifest.kind} backend answers it")
    roles = frozenset(variant.roles)
    if manifest.kind != "mm" and roles & _MAIN_ROLES:
        needed |= {PHASE_HOOK[phase]: f"it serves phase {phase}" for phase in sorted(phases)}
    if "ragged" in roles or any("ragged" in row.features for row in variant.allow):
        needed["attn_ragged"] = f"variant {variant.name} declares ragged"
    if "index" in roles:
        needed["attn_index"] = f"variant {variant.name} declares role index"
    if manifest.kind == "gdn" and "verify" in phases:
        needed["attn_commit"] = "it serves phase verify, after which states must move to the accepted token"
    levels = sorted({row.graph for row in variant.allow} - {"none"})
    if levels:
        needed["attn_graph_state"] = f"variant {variant.name} declares graph level {', '.join(levels)}"
    private = _private_formats(variant)
    if private:
        why = f"format {', '.join(private)} is the plugin's own, so core can neither write nor read it"
        needed |= {"attn_store": why, "attn_gather": why}
    return needed


def _private_formats(variant: Variant) -> list[str]:
    names: set[str] = set()
    for row in variant.allow:
        value = flatten(row.when).get("format.name", ())
        names.update([value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ())
    return sorted(name for name in names if ":" in name)


# --- core's defaults ----------------------------------------------------------------------------------------------------


def _defaults(functions: Mapping[str, Function], manifest: Manifest, variant: str) -> dict[str, Function]:
    """A function for every hook that is not implemented; one without a default says so when it is called."""
    defaults = {hook: _absent(hook, f"{manifest.id}:{variant}") for hook in BACKEND_HOOKS}
    defaults |= {"attn_metadata_in_graph": _no_metadata_in_graph, "attn_commit": _no_commit, "attn_warmup": _no_warmup}
    defaults["attn_draft_metadata"] = _draft_metadata(functions["attn_metadata"])
    if manifest.kind in ("mha", "mla", "dsa") and not {"attn_store", "attn_gather"} <= functions.keys():
        from attn_core.store import (
            default_gather,
            default_store,
        )  # loads torch, which a backend object has done already

        defaults |= {"attn_store": default_store, "attn_gather": default_gather}
    return defaults


def _absent(hook: str, who: str) -> Function:
    def absent(*arguments: Any) -> Any:
        raise BindError(f"{who} does not implement {hook}, and core has no default for it")

    return absent


def _no_metadata_in_graph(metadata: Any) -> None:
    """All metadata was made outside the graph."""


def _no_commit(batch: Any, group: Any, caches: Any, metadata: Any, accepted: Any) -> None:
    """Keys and values stay where they are; the server frees rejected slots."""


def _no_warmup(group: Any, phases: Any, limits: Any) -> None:
    """Nothing to compile or tune."""


def _as_extend(ragged: Function) -> Function:
    """``attn_ragged`` called like ``attn_extend``: the inputs' q, k and v, no cache, no part."""

    def attend_ragged(inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        result, lse = ragged(inputs.q, inputs.k, inputs.v, layer, metadata, None)
        if out is not None and result is not out:
            out.copy_(result)
            result = out
        return result, lse

    return attend_ragged


def _draft_metadata(metadata: Function) -> Function:
    """The default of ``attn_draft_metadata``: one ``attn_metadata`` a step, on the batches of :mod:`attn_core.paging`.

    ``state`` is None in an eager step. Under a graph it is a :class:`attn_core.paging.DraftStates`, with a GraphState a step.
    """

    def attn_draft_metadata(batch: AttentionBatch, group: Any, draft: DraftSteps, state: Any) -> tuple[Any, ...]:
        return tuple(made for _, made in draft_steps(metadata, batch, group, draft, state))

    return attn_draft_metadata


def draft_steps(
    metadata: Function, batch: AttentionBatch, group: Any, draft: DraftSteps, state: Any
) -> list[tuple[AttentionBatch, Any]]:
    """Every draft step's batch with its metadata from ``attn_metadata``. Raises :class:`GraphError` for a plain GraphState."""
    from attn_core.paging import DraftStates, step_batches

    if state is None:
        return [(step, metadata(step, group, "draft", None, False)) for step in step_batches(batch, draft)]
    if not isinstance(state, DraftStates):
        # attn_metadata returns the same object for the same key: N steps would share the last one's contents
        raise GraphError(
            "draft steps under a graph need a state each, or a backend that implements attn_draft_metadata",
            fix="GraphLimits(..., draft=(steps, topk)) in Router.graph_state",
        )
    steps, capture = state.load(batch, draft)
    # fewer steps than the limits allow leave the last states alone
    pairs = zip(steps, state.states, strict=False)
    return [(step, metadata(step, group, "draft", one, capture)) for step, one in pairs]
