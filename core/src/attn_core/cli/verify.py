"""``attn verify KIND/NAME``: the conformance kit; what is declared must be right, what is not must be refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import click


@click.command("verify", help=__doc__)
@click.argument("backend", metavar="KIND/NAME[:VARIANT]")
@click.option("--device", default="cpu", show_default=True, help="torch device to run on")
@click.option("--quick", is_flag=True, help="one case per declaration, small shapes")
@click.option(
    "--budget",
    type=float,
    default=None,
    help="seconds; what is left is skipped and said so. Default 300, quick 50; 0: none",
)
@click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, help="processes; a crash then costs one cell"
)
@click.option("--only", multiple=True, help="only this check (repeatable)")
@click.option(
    "--report", "report_path", type=click.Path(dir_okay=False), default=None, help="write the report to this file"
)
@click.option("--json", "as_json", is_flag=True, help="print the report as JSON")
@click.pass_context
def command(
    context: click.Context,
    /,
    backend: str,
    device: str,
    quick: bool,
    budget: float | None,
    jobs: int,
    only: tuple[str, ...],
    report_path: str | None,
    as_json: bool,
) -> None:
    """Run the kit; exit status 1 if a declaration is false, 2 if nothing could be run."""
    from attn_core.errors import UsageError
    from attn_core.platform import detect_platform

    kind, slash, name = backend.partition("/")
    if not (slash and kind and name):
        raise UsageError(
            f"{backend!r} is not KIND/NAME, such as mha/torch_native", fix="attn list shows what is installed"
        )
    detect_platform(device)  # a device that is not here is refused before torch is loaded
    from attn_core._device import Place
    from attn_core.testing.report import run_verification

    shown = sys.stderr.isatty() and not as_json
    seconds = budget if budget is not None else (50.0 if quick else 300.0)
    with Place(device).use():  # kernels, streams and captures of the kit go to the current device
        report = run_verification(
            kind,
            name,
            device,
            quick,
            report_path,
            only=only,
            progress=_progress(backend) if shown else None,
            budget_s=seconds or None,
            jobs=jobs,
        )
    if as_json:
        click.echo(json.dumps(report, indent=1))
    else:
        _print(report, report_path)
    counts = report["summary"]
    if not counts["passed"] + counts["failed"] + counts["refused"]:
        click.echo("nothing was run: every cell was skipped; attn doctor says what is missing here", err=True)
        context.exit(2)
    context.exit(1 if counts["failed"] else 0)


def _progress(backend: str) -> Any:
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(f"verify {backend}", total=None)
    bar.start()

    def advance(done: int, total: int, result: Any) -> None:
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    return advance


def _print(report: dict[str, Any], path: str | None) -> None:
    for failure in report["failures"]:
        click.echo(failure if isinstance(failure, str) else json.dumps(failure, indent=1))
    counts = ", ".join(f"{count} {word}" for word, count in report["summary"].items())
    click.echo(f"{report['backend']} ({report['package']} {report['version']}): {counts}, {report['seconds']:.1f} s")
    if path:
        click.echo(f"written to {path}")
