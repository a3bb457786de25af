"""Families by the way their files spell things: raw ``config.json`` contents, cut to what counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from attn_core.errors import ModelError
from attn_core.geometry import GdnGeometry, LayerGroup, MhaGeometry, MlaGeometry, Model
from attn_core.model import parse_model

Row = tuple[str, int, int, int, int, int]  # name, layers, query heads, KV heads, qk width, v width


def config(model_type: str, architecture: str = "", **keys: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture or "X" + model_type], **keys}


def rows(model: Model) -> list[Row]:
    return [
        (g.name, len(g.layers), g.geometry.q_heads, g.geometry.kv_heads, g.geometry.qk_dim, g.geometry.v_dim)
        for g in model.groups
        if isinstance(g.geometry, MhaGeometry)
    ]


def mha(model: Model, name: str) -> MhaGeometry:
    geometry = model.group(name).geometry
    assert isinstance(geometry, MhaGeometry)
    return geometry


LLAVA = config(
    "llava",
    text_config={"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"},
    vision_config={
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
    },
)
QWEN2_VL = config(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    hidden_size=3584,
    num_attention_heads=28,
    num_hidden_layers=28,
    num_key_value_heads=4,
    sliding_window=32768,
    use_sliding_window=False,
    vision_config={"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584, "patch_size": 14},
)
MLLAMA = config(
    "mllama",
    text_config={"model_type": "mllama_text_model", "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
    vision_config={"model_type": "mllama_vision_model", "image_size": 560, "patch_size": 14, "max_num_tiles": 4},
)
INTERNVL = config(
    "internvl_chat",
    llm_config={"architectures": ["InternLM2ForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32,
                "num_hidden_layers": 32, "num_key_value_heads": 8, "model_type": "internlm2"},
    vision_config={"model_type": "intern_vit_6b", "hidden_size": 1024, "num_attention_heads": 16,
                   "num_hidden_layers": 24},
)  # fmt: skip
KIMI_K25 = config(
    "kimi_k25", num_hidden_layers=61, hidden_size=7168, num_attention_heads=64, num_key_value_heads=64,
    kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    vision_config={"vt_num_hidden_layers": 20, "vt_num_attention_heads": 16, "vt_hidden_size": 1152, "patch_size": 14},
)  # fmt: skip
DEEPSEEK_VL2_TINY = config(
    "deepseek_vl_v2",
    language_config={"model_type": "deepseek_v2", "hidden_size": 1280, "kv_lora_rank": None, "num_attention_heads": 10,
                     "num_hidden_layers": 12, "num_key_value_heads": 10, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0,
                     "use_mla": False, "v_head_dim": 0},
)  # fmt: skip


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (LLAVA, [("full", 32, 32, 32, 128, 128), ("vision", 24, 16, 16, 64, 64)]),
        (QWEN2_VL, [("full", 28, 28, 4, 128, 128), ("vision", 32, 16, 16, 80, 80)]),
        (MLLAMA, [("full", 32, 32, 8, 128, 128), ("cross", 8, 32, 8, 128, 128), ("vision", 40, 16, 16, 80, 80)]),
        (INTERNVL, [("full", 32, 32, 8, 128, 128), ("vision", 24, 16, 16, 64, 64)]),
        (KIMI_K25, [("vision", 20, 16, 16, 72, 72)]),
        (DEEPSEEK_VL2_TINY, [("full", 12, 10, 10, 128, 128)]),
        (
            config("falcon", hidden_size=4544, multi_query=True, num_attention_heads=71, num_hidden_layers=32),
            [("full", 32, 71, 1, 64, 64)],
        ),
        (
            config(
                "falcon", hidden_size=8192, new_decoder_architecture=True, num_attention_heads=128,
                num_hidden_layers=60, num_kv_heads=8,
            ),
            [("full", 60, 128, 8, 64, 64)],
        ),
        (config("gpt2", n_embd=768, n_head=12, n_layer=12), [("full", 12, 12, 12, 64, 64)]),
        (config("gpt_bigcode", n_embd=6144, n_head=48, n_layer=40, multi_query=True), [("full", 40, 48, 1, 128, 128)]),
        (
            config(
                "chatglm", hidden_size=4096, kv_channels=128, multi_query_attention=True, multi_query_group_num=2,
                num_attention_heads=32, num_layers=28,
            ),
            [("full", 28, 32, 2, 128, 128)],
        ),
        (
            config("dbrx", d_model=6144, n_heads=48, n_layers=40, attn_config={"kv_n_heads": 8, "clip_qkv": 8}),
            [("full", 40, 48, 8, 128, 128)],
        ),
        (
            config(
                "openelm", num_transformer_layers=2, num_query_heads=[12, 16], num_kv_heads=[3, 4], head_dim=64,
                model_dim=1280,
            ),
            [("full", 1, 12, 3, 64, 64), ("full_2", 1, 16, 4, 64, 64)],
        ),
        (
            config(
                "phi4mm", "Phi3ForCausalLM", hidden_size=3072, num_attention_heads=24, num_key_value_heads=8,
                num_hidden_layers=32,
            ),
            [("full", 32, 24, 8, 128, 128)],
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)  # fmt: skip
def test_head_counts(source: dict[str, Any], want: list[Row]) -> None:
    assert rows(parse_model(source)) == want


def test_draft_layers_are_counted_only_when_they_are_stated() -> None:
    assert parse_model(KIMI_K25).mtp_layers == 0  # the class of its language model has a default of 1
    assert parse_model({**KIMI_K25, "num_nextn_predict_layers": 1}).mtp_layers == 1


def test_defaults_of_the_class_are_named_when_they_are_used() -> None:
    notes = parse_model(LLAVA).notes
    assert notes == (
        "text_config: not stated, taken from the defaults of llama: num_hidden_layers 32, num_attention_heads 32, "
        "hidden_size 4096",
    )


def test_explicit_null_hides_a_default() -> None:
    keys: dict[str, Any] = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
    }
    assert [g.kind for g in parse_model(config("mistral", **keys, sliding_window=None)).groups] == ["full"]
    assert [g.kind for g in parse_model(config("mistral", **keys)).groups] == ["sliding"]


def test_cross_attention_of_mllama_counts_image_tiles() -> None:
    cross = parse_model(MLLAMA).group("cross")
    assert cross.layers == (3, 8, 13, 18, 23, 28, 33, 38)
    assert cross.kv_len == 4 * (40 * 40 + 1)
    assert dict(cross.pools) == {"cross": "cross"}


@pytest.mark.parametrize(
    ("keys", "full"),
    [
        ({"model_type": "cohere2", "sliding_window_pattern": 4}, [3, 7]),
        ({"model_type": "olmo3"}, [3, 7]),
        ({"model_type": "cwm"}, [0, 4]),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, [3, 7]),
        ({"model_type": "exaone4", "sliding_window_pattern": 3}, [2, 5]),
        ({"model_type": "afmoe", "global_attn_every_n_layers": 2}, [1, 3, 5, 7]),
        ({"model_type": "gemma2"}, [1, 3, 5, 7]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, [2, 5]),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 0}, [4]),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 5}, [0, 1, 2, 3, 4]),
        ({"model_type": "qwen3", "use_sliding_window": False}, list(range(8))),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 3}, [1, 3, 4, 5, 6, 7]),
        ({"model_type": "smollm3", "use_sliding_window": True, "no_rope_layer_interval": 4}, [0, 1, 2, 4, 5, 6]),
        ({"model_type": "muse_glimmer_text"}, [3, 7]),
        ({"model_type": "phi3"}, []),
        ({"model_type": "starcoder2"}, []),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else None,
)
def test_which_layers_slide(keys: dict[str, Any], full: list[int]) -> None:
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 8,
        "head_dim": 64,
    }
    model = parse_model({**sizes, "sliding_window": 1024, **keys})
    found = {group.kind: list(group.layers) for group in model.groups}
    assert found.get("full", []) == full
    assert sorted(found.get("sliding", []) + full) == list(range(8))
    assert all(mha(model, g.name).window == 1024 for g in model.groups if g.kind == "sliding")


def test_a_window_that_the_family_does_not_read_is_told() -> None:
    model = parse_model(config("llama", sliding_window=4096))
    assert [group.kind for group in model.groups] == ["full"]
    assert "sliding_window 4096 is not read by the code of llama; its layers are full" in model.notes


def test_sliding_layer_without_a_window_is_an_error() -> None:
    with pytest.raises(ModelError, match="no sliding_window is stated"):
        parse_model(config("olmo3", sliding_window=None, layer_types=["sliding_attention"] * 32))


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({"model_type": "granite", "attention_multiplier": 0.0078125}, 0.0078125),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 168}, 168**-0.5),
        ({"model_type": "gemma3n_text"}, 1.0),
        ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global", "local"], 1]]}, 1.0),
        ({"model_type": "gpt2", "scale_attn_weights": False}, 1.0),
        ({"model_type": "mpt", "attn_config": {"softmax_scale": 0.25, "alibi": False}}, 0.25),
        ({"model_type": "llama", "head_dim": 32}, 32**-0.5),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else None,
)
def test_softmax_scale(keys: dict[str, Any], scale: float) -> None:
    assert mha(parse_model(keys), "full").scale == pytest.approx(scale, rel=1e-9)


def test_gpt2_scales_by_layer_when_asked() -> None:
    model = parse_model(config("gpt2", n_layer=3, scale_attn_by_inverse_layer_idx=True))
    assert [mha(model, g.name).scale for g in model.groups] == [0.125, 0.0625, 0.125 / 3]


def test_yarn_temperature_of_latent_attention() -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    geometry = parse_model(config("deepseek_v3", rope_scaling=yarn)).groups[0].geometry
    assert isinstance(geometry, MlaGeometry)
    assert geometry.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_modernbert_windows_reach_both_ways() -> None:
    model = parse_model(config("modernbert", local_attention=128, num_hidden_layers=6))
    local = next(g for g in model.groups if isinstance(g.geometry, MhaGeometry) and g.geometry.window)
    assert (mha(model, local.name).window, mha(model, local.name).window_right) == (65, 64)
    assert local.layers == (1, 2, 4, 5)
    assert (local.kind, local.model, local.backend_kind) == ("encoder_bidirectional", "encoder", "mm")


def test_embedding_gemma_halves_its_window() -> None:
    model = parse_model(
        config("gemma3_text", sliding_window=512, use_bidirectional_attention=True, num_hidden_layers=6)
    )
    local = next(g for g in model.groups if mha(model, g.name).window)
    assert (mha(model, local.name).window, mha(model, local.name).window_right, mha(model, local.name).causal) == (
        257,
        256,
        False,
    )


def test_bert_as_a_decoder_is_causal() -> None:
    assert [g.kind for g in parse_model(config("bert")).groups] == ["encoder_bidirectional"]
    assert [g.kind for g in parse_model(config("bert", is_decoder=True)).groups] == ["full"]
    both = parse_model(config("bert", is_decoder=True, add_cross_attention=True))
    assert [g.kind for g in both.groups] == ["full", "cross"]


def test_parallel_mixers_give_two_groups_over_the_same_layers() -> None:
    model = parse_model(config("falcon_h1", num_hidden_layers=4))
    assert [group.layers for group in model.groups] == [(0, 1, 2, 3), (0, 1, 2, 3)]
    assert model.layers_counted == 4
    assert model.traits == {"hybrid_linear"}


def test_kimi_layer_lists_must_cover_every_layer() -> None:
    lists = {
        "full_attn_layers": [4],
        "kda_layers": [1, 2],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    }
    with pytest.raises(ModelError, match="do not name each of the layers 1 to 4 once"):
        parse_model(config("kimi_linear", num_hidden_layers=4, linear_attn_config=lists))


def test_nemotron_nas_blocks() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 8}},
        {"attention": {"no_op": True}},
        {"attention": {"n_heads_in_group": 16}},
    ]
    keys: dict[str, Any] = {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 3}
    model = parse_model(config("nemotron-nas", "DeciLMForCausalLM", block_configs=blocks, **keys))
    assert rows(model) == [("full", 1, 64, 8, 128, 128), ("full_2", 1, 64, 4, 128, 128)]
    assert model.group("no_attention").layers == (1,)


def test_per_layer_config_of_newer_files() -> None:
    keys: dict[str, Any] = {
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
    }
    model = parse_model(
        config("gemma4_text", **keys, per_layer_config={"05": {"head_dim": 128, "num_key_value_heads": 2}})
    )
    assert rows(model) == [("full", 1, 8, 2, 128, 128), ("sliding", 5, 8, 4, 256, 256)]


def test_draft_layers_are_counted_and_cut_off_the_layer_list() -> None:
    kinds = ["full_attention"] * 4 + ["sliding_attention"]
    model = parse_model(config("step3p5", num_hidden_layers=4, layer_types=kinds, num_nextn_predict_layers=1))
    assert (model.layers_counted, model.mtp_layers) == (4, 1)


def test_encoder_and_decoder_with_their_own_configurations() -> None:
    source = config(
        "vision-encoder-decoder",
        encoder={"model_type": "vit"},
        decoder={"model_type": "gpt2", "add_cross_attention": True},
    )
    model = parse_model(source)
    assert [(g.kind, g.model) for g in model.groups] == [
        ("full", "target"),
        ("cross", "target"),
        ("vit_full_bidirectional", "vision"),
    ]
    assert model.group("cross").kv_len == 14 * 14 + 1
    assert "encoder_decoder" in model.traits


def test_a_tower_that_api_1_cannot_express_is_left_to_the_server() -> None:
    sam = {"model_type": "sam_vision_model", "use_rel_pos": True}
    model = parse_model(config("llava", text_config={"model_type": "llama"}, vision_config=sam))
    assert [group.name for group in model.groups] == ["full"]
    assert "is left to the server: relative_position_bias" in " ".join(model.notes)


def test_a_tower_that_is_not_known_does_not_stop_the_language_model() -> None:
    swin = {"model_type": "swin", "depths": [2, 2], "num_heads": [3, 6], "embed_dim": 96}
    model = parse_model(config("llava", text_config={"model_type": "llama"}, vision_config=swin))
    assert [group.name for group in model.groups] == ["full"]
    assert "vision_config (swin) is not described: its attention is not known here" in model.notes


def test_audio_towers() -> None:
    model = parse_model(
        config("qwen2_audio", audio_config={"model_type": "qwen2_audio_encoder"}, text_config={"model_type": "qwen2"})
    )
    audio = model.group("audio")
    assert (audio.model, audio.kind, len(audio.layers)) == ("encoder", "encoder_bidirectional", 32)
    assert audio.facts["tower"] == "audio"


def test_jet_convolution_stays_with_the_model() -> None:
    jet = {"num_heads": 4, "head_dim": 64, "expand_v": 2.0, "conv_size": 4}
    keys: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "layer_types": ["jet", "attn"],
    }
    group: LayerGroup = parse_model(config("jet_nemotron", **keys, efficient_attention_config={"jet": jet})).group(
        "linear"
    )
    assert isinstance(group.geometry, GdnGeometry)
    assert (group.geometry.v_dim, group.geometry.external_conv, group.backend_kind) == (128, True, "gdn")
