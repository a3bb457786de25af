"""What API 1 cannot express is named, what has no backend is described and left to the server."""

from __future__ import annotations

import math
from typing import Any

import pytest

from attn_core.model import describe, kv_bytes_per_token, parse_model, state_bytes, state_shapes

NAMED = [
    ({"model_type": "bloom"}, "alibi"),
    ({"model_type": "mpt"}, "alibi"),
    ({"model_type": "falcon", "alibi": True}, "alibi"),
    ({"model_type": "baichuan", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 2}, "alibi"),
    ({"model_type": "jais", "n_embd": 512, "n_head": 8, "n_layer": 2}, "alibi"),
    ({"model_type": "t5"}, "relative_position_bias"),
    ({"model_type": "mpnet"}, "relative_position_bias"),
    ({"model_type": "bert", "position_embedding_type": "relative_key_query"}, "relative_position_bias"),
    ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, "prefix_lm"),
    ({"model_type": "mpt", "attn_config": {"alibi": False, "prefix_lm": True}}, "prefix_lm"),
    ({"model_type": "big_bird"}, "block_sparse_attention"),
    ({"model_type": "diffllama"}, "differential_attention"),
    ({"model_type": "deepseek_v4"}, "compressed_kv_pools"),
    ({"model_type": "unlimited_ocr_text"}, "reference_sliding_window"),
    ({"model_type": "minimax_m3_vl_text", "num_hidden_layers": 1, "layer_types": ["minimax_m3_sparse"]},
     "minimax_sparse_attention"),
    ({"model_type": "qwen4_exp_text"}, "qwen_sparse_attention"),
    ({"model_type": "diffusion_gemma_text"}, "block_diffusion_mask"),
    ({"model_type": "gemma4_text", "num_hidden_layers": 6, "num_kv_shared_layers": 6}, "kv_of_target_model"),
    ({"model_type": "hy_v4"}, "sinks_over_latent"),
    ({"model_type": "minicpm", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2,
      "sparse_config": {"block_size": 64}}, "sparse_attention"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "name"), NAMED, ids=lambda value: value if isinstance(value, str) else value["model_type"]
)
def test_what_api_1_cannot_express_is_named(source: dict[str, Any], name: str) -> None:
    model = parse_model(source)
    assert any(name in group.unsupported for group in model.groups)
    assert any(name in row.get("unsupported", ()) for row in describe(model)["attention_groups"])


STATES = [
    ({"model_type": "mamba2"}, "mamba2", ((128, 64, 128), (10240, 3))),
    ({"model_type": "mamba", "hidden_size": 768, "state_size": 16, "expand": 2}, "mamba1", ((1536, 16), (1536, 3))),
    ({"model_type": "bamba", "attn_layer_indices": [9, 18, 27]}, "mamba2", ((128, 64, 256), (8704, 3))),
    ({"model_type": "falcon_h1"}, "mamba2", ((128, 8, 256), (1536, 3))),
    ({"model_type": "minimax_text_01", "attn_type_list": [0, 0, 1], "head_dim": 128, "hidden_size": 6144,
      "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 3},
     "linear_lightning", ((64, 128, 128), ())),
    ({"model_type": "recurrent_gemma"}, "rg_lru", ((2560,), (2560, 3))),
    ({"model_type": "lfm2", "full_attn_idxs": [2, 5]}, "short_conv", ((), (2560, 2))),
    ({"model_type": "rwkv"}, "rwkv", ((), ())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "kind", "shapes"), STATES, ids=lambda value: value if isinstance(value, str) else None
)
def test_states_without_a_backend_are_described_and_external(source: Any, kind: str, shapes: Any) -> None:
    group = next(group for group in parse_model(source).groups if group.kind == kind)
    assert group.backend_kind == "external"
    assert state_shapes(group) == shapes
    assert dict(group.pools) == {"state": "state"}
    assert kv_bytes_per_token(group) == 0
    elements = math.prod(shapes[0] or (0,)), math.prod(shapes[1] or (0,))
    assert state_bytes(group, "fp32", "bf16") == 4 * elements[0] + 2 * elements[1]
