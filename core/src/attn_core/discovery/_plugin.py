"""One plugin: its entry point, what it declares, and its module once a backend of it is wanted."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import attn_core
from attn_core.discovery import _entrypoints
from attn_core.discovery._entrypoints import MANIFEST_FILE, EntryPoint
from attn_core.discovery._loading import Failure, call_guarded
from attn_core.discovery._problems import Cause, PluginProblem, advice, describe, place_of
from attn_core.errors import AttnError
from attn_core.manifest import Manifest, load_toml, parse_manifest, parse_manifests


class State(str, Enum):
    """How far a plugin has come."""

    FOUND = "found"
    """Declared and listed; its code has not been imported."""
    LOADED = "loaded"
    """Imported, its hooks checked."""
    FAILED = "failed"
    """Unusable; a problem says why."""
    INCOMPATIBLE = "incompatible"
    """Built for an API version that this core does not serve."""
    FILTERED = "filtered"
    """Left out by ATTN_PLUGINS or ATTN_DISABLE_PLUGINS."""


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What ``attn list`` shows about a plugin. ``origin`` is where pip got it from; ``backends`` are ``kind/name``."""

    distribution: str
    version: str
    origin: str
    entry_point: str
    package: str
    backends: tuple[str, ...]
    state: State

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        names = ("distribution", "version", "origin", "entry_point", "package")
        table: dict[str, Any] = {name: getattr(self, name) for name in names}
        return {**table, "backends": list(self.backends), "state": self.state.value}


