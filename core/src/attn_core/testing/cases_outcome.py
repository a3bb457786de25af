"""What came of a row: a plan, or an error, and everything that was said about it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attn_core.errors import AttnError, PlanError
from attn_core.geometry import LayerGroup, Model
from attn_core.options import Options
from attn_core.plan import GroupPlan, PhasePlan, Plan, Rejection
from attn_core.planner import main_group, solve_plan
from attn_core.platform import Platform
from attn_core.testing.cases_input import Row
from attn_core.testing.cases_toys import World
from attn_core.testing.cases_words import CaseError


@dataclass
class Outcome:
    """One row, planned when somebody asks. ``options`` are read then, too: a wrong flag is an outcome like any other."""

    row: Row
    parsed: Model
    draft: Model | None
    platform: Platform
    read_options: Callable[[], Options]
    world: World

    @cached_property
    def result(self) -> tuple[Plan | None, AttnError | None, frozenset[str]]:
        """(plan, error, modules imported meanwhile)."""
        before = set(sys.modules)
        try:
            options, world = self.read_options(), self.world
            found: Plan | None = solve_plan(
                self.parsed, self.platform, options, world.manifests, world.availability, draft=self.draft
            )
            error: AttnError | None = None
        except AttnError as caught:
            found, error = None, caught
        return found, error, frozenset(set(sys.modules) - before)

    @property
    def found(self) -> Plan | None:
        """The plan, if there is one."""
        return self.result[0]

    @property
    def error(self) -> AttnError | None:
        """The error, if there is no plan."""
        return self.result[1]

    @property
    def plan(self) -> Plan:
        """The plan. Raises :class:`CaseError` with the reasons if there is none."""
        if self.found is None:
            raise CaseError(f"no plan: {self.error}")
        return self.found

    @cached_property
    def model(self) -> Model:
        """The model as one rank sees it."""
        return self.parsed.shard(self.read_options().tp_size)

    @property
    def main(self) -> LayerGroup:
        """The group of the main pool."""
        return main_group(self.model.groups)

    def phase(self, phase: str, kind: str = "", model: str = "target") -> PhasePlan:
        """The plan of one phase, of the main group or of the first group of a backend kind."""
        for group in self._candidates(kind, model):
            if phase in group.phases:
                return group.phases[phase]
        raise CaseError(f"the plan has no {model} {kind or 'main'} group with phase {phase}")

    def _candidates(self, kind: str, model: str) -> Iterator[GroupPlan]:
        for group in self.plan.groups:
            name = group.group
            if model == "draft":
                if name.model == "draft":
                    yield group
            elif kind:
                if name.backend_kind == kind and name.model != "draft":
                    yield group
            elif name.model == self.main.model and name.name == self.main.name:
                yield group

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        """Every candidate that lost, with its reasons."""
        if self.found is not None:
            return self.found.rejected
        return self.error.rejected if isinstance(self.error, PlanError) else ()

    @cached_property
    def text(self) -> str:
        """The explanation as people read it; of an error: message, facts, all candidates, suggestions."""
        from attn_core.explain import as_text, error_as_text

        if self.found is not None:
            return as_text(self.found)
        if isinstance(self.error, PlanError):
            return "\n".join([error_as_text(self.error), *self.error.suggestions])
        return str(self.error)

    @property
    def advice(self) -> str:
        """Everything that says what to do: suggestions, fixes of rejected candidates, warnings."""
        found = [reason.fix for item in self.rejected for reason in item.reasons if reason.fix]
        if self.error is not None:
            found += [self.error.fix or "", *getattr(self.error, "suggestions", ()), *self.error.facts]
        if self.found is not None:
            found += [*self.found.warnings, *(a.reason for a in self.found.adjustments)]
        return "\n".join(found)


def compare(first: Outcome, second: Outcome, expect: Mapping[str, Any]) -> Iterator[str]:
    """Two plans against ``compatible`` and ``diff``."""
    unknown = set(expect) - {"compatible", "diff"}
    if unknown:
        yield f"unknown key(s) {sorted(unknown)} of an expectation about two plans"
    found = first.plan.differences(second.plan)
    fields = [item.field for item in found]
    compatible = not any(item.fatal for item in found)
    if "compatible" in expect and compatible is not expect["compatible"]:
        yield f"compatible: expected {expect['compatible']}, differences {fields}"
    wanted = expect.get("diff", [])
    for name in [wanted] if isinstance(wanted, str) else wanted:
        if not any(name in field for field in fields):
            yield f"diff: {name!r} is not among {fields}"
