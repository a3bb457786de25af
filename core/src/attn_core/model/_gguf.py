"""GGUF files: their metadata as a configuration of the same family, for the ordinary readers.

Key names are those of llama.cpp (``gguf.constants.Keys``); only metadata is read, no tensor. The ``gguf`` library is
imported when a file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_core.errors import ModelError

#: ``general.architecture`` and the model type whose rules read it.
_TYPES: Mapping[str, str] = {
    "llama": "llama", "arcee": "arcee", "afmoe": "afmoe", "apertus": "apertus", "bitnet": "bitnet", "bloom": "bloom",
    "chatglm": "glm", "cohere2": "cohere2", "command-r": "cohere", "dbrx": "dbrx", "deepseek": "deepseek",
    "deepseek2": "deepseek_v3", "dots1": "dots1", "ernie4_5": "ernie4_5", "ernie4_5-moe": "ernie4_5_moe",
    "exaone": "exaone", "exaone4": "exaone4", "falcon": "llama", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "glm4": "glm4", "glm4moe": "glm4_moe",
    "glm-dsa": "glm_moe_dsa", "gpt-oss": "gpt_oss", "gpt2": "gpt2", "gptj": "gptj", "gptneox": "gpt_neox",
    "granite": "granite", "granitemoe": "granitemoe", "granitehybrid": "granitemoehybrid", "internlm2": "internlm2",
    "hunyuan-dense": "hunyuan_v1_dense", "hunyuan-moe": "hunyuan_v1_moe", "jamba": "jamba", "lfm2": "lfm2",
    "lfm2moe": "lfm2", "minicpm": "minicpm", "minicpm3": "minicpm3", "minimax-m2": "minimax_m2",
    "mistral3": "ministral3", "mistral4": "mistral4", "nemotron": "nemotron", "olmo": "olmo", "olmo2": "olmo2",
    "olmoe": "olmoe",
    "orion": "orion",
    "phi2": "phi", "phi3": "phi3", "phimoe": "phimoe", "qwen": "qwen", "qwen2": "qwen2", "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2_vl_text", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "qwen3vl": "qwen3_vl_text",
    "qwen3vlmoe": "qwen3_vl_moe_text", "qwen3next": "qwen3_next", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "seed_oss": "seed_oss", "smollm3": "smollm3", "stablelm": "stablelm", "starcoder": "gpt_bigcode",
    "starcoder2": "starcoder2", "xverse": "xverse",
}  # fmt: skip

#: Keys below ``<architecture>.`` and the configuration keys they stand for.
_KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.chunk_size": "attention_chunk_size",
    "attention.causal": "is_causal",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "full_attention_interval": "full_attention_interval",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "shortconv.l_cache": "conv_L_cache",
}
#: Families whose layers without KV heads are something else than attention.
_WITHOUT_KV: Mapping[str, str] = {"jamba": "mamba", "granitehybrid": "mamba", "lfm2": "conv", "lfm2moe": "conv"}


def read_gguf(path: Path) -> Mapping[str, Any]:
    """The configuration that the metadata of a GGUF file describes.

    Raises :class:`ModelError` when the library is missing, the file is broken or its architecture is not known.
    """
    fields = _fields(path)
    architecture = str(fields.get("general.architecture") or "")
    model_type = _TYPES.get(architecture)
    if model_type is None:
        raise ModelError(
            f"{path}: unknown architecture {architecture!r} in GGUF metadata",
            f"known are {', '.join(sorted(_TYPES))}",
            fix="give the config.json of the original model",
        )
    prefix = f"{architecture}."
    own = {key[len(prefix) :]: value for key, value in fields.items() if key.startswith(prefix)}
    return to_config(architecture, model_type, own)


def to_config(architecture: str, model_type: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration from the keys below ``<architecture>.``; `own` has them without that prefix."""
    config: dict[str, Any] = {"model_type": model_type}
    for key, name in _KEYS.items():
        if own.get(key) is not None:
            config[name] = own[key]
    _latent(own, config)
    _linear(own, config)
    _states(own, config)
    _per_layer(architecture, own, config)
    _scale(architecture, config)
    if "sliding_window" in config and model_type.startswith("qwen"):
        config["use_sliding_window"] = bool(config["sliding_window"])
    return config


