"""What the operator says about plugins: ATTN_PLUGINS, ATTN_DISABLE_PLUGINS and ATTN_PREFER, and duplicates settled by it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from attn_core.discovery._entrypoints import normalise
from attn_core.discovery._plugin import Plugin, State
from attn_core.discovery._problems import Cause, PluginProblem
from attn_core.errors import UsageError
from attn_core.geometry import BACKEND_KINDS
from attn_core.manifest import Manifest

#: ``(kind/name)`` to the normalised distribution that shall own it.
Preferences = Mapping[str, str]


def listed(variable: str, environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """The comma-separated names of a variable, None if it is not set or empty."""
    names = [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]
    return names or None


def filter_plugins(plugins: Sequence[Plugin], environ: Mapping[str, str] = os.environ) -> None:
    """Mark the plugins that the operator left out. Raises :class:`UsageError` for a name that no plugin answers to."""
    only, disabled = listed("ATTN_PLUGINS", environ), listed("ATTN_DISABLE_PLUGINS", environ) or []
    for variable, names in (("ATTN_PLUGINS", only or []), ("ATTN_DISABLE_PLUGINS", disabled)):
        for name in names:
            if not any(plugin.answers_to(name) for plugin in plugins):
                raise _unknown(variable, name, [plugin.entry.distribution for plugin in plugins])
    for plugin in plugins:
        wanted = only is None or any(plugin.answers_to(name) for name in only)
        if not wanted or any(plugin.answers_to(name) for name in disabled):
            plugin.state = State.FILTERED


def preferences(plugins: Sequence[Plugin], environ: Mapping[str, str] = os.environ) -> Preferences:
    """ATTN_PREFER as a table. Raises :class:`UsageError` for text, a distribution or a backend that does not exist."""
    chosen: dict[str, str] = {}
    for item in listed("ATTN_PREFER", environ) or []:
        distribution, colon, backend = item.partition(":")
        if not colon or "/" not in backend:
            raise UsageError(f"ATTN_PREFER={item!r} cannot be read", "needed   distribution:kind/name")
        owners = [plugin for plugin in plugins if normalise(plugin.entry.distribution) == normalise(distribution)]
        if not owners:
            raise _unknown("ATTN_PREFER", distribution, [plugin.entry.distribution for plugin in plugins])
        ids = [manifest.id for plugin in owners for manifest in plugin.manifests]
        if backend not in ids:
            facts = [line for plugin in owners if plugin.problem for line in plugin.problem.facts()]
            raise UsageError(
                f"ATTN_PREFER={item!r}: {distribution} has no usable backend {backend!r}",
                f"it has   {', '.join(ids) or 'none'}",
                *facts,
            )
        if chosen.setdefault(backend, normalise(distribution)) != normalise(distribution):
            raise UsageError(f"ATTN_PREFER names two distributions for {backend}")
    return chosen


def _unknown(variable: str, name: str, known: Iterable[str]) -> UsageError:
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1)
    return UsageError(
        f"{variable} names {name!r}, and no installed plugin has that name",
        f"found    {', '.join(names) or 'no plugin at all'}",
        fix=f"did you mean {near[0]}?" if near else f"install it, or correct {variable}",
    )


# --- duplicates ---------------------------------------------------------------------------------------------------------


def settle(plugins: Sequence[Plugin], prefer: Preferences) -> tuple[list[tuple[Plugin, Manifest]], list[PluginProblem]]:
    """One owner for each ``kind/name``, in an order that does not depend on how plugins were found.

    A backend that two distributions declare, and that ATTN_PREFER does not settle, is left out altogether: whichever were
    taken, somebody's explicit choice would be replaced in silence.
    """
    claims: dict[str, list[tuple[Plugin, Manifest]]] = {}
    for plugin in plugins:
        for manifest in plugin.manifests:
            claims.setdefault(manifest.id, []).append((plugin, manifest))
    kept: list[tuple[Plugin, Manifest]] = []
    problems: list[PluginProblem] = []
    for backend, claimants in claims.items():
        if len(claimants) > 1:
            winners = [c for c in claimants if normalise(c[0].entry.distribution) == prefer.get(backend)]
            if len(winners) != 1:
                problems += [_duplicate(plugin, backend, claimants) for plugin, _ in claimants]
                continue
            claimants = winners
        kept += claimants
    kept.sort(key=lambda item: (BACKEND_KINDS.index(item[1].kind), item[1].name))
    return _settle_aliases(kept, problems), problems


def _duplicate(plugin: Plugin, backend: str, claimants: Sequence[tuple[Plugin, Manifest]]) -> PluginProblem:
    rivals = [other.entry.distribution for other, _ in claimants if other is not plugin]
    text = f"{backend} is declared by {' and '.join(rivals)}, too; it is left out until somebody decides"
    fix = f"ATTN_PREFER={plugin.entry.distribution}:{backend} takes this one; or uninstall the other"
    return plugin.entry.problem(Cause.DUPLICATE, text, fix, backends=(backend,), fatal=False)


def _settle_aliases(
    kept: Sequence[tuple[Plugin, Manifest]], problems: list[PluginProblem]
) -> list[tuple[Plugin, Manifest]]:
    """Drop an alias that is another backend's name or alias: it would mean two things."""
    owners: dict[tuple[str, str], set[str]] = {}
    for _, manifest in kept:
        for name in (manifest.name, *manifest.aliases, *manifest.deprecated_aliases):
            owners.setdefault((manifest.kind, name), set()).add(manifest.id)
    settled = []
    for plugin, manifest in kept:
        clash = {n for n in (*manifest.aliases, *manifest.deprecated_aliases) if len(owners[manifest.kind, n]) > 1}
        if clash:
            text = f"alias {', '.join(sorted(clash))} of {manifest.id} also means another backend; the alias is ignored"
            fix = f"ask for {manifest.id} by its own name"
            problem = plugin.entry.problem(Cause.DUPLICATE, text, fix, backends=(manifest.id,), fatal=False)
            problems.append(problem)
            manifest = replace(
                manifest,
                aliases=tuple(n for n in manifest.aliases if n not in clash),
                deprecated_aliases=tuple(n for n in manifest.deprecated_aliases if n not in clash),
            )
        settled.append((plugin, manifest))
    return settled
