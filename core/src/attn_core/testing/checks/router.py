"""Through the planner and the router: what a server does with the backend, from a plan to the numbers of a step."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.capabilities import PHASES
from attn_core.context import Context
from attn_core.discovery import Registry
from attn_core.errors import BindError
from attn_core.geometry import Model
from attn_core.hookspecs import hookimpl
from attn_core.manifest import Manifest
from attn_core.options import Options
from attn_core.planner import solve_plan
from attn_core.platform import detect_platform
from attn_core.router import Router
from attn_core.testing.batches import build
from attn_core.testing.bench import Bench, NotHere
from attn_core.testing.checks._registry import check
from attn_core.testing.declared import accepted
from attn_core.testing.harness import BackendUnderTest, Result
from attn_core.testing.spec import Case


class _Module:
    """The backend under test as a plugin module of a registry of its own."""

    def __init__(self, backend: BackendUnderTest) -> None:
        self.backend = backend

    @hookimpl
    def attn_create(self, manifest: Manifest, variant: str, context: Context) -> object:
        """The backend's own."""
        return self.backend.create(manifest, variant, context)


def make_router(bench: Bench, case: Case) -> Router:
    """A router for a model of the case's layers, planned with this backend and variant by name."""
    manifest = bench.backend.manifest
    registry = Registry.with_manifests([manifest], modules={manifest.package: _Module(bench.backend)})
    model = Model("kit", "Kit", "kit", case.spec.dtype, (case.group,), len(case.group.layers))
    name = f"{manifest.name}:{bench.variant}"
    flags: dict[str, Any] = {
        "attention_backend": name,
        "page_size": case.spec.page_size,
        "kv_cache_dtype": case.spec.kv,
        "dtype": case.spec.dtype,
        "kv_layout": case.pool.layout,
        "allow_experimental": True,
        "disable_prefix_cache": True,
    }
    platform = detect_platform(bench.device)
    plan = solve_plan(model, platform, Options.of(flags), registry.manifests)
    return Router(plan, registry, device=bench.device, dtype=case.out.dtype)


def _both_phases(bench: Bench) -> None:
    variant = bench.backend.manifest.variant(bench.variant)
    served = {phase for row in variant.allow for phase in accepted(row, "phase", PHASES)}
    if not {"prefill", "decode"} <= served:
        raise NotHere("the variant does not serve prefill and decode: a plan of it alone is not possible")


@check(phases=("prefill", "decode"), spread="phase")
def through_the_router(bench: Bench) -> None:
    """Planned by name, bound and run by the router, the backend gives each of two layers what it gives alone."""
    _both_phases(bench)
    if bench.ask.dtypes[0].startswith("fp8"):
        raise NotHere("the model's own type is not fp8")
    spec = bench.spec(decoy_pool=False, needs_lse=False)
    cases = [build(spec.but(layers=2, layer=number)) for number in (0, 1)]
    router = make_router(bench, cases[0])
    router.bind([case.layer for case in cases], [case.cache for case in cases])
    step = router.begin(cases[0].batch)
    for case in cases:
        out = step.attend(case.layer, case.inputs, case.out)
        bench.require_none(bench.compare(case, Result(out, None), bench.oracle(case)) + case.problems(), case.spec)


@check(phases=("prefill",), spread="once")
def router_refuses_undeclared(bench: Bench) -> None:
    """A layer that brings sinks to a group planned without them is refused at bind time, never ignored (case C18)."""
    _both_phases(bench)
    if bench.ask.dtypes[0].startswith("fp8"):
        raise NotHere("the model's own type is not fp8")
    case = build(bench.spec(decoy_pool=False, needs_lse=False))
    router = make_router(bench, case)
    case.layer.sinks = torch.zeros(bench.ask.heads[0], device=bench.device)
    try:
        router.bind([case.layer], [case.cache])
    except BindError:
        return
    bench.require_none(["the router bound a layer with sinks that nobody planned for"])
