"""A worker process gets its parent's plan as data; here it finds out whether it has what was planned."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attn_core
from attn_core.discovery._entrypoints import normalise
from attn_core.discovery._plugin import State
from attn_core.errors import WorkerMismatch

if TYPE_CHECKING:
    from attn_core.discovery import Registry
    from attn_core.plan import Plan


def verify_packages(plan: Plan, registry: Registry) -> None:
    """See :func:`attn_core.discovery.verify_plan`."""
    facts = [*_api_facts(plan), *_package_facts(plan, registry)]
    facts = facts or list(_backend_facts(plan, registry))
    if not facts:
        return
    wanted = " ".join(f"{name}=={version}" for name, version in plan.packages().items() if name and version)
    raise WorkerMismatch(
        f"process {os.getpid()} cannot run the plan it was given",
        *facts,
        f"python   {sys.executable}",
        fix=f"install in the worker what the parent has: pip install {wanted}; or plan again here",
    )


def _api_facts(plan: Plan) -> Iterator[str]:
    planned, here = (_numbers(version) for version in (plan.api_version, attn_core.API_VERSION))
    if planned[:1] != here[:1] or planned > here:
        yield f"attn-core  the plan is of API {plan.api_version}, this process has {attn_core.API_VERSION}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _package_facts(plan: Plan, registry: Registry) -> Iterator[str]:
    for package, version in plan.packages().items():
        if not package:  # groups that the server serves itself
            continue
        here = [info for info in registry.plugins if normalise(info.distribution) == normalise(package)]
        usable = [info for info in here if info.state in (State.FOUND, State.LOADED)]
        if not here:
            yield f"{package}  planned {version}, not installed here"
        elif not usable:
            problem = registry.problem_for(package)
            why = problem.text.splitlines()[0] if problem else "left out by ATTN_PLUGINS or ATTN_DISABLE_PLUGINS"
            yield f"{package}  planned {version}, {here[0].state.value} here: {why}"
        elif usable[0].version != version:
            yield f"{package}  planned {version}, this process has {usable[0].version}"


def _backend_facts(plan: Plan, registry: Registry) -> Iterator[str]:
    """The same version with other backends: an editable install that was changed, or a duplicate settled differently."""
    have = {
        (normalise(manifest.package), manifest.name, variant.name)
        for manifest in registry.manifests
        for variant in manifest.variants
    }
    missing = set()
    for _, _, phase_plan in plan.phase_plans():
        for part in phase_plan.parts:
            if part.package and (normalise(part.package), part.backend, part.variant) not in have:
                missing.add(f"{part.package}  has no backend {part.backend}:{part.variant} here")
    yield from sorted(missing)
