"""Greedy tokens of transformers' own eager attention, one prompt after the other, for models whose attention SGLang's
``torch_native`` does not compute (soft cap, sinks). Prints JSON in the form of ``engine_run.py``."""

from __future__ import annotations

import json
import sys

import torch
from engine_run import CHUNKED, PLAIN, PREFIX
from transformers import AutoModelForCausalLM


def tokens(model, prompt, count):
    """`count` greedy tokens after `prompt`, whatever they are."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            best = model(ids).logits[0, -1].argmax()
            ids = torch.cat([ids, best.view(1, 1)], 1)
    return ids[0, len(prompt) :].tolist()


def main() -> None:
    """Every scenario without speculation or a cache: the tokens must not depend on either."""
    folder, *names = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    asked = {
        "plain": [(prompt, 24) for prompt in PLAIN],
        "prefix hit": [(PREFIX[0], 4), *((prompt, 16) for prompt in PREFIX)],
        "chunked prefill": [(prompt, 24) for prompt in CHUNKED],
    }
    print(json.dumps({name: [tokens(model, *pair) for pair in asked[name]] for name in names}))


if __name__ == "__main__":
    main()
