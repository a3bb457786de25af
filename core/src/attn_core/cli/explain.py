"""``attn explain``: who was considered for each group and phase, what each lacked, what would make it work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from attn_core.cli._planning import planning_flags
from attn_core.errors import PlanError
from attn_core.plan import Plan


@click.command("explain", help=__doc__)
@planning_flags
@click.option("--json", "as_json", is_flag=True, help="print the plan with all its reasons as JSON")
@click.option("--html", "html", type=click.Path(dir_okay=False), default=None, help="write one self-contained page")
@click.option("--plain", is_flag=True, help="plain text without colours or a tree")
@click.pass_context
def command(context: click.Context, /, as_json: bool, html: str | None, plain: bool, **flags: Any) -> None:
    """Explain a plan, or its absence (exit status 3)."""
    from attn_core.cli._planning import make_plan
    from attn_core.explain import as_html

    found: Plan | PlanError
    try:
        found = make_plan(flags)
    except PlanError as error:
        found = error
    if html:
        Path(html).write_text(as_html(found), encoding="utf-8")
        click.echo(f"written to {html}", err=True)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1))
    elif not html:
        _show(found, plain)
    context.exit(3 if isinstance(found, PlanError) else 0)


def _show(found: Plan | PlanError, plain: bool) -> None:
    from attn_core import explain

    if plain:
        click.echo(explain.error_as_text(found) if isinstance(found, PlanError) else explain.as_text(found))
        return
    from rich.console import Console

    Console().print(explain.error_as_tree(found) if isinstance(found, PlanError) else explain.as_tree(found))
