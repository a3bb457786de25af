"""Where a model may come from, and what is refused: files, folders, dictionaries, objects, GGUF, unknown families."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core.errors import ModelError
from attn_core.geometry import MhaGeometry, MlaGeometry
from attn_core.model import describe, parse_model

SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 2}


class Config:
    """What a ``PretrainedConfig`` offers."""

    _name_or_path = "somebody/some-model"

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "llama", "torch_dtype": "torch.bfloat16", **SIZES}


def test_file_folder_and_model_file(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    described = tmp_path / "x.json"
    described.write_text(json.dumps({"slug": "small", "config": {"model_type": "llama", **SIZES}, "derived": {}}))
    assert (
        parse_model(folder).name
        == parse_model(str(folder)).name
        == parse_model(folder / "config.json").name
        == "my-model"
    )
    assert parse_model(described).name == "small"
    assert parse_model(folder).groups == parse_model(described).groups


def test_dictionary_and_object() -> None:
    parsed = parse_model(Config())
    assert (parsed.name, parsed.dtype, parsed.architecture) == ("somebody/some-model", "bf16", "llama")
    assert parse_model(Config().to_dict()).groups == parsed.groups


@pytest.mark.parametrize("content", ["[]", "{", "\x00"])
def test_broken_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        parse_model(path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model file"):
        parse_model("meta-llama/Llama-3.1-8B")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        parse_model(tmp_path)
    with pytest.raises(ModelError, match="not int"):
        parse_model(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 7, "num_key_value_heads": None}, "hidden_size 512 does not divide into 7 heads"),
        ({"num_attention_heads": "8"}, "num_attention_heads is '8', a whole number is needed"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, a positive number is needed"),
        ({"num_key_value_heads": 3}, "8 query heads do not divide into 3 KV heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"layer_types": ["full_attention"]}, "1 layer kinds are listed for 2 layers"),
        ({"layer_types": "full_attention"}, "a list is needed"),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [0]},
            "no usable form",
        ),
        (
            {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": "x", "mscale_all_dim": 1}},
            "factor is 'x'",
        ),
        ({"layer_types": ["full_attention", None]}, "layer kind None is not known"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "of a kind that is not known here"),
        ({"layer_types": ["full_attention", "deepseek_sparse_attention"]}, "kv_lora_rank is missing"),
    ],
)
def test_broken_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model({"model_type": "llama", **SIZES, **changes})


def test_unknown_family_is_read_when_it_is_plain() -> None:
    model = parse_model(
        {"model_type": "brandnew", "architectures": ["BrandNewForCausalLM"], **SIZES, "rope_theta": 1e4}
    )
    geometry = model.groups[0].geometry
    assert isinstance(geometry, MhaGeometry)
    assert (geometry.q_heads, geometry.kv_heads, geometry.qk_dim) == (8, 2, 64)
    assert model.notes == (
        "architecture BrandNewForCausalLM is not known; read as plain multi-head attention from its config keys",
    )


@pytest.mark.parametrize(
    "suspicious",
    [
        {"linear_num_key_heads": 4},
        {"kv_lora_rank": 512},
        {"index_topk": 2048},
        {"mamba_d_state": 16},
        {"alibi": True},
        {"relative_attention_num_buckets": 32},
        {"attention_chunk_size": 8192},
        {"sparse_attention_config": {"x": 1}},
        {"add_attention_sink": True},
        {"hybrid_pattern": "MM*"},
        {"cross_attention_layers": [1]},
        {"patch_size": 14},
        {"cla_share_factor": 2},
        {"swa_head_dim": 64},
    ],
    ids=lambda value: next(iter(value)),
)
def test_unknown_family_with_suspicious_keys_is_refused(suspicious: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="unknown architecture BrandNewForCausalLM") as caught:
        parse_model({"model_type": "brandnew", "architectures": ["BrandNewForCausalLM"], **SIZES, **suspicious})
    assert next(iter(suspicious)) in str(caught.value)


@pytest.mark.parametrize("harmless", [{"index_topk": None}, {"decoder_sparse_step": 1}, {"chunk_size_feed_forward": 4}])
def test_keys_that_say_nothing_do_not_make_a_family_suspicious(harmless: dict[str, Any]) -> None:
    assert parse_model({"model_type": "brandnew", **SIZES, **harmless}).layers_counted == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "unknown architecture"),
        ({"model_type": "brandnew"}, "unknown architecture"),
        ({"architectures": ["BrandNewForMaskedLM"], **SIZES}, "unknown architecture BrandNewForMaskedLM"),
        ({"model_type": "resnet"}, "not an attention model"),
        ({"model_type": "detr"}, "unknown architecture"),
        ({"model_type": "paligemma"}, "the configuration of its language model is missing"),
        ({"model_type": "encoder-decoder"}, "the configuration of its encoder is missing"),
        ({"model_type": "longformer"}, "unknown architecture: transformers has it"),
    ],
)
def test_what_is_no_attention_model_is_refused(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model(source)


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, attn_core.model as m; m.parse_model({'model_type': 'llama'}); print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in loaded for name in ("torch", "numpy", "transformers", "gguf"))


def write_gguf(path: Path, architecture: str, values: dict[str, Any]) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in values.items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


BASE = {"block_count": 12, "embedding_length": 2048, "context_length": 8192, "attention.head_count": 16}


@pytest.mark.parametrize(
    ("architecture", "values", "want"),
    [
        ("llama", {"attention.head_count_kv": 4}, {"full": (12, 16, 4, 128)}),
        ("qwen2", {"attention.head_count_kv": 2}, {"full": (12, 16, 2, 128)}),
        ("qwen3", {"attention.head_count_kv": 8, "attention.key_length": 64}, {"full": (12, 16, 8, 64)}),
        (
            "gemma2",
            {"attention.head_count_kv": 8, "attention.key_length": 256, "attention.sliding_window": 4096,
             "attn_logit_softcapping": 50.0},
            {"full": (6, 16, 8, 256), "sliding": (6, 16, 8, 256)},
        ),
        (
            "gemma3",
            {"attention.head_count_kv": 8, "attention.key_length": 256, "attention.sliding_window": 512},
            {"full": (2, 16, 8, 256), "sliding": (10, 16, 8, 256)},
        ),
        (
            "lfm2",
            {"attention.head_count_kv": [0, 4] * 6, "shortconv.l_cache": 3},
            {"full": (6, 16, 4, 128)},
        ),
        (
            "llama",
            {"attention.head_count_kv": [4] * 6 + [8] * 6},
            {"full": (6, 16, 4, 128), "full_2": (6, 16, 8, 128)},
        ),
    ],
)  # fmt: skip
def test_gguf(tmp_path: Path, architecture: str, values: dict[str, Any], want: dict[str, Any]) -> None:
    model = parse_model(write_gguf(tmp_path / "m.gguf", architecture, {**BASE, **values}))
    found = {
        g.name: (len(g.layers), g.geometry.q_heads, g.geometry.kv_heads, g.geometry.qk_dim)
        for g in model.groups
        if isinstance(g.geometry, MhaGeometry)
    }
    assert found == want
    assert (model.name, model.max_positions) == ("m", 8192)


def test_gguf_scale_of_the_27b_gemma(tmp_path: Path) -> None:
    values = {**BASE, "block_count": 62, "embedding_length": 5376, "attention.head_count": 32,
              "attention.head_count_kv": 16, "attention.key_length": 128, "attention.sliding_window": 1024}  # fmt: skip
    geometry = parse_model(write_gguf(tmp_path / "m.gguf", "gemma3", values)).group("full").geometry
    assert isinstance(geometry, MhaGeometry)
    assert geometry.scale == pytest.approx(168**-0.5)


def test_gguf_latent_attention(tmp_path: Path) -> None:
    values = {**BASE, "attention.head_count_kv": 1, "attention.kv_lora_rank": 512, "attention.key_length": 576,
              "attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128,
              "rope.dimension_count": 64}  # fmt: skip
    geometry = parse_model(write_gguf(tmp_path / "m.gguf", "deepseek2", values)).groups[0].geometry
    assert geometry == MlaGeometry(16, 512, 64, 128, 128, 192**-0.5)


def test_gguf_of_an_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unknown architecture 'hyena'"):
        parse_model(write_gguf(tmp_path / "m.gguf", "hyena", BASE))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        parse_model(broken)


MODELS = sorted((Path(__file__).parent / "data" / "models").glob("*.json"))
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@given(path=st.sampled_from(MODELS), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_spoilt_configuration_is_read_or_refused_never_anything_else(path: Path, data: st.DataObject) -> None:
    config = json.loads(path.read_text())["config"]
    part = config.get("text_config", config) if data.draw(st.booleans()) else config
    for key in data.draw(st.lists(st.sampled_from(sorted(part)), min_size=1, max_size=3)):
        part[key] = data.draw(JUNK)
    with contextlib.suppress(ModelError):
        describe(parse_model(config))
