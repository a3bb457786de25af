"""Runs in the environment of SGLang: one engine, a list of scenarios, greedy tokens as JSON.

python engine_run.py '{"model": FOLDER, "engine": {…}, "scenarios": ["plain", …], "out": FILE}'
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

LONG = [3 + (7 * i * i + 5 * i) % 400 for i in range(150)]
#: Several prompts at once, of different lengths.
PLAIN = [[1, 2, 3, 4, 5], list(range(10, 50)), [7], [100 + i for i in range(17)]]
#: Longer than a prefill chunk (64).
CHUNKED = [[9, *LONG], [5, 6], [8, *LONG[:90]]]
PREFIX = [[*LONG[:140], 7], [*LONG[:140], 8]]
REPETITIVE = [[1, 2, 3, 4] * 8, [50, 51, 52] * 5, [9] * 12, list(range(60, 75)) * 2]


def generate(engine, prompts, count):
    """Tokens and cached tokens of each prompt."""
    options = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=options)
    return {
        "tokens": [answer["output_ids"] for answer in answers],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
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
    import sglang

    assert sglang.Engine  # SGLang imports lazily: look at it before the clock is read
    imported = time.monotonic()
    engine = sglang.Engine(
        model_path=asked["model"],
        skip_tokenizer_init=True,
        device="cpu",
        mem_fraction_static=0.9,
        max_total_tokens=4096,
        max_running_requests=8,
        context_length=256,
        chunked_prefill_size=64,
        disable_overlap_schedule=True,
        **{"dtype": "float32", **asked["engine"]},
    )
    ready = time.monotonic()
    known = scenarios(engine)
    answers = {name: known[name]() for name in asked["scenarios"]}
    Path(asked["out"]).write_text(
        json.dumps(
            {
                "sglang": sglang.__version__,
                "seconds": {"import": round(imported - began, 2), "engine": round(ready - imported, 2)},
                "answers": answers,
            }
        )
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
