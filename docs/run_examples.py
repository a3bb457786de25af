"""Fill the ```console blocks of docs/planning.md with real output, and write docs/examples-of-plans.md.

A block starts with ``$ attn …`` lines; ``lines=N`` after ``console`` keeps the first N lines of each output. Run from anywhere:
python docs/run_examples.py
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "planning.md"
EXAMPLES = ROOT / "docs" / "examples-of-plans.md"
BLOCK = re.compile(r"```console(?: lines=(\d+))?\n(.*?)```", re.DOTALL)
MODELS = "core/tests/data/models"

#: What is shown: title, model, platforms, further flags.
PLANS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("DeepSeek-R1: FA4 prefill, TRTLLM MLA decode", "deepseek-v3", ("cuda:sm100,cuda=13.0",),
     "--attention-backend trtllm_mla --prefill-attention-backend fa4"),
    ("Qwen3-Next", "qwen3-next-80b-a3b",
     ("cuda:sm90,cuda=13.0", "cuda:sm100,cuda=13.0", "cuda:sm120,cuda=13.0", "rocm:gfx942", "npu:a2", "cpu"), ""),
    ("gpt-oss", "gpt-oss-20b", tuple(f"cuda:sm{n},cuda=13.0" for n in (80, 89, 90, 100, 120)), ""),
    ("Gemma 4", "gemma-4-26b-a4b", ("rocm:gfx942",), ""),
    ("Gemma 4 with an fp8 cache on aiter: refused", "gemma-4-26b-a4b", ("rocm:gfx942",),
     "--attention-backend aiter --kv-cache-dtype fp8_e4m3"),
    ("DeepSeek V3.2, bf16", "deepseek-v3.2", ("cuda:sm90,cuda=13.0", "cuda:sm100,cuda=13.0", "rocm:gfx950"),
     "--kv-cache-dtype bfloat16"),
    ("DeepSeek V3.2, fp8", "deepseek-v3.2", ("cuda:sm90,cuda=13.0", "cuda:sm100,cuda=13.0", "rocm:gfx950"),
     "--kv-cache-dtype fp8_e4m3"),
)  # fmt: skip


def run(command: str) -> str:
    """The output of one ``attn …`` command, run in the repository's root."""
    arguments = shlex.split(command)
    assert arguments[0] == "attn", command
    start = "import sys; from attn_core.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", start, *arguments[1:]], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "130"},
    )  # fmt: skip
    return (done.stdout or done.stderr).rstrip()


def commands(block: str) -> list[str]:
    """The commands of a block."""
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]


def filled(text: str) -> str:
    """The page with every block's output made anew."""

    def fill(match: re.Match[str]) -> str:
        limit = int(match[1]) if match[1] else None
        lines: list[str] = []
        for command in commands(match[2]):
            output = run(command).splitlines()
            lines += [f"$ {command}", *output[:limit], *(["…"] if limit and len(output) > limit else [])]
        head = "```console" + (f" lines={match[1]}" if match[1] else "")
        return "\n".join([head, *lines, "```"])

    return BLOCK.sub(fill, text)


def short(command: str) -> Iterator[str]:
    """A plan in a few lines: who serves each group and phase, pages and pools; or the error."""
    import json

    table = json.loads(run(f"{command} --json"))
    if not table["ok"]:
        error = table["error"]
        yield from (
            error["message"],
            *("  " + fact for fact in error["facts"][:4]),
            *("  try " + s for s in error["suggestions"]),
        )
        return
    for group in table["groups"]:
        served = {}
        for phase, plan in group["phases"].items():
            form = f" ({plan['form']})" if plan.get("form") else ""
            served[phase] = f"{plan['backend']}:{plan['variant']}{form}"
        same = set(served.values())
        said = same.pop() if len(same) == 1 else ", ".join(f"{phase} {who}" for phase, who in served.items())
        yield f"{group['model']} {group['name']} ({group['num_layers']} layers): {said or 'left to the server'}"
    for pool in table["pools"]:
        yield f"pool {pool['name']}: page {pool['page_size']}, {pool['format']}, {pool['dtype']}, {pool['layout']}"
    for change in table["adjustments"]:
        yield f"changed {change['field']}: {change['from']} -> {change['to']}, {change['reason']}"


def examples() -> str:
    """The page of plans."""
    lines = [
        "# Plans\n",
        "Written by `python docs/run_examples.py`, each plan in a few lines; backends whose kernels are only planned count.\n",
    ]
    for title, model, platforms, flags in PLANS:
        lines.append(f"## {title}\n")
        for platform in platforms:
            command = f"attn plan --model {MODELS}/{model}.json --platform {platform} --allow-planned {flags}".rstrip()
            lines += ["```text", f"$ {command}", *short(command), "```\n"]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    EXAMPLES.write_text(examples(), encoding="utf-8")
