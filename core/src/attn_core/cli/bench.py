"""``attn bench``: this machine's backends side by side on one shape, through the router."""

from __future__ import annotations

import json

import click


@click.command("bench", help=__doc__)
@click.option("--phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="rows")
@click.option("--kv-len", type=click.IntRange(min=1), default=2048, show_default=True, help="keys per row")
@click.option("--new", type=click.IntRange(min=1), default=512, show_default=True, help="new tokens per row (prefill)")
@click.option("--heads", default="32/8", show_default=True, help="query/KV heads")
@click.option("--head-dim", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--kv-cache-dtype", default="auto", show_default=True)
@click.option("--backend", "backends", multiple=True, help="only these (repeatable)")
@click.option("--device", default=None, help="torch device; default: what the platform is")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print the figures as JSON")
def command(
    phase: str,
    batch: int,
    kv_len: int,
    new: int,
    heads: str,
    head_dim: int,
    page_size: int,
    dtype: str,
    kv_cache_dtype: str,
    backends: tuple[str, ...],
    device: str | None,
    rounds: int,
    as_json: bool,
) -> None:
    """Measure and print, fastest first; a backend that cannot run says why."""
    from attn_core.bench import Shape, run
    from attn_core.discovery import discover
    from attn_core.dtypes import canonical
    from attn_core.errors import UsageError
    from attn_core.platform import detect_platform

    q_heads, slash, kv_heads = heads.partition("/")
    if not (slash and q_heads.isdigit() and kv_heads.isdigit() and int(kv_heads) and int(q_heads) % int(kv_heads) == 0):
        raise UsageError(f"--heads {heads!r} is not QUERY/KV with a whole ratio, such as 32/8")
    if canonical(dtype) not in ("bf16", "fp16", "fp32"):
        raise UsageError(
            f"--dtype {dtype!r}: models compute in bfloat16, float16 or float32; --kv-cache-dtype quantises the cache"
        )
    if phase == "prefill" and new > kv_len:
        raise UsageError(f"--new {new} tokens are part of the --kv-len {kv_len} keys and cannot be more")
    platform = detect_platform(device)
    where = device or {"rocm": "cuda"}.get(platform.device, platform.device)
    shape = Shape(
        phase, batch, kv_len, 1 if phase == "decode" else new, int(q_heads), int(kv_heads), head_dim, page_size,
        canonical(dtype), kv_cache_dtype if kv_cache_dtype == "auto" else canonical(kv_cache_dtype),
    )  # fmt: skip
    result = run(shape, discover(), platform, where, rounds, backends)
    if as_json:
        click.echo(json.dumps(result, indent=1))
        return
    _print(result)


def _print(result: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    shape, ceilings, rows = result["shape"], result["ceilings"], result["rows"]
    assert isinstance(shape, dict)
    assert isinstance(ceilings, dict)
    assert isinstance(rows, list)
    title = f"{shape['phase']}: {shape['batch']} x {shape['kv_len']} tokens, page {shape['page_size']}, {shape['dtype']} on {result['platform']}"
    caption = (
        f"measured here: copy {ceilings['copy'] / 1e9:.1f} GB/s, matrix product {ceilings['matrix'] / 1e9:.1f} GFLOP/s"
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for column in ("backend", "package", "median us", "of the ceiling", ""):
        table.add_column(
            column, justify="right" if column in ("median us", "of the ceiling") else "left", overflow="fold"
        )
    for row in rows:
        name = f"{row['backend']}:{row['variant']}" if row["variant"] else row["backend"]
        time_text = f"{row['microseconds']:.1f}" if row["microseconds"] else "-"
        share = f"{row['of_ceiling']:.0%}" if row["of_ceiling"] else "-"
        table.add_row(name, row["package"], time_text, share, row["note"])
    console = Console()
    console.print(table)
    planned = result["planned"]
    if planned:
        assert isinstance(planned, list)
        console.print(f"planned, not measured: {', '.join(planned)}", highlight=False)