class PluginBroken(Exception):
    """A fatal problem was found; raised and caught inside the registry only."""

    def __init__(self, problem: PluginProblem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class Plugin:
    """The mutable record behind a :class:`PluginInfo`. ``lock`` is held while its code is imported."""

    def __init__(self, entry: EntryPoint, find_module: Callable[[], Any] | None = None, has_code: bool = True) -> None:
        self.entry = entry
        self.has_code = has_code  # hand-made manifests have none
        self.manifests: tuple[Manifest, ...] = ()
        self.state = State.FOUND
        self.module: Any = None
        self.hooks: dict[str, Any] = {}
        self.problem: PluginProblem | None = None
        self.error: BaseException | None = None
        self.registered = False  # in the registry's plugin manager
        self.lock = threading.Lock()
        self._find_module = find_module or (lambda: importlib.import_module(entry.package))

    @property
    def key(self) -> str:
        """Names the plugin in messages and in pluggy."""
        return f"{self.entry.distribution}:{self.entry.name}"

    @property
    def info(self) -> PluginInfo:
        """The public, frozen view."""
        entry = self.entry
        backends = tuple(sorted(manifest.id for manifest in self.manifests))
        return PluginInfo(
            entry.distribution, entry.version, entry.origin, entry.name, entry.package, backends, self.state
        )

    def answers_to(self, name: str) -> bool:
        """Whether `name` is this plugin's distribution, entry point or import package."""
        entry, wanted = self.entry, _entrypoints.normalise(name)
        return wanted in map(_entrypoints.normalise, (entry.distribution, entry.name, entry.package))

    def fail(self, problem: PluginProblem, error: BaseException | None = None) -> PluginBroken:
        """Record a fatal problem and what was raised; the caller raises what is returned."""
        self.problem, self.error = problem, error
        self.state = State.INCOMPATIBLE if problem.cause is Cause.API else State.FAILED
        return PluginBroken(problem)

    # --- declarations ---------------------------------------------------------------------------------------------------

    def declare(self) -> None:
        """Read the manifest file; a package without one is imported and asked. Raises :class:`PluginBroken`."""
        text = self._manifest_text()
        if text is not None:
            self.manifests = self._parse(text)
            return
        hooks = self.load()
        if "attn_capabilities" not in hooks:
            text = f"{self.entry.package} has no {MANIFEST_FILE} and does not answer attn_capabilities"
            raise self.fail(self.entry.problem(Cause.MANIFEST, text, f"add {MANIFEST_FILE} as package data"))
        try:
            self._accept(call_guarded(self.key, lambda: list(hooks["attn_capabilities"]())))
        except Failure as failure:
            raise self.fail(self.failure_problem(Cause.RAISED, "attn_capabilities", failure)) from failure.error

    def _manifest_text(self) -> str | None:
        problem = _entrypoints.check_value(self.entry)
        if problem is not None:
            raise self.fail(problem)
        try:
            return _entrypoints.read_manifest_text(self.entry.package)
        except (OSError, UnicodeDecodeError, ValueError, ImportError) as error:
            raise self.fail(self._manifest_problem(f"{MANIFEST_FILE} cannot be read: {describe(error)}")) from error

    def _parse(self, text: str) -> tuple[Manifest, ...]:
        where = f"{self.entry.distribution}: {MANIFEST_FILE}"
        document: Mapping[str, Any] = {}
        try:
            document = load_toml(text, where)
            self.check_api(str(document.get("api", "")), _declared(document))
            return parse_manifests(document, package=self.entry.distribution, version=self.entry.version, where=where)
        except AttnError as error:
            raise self.fail(self._manifest_problem(error.message, error.fix or "", _declared(document))) from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise self.fail(self._manifest_problem(describe(error), "", _declared(document))) from error

    def _manifest_problem(self, text: str, fix: str = "", backends: tuple[str, ...] = ()) -> PluginProblem:
        fix = fix or f"report this to the authors of {self.entry.distribution}: its {MANIFEST_FILE} must be mended"
        return self.entry.problem(Cause.MANIFEST, text, fix, backends=backends)

    def check_api(self, api: str, backends: tuple[str, ...] = ()) -> None:
        """Same major and not a newer minor, or :class:`PluginBroken`."""
        have = _version(attn_core.API_VERSION)
        want = _version(api)
        name = self.entry.distribution
        if want is None or have is None:
            problem = self._manifest_problem(f"api = {api!r} is not 'major.minor'", "", backends)
        elif want[0] == have[0] and want[1] <= have[1]:
            return
        elif want > have:
            text = f"needs attn-core with API {want[0]}.{'x' if want[0] != have[0] else want[1]}; this is API {attn_core.API_VERSION}"
            problem = self.entry.problem(Cause.API, text, "pip install -U attn-core", backends=backends)
        else:
            text = f"built for API {api}; this attn-core serves API {have[0]}.0 to {attn_core.API_VERSION}"
            problem = self.entry.problem(Cause.API, text, f"pip install -U {name}", backends=backends)
        raise self.fail(problem)

    def _accept(self, answer: Sequence[object]) -> None:
        accepted: dict[str, Manifest] = {}
        for item in answer:
            manifest = self._accept_one(item)
            if manifest.id in accepted:
                raise self.fail(self._manifest_problem(f"{manifest.id} is declared twice", "", (manifest.id,)))
            accepted[manifest.id] = manifest
        self.manifests = tuple(accepted.values())

    def _accept_one(self, item: object) -> Manifest:
        table = item.to_dict() if isinstance(item, Manifest) else item
        if not isinstance(table, Mapping):
            text = f"attn_capabilities answered a {type(item).__name__}; needed are manifests or tables"
            raise self.fail(self.entry.problem(Cause.RAISED, text, self._report()))
        self.check_api(str(table.get("api", "")), _declared({"backend": [table]}))
        try:
            manifest = parse_manifest(table)
        except AttnError as error:
            raise self.fail(self._manifest_problem(error.message, error.fix or "")) from error
        return replace(manifest, package=self.entry.distribution, version=self.entry.version)

    # --- code -----------------------------------------------------------------------------------------------------------

    def load(self) -> dict[str, Any]:
        """Import the package and check its hooks, once; the hooks by name. Raises :class:`PluginBroken`."""
        from attn_core.discovery._hookcheck import implementations
        from attn_core.hookspecs import PluginSpec

        if self.problem is not None:
            raise PluginBroken(self.problem) from self.error
        if self.module is not None:
            return self.hooks
        try:
            module = call_guarded(self.key, self._find_module)
        except Failure as failure:
            problem = self.failure_problem(Cause.IMPORT, "import", failure)
            raise self.fail(problem, failure.error) from failure.error
        hooks, faults = implementations(module, PluginSpec)
        if not faults and "attn_create" not in hooks:
            text = f"{self.entry.package} does not answer attn_create(manifest, variant, context)"
            raise self.fail(self.entry.problem(Cause.HOOK, text, self._report(), backends=self.info.backends))
        if faults:
            text = "\n".join(str(fault) for fault in faults)
            place = {"file": faults[0].file, "line": faults[0].line}
            raise self.fail(self.entry.problem(Cause.HOOK, text, self._report(), backends=self.info.backends, **place))
        self.module, self.hooks, self.state = module, hooks, State.LOADED
        return hooks

    def failure_problem(self, cause: Cause, what: str, failure: Failure, **details: Any) -> PluginProblem:
        """The problem that a :class:`Failure` of plugin code amounts to."""
        details.setdefault("backends", self.info.backends)
        error = failure.error
        if error is None:
            text = f"{what} did not come back within {failure.seconds:g} s"
            return self.entry.problem(
                Cause.TIMEOUT, text, "ATTN_PLUGIN_TIMEOUT=seconds allows more time (0: no limit)", **details
            )
        file, line = place_of(error, self.entry.package)
        text = describe(error) if cause is Cause.IMPORT else f"{what}: {describe(error)}"
        return self.entry.problem(cause, text, advice(error, self.entry.distribution), file=file, line=line, **details)

    def _report(self) -> str:
        return f"report this to the authors of {self.entry.distribution}"


def _version(text: str) -> tuple[int, int] | None:
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot and major.isdecimal() and minor.isdecimal() else None


def _declared(document: Mapping[str, Any]) -> tuple[str, ...]:
    """``kind/name`` of the backends of a document that may be broken, so that its problem can be found by name."""
    tables = document.get("backend", ())
    if not isinstance(tables, list):
        return ()
    return tuple(f"{t.get('kind')}/{t.get('name')}" for t in tables if isinstance(t, Mapping) and "name" in t)
