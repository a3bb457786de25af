"""The thirty published models: every derived value, and every trap that their files name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_core.errors import ModelError
from attn_core.geometry import DsaGeometry, GdnGeometry, MhaGeometry, MlaGeometry, Model
from attn_core.model import (
    describe,
    kv_bytes_per_token,
    model_kv_bytes_per_token,
    parse_model,
    state_bytes,
    state_dtypes,
)

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "data" / "models").glob("*.json"))}


def model(slug: str, text: dict[str, Any] | None = None, **changes: Any) -> Model:
    config = copy.deepcopy(json.loads(FILES[slug].read_text())["config"])
    config.update(changes)
    if text:
        config["text_config"].update(text)
    return parse_model(config)


def mha(one: Model, name: str) -> MhaGeometry:
    geometry = one.group(name).geometry
    assert isinstance(geometry, MhaGeometry)
    return geometry


def mla(one: Model) -> MlaGeometry:
    geometry = one.groups[0].geometry
    geometry = geometry.mla if isinstance(geometry, DsaGeometry) else geometry
    assert isinstance(geometry, MlaGeometry)
    return geometry


def gdn(one: Model) -> GdnGeometry:
    geometry = one.group("linear").geometry
    assert isinstance(geometry, GdnGeometry)
    return geometry


def differences(want: Any, have: Any, path: str = "") -> list[str]:
    """Where two descriptions differ; notes are prose, floats are compared to six digits."""
    if isinstance(want, dict) and isinstance(have, dict):
        keys = sorted(key for key in want.keys() | have.keys() if not key.endswith("note"))
        return [
            text
            for key in keys
            for text in differences(want.get(key, "absent"), have.get(key, "absent"), f"{path}.{key}")
        ]
    if isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
        return [
            text for i, (a, b) in enumerate(zip(want, have, strict=True)) for text in differences(a, b, f"{path}[{i}]")
        ]
    if isinstance(want, float) and isinstance(have, (int, float)):
        return [] if abs(want - have) <= 1e-6 * abs(want) else [f"{path}: {want} != {have}"]
    return [] if want == have and type(want) is type(have) else [f"{path}: {want!r} != {have!r}"]


@pytest.mark.parametrize("slug", FILES)
def test_description_equals_the_published_one(slug: str) -> None:
    published = json.loads(FILES[slug].read_text())
    parsed = parse_model(FILES[slug])
    assert differences(published["derived"], describe(parsed)) == []
    assert parsed.name == slug
    assert json.loads(json.dumps(describe(parsed))) == describe(parsed)


@pytest.mark.parametrize("slug", FILES)
def test_groups_have_unique_names_and_cover_each_layer_once(slug: str) -> None:
    parsed = parse_model(FILES[slug])
    names = [group.name for group in parsed.groups]
    assert len(set(names)) == len(names)
    own = [
        layer for group in parsed.groups if group.model == "target" and group.kind != "cross" for layer in group.layers
    ]
    assert sorted(own) == list(range(parsed.layers_counted))
    pools = [pool for group in parsed.groups for pool in group.pools.values()]
    assert len(set(pools)) == len(pools)
    assert all(not group.unsupported for group in parsed.groups)
    assert parsed.notes == ()


def changed(parsed: Model, text: dict[str, Any] | None = None, **changes: Any) -> Model:
    """The same file again, with other values in its configuration."""
    return model(parsed.name, text, **changes)


def ranks(parsed: Model, *sizes: tuple[int, int]) -> bool:
    return all(mla(parsed.shard(tp)).q_heads == heads for tp, heads in sizes)


def ratio(parsed: Model, name: str, want: int) -> bool:
    return mha(parsed, name).ratio == want


def one_latent(parsed: Model) -> bool:
    return {kv_bytes_per_token(parsed.shard(tp).groups[0]) for tp in (1, 2, 4, 8)} == {1152}


def sinks_by_architecture(parsed: Model) -> bool:
    config = json.loads(FILES[parsed.name].read_text())["config"]
    unnamed = not any("sink" in key for key in config)
    return unnamed and all(mha(parsed, name).sinks for name in ("full", "sliding"))


def glm_widths(parsed: Model) -> bool:
    return all(
        (mla(one).nope_dim, mla(one).rope_dim, mla(one).v_dim, mla(one).latent_dim) == (192, 64, 256, 512)
        for one in (parsed, changed(parsed, head_dim=77))
    )


def fails(call: Callable[[], Any], text: str) -> bool:
    with pytest.raises(ModelError, match=text):
        call()
    return True


#: (model, beginning of the trap's text in its file): what must hold of the parsed file.
#: A trap about kernels is checked by the facts that a rule for it reads.
TRAPS: dict[tuple[str, str], Callable[[Model], bool]] = {
    ("deepseek-v2-lite", "16 heads: TP2->8"): lambda m: ranks(m, (2, 8), (4, 4), (8, 2)),
    ("deepseek-v2-lite", "num_key_value_heads 16"): lambda m: one_latent(m),
    ("deepseek-v2-lite", "no q_lora_rank"): lambda m: mla(changed(m, q_lora_rank=None)).q_heads == 16,
    ("deepseek-v3.2", "index_topk present"): lambda m: m.groups[0].backend_kind == "dsa",
    ("deepseek-v3.2", "DSA implies page 64"): lambda m: m.groups[0].pools["index"] == "index",
    ("deepseek-v3.2", "transformers' own default"): lambda m: mla(changed(m, head_dim=64)) == mla(m),
    ("deepseek-v3", "128 heads"): lambda m: ranks(m, (8, 16), (16, 8), (4, 32)),
    ("deepseek-v3", "num_key_value_heads equals"): lambda m: one_latent(m),
    ("gemma-2-2b", "softcap 50"): lambda m: (mha(m, "full").softcap, mha(m, "full").qk_dim) == (50.0, 256),
    ("gemma-3-27b", "scale 168"): lambda m: abs(mha(m, "full").scale - 168**-0.5) < 1e-12,
    ("gemma-3-27b", "pattern 6"): lambda m: m.group("full").layers == tuple(range(5, 62, 6)),
    ("gemma-3-27b", "image tokens attend"): lambda m: all(
        "mm_spans" in m.group(name).wants for name in ("full", "sliding")
    ),
    ("gemma-3-27b", "vision head_dim 72"): lambda m: mha(m, "vision").qk_dim == 72,
    ("gemma-4-26b-a4b", "two head dims"): lambda m: "mixed_head_dims" in m.traits,
    ("gemma-4-26b-a4b", "full layers: 16 q"): lambda m: ratio(m, "full", 8) and ratio(m, "sliding", 2),
    ("gemma-4-26b-a4b", "attention_k_eq_v"): lambda m: m.group("full").facts["k_eq_v"] is True,
    ("gemma-4-26b-a4b", "use_bidirectional_attention"): lambda m: (
        {g.name for g in m.groups if "mm_spans" in g.wants} == {"sliding"}
    ),
    ("gemma-4-26b-a4b", "KV bytes per layer"): lambda m: [kv_bytes_per_token(g) for g in m.groups[:2]] == [4096, 8192],
    ("glm-4.7", "GQA 12"): lambda m: (lambda g: (g.q_heads, g.kv_heads))(mha(m.shard(8), "full")) == (12, 1),
    ("glm-4.7", "head_dim 128"): lambda m: fails(lambda: changed(m, head_dim=None), "does not divide into 96"),
    ("glm-5.2", "config head_dim is 192"): lambda m: glm_widths(m),
    ("glm-5.2", "64 heads"): lambda m: ranks(m, (8, 8)),
    ("glm-5.2", "nope 192"): lambda m: (mla(m).nope_dim, mla(m).v_dim) != (128, 128),
    ("glm-5", "config head_dim is 64"): lambda m: glm_widths(m),
    ("glm-5", "64 heads"): lambda m: ranks(m, (8, 8)),
    ("glm-5", "nope 192"): lambda m: (mla(m).nope_dim, mla(m).v_dim) != (128, 128),
    ("gpt-oss-120b", "sinks are NOT"): lambda m: sinks_by_architecture(m),
    ("gpt-oss-120b", "window 128"): lambda m: mha(m, "sliding").window == 128,
    ("gpt-oss-120b", "head_dim 64"): lambda m: mha(m, "full").qk_dim == 64,
    ("gpt-oss-20b", "sinks are NOT"): lambda m: sinks_by_architecture(m),
    ("gpt-oss-20b", "window 128"): lambda m: mha(m, "sliding").window == 128,
    ("gpt-oss-20b", "head_dim 64"): lambda m: mha(m, "full").qk_dim == 64,
    ("jamba-v0.1", "attention only at"): lambda m: m.group("full").layers == (4, 12, 20, 28),
    ("jamba-v0.1", "no rotary"): lambda m: "rotary" in m.group("full").facts["note"],
    ("jamba-v0.1", "Mamba-1 state"): lambda m: m.group("mamba").kind == "mamba1",
    ("jet-nemotron-2b", "layer kinds named"): lambda m: [g.kind for g in m.groups] == ["full", "sliding", "linear_jet"],
    ("jet-nemotron-2b", "linear head_v_dim"): lambda m: (gdn(m).k_dim, gdn(m).v_dim) == (96, 256),
    ("jet-nemotron-2b", "GQA 6"): lambda m: ratio(m, "full", 6),
    ("jet-nemotron-2b", "window is nested"): lambda m: mha(m, "sliding").window == 1152,
    ("kimi-k2", "64 heads"): lambda m: (
        ranks(m, (8, 8), (4, 16), (2, 32)) and mla(changed(m, model_type="kimi_k9")).q_heads == 64
    ),
    ("kimi-k2", "num_key_value_heads equals"): lambda m: one_latent(m),
    ("kimi-linear-48b-a3b", "layer lists are 1-INDEXED"): lambda m: m.group("mla").layers == (3, 7, 11, 15, 19, 23, 26),
    ("kimi-linear-48b-a3b", "transformers' fallback"): lambda m: 4 not in m.group("mla").layers,
    ("kimi-linear-48b-a3b", "head_dim 72"): lambda m: gdn(m).k_dim == 128 and mla(m).nope_dim == 128,
    ("kimi-linear-48b-a3b", "hybrid of MLA"): lambda m: ranks(m, (8, 4)) and {"hybrid_linear", "mla"} <= m.traits,
    ("kimi-linear-48b-a3b", "MLA layers use NoPE"): lambda m: "rotary" in m.group("mla").facts["note"],
    ("llama-3.1-405b", "GQA 16"): lambda m: ratio(m, "full", 16),
    ("llama-3.1-8b", "baseline"): lambda m: ratio(m, "full", 4) and m.traits == frozenset(),
    ("llama-4-scout", "chunked (not sliding)"): lambda m: (
        (mha(m, "chunked_local").chunk, mha(m, "chunked_local").window) == (8192, None)
    ),
    ("llama-4-scout", "GQA 5"): lambda m: ratio(m, "full", 5),
    ("llama-4-scout", "max_position"): lambda m: m.max_positions == 10485760,
    ("mimo-v2-flash", "K and V head dims"): lambda m: [kv_bytes_per_token(g) for g in m.groups] == [2560, 5120],
    ("mimo-v2-flash", "full layers 4 KV"): lambda m: ratio(m, "full", 16) and ratio(m, "sliding", 8),
    ("mimo-v2-flash", "sinks on SLIDING"): lambda m: [mha(m, n).sinks for n in ("full", "sliding")] == [False, True],
    ("mimo-v2-flash", "sliding_window_size=128"): lambda m: mha(m, "sliding").window == 129,
    ("mimo-v2-flash", "attention_chunk_size"): lambda m: all(g.kind != "chunked_local" for g in m.groups),
    ("mistral-7b-v0.1", "all layers sliding"): lambda m: mha(m, "sliding").window == 4096,
    ("mistral-7b-v0.1", "mlc preset"): lambda m: not mha(changed(m, attention_sink_size=4), "sliding").sinks,
    ("nemotron-3-nano-30b-a3b", "layer kinds come from"): lambda m: m.group("full").layers == (5, 12, 19, 26, 33, 42),
    ("nemotron-3-nano-30b-a3b", "layer 0"): lambda m: 0 in m.group("mamba").layers,
    ("nemotron-3-nano-30b-a3b", "mamba_ssm_cache"): lambda m: state_dtypes(m.group("mamba")) == ("fp32", "bf16"),
    ("phi-4", "10 KV heads"): lambda m: (
        all(mha(m.shard(n), "full").kv_heads == 10 // n for n in (2, 5, 10))
        and fails(lambda: m.shard(4), "10 KV heads")
    ),
    ("phi-4", "no head_dim key"): lambda m: mha(m, "full").qk_dim == 128,
    ("phi-4", "architecture name"): lambda m: mha(changed(m, hidden_size=2560), "full").qk_dim == 64,
    ("qwen2.5-vl-7b", "GQA 7"): lambda m: ratio(m, "full", 7),
    ("qwen2.5-vl-7b", "ViT head_dim"): lambda m: mha(m, "vision").qk_dim == 80,
    ("qwen2.5-vl-7b", "use_sliding_window false"): lambda m: (
        len(changed(m, {"sliding_window": 32768}).group("full").layers) == 28
    ),
    ("qwen2.5-vl-7b", "ViT windows"): lambda m: mha(m, "vision_windowed").window is None,
    ("qwen3-235b-a22b", "GQA 16"): lambda m: ratio(m, "full", 16) and mha(m.shard(8), "full").kv_heads == 1,
    ("qwen3-next-80b-a3b", "no layer_types"): lambda m: m.group("full").layers == tuple(range(3, 48, 4)),
    ("qwen3-next-80b-a3b", "GQA 8"): lambda m: ratio(m, "full", 8) and mha(m, "full").qk_dim == 256,
    ("qwen3-next-80b-a3b", "TP4/TP8"): lambda m: {mha(m.shard(n), "full").kv_heads for n in (2, 4, 8)} == {1},
    ("qwen3-next-80b-a3b", "state pool"): lambda m: (
        [dict(g.pools) for g in m.groups] == [{"attend": "kv"}, {"state": "state"}]
    ),
    ("qwen3.5-27b", "text fields"): lambda m: m.layers_counted == 64,
    ("qwen3.5-27b", "mamba_ssm_dtype"): lambda m: (
        gdn(m).state_dtype == "fp32" and gdn(changed(m, {"mamba_ssm_dtype": None})).state_dtype == "bf16"
    ),
    ("qwen3.5-27b", "vision head_dim"): lambda m: mha(m, "vision").qk_dim == 72,
    ("qwen3.5-27b", "GQA 6"): lambda m: ratio(m, "full", 6),
    ("smollm2-135m", "9 q / 3 kv"): lambda m: ratio(m, "full", 3) and fails(lambda: m.shard(2), "9 query heads"),
    ("whisper-large-v3", "encoder-decoder"): lambda m: (
        (m.group("cross").kv_len, m.group("cross").features) == (1500, frozenset({"cross"}))
    ),
    ("whisper-large-v3", "decoder max 448"): lambda m: m.max_positions == 448,
    ("whisper-large-v3", "no num_attention_heads"): lambda m: mha(m, "full").q_heads == 20,
    ("whisper-large-v3", "encoder is bidirectional"): lambda m: (
        not mha(m, "encoder").causal and not m.group("encoder").pools
    ),
}


def test_every_trap_in_the_files_is_named_here() -> None:
    written = [(slug, trap) for slug, path in FILES.items() for trap in json.loads(path.read_text())["planner_traps"]]
    unnamed = [
        (slug, trap) for slug, trap in written if sum(key[0] == slug and trap.startswith(key[1]) for key in TRAPS) != 1
    ]
    assert unnamed == []
    assert len(TRAPS) == len(written)


@pytest.mark.parametrize(("slug", "trap"), TRAPS, ids=lambda value: str(value))
def test_trap(slug: str, trap: str) -> None:
    assert TRAPS[(slug, trap)](parse_model(FILES[slug]))


# Cases that users of such systems reported, by their numbers in the case file.


def test_c14_shared_kv_layers_are_a_feature_and_cost_nothing() -> None:
    shared = model("gemma-4-26b-a4b", {"num_kv_shared_layers": 20})
    full, sliding = shared.group("full"), shared.group("sliding")
    assert dict(full.kv_from) == {11: 5, 17: 5, 23: 5, 29: 5}
    assert set(sliding.kv_from.values()) == {9}
    assert full.features == sliding.features == {"shared_kv"}
    assert "shared_kv" in shared.traits
    assert model_kv_bytes_per_token(shared) == 1 * 4096 + 9 * 8192


def test_c28_latent_cache_is_replicated_over_ranks() -> None:
    for tp in (1, 2, 4, 8, 16):
        assert model_kv_bytes_per_token(model("deepseek-v3").shard(tp)) == 61 * 576 * 2 == 70272


@pytest.mark.parametrize(
    ("slug", "widths"),
    [
        ("glm-5", (256, 256, 576)),
        ("glm-5.2", (256, 256, 576)),
        ("kimi-linear-48b-a3b", (192, 128, 576)),
        ("deepseek-v3", (192, 128, 576)),
    ],
)
def test_c51_head_dim_of_the_config_is_not_the_attention_head_dim(slug: str, widths: tuple[int, int, int]) -> None:
    latent = mla(model(slug))
    assert (latent.nope_dim + latent.rope_dim, latent.v_dim, latent.latent_dim + latent.rope_dim) == widths


def test_c56_use_sliding_window_decides() -> None:
    assert "sliding" not in {g.kind for g in model("qwen2.5-vl-7b", {"sliding_window": 32768}).groups}
    used = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 21}
    assert model("qwen2.5-vl-7b", used).group("sliding").layers == tuple(range(21, 28))
    assert len(model("mistral-7b-v0.1").group("sliding").layers) == 32


@pytest.mark.parametrize(
    ("slug", "window"), [("mimo-v2-flash", 129), ("gpt-oss-20b", 128), ("gemma-3-27b", 1024), ("mistral-7b-v0.1", 4096)]
)
def test_c81_window_counts_the_own_position(slug: str, window: int) -> None:
    assert mha(model(slug), "sliding").window == window


def test_c90_state_dtype_of_the_config_wins() -> None:
    one = model("qwen3.5-27b")
    assert state_bytes(one.group("linear")) == 48 * 128 * 128 * 4 + 10240 * 3 * 2
    assert state_bytes(one.group("linear"), "bf16", "bf16") == 48 * 128 * 128 * 2 + 10240 * 3 * 2
    assert 48 * 128 * 128 * 4 == 3145728


@pytest.mark.parametrize(
    ("slug", "layers"),
    [
        ("kimi-linear-48b-a3b", {"mla": (3, 7, 11, 15, 19, 23, 26)}),
        ("jamba-v0.1", {"full": (4, 12, 20, 28)}),
        ("nemotron-3-nano-30b-a3b", {"full": (5, 12, 19, 26, 33, 42)}),
        ("jet-nemotron-2b", {"full": (14, 19), "sliding": (20, 21)}),
        ("qwen3-next-80b-a3b", {"full": tuple(range(3, 48, 4))}),
    ],
)
def test_c92_layer_lists(slug: str, layers: dict[str, tuple[int, ...]]) -> None:
    for name, indices in layers.items():
        assert model(slug).group(name).layers == indices


def test_c92_unknown_layer_kind_is_an_error() -> None:
    with pytest.raises(ModelError, match="unknown architecture: layer kind 'hyena'"):
        model("llama-3.1-8b", layer_types=["full_attention"] * 31 + ["hyena"])
    with pytest.raises(ModelError, match="layer kind 'Q'"):
        model("nemotron-3-nano-30b-a3b", hybrid_override_pattern="MEQ*")


def test_dsa_layers_that_share_an_index_name_its_owner() -> None:
    geometry = model("glm-5.2").groups[0].geometry
    assert isinstance(geometry, DsaGeometry)
    assert (geometry.index_from[3], geometry.index_from[5], geometry.index_from[77]) == (2, 2, 74)
    assert not {0, 1, 2, 6} & geometry.index_from.keys()
    written_out = (
        model("glm-5.2", indexer_types=None).groups[0].geometry
    )  # by index_topk_freq and index_skip_topk_offset
    assert written_out == geometry


def test_an_unlisted_tower_is_planned_and_told_in_a_note() -> None:
    parsed = model("gemma-4-26b-a4b")
    assert (parsed.group("vision").backend_kind, mha(parsed, "vision").scale) == ("mm", 1.0)
    assert "27 layers, 16 heads of 72" in describe(parsed)["towers_note"]
