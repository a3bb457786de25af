"""``attn doctor``: this machine, what is installed, whether it runs, and what to do about what does not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from attn_core.availability import Availability
    from attn_core.discovery import Registry
    from attn_core.manifest import Variant
    from attn_core.platform import Platform

SCHEMA_VERSION = 1

#: Libraries that kernels and servers depend on; what manifests require is added.
_LIBRARIES = ("attn-core", "pluggy", "torch", "triton", "numpy", "transformers")


@click.command("doctor")
@click.option("--verify", is_flag=True, help="Check the plugins' files against the hashes of their RECORD.")
@click.option(
    "--report", type=click.Path(dir_okay=False), help="Also write the JSON document to FILE, for a bug report."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--device", help="Probe for this device (cuda, cuda:1, cpu, …) instead of the first one present.")
def command(verify: bool, report: str | None, as_json: bool, device: str | None) -> int:
    """Show platform, libraries, probes of every backend, problems and fixes. Exit status 1 if a problem was found."""
    from attn_core.cli._output import print_json, problems_are_printed
    from attn_core.discovery import discover
    from attn_core.platform import detect_platform

    with problems_are_printed():
        found = examine(discover(), detect_platform(device), verify=verify)
    if report:
        Path(report).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(found)
    else:
        _print(found)
        if report:
            click.echo(f"written to {report}")
    return 0 if found["ok"] else 1


def examine(registry: Registry, platform: Platform, *, verify: bool = False) -> dict[str, Any]:
    """The JSON form. Probing imports the plugins of implemented backends."""
    from attn_core import API_VERSION
    from attn_core.cli.list import document

    listing = document(registry)
    backends = []
    for manifest, entry in zip(registry.manifests, listing["backends"], strict=True):
        answers = registry.probe(manifest, platform)
        variants = {name: _here(manifest.variant(name), answer, platform) for name, answer in answers.items()}
        backends.append({**entry, "variants": variants})
    files = _verify(registry) if verify else None
    problems = [problem.to_dict() for problem in registry.problems]  # probing may have found more
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": not problems and all(item["result"] != "changed" for item in files or ()),
        "api_version": API_VERSION,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "platform": {**platform.to_dict(), "text": str(platform)},
        "libraries": _libraries(registry),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("ATTN_")},
        "cache_directory": _cache(),
        "backends": backends,
        "plugins": [plugin.to_dict() for plugin in registry.plugins],
        "problems": problems,
        **({"files": files} if files is not None else {}),
    }


def _here(variant: Variant, answer: Availability, platform: Platform) -> dict[str, Any]:
    """The probe's answer as JSON; a variant that declares nothing for this hardware does not run here either."""
    from attn_core.reasons import Reason

    table, hardware = answer.to_dict(), {"vendor": platform.vendor, "arch": platform.arch}
    served = any(
        all(item.accepts(hardware[item.axis]) for item in row.conditions if item.axis in hardware)
        for row in variant.allow
    )
    if not answer.ok or served:
        return table
    archs = {
        name for row in variant.allow for item in row.conditions if item.axis == "arch" for name in _words(item.value)
    }
    reason = Reason(
        "arch",
        need=", ".join(sorted(archs)) or "other hardware",
        have=str(platform),
        fix="attn plan shows what serves this hardware",
    )
    return {**table, "ok": False, "reasons": [reason.to_dict()]}


def _words(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)


def _libraries(registry: Registry) -> dict[str, str]:
    """Versions of libraries by distribution name; empty for one that a manifest requires and that is missing."""
    import importlib_metadata
    from packaging.requirements import InvalidRequirement, Requirement

    names = set(_LIBRARIES)
    for variant in (variant for manifest in registry.manifests for variant in manifest.variants):
        for text in variant.requires:
            try:
                names.add(Requirement(text).name)
            except InvalidRequirement:  # the probe reports it
                continue
    versions = {}
    for name in sorted(names):
        try:
            versions[name] = str(importlib_metadata.version(name))
        except importlib_metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def _cache() -> str:
    from attn_core.errors import UsageError
    from attn_core.jit_cache import cache_directory

    try:
        return str(cache_directory())
    except UsageError as error:
        return f"unusable: {error.message}"


def _verify(registry: Registry) -> list[dict[str, Any]]:
    from attn_core.discovery._record import verify_distribution

    names = sorted({plugin.distribution for plugin in registry.plugins})
    return [verify_distribution(name).to_dict() for name in names]


# --- text ---------------------------------------------------------------------------------------------------------------


def _print(found: dict[str, Any]) -> None:
    platform = found["platform"]
    click.echo(f"platform   {platform['text']}, {platform['chosen_by']}")
    if platform["others"]:
        click.echo(f"           also here: {', '.join(platform['others'])}")
    for note in platform["notes"]:
        click.echo(f"           note: {note}")
    click.echo(f"python     {found['python']}, {found['executable']}")
    versions = [f"{name} {version or 'missing'}" for name, version in found["libraries"].items()]
    click.echo(f"libraries  {', '.join(versions)}")
    click.echo(f"cache      {found['cache_directory']}")
    for name, value in found["environment"].items():
        click.echo(f"setting    {name}={value}")
    click.echo()
    _print_backends(found["backends"])
    for item in found.get("files", ()):
        click.echo(f"files of {item['distribution']} {item['version']}: {item['text']}")
        for name in (*item["changed"], *item["missing"], *item["unlisted"]):
            click.echo(f"  {name}")
    _print_problems(found)


def _print_backends(backends: list[dict[str, Any]]) -> None:
    from attn_core.cli._output import print_table

    rows = []
    for backend in backends:
        for name, answer in backend["variants"].items():
            why = "; ".join(_reason(reason) for reason in answer["reasons"])
            state = "ready" if answer["ok"] else "planned" if backend["status"] == "planned" else "no"
            rows.append((f"{backend['kind']}/{backend['name']}:{name}", state, backend["package"], why))
    if rows:
        print_table("backends", ("variant", "runs here", "package", "why not, and what to do"), rows)


def _reason(reason: dict[str, str]) -> str:
    from attn_core.reasons import Reason

    return str(Reason.from_dict(reason)) + (f" [{reason['fix']}]" if reason.get("fix") else "")


def _print_problems(found: dict[str, Any]) -> None:
    from attn_core.cli.list import print_problems
    from attn_core.discovery import Cause, PluginProblem

    records = [
        PluginProblem(**{**item, "cause": Cause(item["cause"]), "backends": tuple(item["backends"])})
        for item in found["problems"]
    ]
    click.echo()
    print_problems(tuple(records))
    if not records:
        click.echo("no problem found")
