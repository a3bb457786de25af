"""Writes ``defaults.json`` from the installed transformers: ``python -m attn_core.model.build_defaults``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_core.model import _compose, _view

#: Keys that a reader or a rule looks up. Everything else in a configuration has no bearing on attention.
KEEP = frozenset(
    (*_view.LAYERS, *_view.HEADS, *_view.KV_HEADS, *_view.HIDDEN, *_view.HEAD_DIM, *_view.WINDOW, *_view.CHUNK,
     *_view.MTP, *_view.POSITIONS, *(f"{side}_{key}" for side in ("encoder", "decoder") for key in (
         "layers", "attention_heads", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "hidden_size")),
     *_compose.TEXT, *_compose.VISION, *_compose.AUDIO, *_compose.WRAPPERS, "encoder", "decoder", "encoder_config",
     "decoder_config", "text_encoder", "num_decoder_layers", "v_head_dim", "kv_lora_rank", "qk_nope_head_dim",
     "qk_rope_head_dim", "q_lora_rank", "index_topk", "index_n_heads", "index_head_dim", "index_kpool",
     "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
     "linear_head_dim",
     "linear_conv_kernel_dim", "linear_num_heads", "short_conv_kernel_size", "mamba_expand", "expand", "mamba_d_state",
     "state_size", "ssm_state_size", "mamba_d_conv", "conv_kernel", "mamba_num_heads", "mamba_n_heads", "n_mamba_heads",
     "mamba_head_dim", "mamba_d_head", "mamba_headdim", "mamba_d_ssm", "n_groups", "mamba_n_groups", "mamba_ngroups",
     "mamba_ssm_cache_dtype", "conv_L_cache", "lru_width", "conv1d_width", "query_pre_attn_scalar",
     "attention_multiplier", "attn_logit_softcapping", "use_sliding_window", "max_window_layers", "window_size",
     "sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers", "no_rope_layer_interval",
     "attn_layer_period", "attn_layer_offset", "layer_group_size", "num_kv_shared_layers", "attention_k_eq_v",
     "prefix_dense_sliding_window_pattern", "multi_query", "new_decoder_architecture", "alibi", "attention_type",
     "position_embedding_type", "is_decoder", "add_cross_attention", "max_source_positions", "scale_attn_weights",
     "scale_attn_by_inverse_layer_idx", "use_bidirectional_attention", "is_causal", "prefix_lm", "local_attention",
     "attention_value_scale", "num_global_layers", "image_size", "patch_size", "max_num_tiles", "true_hidden_size",
     "num_experts_per_tok", "fullatt_block_indexes", "use_rel_pos", "num_sliding_attention_heads", "conv_size",
     "max_encoder_position_embeddings", "use_relative_position_bias", "causal", "num_layers_per_stack", "H_cycles",
     "L_cycles")
)  # fmt: skip


def table(classes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Defaults by model type. `classes` maps a model type to its configuration class (a dataclass)."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(classes):
        cls = classes[name]
        plain = {field.name: field.default for field in dataclasses.fields(cls)}
        kept = {key: plain[key] for key in sorted(KEEP & plain.keys()) if _storable(plain[key])}
        for key, sub in sorted(_subtypes(cls).items()):
            if key in KEEP:
                kept[key] = f"@{sub}"
        found[name] = kept
    return found


def _storable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, int) for item in value)
    return isinstance(value, (bool, int, float, str)) and value != ""


def _subtypes(cls: Any) -> dict[str, str]:
    types: dict[str, str] = {}
    for key, sub in (getattr(cls, "sub_configs", None) or {}).items():
        name = getattr(sub, "model_type", "")
        if name:
            types[key] = name
    try:
        instance = cls().to_dict()
    except Exception:  # a class without usable defaults says nothing about its parts
        return types
    for key, value in instance.items():
        if isinstance(value, dict) and value.get("model_type"):
            types[key] = value["model_type"]
    return types


def main() -> None:
    """Write the file beside this module."""
    import transformers

    types = table({name: transformers.CONFIG_MAPPING[name] for name in transformers.CONFIG_MAPPING})
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(keys)}" for name, keys in types.items())
    text = f'{{"transformers": {json.dumps(transformers.__version__)}, "types": {{\n{rows}\n}}}}\n'
    Path(__file__).with_name("defaults.json").write_text(text, encoding="utf-8")
    print(f"{len(types)} types, {len(text)} bytes")


if __name__ == "__main__":
    main()
