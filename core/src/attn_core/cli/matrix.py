"""``attn matrix``: the support tables, from manifests, with evidence from verification reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

_MARKS = {True: "yes", False: "-", None: "any"}


@click.command("matrix", help=__doc__)
@click.option("--json", "as_json", is_flag=True, help="print the tables as JSON")
@click.option(
    "--reports", type=click.Path(exists=True, file_okay=False), default=None, help="folder of verification reports"
)
def command(as_json: bool, reports: str | None) -> None:
    """Print what every installed backend supports, planned ones marked."""
    from attn_core.discovery import discover
    from attn_core.matrix import support_matrix

    tables = support_matrix(discover().manifests)
    evidence = read_reports(Path(reports)) if reports else {}
    if as_json:
        click.echo(json.dumps({**tables, **({"evidence": evidence} if reports else {})}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for kind, content in tables.items():
        table = Table(title=kind, title_justify="left")
        for column in ("backend", "status", *content["columns"], *(("verified",) if reports else ())):
            table.add_column(column, overflow="fold")
        for name, row in content["rows"].items():
            cells = [_cell(row["cells"].get(column)) for column in content["columns"]]
            table.add_row(name, row["status"], *cells, *((_evidence(evidence, kind, name),) if reports else ()))
        console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return _MARKS[value]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def read_reports(folder: Path) -> dict[str, dict[str, Any]]:
    """Verification reports of a folder by ``kind/name``: counts, device and date. Other files are passed over with a note."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
            summary = {key: report[key] for key in ("summary", "hardware", "date")}
            if not isinstance(summary["summary"], dict) or not isinstance(summary["date"], str):
                raise TypeError("summary must be a table and date a text")
            found[str(report["backend"])] = {**summary, "file": path.name}
        except (ValueError, KeyError, TypeError) as error:
            click.echo(f"{path}: not a verification report ({type(error).__name__}: {error})", err=True)
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _evidence(evidence: dict[str, dict[str, Any]], kind: str, name: str) -> str:
    report = evidence.get(f"{kind}/{name}")
    if report is None:
        return "no report"
    counts = ", ".join(f"{count} {word}" for word, count in report["summary"].items())
    device = report["hardware"].get("device", "") if isinstance(report["hardware"], dict) else report["hardware"]
    return f"{counts} on {device}, {report['date']}"
