"""The support tables: computed from manifests alone, and compared with published ones.

Every cell is read off the *allow* rows, the same declaration that the planner reads. Cell values: true and false; page
sizes as a number or a list when a finite set is listed, true for a range; a string for a condition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from attn_core.dtypes import canonical
from attn_core.manifest import Manifest, Row, Variant
from attn_core.platform import VENDORS
from attn_core.predicate import flatten

#: Columns of the four tables. Kinds without a table (vision towers) appear as a column of another.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "mha": (
        "page_size_gt_1_native",
        "fp8_kv",
        "fp4_kv",
        "spec_topk_1",
        "spec_topk_gt_1",
        "sliding_window",
        "multimodal",
    ),
    "mla": ("native_page_sizes", "fp8_kv", "fp4_kv", "chunked_prefix_cache", "spec_topk_1", "spec_topk_gt_1"),
    "gdn": ("decode", "prefill", "target_verify"),
    "dsa": ("prefill", "decode"),
}

#: Vendors by the beginning of an architecture's name; the first that fits counts.
_VENDOR_OF_ARCH: Mapping[str, str] = {
    "sm": "nvidia",
    "gfx": "amd",
    "xpu": "intel",
    "cpu": "cpu",
    "amx": "cpu",
    "a": "ascend",
}

_SPECULATIVE = frozenset({"verify", "draft"})
_FP8 = frozenset({"fp8_e4m3", "fp8_e5m2"})

#: What a page condition accepts: a finite set, or ``None`` for an open range.
Pages = frozenset[int] | None
_SLOTS = frozenset({1})


@dataclass(frozen=True, slots=True)
class CellDifference:
    """One cell that differs from a published table. ``verdict``: better, worse or missing (no such row)."""

    kind: str
    row: str
    column: str
    published: Any
    ours: Any
    verdict: str


def support_matrix(manifests: Iterable[Manifest]) -> dict[str, Any]:
    """The four support tables of these manifests: ``{kind: {"columns", "rows": {name: {"status", "package", "cells"}}}}``."""
    listed = list(manifests)
    tables: dict[str, Any] = {}
    for kind, columns in COLUMNS.items():
        rows: dict[str, Any] = {}
        for manifest in (item for item in listed if item.kind == kind):
            for name, cells in _ROWS[kind](manifest, listed):
                rows[name] = {
                    "status": manifest.status,
                    "package": manifest.package,
                    "cells": dict(zip(columns, cells, strict=True)),
                }
        tables[kind] = {"columns": list(columns), "rows": rows}
    return tables


def published_matrix() -> dict[str, Any]:
    """The published support tables, as ``{kind: {"columns": […], "rows": {name: [cells]}}}`` with notes beside them."""
    text = resources.files("attn_core.testing").joinpath("support_matrix.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def compare_matrix(published: Mapping[str, Any], ours: Mapping[str, Any]) -> list[CellDifference]:
    """Every cell of the published tables that differs in ours, each judged better, worse or missing."""
    differences: list[CellDifference] = []
    for kind, column, row, want in published_cells(published):
        found = ours.get(kind, {}).get("rows", {}).get(row)
        if found is None:
            differences.append(CellDifference(kind, row, column, want, None, "missing"))
        elif (have := found["cells"][column]) != want or type(have) is not type(want):
            verdict = "better" if _strength(have) > _strength(want) else "worse"
            differences.append(CellDifference(kind, row, column, want, have, verdict))
    return differences


def published_cells(published: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """All cells of published tables as (kind, column, row, value)."""
    for kind in COLUMNS:
        table = published.get(kind, {"columns": [], "rows": {}})
        for row, cells in table["rows"].items():
            for column, value in zip(table["columns"], cells, strict=True):
                yield kind, column, row, value


def _strength(cell: Any) -> tuple[int, int]:
    """How much a cell claims: nothing, a condition, a finite set of pages, everything."""
    if cell is None or cell is True:  # None in a column of page sizes: no fixed page size
        return 3, 0
    if isinstance(cell, list):
        return 2, len(cell)
    if isinstance(cell, int) and cell is not False:
        return 2, 1
    return (1, 0) if isinstance(cell, str) else (0, 0)


# --- rows ---------------------------------------------------------------------------------------------------------------

Cells = tuple[Any, ...]


def _mha_rows(manifest: Manifest, manifests: list[Manifest]) -> Iterator[tuple[str, Cells]]:
    rows = _allow(manifest)
    pages = _union(_pages(row) for row in rows)
    cells = (
        True if pages is None else _as_cell(pages - _SLOTS),
        _fp8_cell(rows),
        any("fp4" in _kv_dtypes(row) for row in rows),
        any(_speculates(row, "spec_topk1") for row in rows),
        any(_speculates(row, "spec_tree") for row in rows),
        _in_all_phases(rows, "sliding_window"),
        any(other.kind == "mm" and other.name == manifest.name for other in manifests),
    )
    yield manifest.name, cells


def _mla_rows(manifest: Manifest, manifests: list[Manifest]) -> Iterator[tuple[str, Cells]]:
    everything = _allow(manifest)
    rows = _allow(manifest, role="absorbed")
    pages = _union(_pages(row) for row in rows)
    trees = [row for row in rows if _speculates(row, "spec_tree")]
    slots_only = bool(trees) and all(_pages(row) == _SLOTS for row in trees) and pages != _SLOTS
    cells = (
        None if pages is None else sorted(pages),
        _fp8_cell(rows),
        any("fp4" in _kv_dtypes(row) for row in rows),
        any("chunked_prefix" in row.features for row in [*everything, *_companion_rows(manifest, manifests)]),
        any(_speculates(row, "spec_topk1") for row in rows),
        "page_size=1 only" if slots_only else bool(trees),
    )
    yield manifest.name, cells


def _gdn_rows(manifest: Manifest, manifests: list[Manifest]) -> Iterator[tuple[str, Cells]]:
    rows = _allow(manifest)
    for device, vendor in VENDORS.items():
        here = [row for row in rows if vendor in _vendors(row)]
        if not here:
            continue
        archs = _archs(here, vendor)
        name = f"{manifest.name}@{device}" + (f":{','.join(archs)}" if archs else "")
        yield name, (_serves(here, "decode"), _serves(here, "prefill"), _verify_cell(manifest, here))


def _dsa_rows(manifest: Manifest, manifests: list[Manifest]) -> Iterator[tuple[str, Cells]]:
    rows = _allow(manifest, role="sparse")
    if rows:  # an indexer alone is no row of the table
        yield manifest.name, (_serves(rows, "prefill"), _serves(rows, "decode"))


_ROWS: Mapping[str, Callable[[Manifest, list[Manifest]], Iterator[tuple[str, Cells]]]] = {
    "mha": _mha_rows,
    "mla": _mla_rows,
    "gdn": _gdn_rows,
    "dsa": _dsa_rows,
}


# --- cells --------------------------------------------------------------------------------------------------------------


def _allow(manifest: Manifest, role: str | None = None) -> list[Row]:
    def plays(variant: Variant) -> bool:
        return role is None or role in variant.roles

    return [row for variant in manifest.variants if plays(variant) for row in variant.allow]


def _listed(row: Row, axis: str) -> list[Any]:
    """The values an axis lists: one or many; nothing for a range or an absent axis."""
    value = flatten(row.when).get(axis, [])
    if isinstance(value, Mapping):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _pages(row: Row) -> Pages:
    """Page sizes that a row reads natively; None for an open range (a table is a range, a list a set)."""
    value = row.when.get("page_size", {})
    if not isinstance(value, Mapping):
        return frozenset(_listed(row, "page_size"))
    if "exactly" in value:
        return frozenset({value["exactly"]})
    return _SLOTS if value.get("max") == 1 else None


def _union(sets: Iterable[Pages]) -> Pages:
    union: frozenset[int] = frozenset()
    for pages in sets:
        if pages is None:
            return None
        union |= pages
    return union


def _as_cell(pages: frozenset[int]) -> Any:
    listed = sorted(pages)
    return listed[0] if len(listed) == 1 else listed or False


def _kv_dtypes(row: Row) -> frozenset[str]:
    triples = row.when.get("dtypes", [])
    triples = [triples] if isinstance(triples, Mapping) else triples
    return frozenset(canonical(triple["kv"]) for triple in triples if "kv" in triple)


def _fp8_cell(rows: list[Row]) -> Any:
    read = frozenset(dtype for row in rows for dtype in _kv_dtypes(row))
    if read and read <= _FP8:
        return f"required: {', '.join(sorted(read))}"
    return bool(read & _FP8)


def _serves(rows: list[Row], phase: str) -> bool:
    return any(phase in _listed(row, "phase") for row in rows)


def _speculates(row: Row, feature: str) -> bool:
    return feature in row.features and bool(_SPECULATIVE & set(_listed(row, "phase")))


def _in_all_phases(rows: list[Row], feature: str) -> bool:
    """Whether both prefill and decode have a row with this feature."""
    having = [row for row in rows if feature in row.features]
    return _serves(having, "prefill") and _serves(having, "decode")


def _companion_rows(manifest: Manifest, manifests: list[Manifest]) -> list[Row]:
    """Rows of the backends that serve prefill where this one leaves it open."""
    names = {row.backend for row in manifest.companions if row.phase == "prefill"}
    return [row for other in manifests if other.kind == manifest.kind and other.name in names for row in _allow(other)]


def _verify_cell(manifest: Manifest, rows: list[Row]) -> Any:
    if any(_speculates(row, "spec_tree") for row in rows):
        return True
    if not any(_speculates(row, "spec_topk1") for row in rows):
        return False
    helpers = sorted({row.backend for row in manifest.companions if row.phase == "verify"})
    return "linear chain" + (f"; trees fall back to {', '.join(helpers)}" if helpers else "")


def _vendors(row: Row) -> frozenset[str]:
    return frozenset([*_listed(row, "vendor"), *map(_vendor_of, _listed(row, "arch"))])


def _vendor_of(arch: str) -> str:
    return next((vendor for prefix, vendor in _VENDOR_OF_ARCH.items() if arch.startswith(prefix)), "")


def _archs(rows: list[Row], vendor: str) -> list[str]:
    """The architectures of a vendor that rows name, by number; empty when a row takes all of them."""
    if any(not _listed(row, "arch") for row in rows):
        return []
    named = {arch for row in rows for arch in _listed(row, "arch") if _vendor_of(arch) == vendor}
    return sorted(named, key=lambda arch: (len(arch), arch))
