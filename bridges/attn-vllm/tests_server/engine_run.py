"""Runs in the environment of vLLM: one engine, a list of scenarios, greedy tokens as JSON.

python engine_run.py '{"model": FOLDER, "engine": {…}, "scenarios": ["plain", …], "out": FILE}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from cpu_time import cpu_seconds

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

LONG = [3 + (7 * i * i + 5 * i) % 400 for i in range(150)]
#: Several prompts at once; more tokens than one step takes (64), so that chunks and decodes are mixed.
PLAIN = [[1, 2, 3, 4, 5], list(range(10, 50)), [7], [100 + i for i in range(17)]]
CHUNKED = [[9, *LONG], [5, 6], [8, *LONG[:90]]]
PREFIX = [[*LONG[:140], 7], [*LONG[:140], 8]]
REPETITIVE = [[1, 2, 3, 4] * 8, [50, 51, 52] * 5, [9] * 12, list(range(60, 75)) * 2]


def generate(engine, prompts, count):
    """Tokens and cached tokens of each prompt."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "cached": [answer.num_cached_tokens for answer in answers],
    }


def scenarios(engine):
    """Name -> what it does."""

    def prefix_hit():
        first = generate(engine, PREFIX[:1], 4)
        second = generate(engine, PREFIX, 16)
        return {"tokens": [*first["tokens"], *second["tokens"]], "cached": second["cached"]}

    def n_gram():
        together = generate(engine, REPETITIVE, 24)
        alone = generate(engine, REPETITIVE[:1], 40)
        return {"tokens": [*together["tokens"], *alone["tokens"]], "cached": together["cached"]}

    return {
        "plain": lambda: generate(engine, PLAIN, 24),
        "prefix hit": prefix_hit,
        "chunked prefill": lambda: generate(engine, CHUNKED, 24),
        "n-gram": n_gram,
    }


def main() -> None:
    """Make the engine, run, write."""
    asked = json.loads(sys.argv[1])
    began = time.monotonic()
    from vllm import LLM, __version__

    imported = time.monotonic()
    engine = LLM(
        asked["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        gpu_memory_utilization=0.2,
        **{"dtype": "float32", **asked["engine"]},
    )
    ready, cpu = time.monotonic(), cpu_seconds(os.getpgrp())
    known = scenarios(engine)
    answers = {name: known[name]() for name in asked["scenarios"]}
    Path(asked["out"]).write_text(
        json.dumps(
            {
                "vllm": __version__,
                "seconds": {"import": round(imported - began, 2), "engine": round(ready - imported, 2), "cpu": cpu},
                "answers": answers,
            }
        )
    )


if __name__ == "__main__":
    main()
