"""Runs one backend on one case, in the order that every server follows: metadata, in-graph part, store, attend.

::

    backend = BackendUnderTest.installed("mha", "torch_native")        by its entry point
    backend = BackendUnderTest.of_module(module, manifest)             a module that is not installed
    session = backend.open(case)                                       a backend object for the case's group and pool
    result = session.run(case)                                         (out, lse)

The plan of the phase is made by hand from the manifest's row, so that a backend is judged alone, without a router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.binding import BoundBackend, bind_backend
from attn_core.context import Context, GraphLimits, GraphState, Metadata
from attn_core.errors import UsageError
from attn_core.geometry import LayerGroup
from attn_core.hookspecs import PHASE_HOOK
from attn_core.manifest import Manifest, Row
from attn_core.plan import GraphPlan, PartPlan, PhasePlan
from attn_core.testing.elements import torch_dtype
from attn_core.testing.spec import Case, CaseSpec

Create = Callable[[Manifest, str, Context], object]


class Result(NamedTuple):
    """What a backend returned for one layer."""

    out: torch.Tensor
    lse: torch.Tensor | None


class ContractError(Exception):
    """A backend broke the protocol: a missing hook, a result of the wrong form, None for metadata."""


@dataclass
class BackendUnderTest:
    """A backend by its manifest, and the function that makes its objects."""

    manifest: Manifest
    create: Create
    probe: Callable[..., Any] | None = None

    @classmethod
    def of_module(cls, module: ModuleType | Any, manifest: Manifest) -> BackendUnderTest:
        """From an imported plugin module (or an object with ``attn_create``). Raises ContractError without that hook."""
        create = getattr(module, "attn_create", None)
        if create is None:
            raise ContractError(f"{module} has no attn_create")
        return cls(manifest, create, getattr(module, "attn_probe", None))

    @classmethod
    def installed(cls, kind: str, name: str) -> BackendUnderTest:
        """By discovery. Raises :class:`UsageError` for an unknown backend, :class:`PluginError` for a broken plugin."""
        if name == "reference" and kind in ("mha", "gdn", "mla"):
            return cls._reference(kind)
        from attn_core.discovery import discover

        registry = discover()
        for manifest in registry.manifests:
            if manifest.kind == kind and name in (manifest.name, *manifest.aliases):
                return cls(manifest, registry.create, registry.probe)
        problem = registry.problem_for(f"{kind}/{name}")
        if problem is not None:
            raise problem.to_error(f"{kind}/{name} cannot be used")
        known = [manifest.id for manifest in registry.manifests]
        raise UsageError(f"no installed plugin declares {kind}/{name}", f"installed {', '.join(known) or 'none'}")

    @classmethod
    def _reference(cls, kind: str) -> BackendUnderTest:
        """The kit's own backends, which no distribution declares."""
        from attn_core.testing import reference_backend, reference_gdn, reference_mla

        if kind == "gdn":
            return cls.of_module(reference_gdn, reference_gdn.load_gdn_manifest())
        if kind == "mla":
            return cls.of_module(reference_mla, reference_mla.load_mla_manifest())
        return cls.of_module(reference_backend, reference_backend.load_manifest())

    def open(
        self,
        spec: CaseSpec | Case,
        variant: str = "",
        *,
        phases: Iterable[str] = (),
        limits: GraphLimits | None = None,
        lanes: int = 1,
        options: Mapping[str, Any] | None = None,
        row: Row | None = None,
        context_class: type[Context] = Context,
        group: LayerGroup | None = None,
        form: str | None = None,
        batch_invariant: bool = False,
    ) -> Session:
        """A backend object for the group, pool and phases of `spec` (a Case lends its own group and pool).

        `batch_invariant` is what ``--deterministic`` sets: the backend must keep what it declares of that feature.
        """
        from attn_core.testing.batches import group_of, pool_of

        case = spec if isinstance(spec, Case) else None
        described = case.spec if case is not None else spec
        assert isinstance(described, CaseSpec)
        group = group or (case.group if case is not None else group_of(described))
        pool = case.pool if case is not None else pool_of(described, group)
        name = variant or self.manifest.variants[0].name
        names = dict.fromkeys((*phases, described.phase))
        plans = {phase: replace(self._phase_plan(name, described, phase, limits, row), form=form) for phase in names}
        context = context_class(
            device=torch.device(described.device),
            dtype=torch_dtype(described.out),
            group=group,
            pools={"attend": pool, "cross": pool} if group.kind == "cross" else {"attend": pool},
            pool_index={role: int(described.decoy_pool) for role in ("attend", "cross")},
            phases=plans,
            limits=limits,
            lanes=lanes,
            options=dict(options or {}),
            batch_invariant=batch_invariant,
        )
        backend = self.create(self.manifest, name, context)
        return Session(bind_backend(backend, self.manifest, name, tuple(plans)), context)

    def _phase_plan(
        self, variant: str, spec: CaseSpec, phase: str, limits: GraphLimits | None, row: Row | None
    ) -> PhasePlan:
        manifest = self.manifest
        row = row or matching_row(manifest, variant, phase)
        part = PartPlan(
            role="attend",
            backend=manifest.name,
            variant=variant,
            package=manifest.package,
            version=manifest.version,
            fuses=tuple(sorted(row.fuses)) if row else (),
            features=tuple(sorted(row.features)) if row else (),
        )
        graph = GraphPlan()
        if limits is not None and row is not None:
            graph = GraphPlan(row.graph, limits.max_rows, limits.max_query_len, limits.max_kv_len, (), row.piecewise)
        return PhasePlan(
            manifest.name,
            variant,
            manifest.package,
            manifest.version,
            (part,),
            kernel_page_size=spec.kernel_page or spec.page_size,
            graph=graph,
            needs_lse=spec.needs_lse,
            mixed=bool(spec.decode_rows),
            host_lengths=spec.host,
            padded_out=row.padded_out if row else "garbage",
            q_dtype=spec.dtype,
        )


