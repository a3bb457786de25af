"""Commands of other distributions: entry points of the group ``attn.commands``, whose values are click commands.

They are listed by name and distribution without importing anything, and loaded when they are called. One can never replace
a command of attn-core, and a broken one is an error that says whose it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from attn_core.errors import PluginError, UsageError

if TYPE_CHECKING:
    from attn_core.discovery._entrypoints import EntryPoint

GROUP = "attn.commands"


def find_commands(taken: Iterable[str]) -> dict[str, list[EntryPoint]]:
    """Entry points by command name, sorted; names in `taken` are left out. Two distributions may claim one name."""
    from attn_core.discovery._entrypoints import find_entry_points

    reserved = {*taken}
    found: dict[str, list[EntryPoint]] = {}
    for entry in find_entry_points(GROUP)[0]:
        if entry.name not in reserved:
            found.setdefault(entry.name, []).append(entry)
    return dict(sorted(found.items()))


def summary(entries: list[EntryPoint]) -> str:
    """What ``attn --help`` shows: the distributions that bring the command."""
    return "from " + " and ".join(f"{entry.distribution} {entry.version}" for entry in entries)


def load_command(entries: list[EntryPoint]) -> click.Command:
    """Import the command. Raises :class:`PluginError` when that fails, or when two distributions claim the name."""
    entry = entries[0]
    if len(entries) > 1:
        raise PluginError(
            f"command {entry.name!r} is claimed by {len(entries)} distributions",
            *(f"claimed  by {one.distribution} {one.version} ({one.value})" for one in entries),
            fix=f"uninstall one: pip uninstall {entries[-1].distribution}",
        )
    try:
        command = _resolve(entry.value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise SystemExit, too
        raise _broken(entry, error) from error
    if not isinstance(command, click.Command):
        raise _broken(entry, TypeError(f"{entry.value} is {type(command).__name__}, not a click command"))
    return command


def _resolve(value: str) -> object:
    module, _, attributes = value.partition(":")
    found: object = importlib.import_module(module.strip())
    for name in attributes.strip().split(".") if attributes.strip() else ():
        found = getattr(found, name)
    return found


def _broken(entry: EntryPoint, error: BaseException) -> PluginError:
    from attn_core.discovery._problems import advice, describe, place_of

    file, line = place_of(error, entry.package)
    facts = [
        f"plugin   {entry.name} = {entry.value} of {entry.distribution} {entry.version}",
        f"found    {describe(error)}",
    ]
    if file:
        facts.append(f"at       {file}:{line}")
    fix = advice(error, entry.distribution).partition("; ATTN_DISABLE_PLUGINS")[0]
    return PluginError(f"command {entry.name!r} cannot be loaded", *facts, fix=fix)


def refuse_missing(name: str) -> None:
    """Raise :class:`UsageError` with what to install, for a command that another distribution is known to bring."""
    from importlib.resources import files

    from attn_core.manifest import load_toml

    table = load_toml(files("attn_core").joinpath("directory.toml").read_text(encoding="utf-8"), "directory.toml")
    requirement = table.get("commands", {}).get(name)
    if requirement:
        raise UsageError(f"`attn {name}` comes with a package that is not installed", fix=f"pip install {requirement}")
