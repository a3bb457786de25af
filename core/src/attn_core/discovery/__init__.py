"""Which plugins are installed, what they declare, and their code when it is wanted.

:func:`discover` reads entry points and manifest files and imports no plugin code. A :class:`Registry` imports a plugin only
when one of its backends is probed or created. Whatever is wrong with a plugin becomes a :class:`PluginProblem` and stops
nothing else; ``ATTN_STRICT=1`` turns problems into errors.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from attn_core.availability import Availability
from attn_core.discovery import _filters, _problems
from attn_core.discovery._entrypoints import EntryPoint, find_entry_points, normalise
from attn_core.discovery._loading import Failure, call_guarded, progress, running
from attn_core.discovery._plugin import Plugin, PluginBroken, PluginInfo, State
from attn_core.discovery._problems import Cause, PluginProblem
from attn_core.discovery._requirements import default_availability
from attn_core.discovery._workers import verify_packages
from attn_core.errors import AttnError, PluginError, UsageError
from attn_core.manifest import Manifest
from attn_core.reasons import Reason

if TYPE_CHECKING:
    from attn_core.context import Context
    from attn_core.discovery._hookcheck import HookManager
    from attn_core.plan import Plan
    from attn_core.platform import Platform

__all__ = ["Cause", "PluginInfo", "PluginProblem", "Registry", "State", "check_workers", "discover", "verify_plan"]

#: Held for a moment while a registry is changed, and while entry points are read; both are replaced in a forked child.
_lock = threading.RLock()
_discovering = threading.RLock()
_current: Registry | None = None
_registries: weakref.WeakSet[Registry] = weakref.WeakSet()


def discover(refresh: bool = False) -> Registry:
    """The registry of this process, made at the first call. `refresh` reads the installed distributions again.

    Thread-safe, and the same in spawned and forked workers. Raises :class:`UsageError` for an unknown name in ATTN_PLUGINS,
    ATTN_DISABLE_PLUGINS or ATTN_PREFER, and :class:`PluginError` for any problem under ATTN_STRICT=1.
    """
    global _current
    if _current is not None and not refresh:
        return _current
    if running.get():
        raise PluginError(f"attn_core.discover() was called by {', '.join(running.get())} while it is being loaded")
    with _discovering:
        if _current is None or refresh:
            importlib.invalidate_caches()
            _current = Registry.from_environment()
        return _current


def _after_fork() -> None:
    """Locks that another thread of the parent held would stay locked in a forked child for ever."""
    global _lock, _discovering
    _lock, _discovering = threading.RLock(), threading.RLock()
    for registry in list(_registries):
        registry._reset_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Registry:
    """Plugins with their manifests and problems. Safe to use from several threads.

    ``manifests`` is ordered by kind and name. Backends that two distributions declare are not in it; a problem says so.
    """

    def __init__(
        self, plugins: Sequence[Plugin], problems: Sequence[PluginProblem] = (), prefer: Mapping[str, str] = {}
    ):
        kept, duplicates = _filters.settle(plugins, prefer)
        self.manifests: tuple[Manifest, ...] = tuple(manifest for _, manifest in kept)
        self._owners = {(normalise(manifest.package), manifest.id): plugin for plugin, manifest in kept}
        self._plugins = tuple(plugins)
        self._problems: list[PluginProblem] = []
        self._hung: dict[str, PluginProblem] = {}
        self._manager: HookManager | None = None
        for problem in (*problems, *(p.problem for p in plugins if p.problem), *duplicates):
            self._note(problem)
        _registries.add(self)

    @classmethod
    def from_environment(cls) -> Registry:
        """Read what is installed here; see :func:`discover`, which caches it."""
        entries, problems = find_entry_points()
        plugins = [Plugin(entry) for entry in entries]
        _filters.filter_plugins(plugins)
        used: dict[tuple[str, str], Plugin] = {}
        for plugin in plugins:
            if plugin.state is State.FILTERED:
                continue
            twin = used.setdefault((normalise(plugin.entry.distribution), plugin.entry.package), plugin)
            if twin is not plugin:
                text = (
                    f"entry point {twin.entry.name} of this distribution names the package {plugin.entry.package}, too"
                )
                plugin.fail(plugin.entry.problem(Cause.DUPLICATE, text, "keep one of the two entry points"))
                continue
            with suppress(PluginBroken):  # recorded in the plugin
                plugin.declare()
        registry = cls(plugins, problems, _filters.preferences(plugins))
        if registry.problems and _problems.strict():
            facts = [line for problem in registry.problems for line in problem.facts()]
            raise PluginError(f"{len(registry.problems)} plugin problem(s), and ATTN_STRICT is set", *facts)
        return registry

    @classmethod
    def with_manifests(
        cls,
        manifests: Sequence[Manifest],
        *,
        modules: Mapping[str, Any] | None = None,
        problems: Sequence[PluginProblem] = (),
    ) -> Registry:
        """A registry of hand-made manifests, for tests and what-if plans.

        `modules` maps a manifest's ``package`` to an object that answers the plugin hooks; without one its backends can be
        planned but not created.
        """
        plugins: dict[str, Plugin] = {}
        for manifest in manifests:
            package = manifest.package
            if package not in plugins:
                entry = EntryPoint(package, package, package, manifest.version, "given")
                module = (modules or {}).get(package)
                plugins[package] = Plugin(entry, partial(_given, module), has_code=module is not None)
            plugins[package].manifests += (manifest,)
        return cls(list(plugins.values()), problems)

    # --- what there is --------------------------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin with its present state, ordered by distribution and entry point."""
        return tuple(plugin.info for plugin in self._plugins)

    @property
    def problems(self) -> tuple[PluginProblem, ...]:
        """Everything found wrong so far, ordered by distribution and entry point."""
        with _lock:
            found = list(self._problems)
        return tuple(sorted(found, key=lambda p: (normalise(p.distribution), p.entry_point, p.cause.value, p.text)))

    def owner(self, manifest: Manifest) -> PluginInfo:
        """The plugin that `manifest` comes from. Raises :class:`UsageError` if it is not one of this registry's."""
        return self._owner(manifest).info

    def problem_for(self, name: str) -> PluginProblem | None:
        """The problem that explains why `name` is missing: a backend (``triton``, ``mha/triton``), plugin or package."""
        wanted = name.partition(":")[0]
        for problem in sorted(self.problems, key=lambda p: not p.fatal):
            backends = {part for backend in problem.backends for part in (backend, backend.partition("/")[2])}
            if wanted in backends or normalise(wanted) in map(normalise, (problem.distribution, problem.entry_point)):
                return problem
        return next((p.problem for p in self._plugins if p.problem is not None and p.answers_to(wanted)), None)

    # --- plugin code ----------------------------------------------------------------------------------------------------

    def load(self, manifest: Manifest) -> Any:
        """The module of the plugin that owns `manifest`, imported and checked at the first call.

        Raises :class:`PluginError` with the problem if it cannot be used.
        """
        plugin = self._owner(manifest)
        if not plugin.has_code:
            raise PluginError(f"{manifest.id} is a manifest without code: it can be planned, not created")
        try:
            return self._load(plugin)
        except PluginBroken as broken:
            raise broken.problem.to_error(f"{manifest.id} cannot be used") from broken.__cause__

    def probe(self, manifest: Manifest, platform: Platform) -> dict[str, Availability]:
        """Whether each variant of `manifest` can run on `platform`. Asks the owning plugin only.

        Without an ``attn_probe`` hook the requirements and tools of the manifest are looked for. A plugin that fails is an
        answer, too: not available, with the reason. Raises :class:`PluginError` only under ATTN_STRICT=1.
        """
        if manifest.status == "planned":
            reason = Reason("status", need="implemented", have="planned: no kernels yet")
            return {variant.name: Availability(False, (reason,)) for variant in manifest.variants}
        plugin = self._owner(manifest)
        problem = self._hung.get(manifest.id)  # it would only hang again
        try:
            if problem is None:
                return _availabilities(self._ask_probe(plugin, manifest, platform), manifest)
        except PluginBroken as broken:
            problem = broken.problem
        except Failure as failure:
            problem = plugin.failure_problem(Cause.RAISED, "attn_probe", failure, backends=(manifest.id,), fatal=False)
            self._note(problem)
            if failure.error is None:
                self._hung[manifest.id] = problem
        if _problems.strict():
            raise problem.to_error()
        reason = Reason("plugin", need="a plugin that works", have=problem.text, fix=problem.fix)
        return {variant.name: Availability(False, (reason,)) for variant in manifest.variants}

    def create(self, manifest: Manifest, variant: str, context: Context) -> Any:
        """A backend object for one (model, layer group, variant). Has no time limit, as kernels may be compiled.

        Raises :class:`PluginError`; an error of attn-core's own that the plugin raises passes through.
        """
        plugin = self._owner(manifest)
        self.load(manifest)
        manifest.variant(variant)  # an unknown variant is refused here, not in the plugin
        what = f"creating {manifest.id}:{variant} ({plugin.entry.distribution})"
        try:
            with progress(what):
                backend = self._call(plugin, "attn_create", manifest=manifest, variant=variant, context=context)
        except AttnError:
            raise
        except (Exception, SystemExit) as error:
            raise self._created_badly(plugin, manifest, Failure(error)) from error
        if backend is None:
            raise self._created_badly(plugin, manifest, Failure(TypeError("attn_create answered None")))
        return backend

    def _created_badly(self, plugin: Plugin, manifest: Manifest, failure: Failure) -> PluginError:
        problem = plugin.failure_problem(Cause.RAISED, "attn_create", failure, backends=(manifest.id,), fatal=False)
        self._note(problem)
        return problem.to_error(f"{manifest.id} cannot be created")

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _owner(self, manifest: Manifest) -> Plugin:
        plugin = self._owners.get((normalise(manifest.package), manifest.id))
        if plugin is None:
            problem = self.problem_for(manifest.id)
            known = ", ".join(sorted({m.id for m in self.manifests})) or "none"
            facts = problem.facts() if problem else (f"found    {known}",)
            raise UsageError(f"no installed plugin {manifest.package!r} serves {manifest.id}", *facts)
        return plugin

    def _load(self, plugin: Plugin) -> Any:
        """Import once. Raises :class:`PluginBroken`, after noting the problem."""
        if plugin.registered:
            return plugin.module
        with self._loading(plugin):
            try:
                plugin.load()
            except PluginBroken as broken:
                self._note(broken.problem)
                raise
            self._register(plugin)
        return plugin.module

    @contextmanager
    def _loading(self, plugin: Plugin) -> Iterator[None]:
        """The plugin's lock; refuses a plugin that asks for itself while it is being loaded."""
        if plugin.key in running.get():
            raise PluginError(f"plugin {plugin.key} asked for its own backends while it is being loaded")
        seconds = _problems.timeout_seconds()
        if not plugin.lock.acquire(timeout=-1 if seconds is None else seconds + 5):
            raise PluginBroken(
                plugin.failure_problem(Cause.TIMEOUT, "import in another thread", Failure(None, seconds or 0))
            )
        try:
            yield
        finally:
            plugin.lock.release()

    def _register(self, plugin: Plugin) -> None:
        from attn_core.discovery._hookcheck import HookManager
        from attn_core.hookspecs import PluginSpec

        with _lock:
            if self._manager is None:
                self._manager = HookManager(PluginSpec)
            if not self._manager.is_registered(plugin.module):
                self._manager.register(plugin.module, plugin.key)
            plugin.registered = True

    def _call(self, plugin: Plugin, hook: str, **arguments: Any) -> Any:
        """Ask one plugin only: a manager would ask every plugin that answers the hook."""
        assert self._manager is not None
        others = [module for module in self._manager.get_plugins() if module is not plugin.module]
        return self._manager.subset_hook_caller(hook, remove_plugins=others)(**arguments)

    def _ask_probe(self, plugin: Plugin, manifest: Manifest, platform: Platform) -> Any:
        if not plugin.has_code:
            return None
        self._load(plugin)
        return call_guarded(plugin.key, lambda: self._call(plugin, "attn_probe", manifest=manifest, platform=platform))

    def _note(self, problem: PluginProblem) -> None:
        with _lock:
            if problem in self._problems:
                return
            self._problems.append(problem)
        _problems.log_once(problem)

    def _reset_locks(self) -> None:
        for plugin in self._plugins:
            plugin.lock = threading.Lock()


