"""Every way through a plan that a step can take: what warm-up builds and runs once before serving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attn_core.plan import PartPlan, PhasePlan, Plan

__all__ = ["Route", "warmup_routes"]


@dataclass(frozen=True)
class Route:
    """One route: ``extend_no_prefix``, ``extend_prefix``, ``decode``, ``verify``, ``draft``, ``draft_extend`` or ``vision``.

    ``by`` serves it, ``form`` is MLA's. A plan has a route only where somebody serves it.
    """

    name: str
    model: str
    group: str
    phase: str
    by: PartPlan
    form: str | None = None


def warmup_routes(plan: Plan) -> Iterator[Route]:
    """All routes of a plan, group by group."""
    prefix = not plan.options.get("disable_prefix_cache", False)
    for group, phase, phase_plan in plan.phase_plans():
        place = group.group.model, group.group.name, phase
        main = phase_plan.parts[0]
        if group.group.backend_kind == "mm":
            yield Route("vision", *place, main)
        elif phase != "prefill":
            yield Route(phase, *place, main, phase_plan.form)
        else:
            yield Route("extend_no_prefix", *place, main, _first_form(phase_plan))
            if prefix:
                part = _prefix_part(phase_plan)
                yield Route("extend_prefix", *place, part, "absorbed" if part.role == "absorbed" else phase_plan.form)


def _first_form(phase_plan: PhasePlan) -> str | None:
    return "ragged" if phase_plan.form and phase_plan.parts[0].role == "ragged" else phase_plan.form


def _prefix_part(phase_plan: PhasePlan) -> PartPlan:
    """Who serves rows with a cached prefix: a part of its own where the main one cannot."""
    main = phase_plan.parts[0]
    return next((p for p in phase_plan.parts[1:] if p.role == "absorbed" and main.role == "ragged"), main)
