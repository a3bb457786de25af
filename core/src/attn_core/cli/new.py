"""``attn new NAME``: start a plugin package that is installable, tested and passes the conformance kit as generated."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("new", help=__doc__)
@click.argument("name")
@click.option("--kind", default="mha", show_default=True, help="what the backend computes")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="where to put it")
@click.option("--json", "as_json", is_flag=True, help="print the written files as JSON")
def command(name: str, kind: str, folder: Path, as_json: bool) -> None:
    """Write the package and say what to do next."""
    from attn_core.scaffold import create

    files = create(name, kind, folder)
    root = files[0].parent
    if as_json:
        click.echo(
            json.dumps({"schema_version": 1, "folder": str(root), "files": [str(path) for path in files]}, indent=1)
        )
        return
    click.echo(f"written to {root}:")
    for path in files:
        click.echo(f"  {path.relative_to(root)}")
    short = root.name.removeprefix("attn-").replace("-", "_")
    click.echo(f"\nnext:\n  pip install -e {root}\n  attn list\n  attn verify {kind}/{short} --quick")
