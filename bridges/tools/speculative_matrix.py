"""``attn speculate`` over many settings, several processes side by side, one JSON file.

    .venv/bin/python bridges/tools/smollm2_checkpoint.py build/SmolLM2-135M-Instruct
    .venv/bin/python bridges/tools/speculative_matrix.py --model build/SmolLM2-135M-Instruct --device cuda --jobs 3 \
        --report benchmarks/results/speculative-h200.json

Splits of prefill and decode, both verify modes, chain and tree, n-gram and truncated drafts, page sizes, graphs on and off,
float32 and bfloat16. What the budget leaves out is listed in the file as not run. Exit status 1 where a token is neither plain
decoding's choice nor a tie with it, or a setting failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attn_transformers.speculative.run import Settings

SPLITS = (("torch_native", "triton"), ("triton", "torch_native"), ("triton", "triton"))
CHAINS = (("ngram", 1), ("truncated", 1))
TREES = (("truncated", 3), ("ngram", 3))
#: What is told of each run beside its settings.
SHOWN = (
    "ok", "tokens", "identical", "ties", "tie_tolerance", "first_differences", "mismatches", "logits_apart", "control",
    "draft_tokens", "verify_steps", "accepted", "offered", "acceptance", "tokens_per_verify", "moved_paths", "graph_replays",
    "captured_rows", "replayed_calls", "calls", "plain_calls", "seconds", "plain_seconds",
)  # fmt: skip


def settings(base: Settings, splits: Sequence[tuple[str, str]], dtypes: Sequence[str]) -> Iterator[Settings]:
    """Everything that is run, the most telling first: what a budget cuts off is at the end."""
    named = [replace(base, prefill_attention_backend=p, decode_attention_backend=d) for p, d in splits]
    modes = ("decode", "prefill")
    for dtype in dtypes:  # the matrix itself, at page size 16
        for mode in modes:
            for one in named:
                for draft, topk in (TREES[0], CHAINS[0]):
                    # what the batch size alone changes is the same for every split: one control a dtype and shape
                    control = mode == modes[0] and one is named[0]
                    yield _made(one, dtype, mode, draft, topk, 16, "auto", control)
    for page in (1, 64):
        for dtype in dtypes:
            for one in named:
                yield _made(one, dtype, "decode", *TREES[0], page, "auto")
                yield _made(one, dtype, "prefill", *CHAINS[0], page, "auto")
    for dtype in dtypes:
        for one in named:
            for mode in modes:
                yield _made(one, dtype, mode, *TREES[0], 16, "off")
                yield _made(one, dtype, mode, *CHAINS[1], 16, "off")
                yield _made(one, dtype, mode, *TREES[1], 16, "auto")
                yield _made(one, dtype, mode, *CHAINS[0], 16, "off")


def _made(
    base: Settings, dtype: str, mode: str, draft: str, topk: int, page: int, graphs: str, control: bool = False
) -> Settings:
    drafts = base.draft_attention_backend if draft == "truncated" else None
    return replace(
        base, dtype=dtype, speculative_attention_mode=mode, draft=draft, topk=topk, page_size=page, cuda_graph=graphs,
        control=control, draft_attention_backend=drafts,
    )  # fmt: skip


def described(one: Settings) -> dict[str, Any]:
    """The settings that differ between runs."""
    return {
        "dtype": one.dtype,
        "prefill": one.prefill_attention_backend,
        "decode": one.decode_attention_backend,
        "mode": one.speculative_attention_mode,
        "draft": one.draft,
        "topk": one.topk,
        "page_size": one.page_size,
        "cuda_graph": one.cuda_graph,
    }


def work(number: int, base: Settings, threads: int, end: float, tasks: Any, results: Any) -> None:
    """A worker: loads the model once a dtype, then runs what it is given, as (index, settings) until None."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    from attn_transformers import smollm2
    from attn_transformers.demo import _calm, _torch_dtype

    torch.set_num_threads(threads)
    loaded: dict[str, Any] = {}
    while (task := tasks.get()) is not None:
        index, one = task
        if time.time() > end:
            continue
        start = time.perf_counter()
        try:
            if one.dtype not in loaded:
                with _calm():
                    loaded[one.dtype] = smollm2.load(_torch_dtype(one.dtype), base.device, folder=base.model)
            results.put((index, number, ran(one, loaded[one.dtype], start)))
        except Exception as error:
            cut = traceback.format_exc(limit=-6).strip().splitlines()[-14:]
            results.put((index, number, {"failed": f"{type(error).__name__}: {error}", "traceback": cut}))
            if "CUDA error" in str(error):  # nothing runs in this process any more
                break
    results.put((None, number, None))


def ran(one: Settings, model: Any, start: float) -> dict[str, Any]:
    """One run as a row of the file; the key ``_`` holds what all rows have in common."""
    from attn_transformers.provenance import provenance
    from attn_transformers.speculative.run import run

    report = run(one, quiet=True, model=model)
    told = report.to_dict()
    phases = {f"{g.group.model} {phase}": f"{who.backend}:{who.variant}" for g, phase, who in report.plan.phase_plans()}
    return {
        **{name: told[name] for name in SHOWN},
        "plan": {"fingerprint": report.plan.fingerprint, "phases": phases},
        "wall_seconds": round(time.perf_counter() - start, 1),
        "_": {
            "provenance": provenance([report.plan], one.device),
            "model": report.plan.model,
            "prompts": told["prompts"],
            "texts": told["texts"],
        },
    }