def _given(module: Any) -> Any:
    return module


def _availabilities(answer: Any, manifest: Manifest) -> dict[str, Availability]:
    """The answer of ``attn_probe`` for each variant; the default probe for those it says nothing about."""
    if isinstance(answer, Availability):
        return {variant.name: answer for variant in manifest.variants}
    table = {} if answer is None else answer
    if not isinstance(table, Mapping) or not all(isinstance(item, Availability) for item in table.values()):
        raise Failure(TypeError(f"answered {answer!r:.200}; needed is an Availability, or one for each variant"))
    unknown = set(table) - {variant.name for variant in manifest.variants}
    if unknown:
        raise Failure(KeyError(f"answered for variants that the manifest does not have: {sorted(map(str, unknown))}"))
    return {v.name: table[v.name] if v.name in table else default_availability(v) for v in manifest.variants}


# --- workers ------------------------------------------------------------------------------------------------------------


def verify_plan(plan: Plan, registry: Registry) -> None:
    """Check that this process can run `plan`. Raises :class:`WorkerMismatch` that names every package in the way."""
    verify_packages(plan, registry)


def check_workers(plan: Plan) -> None:
    """:func:`verify_plan` against what is installed here: the first thing a worker does with its parent's plan."""
    verify_packages(plan, discover())
