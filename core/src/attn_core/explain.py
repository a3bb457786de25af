"""A decision as people read it: who was considered for each group and phase, what each lacked, what would make it work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.errors import PlanError
from attn_core.plan import Plan, Rejection

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Rival:
    """A candidate that lost: its name and package, and one text a reason with the fix where there is one."""

    name: str
    package: str
    reasons: tuple[str, ...]
    eligible: bool


@dataclass(frozen=True)
class Decision:
    """One (group, phase): the winner with the reason, or None, and the rivals, nearest misses first.

    ``elsewhere`` names those that were made for hardware of another kind.
    """

    title: str
    winner: str | None
    why: str
    details: Mapping[str, Any]
    rivals: tuple[Rival, ...]
    elsewhere: tuple[str, ...] = ()


def decisions(plan: Plan) -> Iterator[Decision]:
    """Every decision of a plan, group by group."""
    for group_plan, phase, phase_plan in plan.phase_plans():
        group = group_plan.group
        layers = f"{len(group.layers)} {group.kind} layer{'s' if len(group.layers) != 1 else ''}"
        pool = next((p for p in plan.pools if p.model == group.model and p.name in group.pools.values()), None)
        details = {
            "package": f"{phase_plan.package} {phase_plan.version}".strip(),
            "pool page": pool.page_size if pool else None,
            "kernel page": phase_plan.kernel_page_size if pool else None,
            "kv": f"{pool.dtype} {pool.format} {pool.layout}" if pool else None,
            "graph": phase_plan.graph.level,
            "form": phase_plan.form,
            "parts": ", ".join(f"{part.role}: {part.backend}:{part.variant}" for part in phase_plan.parts[1:]) or None,
            "pads": ", ".join(f"{name} {_arrow(*change)}" for name, change in phase_plan.pads.items()) or None,
            "library": ", ".join(phase_plan.libraries.values()) or None,
        }
        yield Decision(
            f"{_prefix(group.model)}{group.name} · {layers} · {_dims(group)} · {phase}",
            f"{phase_plan.backend}:{phase_plan.variant}",
            phase_plan.reason,
            {key: value for key, value in details.items() if value not in (None, "")},
            *_rivals(plan.rejected, group.model, group.name, phase),
        )


def refused(error: PlanError) -> Iterator[Decision]:
    """The candidates of a failed plan, by group and phase."""
    for model, name, phase in dict.fromkeys((r.model, r.group, r.phase) for r in error.rejected):
        yield Decision(
            f"{_prefix(model)}{name} · {phase}", None, "no plan", {}, *_rivals(error.rejected, model, name, phase)
        )


def _arrow(before: Any, after: Any) -> str:
    shown = ("/".join(map(str, n)) if isinstance(n, list | tuple) else str(n) for n in (before, after))
    return "->".join(shown)


def _prefix(model: str) -> str:
    return "" if model == "target" else f"{model} "


def _dims(group: Any) -> str:
    geometry = group.geometry
    for name in ("qk_dim", "k_dim", "latent_dim"):
        if hasattr(geometry, name):
            return f"head_dim {getattr(geometry, name)}"
    return f"head_dim {geometry.mla.latent_dim}" if hasattr(geometry, "mla") else ""


_SOFT = ("outranked", "not_asked", "follows", "experimental")


def _rivals(
    rejected: tuple[Rejection, ...], model: str, group: str, phase: str
) -> tuple[tuple[Rival, ...], tuple[str, ...]]:
    """Who lost, nearest misses first, and the names of those for hardware of another kind."""
    mine = [r for r in rejected if (r.model, r.group, r.phase) == (model, group, phase)]
    far = [
        r
        for r in mine
        if any(_other_hardware(reason.need, reason.have) for reason in r.reasons if reason.code in ("arch", "vendor"))
    ]
    near = [r for r in mine if not any(r is item for item in far)]
    near.sort(key=lambda r: (not _eligible(r), len({reason.code for reason in r.reasons}), r.backend, r.variant))
    rivals = []
    for item in near:
        texts = tuple(str(reason) + (f" → {reason.fix}" if reason.fix else "") for reason in item.reasons)
        name = f"{item.backend}:{item.variant}"
        rivals.append(Rival(name, f"{item.package} {item.version}".strip(), texts, _eligible(item)))
    return tuple(rivals), tuple(dict.fromkeys(f"{item.backend}:{item.variant}" for item in far))


def _eligible(item: Rejection) -> bool:
    return any(reason.code in _SOFT for reason in item.reasons)


def _other_hardware(need: str, have: str) -> bool:
    """No architecture of the family that is there (``sm``, ``gfx``) is among those that are needed."""
    found = re.findall(r"[a-z]+(?=[0-9])|[a-z]+", have.rpartition("(")[2])
    return bool(found) and re.search(rf"\b{found[0]}\d*", need) is None


def header(plan: Plan) -> list[tuple[str, str]]:
    """The plan in a few (name, value) lines."""
    rows = [
        ("model", plan.model),
        ("platform", plan.platform),
        ("dtype / kv cache", f"{plan.dtype} / {plan.kv_cache_dtype}, {plan.kv_layout}, page {plan.page_size}"),
        ("graphs", str(plan.cuda_graph.get("mode", "off")) + _paren(plan.cuda_graph.get("reason", ""))),
    ]
    if plan.tp != 1:
        rows.append(("tp size", str(plan.tp)))
    if plan.mixed_batch:
        rows.append(("mixed batches", f"{plan.mixed_batch} (any prefill token: the prefill backend)"))
    if plan.options:
        rows.append(("options", ", ".join(f"{key}={value}" for key, value in plan.options.items())))
    rows += [("changed", f"{a.field}: {a.before} → {a.after}, {a.reason}") for a in plan.adjustments]
    rows += [("note", warning) for warning in plan.warnings]
    rows.append(("fingerprint", plan.fingerprint))
    return rows


def _paren(text: str) -> str:
    return f" ({text})" if text else ""


# --- text, tree and page ------------------------------------------------------------------------------------------------


def as_text(plan: Plan, *, rivals: bool = True) -> str:
    """The explanation as plain text; what logs and tests read."""
    rows = header(plan)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    for decision in decisions(plan):
        lines += ["", *_decision_lines(decision, rivals)]
    return "\n".join(lines)


def error_as_text(error: PlanError) -> str:
    """A failed plan with every candidate as plain text."""
    lines = [str(error)]
    lines += [f"  or       {text}" for text in error.suggestions if text != error.fix]
    for decision in refused(error):
        lines += ["", *_decision_lines(decision, True)]
    return "\n".join(lines)


def _decision_lines(decision: Decision, rivals: bool) -> list[str]:
    lines = [decision.title]
    if decision.winner:
        details = ", ".join(f"{key} {value}" for key, value in decision.details.items())
        lines.append(f"  ✔ {decision.winner}   {decision.why}   [{details}]")
    for rival in decision.rivals if rivals else ():
        mark = "·" if rival.eligible else "✘"
        lines.append(f"  {mark} {rival.name} ({rival.package})   {' | '.join(rival.reasons)}")
    if rivals and decision.elsewhere:
        lines.append(f"  - for other hardware: {', '.join(decision.elsewhere)}")
    return lines


def as_tree(plan: Plan) -> RenderableType:
    """The explanation as a rich tree."""
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text.assemble((plan.model, "bold"), " on ", (plan.platform, "bold")))
    for name, value in header(plan)[2:]:
        root.add(Text.assemble((f"{name}  ", "dim"), value))
    for decision in decisions(plan):
        _add_decision(root, decision)
    return root


def error_as_tree(error: PlanError) -> RenderableType:
    """A failed plan with its candidates as a rich tree."""
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text(str(error), "red"))
    for text in error.suggestions:
        root.add(Text.assemble(("try  ", "dim"), (text, "green")))
    for decision in refused(error):
        _add_decision(root, decision)
    return root


def _add_decision(root: Any, decision: Decision) -> None:
    from rich.text import Text

    branch = root.add(Text(decision.title, "bold"))
    if decision.winner:
        details = ", ".join(f"{key} {value}" for key, value in decision.details.items())
        branch.add(
            Text.assemble(("✔ ", "green"), (decision.winner, "bold green"), f"  {decision.why}  ", (details, "dim"))
        )
    for rival in decision.rivals:
        style = "yellow" if rival.eligible else "red"
        leaf = branch.add(
            Text.assemble(("· " if rival.eligible else "✘ ", style), rival.name, (f"  {rival.package}", "dim"))
        )
        for reason in rival.reasons:
            leaf.add(Text(reason, style))
    if decision.elsewhere:
        branch.add(Text(f"for other hardware: {', '.join(decision.elsewhere)}", "dim"))


def as_html(plan: Plan | PlanError) -> str:
    """One self-contained page (no scripts, no links out)."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    template = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(
        "explain.html.j2"
    )
    if isinstance(plan, PlanError):
        tries = [("try", text) for text in plan.suggestions]
        return template.render(title="no plan", error=str(plan), header=tries, decisions=list(refused(plan)))
    title = f"{plan.model} on {plan.platform}"
    return template.render(title=title, error=None, header=header(plan), decisions=list(decisions(plan)))
