"""``attn list``: what is installed. Reads declarations; imports no plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from attn_core.discovery import PluginProblem, Registry

SCHEMA_VERSION = 1


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> None:
    """List backends by kind: status, package, version, origin, and what is wrong with plugins."""
    from attn_core.cli._output import print_json, problems_are_printed
    from attn_core.discovery import discover

    with problems_are_printed():
        registry = discover()
        if as_json:
            print_json(document(registry))
        else:
            _print(registry)


def document(registry: Registry) -> dict[str, Any]:
    """The JSON form: ``backends``, ``plugins`` and ``problems``."""
    from attn_core import API_VERSION

    return {
        "schema_version": SCHEMA_VERSION,
        "api_version": API_VERSION,
        "backends": [_backend(registry, manifest) for manifest in registry.manifests],
        "plugins": [plugin.to_dict() for plugin in registry.plugins],
        "problems": [problem.to_dict() for problem in registry.problems],
    }


def _backend(registry: Registry, manifest: Any) -> dict[str, Any]:
    info = registry.owner(manifest)
    return {
        "kind": manifest.kind,
        "name": manifest.name,
        "status": manifest.status,
        "summary": manifest.summary,
        "aliases": list(manifest.aliases),
        "variants": [variant.name for variant in manifest.variants],
        "api": manifest.api,
        "package": manifest.package,
        "version": manifest.version,
        "origin": info.origin,
        "state": info.state.value,
    }


def _print(registry: Registry) -> None:
    from attn_core.cli._output import print_table

    columns = ("backend", "status", "variants", "package", "version", "origin")
    kinds = list(dict.fromkeys(manifest.kind for manifest in registry.manifests))
    for kind in kinds:
        rows = [_row(registry, manifest) for manifest in registry.manifests if manifest.kind == kind]
        print_table(kind, columns, rows)
        click.echo()
    filtered = [plugin.distribution for plugin in registry.plugins if plugin.state == "filtered"]
    if filtered:
        click.echo(f"left out by ATTN_PLUGINS or ATTN_DISABLE_PLUGINS: {', '.join(filtered)}")
    if not registry.plugins and not registry.problems:
        click.echo("no backend plugin is installed")
        click.echo(f"  try  pip install one of {', '.join(_known_distributions())}")
    print_problems(registry.problems)


def _row(registry: Registry, manifest: Any) -> tuple[str, ...]:
    variants = ", ".join(variant.name for variant in manifest.variants)
    origin = registry.owner(manifest).origin
    return manifest.name, manifest.status, variants, manifest.package, manifest.version, origin


def _known_distributions() -> list[str]:
    from importlib.resources import files

    from attn_core.manifest import load_toml

    table = load_toml(files("attn_core").joinpath("directory.toml").read_text(encoding="utf-8"), "directory.toml")
    return sorted({str(entry["distribution"]) for entry in table.get("backends", {}).values()})


def print_problems(problems: tuple[PluginProblem, ...]) -> None:
    """Each problem with its cause, place and fix; nothing if there is none."""
    if problems:
        click.echo(f"{len(problems)} problem(s)")
    for problem in problems:
        first, *more = problem.text.splitlines()
        click.echo(
            f"  {problem.entry_point} ({problem.distribution} {problem.version})  {problem.cause.value}: {first}"
        )
        for line in more:
            click.echo(f"      {line}")
        if problem.file:
            click.echo(f"      at   {problem.file}:{problem.line}")
        if problem.fix:
            click.echo(f"      try  {problem.fix}")