def _latent(own: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Latent attention: ``key_length`` is the cache row in newer files, the head width in older ones."""
    rank = own.get("attention.kv_lora_rank")
    if rank is None:
        return
    rope = int(own.get("rope.dimension_count") or 0)
    key = int(own.get("attention.key_length_mla") or own.get("attention.key_length") or 0)
    value = int(own.get("attention.value_length_mla") or own.get("attention.value_length") or 0)
    config |= {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": key - rope, "v_head_dim": value}
    config["num_key_value_heads"] = config.get("num_attention_heads")
    factor, log = own.get("rope.scaling.factor"), own.get("rope.scaling.yarn_log_multiplier")
    if factor and log:  # llama.cpp stores 0.1 * mscale_all_dim
        config["rope_scaling"] = {"type": "yarn", "factor": float(factor), "mscale_all_dim": 10.0 * float(log)}


def _linear(own: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Gated delta networks keep their sizes under the names of state-space models."""
    if config["model_type"] not in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return
    v_heads = int(own.get("ssm.time_step_rank") or 0)
    config |= {
        "linear_num_key_heads": own.get("ssm.group_count"),
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": own.get("ssm.state_size"),
        "linear_value_head_dim": int(own.get("ssm.inner_size") or 0) // max(v_heads, 1),
        "linear_conv_kernel_dim": own.get("ssm.conv_kernel"),
    }


def _states(own: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Mamba layers of hybrid families."""
    inner, hidden = own.get("ssm.inner_size"), own.get("embedding_length")
    if config["model_type"] not in ("jamba", "granitemoehybrid") or not inner or not hidden:
        return
    config |= {"mamba_d_state": own.get("ssm.state_size"), "mamba_d_conv": own.get("ssm.conv_kernel"),
               "mamba_expand": int(inner) / int(hidden)}  # fmt: skip
    if config["model_type"] == "granitemoehybrid":
        heads = int(own.get("ssm.time_step_rank") or 1)
        config |= {
            "mamba_n_heads": heads,
            "mamba_d_head": int(inner) // heads,
            "mamba_n_groups": own.get("ssm.group_count"),
        }


def _per_layer(architecture: str, own: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Arrays with one entry a layer: head counts, which layers slide, which have no attention."""
    layers: dict[str, dict[str, Any]] = {}
    for name in ("num_attention_heads", "num_key_value_heads"):
        values = config.get(name)
        if isinstance(values, list):
            stated = [int(value) for value in values]
            config[name] = max(stated) or 1
            for index, value in enumerate(stated):
                if value:
                    layers.setdefault(str(index), {})[name] = value
            if name == "num_key_value_heads" and 0 in stated and architecture in _WITHOUT_KV:
                other = _WITHOUT_KV[architecture]
                config["layer_types"] = ["attention" if value else other for value in stated]
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if entry else "full_attention" for entry in pattern]
    elif isinstance(pattern, int):
        config["sliding_window_pattern"] = pattern
    wide, narrow = own.get("attention.key_length"), own.get("attention.key_length_swa")
    if narrow:
        config |= {"head_dim": narrow, "global_head_dim": wide, "v_head_dim": None}
    if layers:
        config["per_layer_config"] = layers


def _scale(architecture: str, config: dict[str, Any]) -> None:
    """llama.cpp scales the two 27B Gemmas by the share of the hidden size, all other sizes by the head width."""
    wide = {"gemma2": 46, "gemma3": 62}.get(architecture)
    if wide is None:
        return
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("num_hidden_layers") == wide and heads and hidden:
        config["query_pre_attn_scalar"] = int(hidden) // int(heads)
    else:
        config["query_pre_attn_scalar"] = config.get("head_dim")


def _fields(path: Path) -> dict[str, Any]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(f"{path}: the gguf library is needed to read GGUF files", fix="pip install gguf") from error
    try:
        reader = GGUFReader(str(path))
    except Exception as error:  # the library raises bare errors of many kinds for a broken file
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    return {
        name: _plain(field.contents())
        for name, field in reader.fields.items()
        if not name.startswith(("tokenizer.", "GGUF."))
    }


def _plain(value: Any) -> Any:
    """Python numbers instead of the library's array scalars."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value
