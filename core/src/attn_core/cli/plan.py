"""``attn plan``: the plan, or why there is none; ``--diff A B`` compares two nodes' cache contracts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_core.cli._planning import planning_flags
from attn_core.errors import PlanError, UsageError

if TYPE_CHECKING:
    from attn_core.plan import Plan


@click.command("plan", help=__doc__)
@planning_flags
@click.option("--json", "as_json", is_flag=True, help="print the plan (or the error) as JSON")
@click.option("--output", type=click.Path(dir_okay=False), default=None, help="also write the plan to this file")
@click.option(
    "--diff", "diff", nargs=2, type=click.Path(), default=None, help="compare the cache contracts of two plan files"
)
@click.pass_context
def command(
    context: click.Context, /, as_json: bool, output: str | None, diff: tuple[str, str] | None, **flags: Any
) -> None:
    """Print a plan, or the reasons why there is none (exit status 3)."""
    from attn_core.cli._planning import make_plan
    from attn_core.explain import as_text

    if diff:
        context.exit(show_difference(*diff, as_json=as_json))
    try:
        plan = make_plan(flags)
    except PlanError as error:
        if not as_json:
            raise
        click.echo(json.dumps(error.to_dict(), indent=1))
        context.exit(3)
    if output:
        Path(output).write_text(plan.to_json(), encoding="utf-8")
    click.echo(plan.to_json() if as_json else as_text(plan, rivals=False))


# --diff stands alone: a model is not needed then
for _parameter in command.params:
    if _parameter.name == "model":
        _parameter.required = False


def show_difference(first: str, second: str, *, as_json: bool) -> int:
    """Print the fields in which two plans' cache contracts differ; 0 if caches may be exchanged, else 1."""
    plans = [read_plan(path) for path in (first, second)]
    found = plans[0].differences(plans[1])
    fatal = [item for item in found if item.fatal]
    if as_json:
        table = [{"field": d.field, "here": d.here, "there": d.there, "fatal": d.fatal} for d in found]
        click.echo(json.dumps({"schema_version": 1, "compatible": not fatal, "differences": table}, indent=1))
    else:
        for item in found:
            click.echo(f"{'✘' if item.fatal else '·'} {item.field}: {item.here} here, {item.there} there")
        click.echo("the caches cannot be exchanged" if fatal else "the caches can be exchanged")
    return 1 if fatal else 0


def read_plan(path: str) -> Plan:
    """The plan in a file. Raises :class:`UsageError` if it is none, or was changed."""
    from attn_core.plan import load_plan

    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a plan file: {error}") from error
    if not isinstance(content, dict) or not content.get("ok"):
        raise UsageError(f"{path}: not a plan (its `ok` is not true)", fix="write one with: attn plan … --output FILE")
    return load_plan(content)