def line(one: Settings, row: dict[str, Any]) -> str:
    """One line a run."""
    name = " ".join(f"{key}={value}" for key, value in described(one).items())
    if "failed" in row:
        return "\n    ".join([f"ERROR {name}: {row['failed']}", *row["traceback"]])
    text = (
        f"{'ok ' if row['ok'] else 'BAD'} {name}: {row['identical']}/{row['tokens']}, {row['ties']} ties, apart "
        f"{row['logits_apart']['median']:.1e} ({row['logits_apart']['largest']:.1e}), acceptance {row['acceptance']:.2f}, "
        f"moved {row['moved_paths']}, replays {row['graph_replays']}/{row['verify_steps']}, "
        f"{row['tokens'] / row['seconds']:.0f} tok/s (plain {row['tokens'] / row['plain_seconds']:.0f}), "
        f"{row['wall_seconds']} s"
    )
    if row["control"]:
        control = row["control"]
        text += (
            f"\n    control: {len(control['mismatches'])} differ, from plain {control['from_plain']['median']:.1e}, "
            f"from verify {control['from_run']['median']:.1e}"
        )
    for found in row["mismatches"]:
        text += f"\n    {found}"
    return text


def gather(arguments: argparse.Namespace, jobs: list[Settings], base: Settings) -> list[dict[str, Any] | None]:
    """Run `jobs` in processes and write the file after each result."""
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    for task in (*enumerate(jobs), *[None] * arguments.jobs):
        tasks.put(task)
    end = time.time() + arguments.budget
    workers = [
        context.Process(target=work, args=(number, base, arguments.threads, end, tasks, results), daemon=True)
        for number in range(arguments.jobs)
    ]
    for worker in workers:
        worker.start()
    rows: list[dict[str, Any] | None] = [None] * len(jobs)
    common: dict[str, Any] = {}
    left = len(workers)
    while left:
        index, _, row = results.get(timeout=arguments.budget + 120)
        if index is None:
            left -= 1
            continue
        rows[index] = row
        if told := row.pop("_", None):  # every run names the packages of its own plan
            versions = {**common.get("provenance", {}).get("versions", {}), **told["provenance"]["versions"]}
            common = {**told, "provenance": {**told["provenance"], "versions": versions}}
        print(line(jobs[index], row), flush=True)
        write(arguments.report, jobs, rows, common)
    for worker in workers:
        worker.join()
    write(arguments.report, jobs, rows, common)
    return rows


def write(path: Path, jobs: Sequence[Settings], rows: Sequence[dict[str, Any] | None], common: dict[str, Any]) -> None:
    """The file: where it comes from, every run, and what was not run."""
    done = [row for row in rows if row is not None]
    document = {
        "schema_version": 1,
        **common.get("provenance", {}),
        "model": common.get("model"),
        "prompts": common.get("prompts", []),
        "texts_of_one_run": common.get("texts", []),
        "runs": len(done),
        "ok": sum(row.get("ok", False) for row in done),
        "failed": sum("failed" in row for row in done),
        "tokens": sum(row.get("tokens", 0) for row in done),
        "identical": sum(row.get("identical", 0) for row in done),
        "ties": sum(row.get("ties", 0) for row in done),
        "rows": [{**described(one), **row} for one, row in zip(jobs, rows, strict=True) if row is not None],
        "not_run": [described(one) for one, row in zip(jobs, rows, strict=True) if row is None],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in document["rows"])  # one line a run
    text = json.dumps({**document, "rows": []}, indent=1).replace('"rows": []', f'"rows": [\n{lines}\n ]')
    path.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder (smollm2_checkpoint.py)")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=3, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no further setting is begun")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--splits", nargs="+", default=[":".join(one) for one in SPLITS], metavar="PREFILL:DECODE")
    parser.add_argument("--draft-backend", default="triton", help="backend of the draft model")
    parser.add_argument("--draft-layers", type=int, default=27)
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--only", type=int, default=None, help="the first settings only")
    arguments = parser.parse_args()
    base = Settings(
        model=arguments.model, device=arguments.device, max_new_tokens=arguments.max_new_tokens, steps=3,
        draft_layers=arguments.draft_layers, draft_attention_backend=arguments.draft_backend,
    )  # fmt: skip
    splits = [tuple(one.split(":", 1)) for one in arguments.splits]
    jobs = list(settings(base, splits, arguments.dtypes))[: arguments.only]  # type: ignore[arg-type]
    rows = gather(arguments, jobs, base)
    done = [row for row in rows if row is not None]
    good = sum(row.get("ok", False) for row in done)
    print(f"{good} of {len(done)} runs ok, {len(jobs) - len(done)} not run; written to {arguments.report}")
    return 0 if done and good == len(done) else 1


if __name__ == "__main__":
    sys.exit(main())
