"""Cells: every (check, variant, phase, types, page size) that a manifest declares and this hardware allows, and how one runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from attn_core._device import Place
from attn_core.availability import Availability
from attn_core.manifest import Manifest, Row, Variant
from attn_core.platform import Platform, detect_platform
from attn_core.testing.bench import Bench, Failure, NotHere
from attn_core.testing.checks import Check, checks_of
from attn_core.testing.declared import Ask, Hardware, asks
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.refusals import reasons_for, undeclared
from attn_core.testing.shrink import shrink
from attn_core.testing.spec import CaseSpec

#: Outcomes of a cell, as reports write them.
PASSED, FAILED, REFUSED, SKIPPED = "passed", "failed", "refused", "skipped"


@dataclass(frozen=True)
class Cell:
    """One check on one declared combination. ``skip`` says why it cannot run here (empty: it can).

    ``undeclared`` names what the manifest does not declare; such a cell must be refused.
    """

    check: str
    variant: str
    ask: Ask | None
    row: Row | None = None
    turn: int = 0
    skip: str = ""
    undeclared: str = ""

    @property
    def id(self) -> str:
        """``check[variant-phase-q/kv-p16-128x128]``."""
        if self.ask is None:
            return f"{self.check}[{self.variant}]"
        if self.undeclared:
            return f"{self.check}[{self.variant}-{self.undeclared}-{self.ask.phase}]"
        q, kv, out = self.ask.dtypes
        types = f"{q}/{kv}" + (f"/{out}" if out != q else "")
        dims = "x".join(map(str, self.ask.head_dims))
        heads = "x".join(map(str, self.ask.heads))
        layout = "" if self.ask.layout == "NHD" else f"-{self.ask.layout}"
        return f"{self.check}[{self.variant}-{self.ask.phase}-{types}-p{self.ask.page_size}-d{dims}-h{heads}{layout}]"


@dataclass
class CellResult:
    """What came out of a cell. ``problems`` and ``smallest`` (the smallest failing batch, as code) belong to failures."""

    cell: Cell
    outcome: str
    reason: str = ""
    problems: list[str] = field(default_factory=list)
    smallest: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        table: dict[str, Any] = {"id": self.cell.id, "check": self.cell.check, "variant": self.cell.variant}
        ask = self.cell.ask
        if ask is not None:
            q, kv, out = ask.dtypes
            table |= {"phase": ask.phase, "dtypes": {"q": q, "kv": kv, "out": out}, "page_size": ask.page_size}
            table |= {"head_dims": list(ask.head_dims), "heads": list(ask.heads), "layout": ask.layout}
            if self.cell.undeclared:
                table["undeclared"] = self.cell.undeclared
        table |= {"outcome": self.outcome, "seconds": round(self.seconds, 4)}
        for name in ("reason", "problems", "smallest"):
            if getattr(self, name):
                table[name] = getattr(self, name)
        return table


# --- which cells there are ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _platform(device: str) -> Platform:
    return detect_platform(device)


def hardware_of(backend: BackendUnderTest, device: str) -> dict[str, Hardware]:
    """The platform of `device` and the probe's answer, by variant. Raises :class:`PlatformError` for an absent device."""
    platform = _platform(device)
    answer: Any = backend.probe(backend.manifest, platform) if backend.probe is not None else {}
    found: dict[str, Hardware] = {}
    for variant in backend.manifest.variants:
        available = answer if isinstance(answer, Availability) else dict(answer or {}).get(variant.name)
        found[variant.name] = Hardware(platform, available)
    return found


def list_cells(backend: BackendUnderTest, device: str = "cpu", quick: bool = False) -> list[Cell]:
    """All cells of a backend on a device, in a stable order."""
    found: list[Cell] = []
    for variant in backend.manifest.variants:
        hardware = hardware_of(backend, device)[variant.name]
        why = _unavailable(variant, hardware)
        if why:
            found.append(Cell("probe", variant.name, None, skip=why))
            continue
        cells = list(_variant_cells(backend.manifest, variant, hardware, device, quick))
        for item in undeclared(backend.manifest, variant, hardware):
            cells.append(Cell("refusal", variant.name, item.ask, undeclared=item.what))
        found += cells or [Cell("declaration", variant.name, None, skip=f"declares nothing for {hardware.platform}")]
    return found


def _unavailable(variant: Variant, hardware: Hardware) -> str:
    if hardware.available is not None and not hardware.available.ok:
        return "; ".join(map(str, hardware.available.reasons)) or hardware.available.needs or "not available"
    return ""


def _variant_cells(
    manifest: Manifest, variant: Variant, hardware: Hardware, device: str, quick: bool
) -> Iterator[Cell]:
    seen: set[tuple[Any, ...]] = set()
    turn = 0
    checks = [check for check in checks_of(manifest.kind) if not check.device or device.startswith(check.device)]
    for row in variant.allow:
        declared = list(asks(manifest, variant, row, hardware))
        for check in checks:
            if not check.features <= row.features:
                continue
            fitting = [ask for ask in declared if ask.phase in check.phases and check.role in ("", ask.role)]
            for ask in spread_out(fitting, _spread(check, quick), sum(map(ord, check.name))):
                key = (check.name, ask.phase, ask.dtypes, ask.page_size, ask.layout)
                if key in seen:
                    continue
                seen.add(key)
                turn += 1
                yield Cell(check.name, variant.name, ask, row, turn, _interpreter(variant, ask))


