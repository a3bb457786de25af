"""Tiny random models (fp32, a few thousand weights) and the greedy references that everything is compared with."""

from __future__ import annotations

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

torch.set_num_threads(1)

VOCABULARY = 211
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
#: Prompts of different lengths; the shortest is one token.
PROMPTS = (
    [7, 11, 13, 17, 19, 23, 29],
    [31],
    [37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107],
    [5, 6],
)


def make(kind: str, **changes: object) -> PreTrainedModel:
    """A random model in eval mode, the same for the same arguments; weights are large enough for attention to matter."""
    shape = {**SHAPE, "num_hidden_layers": 3, **changes}
    models = {
        "llama": lambda: (LlamaConfig(**shape), LlamaForCausalLM),
        "mistral": lambda: (MistralConfig(**{"sliding_window": 6, **shape}), MistralForCausalLM),
        "qwen2": lambda: (
            Qwen2Config(**{"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1, **shape}),
            Qwen2ForCausalLM,
        ),
        "gemma2": lambda: (
            Gemma2Config(
                **{
                    "head_dim": 16,
                    "sliding_window": 6,
                    "attn_logit_softcapping": 2.0,
                    "query_pre_attn_scalar": 24,
                    "tie_word_embeddings": False,
                    **shape,
                }
            ),
            Gemma2ForCausalLM,
        ),
        "llama4": lambda: (
            Llama4TextConfig(
                **{
                    "head_dim": 16,
                    "attention_chunk_size": 8,
                    "num_local_experts": 2,
                    "intermediate_size_mlp": 96,
                    **shape,
                    "num_hidden_layers": 4,
                }
            ),
            Llama4ForCausalLM,
        ),
        "gpt_oss": lambda: (
            GptOssConfig(
                **{
                    "head_dim": 16,
                    "sliding_window": 6,
                    "num_local_experts": 2,
                    "num_experts_per_tok": 1,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                    **shape,
                }
            ),
            GptOssForCausalLM,
        ),
    }
    config, cls = models[kind]()
    config._attn_implementation = "sdpa" if kind in ("llama", "llama4", "mistral", "qwen2") else "eager"
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0.0, 1.0 if name.endswith("sinks") else 0.15)
    return model


def padded(prompts=PROMPTS) -> dict[str, torch.Tensor]:
    """The prompts as one left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def alone(model: PreTrainedModel, prompts=PROMPTS, new: int = 12) -> torch.Tensor:
    """Greedy tokens of each prompt by itself, through the model's own attention."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        rows.append(output[0, len(prompt) :])
    return torch.stack(rows)


def together(attn, prompts=PROMPTS, new: int = 12, **options) -> torch.Tensor:
    """Greedy tokens of all prompts at once, through attn-core."""
    inputs = padded(prompts)
    output = attn.generate(**inputs, max_new_tokens=new, do_sample=False, **options)
    return output[:, inputs["input_ids"].shape[1] :]


def using(cache):
    """The keyword argument under which this transformers takes a cache."""
    from attn_transformers._compat import cache_argument

    return {cache_argument(): cache}
