"""``attn model CONFIG``: the layer groups of a model."""

from __future__ import annotations

import json

import click


@click.command("model", help=__doc__)
@click.argument("config")
@click.option("--tp-size", type=int, default=1, help="as one of this many tensor-parallel ranks sees it")
@click.option("--json", "as_json", is_flag=True, help="print the groups as JSON")
def command(config: str, tp_size: int, as_json: bool) -> None:
    """Print the layer groups of a config.json, a folder, a GGUF file or a file of models/."""
    from attn_core.cli._planning import existing
    from attn_core.model import parse_model
    from attn_core.model.describe import describe

    model = parse_model(existing(config) or config).shard(tp_size)
    if as_json:
        click.echo(
            json.dumps(
                {"schema_version": 1, "name": model.name, "architecture": model.architecture, **describe(model)},
                indent=1,
            )
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model.name} ({model.architecture})", title_justify="left")
    for column in ("group", "kind", "layers", "served by", "geometry", "needs"):
        table.add_column(column, overflow="fold")
    for group in model.groups:
        needs = ", ".join([*sorted(group.features), *group.unsupported])
        table.add_row(
            group.name, group.kind, ranges(group.layers), group.backend_kind, _geometry(group.geometry), needs
        )
    console = Console()
    console.print(table)
    for note in model.notes:
        console.print(f"note: {note}")


def ranges(layers: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` as ``0-2, 5``."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _geometry(geometry: object) -> str:
    if geometry is None:
        return ""
    from dataclasses import fields, is_dataclass

    assert is_dataclass(geometry)
    assert not isinstance(geometry, type)
    shown = []
    for f in fields(geometry):
        value = getattr(geometry, f.name)
        if value not in (None, False, {}) and not is_dataclass(value):
            shown.append(f"{f.name} {value:.6g}" if isinstance(value, float) else f"{f.name} {value}")
        elif is_dataclass(value):
            shown.append(_geometry(value))
    return ", ".join(shown)
