"""Finding plugins without importing them: entry points, where a distribution came from, and the manifest file."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

import importlib_metadata

from attn_core.discovery._problems import Cause, PluginProblem, describe

GROUP = "attn.backends"
MANIFEST_FILE = "attn_manifest.toml"


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One entry point of the group, with what its distribution says about itself."""

    name: str
    value: str
    distribution: str
    version: str
    origin: str

    @property
    def package(self) -> str:
        """The import package: the value without an attribute or submodule."""
        return re.split(r"[.:\s]", self.value.strip(), maxsplit=1)[0]

    def problem(self, cause: Cause, text: str, fix: str = "", **details: Any) -> PluginProblem:
        """A problem of this plugin."""
        return PluginProblem(self.distribution, self.version, self.name, cause, text, fix, **details)


def normalise(name: str) -> str:
    """A distribution name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).strip().lower()


def find_entry_points(group: str = GROUP) -> tuple[list[EntryPoint], list[PluginProblem]]:
    """All entry points of a group, one distribution at a time, so that a broken one cannot hide the others.

    Of a distribution that is on the path twice the first counts, as for imports. The order of the answer does not depend
    on the path.
    """
    found: list[EntryPoint] = []
    problems: list[PluginProblem] = []
    for distribution in _distributions(group):
        try:
            found += _read(distribution, group)
        except Exception as error:
            name = _name(distribution)
            text = f"entry_points.txt cannot be read: {describe(error)}"
            problems.append(PluginProblem(name, "", "?", Cause.ENTRY_POINT, text, f"reinstall {name}"))
    found.sort(key=lambda entry: (normalise(entry.distribution), entry.name, entry.value))
    return found, problems


def _distributions(group: str) -> Iterator[Any]:
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        text = _text(distribution, "entry_points.txt")
        if group not in text:  # most distributions: do not parse what cannot matter
            continue
        name = normalise(_name(distribution))
        if name not in seen:
            seen.add(name)
            yield distribution


def _text(distribution: Any, name: str) -> str:
    try:
        return distribution.read_text(name) or ""
    except Exception:  # unreadable metadata of somebody else's distribution
        return ""


def _name(distribution: Any) -> str:
    try:
        return str(distribution.name)
    except Exception:  # no METADATA: the folder's name is all there is
        return str(getattr(distribution, "_path", "unknown")).rpartition(os.sep)[2].partition("-")[0]


def _read(distribution: Any, group: str) -> list[EntryPoint]:
    entries = [(entry.name, entry.value) for entry in distribution.entry_points if entry.group == group]
    if not entries:
        return []
    version, origin = str(distribution.version), origin_of(distribution)
    return [EntryPoint(name, value, _name(distribution), version, origin) for name, value in entries]


def origin_of(distribution: Any) -> str:
    """Where a distribution was installed from (PEP 610): a URL, ``editable PATH``, or ``index``."""
    text = _text(distribution, "direct_url.json")
    if not text:
        return "index"
    try:
        table = json.loads(text)
        url = str(table["url"])
        if table.get("dir_info", {}).get("editable"):
            return "editable " + url.removeprefix("file://")
        if "vcs_info" in table:
            return f"{table['vcs_info']['vcs']}+{url}@{table['vcs_info'].get('commit_id', '')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unreadable direct_url.json"
    return url


# --- the import package, without importing it ---------------------------------------------------------------------------


def check_value(entry: EntryPoint) -> PluginProblem | None:
    """Whether the entry point's value is an importable top-level package."""
    try:
        spec = importlib.util.find_spec(entry.package)
    except Exception as error:
        return entry.problem(Cause.IMPORT, describe(error), f"reinstall {entry.distribution}")
    if spec is None:
        text = f"ModuleNotFoundError: No module named {entry.package!r} (entry point value {entry.value!r})"
        return entry.problem(Cause.IMPORT, text, f"reinstall {entry.distribution}")
    if entry.value.strip() != entry.package:
        text = f"the value {entry.value!r} is not a top-level package: looking at it would import code"
        fix = f'in pyproject.toml write {entry.name} = "{entry.package}" and keep {MANIFEST_FILE} in that package'
        return entry.problem(Cause.ENTRY_POINT, text, fix)
    return None


def read_manifest_text(package: str) -> str | None:
    """The text of the package's manifest file, or None if it has none. Reads wheels, editable and zipped installs.

    Raises OSError or UnicodeDecodeError for a file that is there but cannot be read.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:  # a single module holds no data files
        return None
    for folder in spec.submodule_search_locations:
        data = _read_data(spec, os.path.join(folder, MANIFEST_FILE))
        if data is not None:
            return data.decode("utf-8")
    return None


def _read_data(spec: ModuleSpec, path: str) -> bytes | None:
    if os.path.exists(path):
        with open(path, "rb") as file:
            return file.read()
    reader = getattr(spec.loader, "get_data", None)
    if reader is None or os.path.isdir(os.path.dirname(path)):
        return None
    try:  # inside a zip file
        return bytes(reader(path))
    except OSError:
        return None
