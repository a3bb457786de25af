"""Schemas of ``attn list --json`` and ``attn doctor --json``. Fields may be added within a schema version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.capabilities import STATUSES
from attn_core.discovery import Cause, State
from attn_core.geometry import BACKEND_KINDS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_NAMES: dict[str, Any] = {"type": "array", "items": _TEXT}
_VERSIONS: dict[str, Any] = {"type": "object", "additionalProperties": _TEXT}


def _open(properties: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An object with required `properties`; readers ignore what they do not know."""
    every = {**properties, **(optional or {})}
    return {"type": "object", "properties": every, "required": list(properties)}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _texts(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, _TEXT)


_BACKEND: dict[str, Any] = {
    "kind": {"enum": list(BACKEND_KINDS)},
    "name": _TEXT,
    "status": {"enum": list(STATUSES)},
    **_texts("summary", "api", "package", "version", "origin", "state"),
    "aliases": _NAMES,
}
_PLUGIN = _open(
    {
        **_texts("distribution", "version", "origin", "entry_point", "package"),
        "backends": _NAMES,
        "state": {"enum": [state.value for state in State]},
    }
)
_PROBLEM = _open(
    {
        **_texts("distribution", "version", "entry_point", "text", "fix"),
        "cause": {"enum": [cause.value for cause in Cause]},
        "backends": _NAMES,
        "fatal": _FLAG,
    },
    {"file": _TEXT, "line": {"type": "integer"}},
)
_REASON = _open({"code": _TEXT}, _texts("need", "have", "asked_by", "fix", "link"))
_ANSWER = _open({"ok": _FLAG, "reasons": _list(_REASON), "versions": _VERSIONS, "archs": _NAMES, "needs": _TEXT})
_FILES = _open(
    {
        **_texts("distribution", "version", "text"),
        "result": {"enum": ["verified", "changed", "unknown"]},
        **dict.fromkeys(("changed", "missing", "unlisted"), _NAMES),
    }
)


def list_schema() -> dict[str, Any]:
    """The schema of ``attn list --json``."""
    backend = _open({**_BACKEND, "variants": _NAMES})
    properties = {
        "schema_version": {"const": 1},
        "api_version": _TEXT,
        "backends": _list(backend),
        "plugins": _list(_PLUGIN),
        "problems": _list(_PROBLEM),
    }
    return {"$schema": _DIALECT, "title": "attn list, schema version 1", **_open(properties)}


def doctor_schema() -> dict[str, Any]:
    """The schema of ``attn doctor --json`` and of the file that ``--report`` writes."""
    backend = _open({**_BACKEND, "variants": {"type": "object", "additionalProperties": _ANSWER}})
    platform = _open({**_texts("id", "device", "arch", "vendor", "text"), "versions": _VERSIONS, "notes": _NAMES})
    properties = {
        "schema_version": {"const": 1},
        "ok": _FLAG,
        **_texts("api_version", "python", "executable", "cache_directory"),
        "platform": platform,
        "libraries": _VERSIONS,
        "environment": _VERSIONS,
        "backends": _list(backend),
        "plugins": _list(_PLUGIN),
        "problems": _list(_PROBLEM),
    }
    return {
        "$schema": _DIALECT,
        "title": "attn doctor, schema version 1",
        **_open(properties, {"files": _list(_FILES)}),
    }