def matching_row(manifest: Manifest, variant: str, phase: str) -> Row | None:
    """The first allow row of a variant whose phase condition holds, or None."""
    for row in manifest.variant(variant).allow:
        if all(c.accepts(phase) for c in row.conditions if c.axis == "phase"):
            return row
    return None


class Session:
    """One backend object at work. ``before_hook``, if set, is called with the name of each hook before it runs."""

    def __init__(self, bound: BoundBackend, context: Context) -> None:
        self.bound, self.context = bound, context
        self.before_hook: Callable[[str], None] | None = None

    def has(self, hook: str) -> bool:
        """Whether the backend implements this hook itself."""
        return self.bound.provides(hook)

    def call(self, hook: str, *arguments: Any) -> Any:
        """Call a bound hook with all arguments of the specification, in its order."""
        if self.before_hook is not None:
            self.before_hook(hook)
        return getattr(self.bound, hook)(*arguments)

    def metadata(
        self, batch: AttentionBatch, phase: str, state: GraphState | None = None, capture: bool = False
    ) -> Metadata:
        """Metadata of one step, outside a graph. Raises :class:`ContractError` if the backend returns None."""
        found = self.call("attn_metadata", batch, self.context.group, phase, state, capture)
        if found is None:
            raise ContractError("attn_metadata returned None")
        return found  # type: ignore[no-any-return]

    def in_graph(self, metadata: Metadata) -> None:
        """The device part of the metadata."""
        self.call("attn_metadata_in_graph", metadata)

    def graph_state(self, limits: GraphLimits, phases: Sequence[str], lane: int = 0) -> GraphState:
        """Static buffers of one lane."""
        return self.call("attn_graph_state", self.context.group, tuple(phases), limits, lane)  # type: ignore[no-any-return]

    def store(self, case: Case, address: KvAddress | None = None) -> None:
        """Write the case's new tokens, by the backend's own store if it has one, else by core's."""
        if case.inputs.store and case.inputs.k is not None and not self.fuses_store(case.phase):
            address = address or case.batch.kv(case.pool_index)
            self.call("attn_store", case.inputs, case.layer, case.cache, address)

    def fuses_store(self, phase: str) -> bool:
        """Whether the variant writes new tokens inside its attention call."""
        return any("store" in part.fuses for part in self.context.phases[phase].parts)

    def attend(self, case: Case, metadata: Metadata, out: torch.Tensor | None = None) -> Result:
        """One layer. Raises :class:`ContractError` for a result that is not (out, lse)."""
        mixed = len({segment.phase for segment in case.batch.segments}) > 1
        hook = "attn_extend" if mixed else PHASE_HOOK[case.phase]
        found = self.call(hook, case.inputs, case.layer, case.cache, metadata, out)
        return result_of(hook, found)

    def run(self, case: Case, *, state: GraphState | None = None, give_out: bool = True, store: bool = True) -> Result:
        """A whole eager step, or a replayed one with `state`."""
        metadata = self.metadata(case.batch, case.phase, state)
        self.in_graph(metadata)
        if store:
            self.store(case)
        return self.attend(case, metadata, case.out if give_out else None)


def result_of(hook: str, found: Any) -> Result:
    """A hook's answer as a :class:`Result`. Raises :class:`ContractError` if it is not (out, lse)."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.Tensor)):
        raise ContractError(f"{hook} returned {type(found).__name__} instead of (out, lse)")
    return Result(*found)
