"""What a report says about where it comes from: date, hardware, and the versions that took part."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_core.plan import Plan


def provenance(plans: Sequence[Plan], device: str) -> dict[str, Any]:
    """Date (UTC), hardware of `device`, and versions: python, torch, transformers, core, the plans' packages and libraries."""
    import importlib_metadata
    import torch
    import transformers

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.version.cuda and torch.device(device).type == "cuda":
        versions["cuda"] = torch.version.cuda
    planned = [name for plan in plans for name in plan.packages()]
    for name in ("attn-core", "attn-transformers", *planned, "triton"):
        try:
            versions[name] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
    for plan in plans:
        for _, _, phase in plan.phase_plans():
            versions = {**phase.libraries, **versions}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **_hardware(device),
        "versions": versions,
    }


def write(path: Path, report: dict[str, Any], plans: Sequence[Plan], device: str) -> None:
    """Write a report with its provenance as indented JSON; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**report, **provenance(plans, device)}, indent=1) + "\n", encoding="utf-8")


def _hardware(device: str) -> dict[str, Any]:
    import torch

    made = torch.device(device)
    name = torch.cuda.get_device_name(made) if made.type == "cuda" else _processor()
    return {"hardware": name, "cpu": _processor(), "cores": os.cpu_count() or 1, "threads": torch.get_num_threads()}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
