"""What is captured: the level of every phase is the minimum over its groups, and whoever limits it is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attn_core.capabilities import graph_rank
from attn_core.options import Options
from attn_core.plan import GroupPlan

#: The level each phase needs to be captured.
_NEEDED_LEVEL: Mapping[str, str] = {
    "decode": "uniform_decode",
    "draft": "uniform_decode",
    "verify": "uniform_query",
    "draft_extend": "uniform_query",
    "prefill": "full",
}


def resolve_graphs(groups: Sequence[GroupPlan], options: Options, device: str) -> dict[str, Any]:
    """What is captured: the minimum over groups, phase by phase, and who limits it."""
    if device not in ("cuda", "rocm"):
        return {"mode": "off", "reason": f"no graphs on {device}", "phases": {}, "limited_by": []}
    if options.cuda_graph == "off":
        return {"mode": "off", "reason": "--cuda-graph off", "phases": {}, "limited_by": []}
    phases: dict[str, str] = {}
    limits: list[str] = []
    for plan in groups:
        for phase, phase_plan in plan.phases.items():
            if plan.group.backend_kind == "mm":
                continue
            level = phase_plan.graph.level
            phases[phase] = min(phases.get(phase, level), level, key=graph_rank)
            if graph_rank(level) < graph_rank(_NEEDED_LEVEL[phase]):
                limits.append(
                    f"{phase}: {phase_plan.backend} declares {level}, {_NEEDED_LEVEL[phase]} is needed ({plan.group.name})"
                )
    captured = [phase for phase, level in phases.items() if graph_rank(level) >= graph_rank(_NEEDED_LEVEL[phase])]
    wanted = _wanted_phases(phases)
    missing = [phase for phase in wanted if phase not in captured]
    if options.cuda_graph == "piecewise":
        mode = "piecewise"
    elif "decode" not in captured:
        mode = "off"
    elif options.cuda_graph == "full" and missing:
        mode = "piecewise"
    else:
        mode = "full" if options.cuda_graph == "full" else "decode"
    shown = [line for line in limits if line.partition(":")[0] in wanted]
    return {"mode": mode, "phases": phases, "captured": captured, "limited_by": shown, "reason": "; ".join(shown)}


def _wanted_phases(phases: Mapping[str, str]) -> list[str]:
    """Decode is always captured; verify and drafts too under speculation. Prefill is captured only where it can be."""
    return [phase for phase in ("decode", "verify", "draft", "draft_extend") if phase in phases]
