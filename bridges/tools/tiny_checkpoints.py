"""Tiny random models as checkpoint folders, for tests of servers: seconds to make, milliseconds to run.

    python bridges/tools/tiny_checkpoints.py FOLDER [NAME ...]

``llama`` (grouped heads), ``gemma2`` (a window of 24 on every second layer, soft cap), ``gptoss`` (sinks, a window, experts).
Weights are drawn wide, so that greedy tokens depend on all of the context and differ from step to step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=2))


def _gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    more = {"sliding_window": 24, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 32}
    shape = {**SHAPE, "tie_word_embeddings": True}  # vLLM knows no other Gemma 2
    return Gemma2ForCausalLM(Gemma2Config(**shape, num_hidden_layers=4, **more))


def _gptoss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    more = {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    layers = ["sliding_attention", "full_attention"]
    return GptOssForCausalLM(GptOssConfig(**SHAPE, num_hidden_layers=2, layer_types=layers, **more))


MODELS = {"llama": _llama, "gemma2": _gemma2, "gptoss": _gptoss}


def checkpoint(folder: Path, name: str) -> Path:
    """Write the model called `name` below `folder`, always with the same weights; returns its own folder."""
    import torch

    torch.manual_seed(0)
    target = folder / name
    if not (target / "config.json").is_file():
        MODELS[name]().to(torch.float32).save_pretrained(str(target))
    return target


def main() -> None:
    """The command."""
    folder, *names = sys.argv[1:]
    for name in names or MODELS:
        print(checkpoint(Path(folder), name))


if __name__ == "__main__":
    main()
