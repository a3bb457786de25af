"""Runs in the environment of this repository: the same backend and FP8 cache inside transformers, greedy tokens as JSON.

vLLM's own CPU kernel rounds FP8 in a way of its own: it agrees neither with round-to-nearest e4m3 nor with its float32 result
(off by up to 0.49 in a one-layer test whose keys are three times unit variance). Its tokens say nothing about a backend that
stores what was asked for.

    python fp8_reference.py MODEL
"""

from __future__ import annotations

import json
import sys

import torch
from engine_run import PLAIN
from transformers import AutoModelForCausalLM

from attn_transformers import load

COUNT = 24
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
served = load(model, attention_backend="torch_native", kv_cache_dtype="fp8_e4m3")
answers = []
for prompt in PLAIN:
    ids = torch.tensor([prompt])
    made = served.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=COUNT,
        min_new_tokens=COUNT,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    answers.append(made[0, len(prompt) :].tolist())
print(json.dumps(answers))
