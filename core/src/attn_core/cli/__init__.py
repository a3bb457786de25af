"""The ``attn`` command. Subcommands are modules of this package, imported when they are called.

To add one: write ``cli/<name>.py`` with a click command called ``command``, and one line in :data:`COMMANDS`. Another
distribution adds one with an entry point of the group ``attn.commands`` (:mod:`attn_core._commands`). Errors of
attn-core are raised, not printed; they are rendered here, in one place, with one meaning of the exit status:
0 fine, 1 failed, 2 usage, 3 no plan.

Importing ``cli/list.py`` makes ``list`` a module in this namespace: the built-in of that name is not used here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

import click

from attn_core._commands import find_commands, load_command, refuse_missing, summary
from attn_core.errors import AttnError, ModelError, PlanError, PlatformError, UsageError

#: Subcommands in the order of ``attn --help``, with the line shown there. One without a module is not offered.
COMMANDS: Mapping[str, str] = {
    "list": "backends by kind: status, package, version, origin, problems",
    "model": "layer groups of a model",
    "plan": "the plan for a model, or why there is none",
    "explain": "a plan as a tree, with every rejected candidate",
    "matrix": "the support tables, from manifests and verification reports",
    "doctor": "platform, libraries, probes, problems and fixes; --verify checks files",
    "verify": "the conformance kit on one backend",
    "warmup": "compile and tune what a plan needs, before serving",
    "bench": "this machine's backends side by side",
    "new": "start a plugin package",
}

FAILED, USAGE, NO_PLAN = 1, 2, 3


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Commands whose module is there, then those of other distributions."""
        return [*_own(), *find_commands(COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command. Raises :class:`PluginError` if another distribution's is broken."""
        if cmd_name in _own():
            command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
            return command
        entries = find_commands(COMMANDS).get(cmd_name)
        return load_command(entries) if entries else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The lists in ``attn --help``, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in _own()])
        others = find_commands(COMMANDS)
        if others:
            with formatter.section("Commands of other packages"):
                formatter.write_dl([(name, summary(entries)) for name, entries in others.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with a suggestion for a misspelt name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            refuse_missing(args[0])
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            raise click.UsageError(error.message + (f" Did you mean {near[0]!r}?" if near else ""), ctx) from error


def _own() -> list[str]:
    return [name for name in COMMANDS if find_spec(f"{__name__}.{name}") is not None]


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        import importlib_metadata

        from attn_core import API_VERSION

        click.echo(f"attn-core {importlib_metadata.version('attn-core')} (API {API_VERSION})")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print versions."
)
def attn() -> None:
    """Attention backends as pip packages: what is installed, what will run, and why."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Errors are rendered on stderr, and as JSON on stdout with ``--json``."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    try:
        status: Any = attn.main(words, prog_name="attn", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        if "--json" in words:
            click.echo(json.dumps(error_document(UsageError(error.format_message())), indent=1))
        return error.exit_code
    except click.Abort:
        return FAILED
    except AttnError as error:
        _show(error, as_json="--json" in words)
        return exit_status(error)
    except ModuleNotFoundError as error:
        _show(_missing_module(error), as_json="--json" in words)
        return FAILED
    except BrokenPipeError:  # the reader went away (attn list | head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        _show(UsageError(f"{error.filename or 'a file'}: {error.strerror or error}"), as_json="--json" in words)
        return FAILED
    return status if isinstance(status, int) else 0


def _missing_module(error: ModuleNotFoundError) -> AttnError:
    """A command needs a module that only an extra brings: say which one, where a traceback would not help."""
    from attn_core.discovery._problems import advice, place_of
    from attn_core.errors import PluginError

    file, line = place_of(error, "")
    return PluginError(str(error), f"at       {file}:{line}", fix=advice(error, "it").partition("; ATTN_")[0])


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    sys.exit(run(arguments))


def exit_status(error: AttnError) -> int:
    """3 for no plan, 2 for input that cannot be used, 1 for the rest."""
    if isinstance(error, PlanError):
        return NO_PLAN
    return USAGE if isinstance(error, UsageError | ModelError | PlatformError) else FAILED


def error_document(error: AttnError) -> dict[str, Any]:
    """The JSON form of any error; a :class:`PlanError` has its own with the rejected candidates."""
    if isinstance(error, PlanError):
        return error.to_dict()
    table = {"code": error.code, "message": error.message, "facts": [*error.facts], "fix": error.fix or ""}
    return {"schema_version": 1, "ok": False, "error": table}


def _show(error: AttnError, *, as_json: bool) -> None:
    click.echo(f"{type(error).__name__} {error}", err=True)
    if as_json:
        click.echo(json.dumps(error_document(error), indent=1))
