"""The published JSON schemas: ``manifest-1``, ``plan-1``, ``plan-error-1``, ``list-1`` and ``doctor-1``, one file each.

The files are written by ``python -m attn_core.schemas`` from the registries of axes and features, so that code and schema
cannot drift apart; a test compares them. The hot path validates by parsing and imports no schema library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_core.axes import AXES, OPEN_FAMILIES, Axis
from attn_core.capabilities import FEATURES, GRAPH_LEVELS, HOST_LENGTHS, PADDED_OUT, PHASES, ROLES, STATUSES
from attn_core.dtypes import BITS, aliases
from attn_core.geometry import BACKEND_KINDS
from attn_core.manifest import PADDED_AXES, RANK_BOUNDS, WORKSPACE_SIZES

FOLDER = Path(__file__).parent
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def load(name: str) -> dict[str, Any]:
    """A published schema by file name without suffix: ``load("manifest-1")``."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


def build() -> dict[str, dict[str, Any]]:
    """All schemas by name."""
    from attn_core.schemas._reports import doctor_schema, list_schema

    return {
        "manifest-1": manifest_schema(),
        "plan-1": plan_schema(),
        "plan-error-1": error_schema(),
        "list-1": list_schema(),
        "doctor-1": doctor_schema(),
    }


# --- manifest -----------------------------------------------------------------------------------------------------------


def _object(properties: Mapping[str, Any], required: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": dict(properties), "additionalProperties": False, **more}
    return {**schema, "required": list(required)} if required else schema


def _list(items: Any, least: int = 0) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": items}
    return {**schema, "minItems": least} if least else schema


def _one_or_many(item: Any) -> dict[str, Any]:
    return {"anyOf": [item, _list(item, 1)]}


_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_NUMBER: dict[str, Any] = {"type": "integer"}
_PAIR: dict[str, Any] = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}


def _choice(values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def _axis_schema(axis: Axis) -> dict[str, Any]:
    """What may stand after an axis in ``when``."""
    named = {"phase": _choice(PHASES), "role": _choice(ROLES)}.get(axis.name, _TEXT)
    version = {"anyOf": [_NUMBER, {"type": "string", "pattern": r"^\d+(\.\d+)*$"}]}
    forms: dict[str, dict[str, Any]] = {
        "flag": _FLAG,
        "specifier": _TEXT,
        "name": {"anyOf": [named, _list(named, 1), _object({"not": _one_or_many(named)}, ("not",))]},
        "set": {"anyOf": [_TEXT, _list(_TEXT), _object({"not": _one_or_many(_TEXT)}, ("not",))]},
        "number": {"anyOf": [_NUMBER, _list(_NUMBER, 1), _bounds(_NUMBER)]},
        "version": {"anyOf": [version, _list(version, 1), _bounds(version)]},
        "pair": {"anyOf": [_list(_PAIR, 1), _pair_bounds()]},
        "dtypes": _one_or_many(
            _object({key: _choice([*BITS, *aliases()]) for key in ("q", "kv", "out")}, minProperties=1)
        ),
    }
    return {**forms[axis.form], "description": axis.meaning}


def _bounds(value: dict[str, Any]) -> dict[str, Any]:
    return _object(
        {
            "min": value,
            "max": value,
            "multiple": {"type": "integer", "minimum": 1},
            "exactly": _one_or_many(value),
            "not": _one_or_many(value),
        },
        minProperties=1,
    )


def _pair_bounds() -> dict[str, Any]:
    number = {"anyOf": [_NUMBER, _list(_NUMBER, 1), _bounds(_NUMBER)]}
    return _object(
        {
            "min": _NUMBER,
            "max": _NUMBER,
            "multiple": {"type": "integer", "minimum": 1},
            "equal": _FLAG,
            "first": number,
            "second": number,
            "not": _list(_PAIR),
        },
        minProperties=1,
    )


def _when_schema() -> dict[str, Any]:
    properties: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for axis in AXES.values():
        family, dot, name = axis.name.partition(".")
        properties[axis.name] = _axis_schema(axis)
        if dot:
            nested.setdefault(family, {})[name] = _axis_schema(axis)
    for family, items in nested.items():
        properties[family] = _object(items)
    for family, axis in OPEN_FAMILIES.items():
        properties[family] = {"type": "object", "additionalProperties": _axis_schema(axis)}
    patterns = {rf"^{family}\..+$": _axis_schema(axis) for family, axis in OPEN_FAMILIES.items()}
    return {**_object(properties), "patternProperties": patterns}


def _allow_schema() -> dict[str, Any]:
    graph = _object({"level": _choice(GRAPH_LEVELS), "piecewise": _choice(("rebuild", "stable_address"))})
    return _object(
        {
            "when": {"$ref": "#/$defs/when"},
            "features": _list(_choice(FEATURES)),
            "graph": graph,
            "fuses": _list(_TEXT),
            "pads": _list(_choice(PADDED_AXES)),
            "host_lengths": _choice(HOST_LENGTHS),
            "padded_out": _choice(PADDED_OUT),
        },
        ("when",),
    )


def _workspace_schema() -> dict[str, Any]:
    sizes = {key: {"type": "integer", "minimum": 0} for key in WORKSPACE_SIZES}
    row = _object({"when": {"$ref": "#/$defs/when"}, **sizes})
    return _object({**sizes, "zeroed": _FLAG, "shareable": _FLAG, "rows": _list(row)})


def _variant_schema() -> dict[str, Any]:
    deny = _object(
        {"when": {"$ref": "#/$defs/when"}, "code": _TEXT, "reason": _TEXT, "fix": _TEXT, "link": _TEXT}, ("reason",)
    )
    page = {"type": "integer", "minimum": 1}
    prefer = _object(
        {"when": {"$ref": "#/$defs/when"}, "page_size": page, "format": _TEXT, "layout": _TEXT, "reason": _TEXT}
    )
    return _object(
        {
            "name": _TEXT,
            "roles": _list(_choice(ROLES)),
            "allow": _list({"$ref": "#/$defs/allow"}, 1),
            "deny": _list(deny),
            "prefer": _list(prefer),
            "requires": _list(_TEXT),
            "toolkit": _list(_TEXT),
            "jit": _FLAG,
            "network": _TEXT,
            "host_lengths": _choice(HOST_LENGTHS),
            "workspace": _workspace_schema(),
        },
        ("name", "allow"),
    )


def manifest_schema() -> dict[str, Any]:
    """The schema of ``attn_manifest.toml``. Which axes an allow row must state depends on the kind: ``allOf`` below."""
    rank = {"type": "integer", "minimum": RANK_BOUNDS[0], "maximum": RANK_BOUNDS[1]}
    order = _object({"rank": rank, "when": {"$ref": "#/$defs/when"}, "reason": _TEXT}, ("rank",))
    companion = _object(
        {
            "phase": _choice(PHASES),
            "role": _choice(ROLES),
            "backend": _TEXT,
            "when": {"$ref": "#/$defs/when"},
            "reason": _TEXT,
        },
        ("phase", "backend"),
    )
    backend = _object(
        {
            "kind": _choice(BACKEND_KINDS),
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]+$"},
            "status": _choice(STATUSES),
            "summary": _TEXT,
            "help": _TEXT,
            "deprecated": _TEXT,
            "aliases": _list(_TEXT),
            "deprecated_aliases": _list(_TEXT),
            "variant": _list({"$ref": "#/$defs/variant"}, 1),
            "order": _list(order),
            "companion": _list(companion),
            "options_schema": {"type": "object"},
        },
        ("kind", "name", "variant"),
        allOf=[_required_axes(kind) for kind in BACKEND_KINDS],
    )
    return {
        "$schema": _DIALECT,
        "title": "attn_manifest.toml, API 1",
        **_object(
            {"api": {"type": "string", "pattern": r"^\d+\.\d+$"}, "backend": _list(backend, 1)}, ("api", "backend")
        ),
        "$defs": {"when": _when_schema(), "allow": _allow_schema(), "variant": _variant_schema()},
    }


