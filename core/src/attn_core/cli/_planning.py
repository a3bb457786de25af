"""Flags and steps that ``plan``, ``explain``, ``bench`` and ``warmup`` share: read off the table of options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attn_core.errors import UsageError
from attn_core.options import Options

if TYPE_CHECKING:
    from attn_core.plan import Plan

_F = TypeVar("_F", bound=Callable[..., Any])

#: Options that are built from another flag's spelling on the command line.
_SPECIAL = ("backend_options",)


def planning_flags(function: _F) -> _F:
    """Add ``--model``, ``--draft-model``, ``--platform`` and one flag for every option."""
    for f in reversed(fields(Options)):
        if f.name in _SPECIAL:
            continue
        flag, meta = "--" + f.name.replace("_", "-"), f.metadata
        if meta["form"] == "flag":
            function = click.option(flag, is_flag=True, default=None, help=meta["help"])(function)
        else:
            kind: Any = (
                click.INT
                if meta["form"] == "number"
                else click.Choice(meta["choices"])
                if meta["choices"]
                else click.STRING
            )
            shown = f.default if f.default is not MISSING and f.default not in (None, ()) else None
            text = meta["help"] + (f" [default: {shown}]" if shown is not None else "")
            function = click.option(flag, type=kind, default=None, help=text)(function)
    own = (
        click.option(
            "--model", "model", required=True, help="config.json, a folder, a GGUF file, or a file of models/"
        ),
        click.option("--draft-model", "draft", default=None, help="config of the draft model"),
        click.option(
            "--platform", default=None, help="cuda:sm90,cuda=13.0 | rocm:gfx942 | cpu | JSON; default: this machine"
        ),
        click.option(
            "--backend-option", "backend_option", multiple=True, help="NAME.KEY=VALUE, checked by the backend's schema"
        ),
    )
    for option in reversed(own):
        function = option(function)
    return function


def make_plan(values: Mapping[str, Any]) -> Plan:
    """The plan for the flags of :func:`planning_flags`. Raises what :func:`attn_core.plan` raises."""
    from attn_core.planner import plan

    given = dict(values)
    model, draft, platform = given.pop("model"), given.pop("draft"), given.pop("platform")
    options = {name: value for name, value in given.items() if value is not None and name != "backend_option"}
    options["backend_options"] = parse_backend_options(given.get("backend_option", ()))
    return plan(existing(model), platform=platform, draft=existing(draft), options=options)


def existing(path: str | None) -> Path | None:
    """A path that exists. Raises :class:`UsageError` that says what was looked for."""
    if path is None:
        return None
    found = Path(path).expanduser()
    if not found.exists():
        raise UsageError(
            f"{path}: no such file or folder", fix="give a config.json, a folder that holds one, or a .gguf file"
        )
    return found


def parse_backend_options(pairs: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """``("toy.level=3",)`` as ``{"toy": {"level": 3}}``; values are JSON where they parse as JSON, else text."""
    found: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        target, equals, text = pair.partition("=")
        name, dot, key = target.partition(".")
        if not (equals and dot and name and key):
            raise UsageError(f"--backend-option {pair!r} is not NAME.KEY=VALUE")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found.setdefault(name, {})[key] = value
    return found
