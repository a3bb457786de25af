"""What can be wrong with a plugin, as data: one record a problem, logged once, shown by ``attn list`` and ``attn doctor``."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from attn_core.errors import PluginError, UsageError

log = logging.getLogger("attn_core")

#: The installed core: frames in it are not where a plugin's mistake is.
_CORE = str(Path(__file__).parent)


class Cause(str, Enum):
    """The kind of a problem."""

    ENTRY_POINT = "entry_point"
    """The entry point itself is malformed, or its value is not a top-level package."""
    MANIFEST = "manifest"
    """attn_manifest.toml is not TOML, breaks the schema, or cannot be read."""
    API = "api"
    """The plugin was built for an API version that this core does not serve."""
    IMPORT = "import"
    """Importing the plugin raised something."""
    HOOK = "hook"
    """A hook is misspelt, undecorated, missing, or has arguments that the specification does not."""
    RAISED = "raised"
    """A hook raised, or answered something that it may not."""
    TIMEOUT = "timeout"
    """The plugin did not come back within ATTN_PLUGIN_TIMEOUT."""
    DUPLICATE = "duplicate"
    """Two distributions declare one (kind, name), or one alias."""


@dataclass(frozen=True, slots=True)
class PluginProblem:
    """One thing that is wrong with one plugin. ``backends`` are the ``kind/name`` that it makes unusable, where known.

    ``fatal`` problems make the whole plugin unusable; the others concern the listed backends only.
    """

    distribution: str
    version: str
    entry_point: str
    cause: Cause
    text: str
    fix: str = ""
    file: str = ""
    line: int = 0
    backends: tuple[str, ...] = ()
    fatal: bool = True

    def __str__(self) -> str:
        place = f" ({self.file}:{self.line})" if self.file else ""
        return (
            f"plugin {self.entry_point} of {self.distribution} {self.version}: {self.cause.value}: {self.text}{place}"
        )

    def facts(self) -> tuple[str, ...]:
        """One fact a line, for errors."""
        lines = [f"plugin   {self.entry_point} of {self.distribution} {self.version}", f"cause    {self.cause.value}"]
        lines += [f"found    {line}" for line in self.text.splitlines()]
        if self.file:
            lines.append(f"at       {self.file}:{self.line}")
        return tuple(lines)

    def to_error(self, message: str = "") -> PluginError:
        """This problem as an exception."""
        return PluginError(message or f"plugin {self.entry_point} cannot be used", *self.facts(), fix=self.fix or None)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        table = {name: getattr(self, name) for name in ("distribution", "version", "entry_point", "text", "fix")}
        place = {"file": self.file, "line": self.line} if self.file else {}
        return {**table, "cause": self.cause.value, **place, "backends": list(self.backends), "fatal": self.fatal}


def describe(error: BaseException) -> str:
    """``TypeName: message``, the causes it was raised from included."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    cause = error.__cause__
    return text if cause is None else f"{text} (caused by {describe(cause)})"


def place_of(error: BaseException, package: str) -> tuple[str, int]:
    """File and line of the mistake: the innermost frame inside `package`, else the innermost that is not core's own."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    outside = [
        f for f in frames if not f.filename.startswith(("<frozen importlib", _CORE)) and "importlib" not in f.filename
    ]
    folder = f"{os.sep}{package}{os.sep}"
    own = [f for f in outside if folder in f.filename or f.filename.endswith(f"{os.sep}{package}.py")]
    best = (own or outside)[-1:] if package else outside[-1:]
    return (best[0].filename, best[0].lineno or 0) if best else ("", 0)


def advice(error: BaseException, distribution: str) -> str:
    """The next step after an import or hook failed."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        try:
            there = importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):
            there = False
        return (
            f"reinstall {distribution}: part of {top} is missing"
            if there
            else f"install the package that holds {top!r}"
        )
    if isinstance(error, ImportError | OSError):
        shared = re.search(r"lib[\w.+-]+\.so[\w.]*", str(error))
        if shared:
            return f"install the library that holds {shared[0]}, or a build of {distribution} for this system"
    return f"report this to the authors of {distribution}; ATTN_DISABLE_PLUGINS={distribution} hides it"


_logged: set[PluginProblem] = set()


def log_once(problem: PluginProblem) -> None:
    """One WARNING a problem and process, with distribution name and version."""
    if problem not in _logged:
        _logged.add(problem)
        log.warning("%s%s", problem, f"; try: {problem.fix}" if problem.fix else "")


# --- settings from the environment --------------------------------------------------------------------------------------

DEFAULT_SECONDS = 30.0


def strict(environ: Mapping[str, str] = os.environ) -> bool:
    """ATTN_STRICT: every problem is an error."""
    value = environ.get("ATTN_STRICT", "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise UsageError(f"ATTN_STRICT={value!r} is neither 1 nor 0")


def timeout_seconds(environ: Mapping[str, str] = os.environ) -> float | None:
    """ATTN_PLUGIN_TIMEOUT in seconds; None (written as 0) is no limit."""
    value = environ.get("ATTN_PLUGIN_TIMEOUT", "").strip()
    if not value:
        return DEFAULT_SECONDS
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UsageError(f"ATTN_PLUGIN_TIMEOUT={value!r} is not a number of seconds; 0 means no limit")
    return seconds or None
