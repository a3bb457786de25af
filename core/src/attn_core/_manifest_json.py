"""Manifests as JSON values: the inverse of parsing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_core.manifest import Manifest, Row, Variant

_ROW_FIELDS: Mapping[str, tuple[str, ...]] = {
    "allow": ("features", "fuses", "pads", "host_lengths", "padded_out"),
    "deny": ("code", "reason", "fix", "link"),
    "order": ("rank", "reason"),
    "prefer": ("page_size", "format", "layout", "reason"),
    "companion": ("phase", "role", "backend", "reason"),
}


def _dump_row(row: Row, list_name: str) -> dict[str, Any]:
    default = type(row)()
    table: dict[str, Any] = {}
    for name in _ROW_FIELDS[list_name]:
        value = getattr(row, name)
        if value != getattr(default, name) or (name == "rank" and list_name == "order"):
            table[name] = sorted(value) if isinstance(value, frozenset) else value
    if list_name == "allow" and row.graph != "none":
        table["graph"] = {"level": row.graph, "piecewise": row.piecewise}
    if row.when:
        table["when"] = dict(row.when)
    return table


def _dump_variant(variant: Variant) -> dict[str, Any]:
    table: dict[str, Any] = {"name": variant.name, "roles": list(variant.roles)}
    for name in ("requires", "toolkit"):
        if getattr(variant, name):
            table[name] = list(getattr(variant, name))
    for name in ("jit", "network"):
        if getattr(variant, name):
            table[name] = getattr(variant, name)
    table["host_lengths"] = variant.host_lengths
    if variant.workspace:
        table["workspace"] = dict(variant.workspace)
    for name in ("allow", "deny", "prefer"):
        rows = [_dump_row(row, name) for row in getattr(variant, name)]
        if rows:
            table[name] = rows
    return table


def dump_backend(manifest: Manifest) -> dict[str, Any]:
    """The table of one backend, without what has its default."""
    table: dict[str, Any] = {
        "api": manifest.api,
        "kind": manifest.kind,
        "name": manifest.name,
        "status": manifest.status,
    }
    for name in ("summary", "package", "version", "help", "deprecated"):
        if getattr(manifest, name):
            table[name] = getattr(manifest, name)
    for name in ("aliases", "deprecated_aliases"):
        if getattr(manifest, name):
            table[name] = list(getattr(manifest, name))
    table["variant"] = [_dump_variant(variant) for variant in manifest.variants]
    if manifest.order:
        table["order"] = [_dump_row(row, "order") for row in manifest.order]
    if manifest.companions:
        table["companion"] = [_dump_row(row, "companion") for row in manifest.companions]
    if manifest.options_schema:
        table["options_schema"] = dict(manifest.options_schema)
    return table
