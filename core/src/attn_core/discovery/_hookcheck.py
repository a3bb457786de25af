"""Checks of hook implementations that pluggy does not make, shared by discovery (modules) and binding (objects).

pluggy silently accepts a misspelt hook, an undecorated method, keyword-only or ``**kw`` parameters and defaulted arguments.
Each would be a hook that is never called, or called without its arguments; here each is a :class:`HookFault`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import pluggy

from attn_core.hookspecs import PROJECT

PREFIX = "attn_"
_MARK = f"{PROJECT}_impl"
_OPTIONS = ("hookwrapper", "wrapper", "specname")


@dataclass(frozen=True, slots=True)
class HookFault:
    """One thing that is wrong with one implementation. ``argument`` is the offending one, if it is about an argument."""

    hook: str
    text: str
    signature: str = ""
    argument: str = ""
    file: str = ""
    line: int = 0

    def facts(self) -> tuple[str, ...]:
        """One fact a line: hook, signature with its place, offending argument, what is wrong."""
        lines = [f"hook       {self.hook}"]
        if self.signature:
            place = f"   {self.file}:{self.line}" if self.file else ""
            lines.append(f"defined    {self.signature}{place}")
        if self.argument:
            lines.append(f"argument   {self.argument}")
        lines.append(f"problem    {self.text}")
        return tuple(lines)

    def __str__(self) -> str:
        return f"{self.signature or self.hook}: {self.text}"


@cache
def spec_arguments(spec: type) -> Mapping[str, tuple[str, ...]]:
    """Argument names of each hook of a spec class, in the order in which core passes them."""
    return {
        name: tuple(inspect.signature(function).parameters)[1:]  # without self
        for name, function in vars(spec).items()
        if name.startswith(PREFIX)
    }


def implementations(plugin: object, spec: type) -> tuple[dict[str, Any], list[HookFault]]:
    """The valid hook implementations of `plugin` (bound methods or functions) by name, and everything that is wrong."""
    known = spec_arguments(spec)
    found: dict[str, Any] = {}
    faults: list[HookFault] = []
    for name, value in _candidates(plugin):
        fault = _check_name(name, value, known) or _check_signature(name, value, known[name])
        if fault is None:
            found[name] = value
        else:
            faults.append(fault)
    if not faults:
        faults += _pluggy_faults(plugin, spec)
    return found, faults


def _candidates(plugin: object) -> Iterator[tuple[str, Any]]:
    """Attributes that are, or look like, hooks. Nothing else of the plugin is touched, so lazy attributes stay lazy."""
    if isinstance(plugin, ModuleType):
        static: dict[str, Any] = dict(vars(plugin))
    else:
        static = {}
        for cls in reversed(type(plugin).__mro__):
            static.update(vars(cls))
        static.update(getattr(plugin, "__dict__", {}))
    for name in sorted(static):
        marked = hasattr(static[name], _MARK) and callable(static[name])
        if not (marked or name.startswith(PREFIX)) or isinstance(static[name], ModuleType | type):
            continue
        value = getattr(plugin, name)
        if callable(value):
            yield name, value


def _check_name(name: str, value: Any, known: Mapping[str, tuple[str, ...]]) -> HookFault | None:
    options = getattr(value, _MARK, None)
    if isinstance(options, Mapping) and any(options.get(option) for option in _OPTIONS):
        used = [option for option in _OPTIONS if options.get(option)]
        return _fault(name, value, f"hookimpl({used[0]}=…) is not possible here: a hook is answered under its own name")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else f"; hooks are {', '.join(known)}"
        return _fault(name, value, f"there is no hook {name}, and {PREFIX}* names are kept for hooks{hint}")
    if not inspect.isroutine(value):
        return _fault(name, value, f"{name} is a {type(value).__name__}, not a function or method")
    if options is None:
        return _fault(name, value, "not decorated with @attn_core.hookimpl, so it would never be called")
    return None


def _check_signature(name: str, value: Any, expected: tuple[str, ...]) -> HookFault | None:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (ValueError, TypeError):
        return _fault(name, value, "its signature cannot be read (a built-in?); wrap it in a Python function")
    spec = f"{name}({', '.join(expected)})"
    for parameter in parameters:
        word = str(parameter).partition(":")[0]
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            kind = parameter.kind.description
            return _fault(name, value, f"{kind} parameters receive nothing; the hook is {spec}", argument=word)
        if parameter.name not in expected:
            return _fault(name, value, f"not an argument of {spec}", argument=parameter.name)
        if parameter.default is not parameter.empty:
            text = f"a default would hide the argument that core passes; the hook is {spec}"
            return _fault(name, value, text, argument=f"{parameter.name}=…")
    return None


def _fault(name: str, value: Any, text: str, argument: str = "") -> HookFault:
    signature, file, line = name, "", 0
    function = inspect.unwrap(getattr(value, "__func__", value))
    try:
        parameters = ", ".join(str(p).partition(":")[0] for p in inspect.signature(function).parameters.values())
        signature = f"{name}({parameters})"
    except (ValueError, TypeError):
        pass
    code = getattr(function, "__code__", None)
    if code is not None:
        file, line = code.co_filename, code.co_firstlineno
    return HookFault(name, text, signature, argument, file, line)


class HookManager(pluggy.PluginManager):
    """pluggy's manager, looking at ``attn_*`` names only: others may be lazy attributes that import kernels."""

    def __init__(self, spec: type) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(spec)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """See :meth:`pluggy.PluginManager.parse_hookimpl_opts`."""
        return super().parse_hookimpl_opts(plugin, name) if name.startswith(PREFIX) else None


def _pluggy_faults(plugin: object, spec: type) -> list[HookFault]:
    """What pluggy itself says, in a manager that is thrown away: a plugin is registered whole or not at all."""
    manager = HookManager(spec)
    try:
        manager.register(plugin, "checked")
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        return [HookFault("?", str(error))]
    return []
