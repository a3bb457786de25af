"""What every benchmark writes beside its figures: hardware, versions, date, and the file under ``results/``."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def provenance(*distributions: str) -> dict[str, Any]:
    """Date, hardware and the versions of `distributions` (absent ones are left out)."""
    import importlib_metadata

    found: dict[str, str] = {"python": platform.python_version()}
    for name in ("attn-core", "torch", *distributions):
        try:
            found[name] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
    return {"date": datetime.date.today().isoformat(), "hardware": hardware(), "versions": found}


def hardware() -> str:
    """CPU model and core count; the GPU's name where there is one."""
    import os

    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    try:
        import torch

        if torch.cuda.is_available():
            return f"{torch.cuda.get_device_name()}, {name}"
    except ImportError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def write(name: str, content: dict[str, Any]) -> Path:
    """Write one result file and say where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path
