"""Under which names SGLang's users can ask for the installed backends: a pure function of what is there.

Three rules. ``attn_core`` is the router: attn-core chooses. ``attn-NAME`` is always the backend NAME of attn-core. The
bare NAME is registered, too, unless SGLang has a backend of that name: a name of SGLang's own is taken only when the
user lists it in ``ATTN_SGLANG_OVERRIDE``, as ``NAME`` or as ``NAME=BACKEND`` (SGLang admits only certain names for some
models). ``ATTN_SGLANG_PREFIX`` replaces ``attn-``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core.errors import UsageError
from attn_core.options import nearest
from attn_sglang import PREFIX, ROUTER

if TYPE_CHECKING:
    from attn_core.discovery import PluginProblem

#: Environment variables of this module.
PREFIX_VARIABLE, OVERRIDE_VARIABLE = "ATTN_SGLANG_PREFIX", "ATTN_SGLANG_OVERRIDE"


@dataclass(frozen=True, slots=True)
class Registration:
    """One name for SGLang. ``backend`` None is the router; ``problem`` is why this name cannot serve; ``replaces`` is
    True where a backend of SGLang's own is replaced on the user's request."""

    name: str
    backend: str | None = None
    problem: PluginProblem | None = None
    replaces: bool = False


def registrations(
    backends: Iterable[str],
    problems: Iterable[PluginProblem],
    taken: Collection[str],
    environment: Mapping[str, str],
    hints: Mapping[str, str] | None = None,
) -> tuple[Registration, ...]:
    """Every name to register. `backends` are the installed ``mha`` backends, `taken` the names that SGLang has itself,
    `hints` (backend name -> distribution) tell which names a plugin without a readable manifest would have had.

    Raises :class:`UsageError` for a prefix that makes two names equal and for a name in ``ATTN_SGLANG_OVERRIDE`` that no
    installed backend has.
    """
    prefix = environment.get(PREFIX_VARIABLE, PREFIX).strip()
    known = sorted(set(backends))
    asked = _overrides(environment, known, taken)
    found = [Registration(ROUTER)]
    for name in known:
        if prefix:
            found.append(Registration(prefix + name, name))
        if name not in taken:
            found.append(Registration(name, name))
    for name, backend in asked.items():
        found = [item for item in found if item.name != name]
        found.append(Registration(name, backend, replaces=name in taken))
    have = {item.name for item in found} | set(taken)
    for problem in problems:
        for name in _names_of(problem, hints or {}):
            for full in dict.fromkeys((prefix + name, name)):
                if full not in have:
                    have.add(full)
                    found.append(Registration(full, name, problem))
    _check_distinct(found, taken, prefix)
    return tuple(found)


def _overrides(environment: Mapping[str, str], known: Collection[str], taken: Collection[str]) -> dict[str, str | None]:
    """Names that the user gives to attn-core, with the backend of each (None: the router)."""
    listed = [part.strip() for part in environment.get(OVERRIDE_VARIABLE, "").split(",") if part.strip()]
    if listed == ["*"]:
        return {name: name for name in known if name in taken}
    found: dict[str, str | None] = {}
    for part in listed:
        name, _, backend = (word.strip() for word in part.partition("="))
        backend = backend or name
        if backend not in known and backend != ROUTER:
            raise UsageError(
                f"{OVERRIDE_VARIABLE} names {backend!r}, which no installed plugin provides",
                fix=nearest(backend, list(known)),
            )
        found[name] = None if backend == ROUTER else backend
    return found


def _names_of(problem: PluginProblem, hints: Mapping[str, str]) -> Iterator[str]:
    """Names that a user of a broken plugin may type: its backends where known, what it is called where not."""
    listed = [backend.partition("/")[2] for backend in problem.backends if backend.startswith("mha/")]
    yield from listed
    if not problem.backends and problem.fatal:
        yield from (name for name, distribution in hints.items() if distribution == problem.distribution)
        yield problem.entry_point
        yield problem.distribution


def _check_distinct(found: Iterable[Registration], taken: Collection[str], prefix: str) -> None:
    seen: dict[str, Registration] = {}
    for item in found:
        clash = item.name in taken and not item.replaces
        if item.name in seen or clash:
            rival = "a backend of SGLang's own" if clash else f"attn-core's {seen[item.name].backend or 'router'}"
            raise UsageError(
                f"the name {item.name!r} would stand for {item.backend or 'the router'} and for {rival}",
                f"prefix   {prefix!r} ({PREFIX_VARIABLE})",
                fix=f"{PREFIX_VARIABLE}=another prefix",
            )
        seen[item.name] = item