def _required_axes(kind: str) -> dict[str, Any]:
    needed = [axis.name for axis in AXES.values() if kind in axis.required_for]
    when = {"required": needed, "anyOf": [{"required": ["arch"]}, {"required": ["vendor"]}]}
    rows = {"properties": {"variant": {"items": {"properties": {"allow": {"items": {"properties": {"when": when}}}}}}}}
    return {"if": {"properties": {"kind": {"const": kind}}}, "then": rows}


# --- plan ---------------------------------------------------------------------------------------------------------------


def _reason_schema() -> dict[str, Any]:
    return _object(dict.fromkeys(("code", "need", "have", "asked_by", "fix", "link"), _TEXT), ("code",))


def _rejection_schema() -> dict[str, Any]:
    names = ("group", "phase", "role", "backend", "variant", "package", "version", "model")
    return _object(
        {**dict.fromkeys(names, _TEXT), "reasons": _list(_reason_schema(), 1)},
        ("group", "phase", "backend", "reasons"),
    )


def plan_schema() -> dict[str, Any]:
    """The schema of ``attn plan --json``. Fields may be added within a schema version; readers ignore what they do not know."""
    phase = {
        "type": "object",
        "required": ["backend", "variant", "package", "version", "parts", "kernel_page_size", "graph"],
    }
    group = {
        "type": "object",
        "required": ["name", "model", "kind", "layers", "num_layers", "phases"],
        "properties": {"phases": {"type": "object", "propertyNames": _choice(PHASES), "additionalProperties": phase}},
    }
    pool_names = ("name", "model", "layers", "format", "dtype", "layout", "page_size", "bytes_per_page", "kind")
    pool = {"type": "object", "required": list(pool_names)}
    adjustment = _object(
        {"field": _TEXT, "from": {}, "to": {}, "reason": _TEXT, "by": _TEXT}, ("field", "from", "to", "reason", "by")
    )
    properties = {
        "schema_version": {"const": 1},
        "api_version": _TEXT,
        "ok": {"const": True},
        **dict.fromkeys(
            ("model", "platform", "dtype", "kv_cache_dtype", "kv_layout", "fingerprint", "mixed_batch"), _TEXT
        ),
        "page_size": _NUMBER,
        "groups": _list(group, 1),
        "pools": _list(pool),
        "cuda_graph": {"type": "object", "required": ["mode"]},
        "adjustments": _list(adjustment),
        "rejected": _list(_rejection_schema()),
        "warnings": _list(_TEXT),
        "cache_contract": {"type": "object"},
    }
    return {
        "$schema": _DIALECT,
        "title": "plan, schema version 1",
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }


def error_schema() -> dict[str, Any]:
    """The schema of what ``attn plan --json`` prints when there is no plan (exit status 3)."""
    error = _object(
        {
            "code": _TEXT,
            "message": _TEXT,
            "facts": _list(_TEXT),
            "rejected": _list(_rejection_schema()),
            "suggestions": _list(_TEXT),
        },
        ("code", "message", "rejected", "suggestions"),
    )
    return {
        "$schema": _DIALECT,
        "title": "plan error, schema version 1",
        **_object({"schema_version": {"const": 1}, "ok": {"const": False}, "error": error}, ("ok", "error")),
    }


def write() -> None:
    """Write every schema file."""
    for name, schema in build().items():
        (FOLDER / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
