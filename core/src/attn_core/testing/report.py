"""Verification reports: the evidence behind the support matrix, as JSON, and the function behind ``attn verify``.

A report holds hardware, versions, date and every cell with its outcome: ``passed``, ``failed``, ``refused`` (as it must be:
the manifest does not declare it) or ``skipped`` with the reason. ``verification-1.json`` beside this file is its schema.
"""

from __future__ import annotations

import json
import os
import platform as python_platform
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

import importlib_metadata

from attn_core import API_VERSION
from attn_core.errors import UsageError
from attn_core.geometry import BACKEND_KINDS
from attn_core.testing.cells import Cell, CellResult, count, describe, hardware_of, list_cells, run_cell
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.workers import Job, run_cells

SCHEMA_VERSION = 1
Progress = Callable[[int, int, CellResult], None]


def split_name(text: str) -> tuple[str, str]:
    """``mha/triton`` as kind and name. Raises :class:`UsageError` for anything else."""
    kind, slash, name = (text or "").partition("/")
    if not slash or kind not in BACKEND_KINDS or not name:
        raise UsageError(
            f"{text!r} names no backend", f"needed   KIND/NAME with a kind of {', '.join(BACKEND_KINDS)}: mha/triton"
        )
    return kind, name


def run_verification(
    kind: str,
    name: str,
    device: str = "cpu",
    quick: bool = False,
    report_path: str | Path | None = None,
    *,
    only: Sequence[str] = (),
    progress: Progress | None = None,
    backend: BackendUnderTest | None = None,
    budget_s: float | None = None,
    jobs: int = 1,
) -> dict[str, Any]:
    """Run the kit on an installed backend (or on `backend`) and return the report, written to `report_path` if given.

    `name` may end in ``:variant``. `only` restricts it to checks by name; `jobs` above 1 runs cells in so many processes
    (the backend must be installed: they find it by name), where a crash fails one cell and the rest go on; `progress` is called after each cell with (done, all, result). Once `budget_s`
    seconds are spent, what is left is skipped and says so; every check has had a cell by then if time allowed. It is fine if ``report["summary"]["failed"] == 0``. Raises :class:`UsageError` for an unknown backend or check,
    :class:`PluginError` for a broken plugin, :class:`PlatformError` for a device that is not here.
    """
    name, _, variant = name.partition(":")
    if jobs > 1 and backend is not None:
        raise UsageError("a backend object cannot be run in worker processes", "needed   an installed one, or jobs=1")
    examined = backend or BackendUnderTest.installed(kind, name)
    start = time.perf_counter()
    cells = list_cells(examined, device, quick)
    numbers = _chosen(examined, cells, only, variant)
    if budget_s is not None:
        numbers = in_turns(cells, numbers)
    finished = 0

    def done(result: CellResult) -> CellResult:
        nonlocal finished
        finished += 1
        if progress is not None:
            progress(finished, len(numbers), result)
        return result

    def late(cell: Cell) -> CellResult | None:
        spent = budget_s is not None and time.perf_counter() - start > budget_s and not cell.undeclared
        return CellResult(cell, "skipped", f"the time budget of {budget_s or 0.0:.0f} s is spent") if spent else None

    if jobs > 1:
        results = run_cells(Job(kind, name, device, quick), cells, numbers, jobs, late=late, done=done)
    else:
        results = [done(late(cells[number]) or run_cell(examined, cells[number], device)) for number in numbers]
    report = make_report(examined, results, device, quick, time.perf_counter() - start)
    if report_path is not None:
        write_report(report, report_path)
    return report


def _chosen(backend: BackendUnderTest, cells: Sequence[Cell], only: Sequence[str], variant: str) -> list[int]:
    """Numbers of the cells asked for."""
    known = {cell.check for cell in cells}
    unknown = [check for check in only if check not in known]
    if unknown:
        raise UsageError(
            f"no check {unknown[0]!r} runs on {backend.manifest.id} here", f"checks   {', '.join(sorted(known))}"
        )
    variants = [item.name for item in backend.manifest.variants]
    if variant and variant not in variants:
        raise UsageError(f"{backend.manifest.id} has no variant {variant!r}", f"variants {', '.join(variants)}")
    return [
        number
        for number, cell in enumerate(cells)
        if (not only or cell.check in only) and variant in ("", cell.variant)
    ]


def in_turns(cells: Sequence[Cell], numbers: Iterable[int]) -> list[int]:
    """Numbers of cells in an order in which every check runs once before any runs twice."""
    seen: dict[str, int] = {}
    ranked = []
    for number in numbers:
        check = cells[number].check
        seen[check] = seen.get(check, 0) + 1
        ranked.append((seen[check], number))
    return [number for _, number in sorted(ranked, key=lambda pair: pair[0])]


def make_report(
    backend: BackendUnderTest,
    results: Iterable[CellResult],
    device: str,
    quick: bool,
    seconds: float | None = None,
) -> dict[str, Any]:
    """The report as JSON data."""
    results, manifest = list(results), backend.manifest
    failures = [describe(backend, result) for result in results if result.outcome == "failed"]
    return {
        "schema_version": SCHEMA_VERSION,
        "backend": manifest.id,
        "kind": manifest.kind,
        "name": manifest.name,
        "package": manifest.package,
        "version": manifest.version,
        "status": manifest.status,
        "api": manifest.api,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "seconds": round(sum(result.seconds for result in results) if seconds is None else seconds, 2),
        "hardware": _hardware(backend, device),
        "versions": _versions(backend, device),
        "summary": count(results),
        "failures": failures,
        "cells": [result.to_dict() for result in results],
    }


def write_report(report: dict[str, Any], path: str | Path) -> None:
    """Write a report as indented JSON, one line a cell; folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({**report, "cells": []}, indent=1)
    cells = ",\n".join(f"  {json.dumps(cell)}" for cell in report["cells"])
    text = head.replace('"cells": []', f'"cells": [\n{cells}\n ]') if cells else head
    target.write_text(text + "\n", encoding="utf-8")


def load_schema() -> dict[str, Any]:
    """The JSON schema of reports."""
    text = resources.files("attn_core.testing").joinpath("verification-1.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _hardware(backend: BackendUnderTest, device: str) -> dict[str, Any]:
    import torch

    hardware = next(iter(hardware_of(backend, device).values()))
    found: dict[str, Any] = {
        "device": device,
        "platform": hardware.platform.id,
        "vendor": hardware.platform.vendor,
        "arch": hardware.platform.arch,
        "name": hardware.platform.name or _processor(),
        "cpu": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    if hardware.platform.memory_bytes:
        found["memory_bytes"] = hardware.platform.memory_bytes
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return python_platform.processor() or python_platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, python_platform.machine())


def _versions(backend: BackendUnderTest, device: str) -> dict[str, str]:
    """Python, attn-core, torch, the contract, and the libraries that the plugin's probe names."""
    found = {"python": python_platform.python_version(), "api": API_VERSION}
    for name in ("attn-core", "torch", "triton"):
        try:
            found[name] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
    for hardware in hardware_of(backend, device).values():
        found |= hardware.platform.versions
        if hardware.available is not None:
            found |= hardware.available.versions
    return dict(sorted(found.items()))