def _spread(check: Check, quick: bool) -> str:
    """A quick run is one step narrower; numbers without a feature still see every type, everything else every phase."""
    if not quick or check.spread in ("phase", "once"):
        return check.spread
    return "types" if check.spread == "all" and not check.features else "phase"


def spread_out(declared: list[Ask], spread: str, shift: int = 0) -> list[Ask]:
    """The combinations a check runs on; where not all run, page sizes and types take turns, for each check in its own way."""
    if spread == "all":
        return declared
    groups: dict[Any, list[Ask]] = {}
    for ask in declared:
        key = {"types": (ask.phase, ask.dtypes), "phase": ask.phase, "once": ""}[spread]
        groups.setdefault(key, []).append(ask)
    return [group[(5 * number + shift) % len(group)] for number, group in enumerate(groups.values())]


def _interpreter(variant: Variant, ask: Ask) -> str:
    """bf16 is not run under the Triton interpreter, whose ``tl.dot`` reads raw bits."""
    triton = any(requirement.split(";")[0].strip().startswith("triton") for requirement in variant.requires)
    if triton and os.environ.get("TRITON_INTERPRET") == "1" and "bf16" in ask.dtypes:
        return "bf16 under TRITON_INTERPRET=1: the interpreter's tl.dot reads raw bits"
    return ""


# --- running ----------------------------------------------------------------------------------------------------------------


def run_cell(backend: BackendUnderTest, cell: Cell, device: str = "cpu", *, minimise: bool = True) -> CellResult:
    """Run one cell. An exception of the backend is a failure, too; only :class:`NotHere` and a cell's own skip are not."""
    if cell.undeclared and cell.ask is not None:
        return _refused(backend, cell, cell.ask, device)
    if cell.skip or cell.ask is None or cell.row is None:
        return CellResult(cell, SKIPPED, cell.skip)
    checks = {check.name: check for check in checks_of(backend.manifest.kind)}
    bench = Bench(backend, cell.variant, cell.row, cell.ask, device, cell.turn)
    start = time.perf_counter()
    try:
        with Place(device).use():
            checks[cell.check].function(bench)
        result = CellResult(cell, PASSED)
    except NotHere as why:
        result = CellResult(cell, SKIPPED, str(why))
    except Failure as failure:
        smallest = _smallest(failure) if minimise else failure.spec
        result = CellResult(cell, FAILED, problems=failure.problems, smallest=str(smallest or ""))
    except Exception as error:
        result = CellResult(cell, FAILED, problems=[f"{type(error).__name__}: {error}"])
    result.seconds = time.perf_counter() - start
    return result


def _refused(backend: BackendUnderTest, cell: Cell, ask: Ask, device: str) -> CellResult:
    """An undeclared request must have reasons against it."""
    variant = backend.manifest.variant(cell.variant)
    why = reasons_for(backend.manifest, variant, ask, hardware_of(backend, device)[cell.variant])
    if why:
        return CellResult(cell, REFUSED, why)
    return CellResult(cell, FAILED, problems=[f"{cell.undeclared} is not declared, yet the planner would accept it"])


def _smallest(failure: Failure) -> CaseSpec | None:
    if failure.spec is None or failure.judge is None:
        return failure.spec
    return shrink(failure.spec, failure.judge)


def describe(backend: BackendUnderTest, result: CellResult) -> str:
    """A failure for people: the declaration that is false, what was found, and the smallest failing batch."""
    check = {item.name: item for item in checks_of(backend.manifest.kind)}.get(result.cell.check)
    ask, manifest = result.cell.ask, backend.manifest
    lines = [f"{manifest.id}:{result.cell.variant} declares what is not so: {result.cell.id}"]
    if check is not None:
        lines.append(f"  check      {check.proves}")
        lines.append(f"  declared   {_declaration(check, ask)}")
    lines += [f"  found      {problem}" for problem in result.problems]
    if result.smallest:
        lines.append(f"  smallest   {result.smallest}")
    lines.append(f"  try        attn verify {manifest.id} --only '{result.cell.check}'")
    return "\n".join(lines)


def _declaration(check: Check, ask: Ask | None) -> str:
    features = ", ".join(sorted(check.features)) or "the row itself"
    if ask is None:
        return features
    q, kv, _ = ask.dtypes
    return f"{features} for phase {ask.phase}, q {q}, kv {kv}, page_size {ask.page_size}, head dims {ask.head_dims}"


def count(results: Iterable[CellResult]) -> dict[str, int]:
    """Number of cells by outcome, all four outcomes present."""
    totals = dict.fromkeys((PASSED, FAILED, REFUSED, SKIPPED), 0)
    for result in results:
        totals[result.outcome] += 1
    return totals
