"""Families with latent caches, recurrent states or layers that API 1 only names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.model._layers import layer_count
from attn_core.model._rules import Rule, at, every, listed, per_kind, register, rename
from attn_core.model._view import HEADS, HIDDEN, KV_HEADS, LAYERS, View

# Latent attention (MLA). head_dim and num_key_value_heads of these configurations say nothing about the cache.
register(
    "deepseek_v2 deepseek_v3 kimi_k2 minicpm3 mistral4 youtu glm4_moe_lite axk1 sarvam_mla",
    Rule("decoder", attention="mla"),
)


def _longcat(view: View) -> Mapping[str, Any]:
    """Two attention sub-layers in every layer: cache index ``2 * layer + sub-layer``."""
    return {"num_hidden_layers": 2 * view.need("num_layers", *LAYERS)}


register("longcat_flash", Rule("decoder", None, _longcat, attention="mla"))


def _indexed(view: View, count: int) -> list[str]:
    return ["indexed"] * count


def _indexers(view: View) -> Mapping[str, Any]:
    """Which layers choose tokens and which take over an earlier choice, where ``indexer_types`` is not written out.

    transformers' GlmMoeDsaConfig: a pattern of F and S, else every ``index_topk_freq``-th layer from an offset on.
    """
    count = layer_count(view)
    if view.items("indexer_types"):
        return {}
    pattern = view.get("index_topk_pattern")
    if pattern is not None:
        letters = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        return {"indexer_types": [letters.get(item, item) for item in pattern]}
    period = max(view.integer("index_topk_freq") or 1, 1)
    offset = view.integer("index_skip_topk_offset")
    first = 2 if offset is None else offset
    return {"indexer_types": ["shared" if max(i - first + 1, 0) % period else "full" for i in range(count)]}


def _hy_v4(view: View) -> Mapping[str, Any]:
    count = layer_count(view)
    types = view.items("indexer_types") or ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(count)]
    return {"indexer_types": types, "@sinks": True}


def _mistral_large4(view: View) -> Mapping[str, Any]:
    """Layers read the cache of their ``kv_source_layers`` entry; layers without rotary embedding have no rope part."""
    sources = view.items("kv_source_layers") or []
    owners = {i: source for i, source in enumerate(sources) if source != i}
    count, period = layer_count(view), view.integer("no_rope_layer_interval") or 4
    rope = view.items("no_rope_layers") or [int((i + 1) % period != 0) for i in range(count)]
    whole = view.need("qk_nope_head_dim") + (view.integer("qk_rope_head_dim") or 0)
    bare = {"qk_nope_head_dim": whole, "qk_rope_head_dim": 0}
    return {
        **_indexers(view),
        "@kv_from": lambda kinds: owners,
        "@layer": lambda index, kind: {} if rope[index] else bare,
    }


def _dots3(view: View) -> Mapping[str, Any]:
    """``use_dsa`` turns full layers into indexed ones; sliding layers have latent sizes of their own (``swa_…``)."""
    count = layer_count(view)
    indexed = "full" if view.flag("use_dsa") is False else "indexed"
    slides = view.flag("use_sliding_window") is not False
    kinds = view.items("layer_types") or [
        "sliding" if slides and i >= 2 and i % 4 != 1 else indexed for i in range(count)
    ]
    if view.flag("use_dsa") and view.states("layer_types"):
        kinds = [{"full_attention": "indexed"}.get(kind, kind) for kind in kinds]
    latent = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    own = {key: view.get(f"swa_{key}") for key in latent if view.get(f"swa_{key}") is not None}
    return {"layer_types": kinds, "@layer": lambda index, kind: own if kind == "sliding" else {}}


register("deepseek_v32 axk2", Rule("decoder", _indexed, attention="mla"))
register("glm_moe_dsa", Rule("decoder", _indexed, _indexers, attention="mla"))
register("hy_v4 hy_v4_vl_text", Rule("decoder", _indexed, _hy_v4, attention="mla"))
register(
    "mistral_large4_text",
    Rule("decoder", _indexed, _mistral_large4, attention="mla", unsupported=("position_dependent_scale",)),
)
register("dots3_note_text", Rule("decoder", None, _dots3, attention="mla"))
register("deepseek_v4", Rule("decoder", lambda view, count: ["compressed_sparse_attention"] * count))

# Gated delta networks and Kimi delta attention beside full or latent layers.


def _olmo_hybrid(view: View) -> Mapping[str, Any]:
    """OlmoHybridConfig: as many linear heads as attention heads, keys 0.75 and values 1.5 times their share."""
    heads = view.need(*HEADS)
    k_heads = view.integer("linear_num_key_heads") or heads
    k_dim = view.integer("linear_key_head_dim") or int(0.75 * view.need(*HIDDEN) / k_heads)
    return {
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": view.integer("linear_num_value_heads") or heads,
        "linear_key_head_dim": k_dim,
        "linear_value_head_dim": view.integer("linear_value_head_dim") or 2 * k_dim,
    }


def _lara(view: View, count: int) -> list[str]:
    pattern = ("linear", "sliding", "linear", "full", "sliding")
    return [pattern[i % len(pattern)] for i in range(count)]


def _jet(view: View) -> Mapping[str, Any]:
    """Layers are called jet, attn and swa; the window is nested in ``efficient_attention_config``."""
    swa = view.table("efficient_attention_config").get("swa")
    window = swa.get("window_size") if isinstance(swa, Mapping) else None
    return {"@window": window} if window else {}


def _kimi_linear(view: View) -> Mapping[str, Any]:
    """The lists of ``linear_attn_config`` count layers from 1 and win over every other rule."""
    nested = view.table("linear_attn_config")
    facts = (
        {"@facts": {"note": "no rotary embedding: the rope part is not rotated"}} if view.flag("mla_use_nope") else {}
    )
    full, linear = nested.get("full_attn_layers"), nested.get("kda_layers")
    if full is None or linear is None:
        return facts
    count = view.need(*LAYERS)
    if sorted([*full, *linear]) != list(range(1, count + 1)):
        raise view.error(f"full_attn_layers and kda_layers do not name each of the layers 1 to {count} once")
    return {"layer_types": ["full" if i + 1 in full else "linear" for i in range(count)], **facts}


def _glm5_next(view: View) -> Mapping[str, Any]:
    kinds = view.items("layer_types") or ["linear" if i % 4 != 3 else "indexed" for i in range(layer_count(view))]
    return {**_indexers(view), "layer_types": ["indexed" if kind == "full_attention" else kind for kind in kinds]}


_FOUR = every(4, "full_attention_interval", others="linear")
register("qwen3_next qwen3_5_text qwen3_5_moe_text", Rule("decoder", _FOUR, linear="gdn"))
register("olmo_hybrid", Rule("decoder", every(4, others="linear"), _olmo_hybrid, linear="gdn"))
register("lara_mini", Rule("decoder", _lara, linear="gdn", windows=True))
register("jet_nemotron jet_vlm", Rule("decoder", None, _jet, linear="jet", windows=True))
register(
    "kimi_linear",
    Rule(
        "decoder", at(lambda i, n: i > 0 and i % 4 == 0, others="linear"), _kimi_linear, attention="mla", linear="kda"
    ),
)
register(
    "bailing_hybrid",
    Rule("decoder", every(8, "layer_group_size", others="linear"), None, attention="mla", linear="kda"),
)
register("glm5_next_text", Rule("decoder", None, _glm5_next, attention="mla", linear="kda"))


def _qwen4_exp(view: View) -> Mapping[str, Any]:
    """Full layers are indexed ones here (QSA, with block-compressed index keys)."""
    kinds = view.items("layer_types") or _FOUR(view, layer_count(view))
    return {"layer_types": ["indexed" if kind in ("full", "full_attention") else kind for kind in kinds]}


register("qwen4_exp_text", Rule("decoder", None, _qwen4_exp, linear="gdn", indexed="qsa"))

# Mamba, RWKV, lightning attention, short convolutions: states that the server keeps.
_LINEAR = at(lambda i, n: False, others="linear")
_NO_ROPE = {"note": "no rotary embedding"}


def _jamba(view: View, count: int) -> list[str]:
    period, offset = view.integer("attn_layer_period") or 8, view.integer("attn_layer_offset")
    start = 4 if offset is None else offset
    return ["full" if i % period == start else "linear" for i in range(count)]


def _nemotron_h(view: View) -> Mapping[str, Any]:
    """``hybrid_override_pattern``: M mamba, * attention, - MLP, E experts. The pattern gives the number of layers."""
    pattern = view.text("hybrid_override_pattern")
    if pattern is None:
        return {}
    return {"layer_types": list(pattern), "num_hidden_layers": len(pattern)}


def _zamba(view: View) -> Mapping[str, Any]:
    """Attention on the hidden state joined with the embedding: twice the width, scale ``(head_dim / 2) ** -0.5``."""
    wide = view.integer("attention_head_dim") or 2 * view.need(*HIDDEN) // view.need(*HEADS)
    return {"head_dim": wide, "@scale": (wide / 2) ** -0.5}


def _zamba_layout(view: View, count: int) -> list[str]:
    period, offset = view.integer("attn_layer_period") or 6, view.integer("attn_layer_offset")
    start = 4 if offset is None else offset
    rest = ["hybrid" if i % period == start else "linear" for i in range(count - 3)]
    return ["linear", "linear", "hybrid", *rest]


def _minimax(view: View) -> Mapping[str, Any]:
    """``attn_type_list``: 1 is full attention, 0 is lightning attention."""
    kinds = view.items("attn_type_list")
    return {"layer_types": ["full" if kind else "linear" for kind in kinds]} if kinds else {}


def _minimax_m3(view: View) -> Mapping[str, Any]:
    """Block-sparse layers are named; the table that describes them says nothing about the full ones."""
    freq = view.table("sparse_attention_config").get("sparse_attention_freq")
    kinds = view.items("layer_types") or ["minimax_m3_sparse" if item else "full" for item in freq or []]
    return {"layer_types": kinds or None, "sparse_attention_config": None}


def _lfm3(view: View, count: int) -> list[str]:
    return ["full" if i % 4 == 2 else "sliding" if i % 4 == 0 and i > 0 else "conv" for i in range(count)]


def _recurrent_gemma(view: View) -> Mapping[str, Any]:
    """``block_types`` repeats; its attention blocks are local, ``attention_window_size`` wide; head_dim is derived."""
    blocks = view.items("block_types") or ["recurrent", "recurrent", "attention"]
    count, heads = layer_count(view), view.need(*HEADS)
    kinds = ["linear" if blocks[i % len(blocks)] == "recurrent" else "sliding" for i in range(count)]
    return {
        "layer_types": kinds,
        "head_dim": view.need(*HIDDEN) // heads,
        "num_key_value_heads": view.integer(*KV_HEADS) or heads,
        "@window": view.integer("attention_window_size"),
    }


register("jamba", Rule("decoder", _jamba, per_kind(full={"@facts": _NO_ROPE}), linear="mamba1"))
register("mamba falcon_mamba", Rule("decoder", _LINEAR, linear="mamba1"))
register("mamba2", Rule("decoder", _LINEAR, linear="mamba2"))
register("bamba", Rule("decoder", listed("attn_layer_indices"), linear="mamba2"))
register("granitemoehybrid", Rule("decoder", _LINEAR, linear="mamba2"))
register("nemotron_h", Rule("decoder", None, _nemotron_h, linear="mamba2"))
register("falcon_h1", Rule("decoder", lambda view, count: ["hybrid"] * count, linear="mamba2"))
register("zamba", Rule("decoder", _zamba_layout, _zamba, linear="mamba1"))
register("zamba2", Rule("decoder", None, _zamba, linear="mamba2"))
register(
    "minimax minimax_text_01 minimax_m1 MiniMaxText01 MiniMaxM1",
    Rule("decoder", every(2, first=True, others="linear"), _minimax, linear="lightning", windows=True),
)
register("minimax_m3_vl_text", Rule("decoder", None, _minimax_m3))
register("lfm2 lfm2_moe", Rule("decoder", listed("full_attn_idxs", others="conv", missing="full")))
register("lfm3", Rule("decoder", _lfm3, windows=True))
register("recurrent_gemma", Rule("decoder", None, _recurrent_gemma, linear="rg_lru", windows=True))
register("rwkv rwkv5 rwkv6 rwkv7", Rule("decoder", _LINEAR, linear="rwkv"))
register("xlstm", Rule("decoder", _LINEAR, linear="xlstm"))
register("zaya", Rule("decoder", lambda view, count: ["hybrid"] * count, linear="short_conv", windows=True))


def _inkling(view: View) -> Mapping[str, Any]:
    """Attention with short convolutions before it and learned relative positions; sliding layers have own heads."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    own = {name: view.get(f"swa_{name}") for name in names if view.get(f"swa_{name}") is not None}
    local = view.items("local_layer_ids")
    count = layer_count(view)
    full = [i not in local if local is not None else (i + 1) % 6 == 0 for i in range(count)]
    kinds = view.items("layer_types") or ["hybrid" if item else "hybrid_sliding" for item in full]
    scale = {"@scale": 1.0 / view.need("head_dim")} if view.kind == "inkling_text" else {}
    return {"layer_types": kinds, "@layer": lambda index, kind: own if kind == "hybrid_sliding" else {}, **scale}


register(
    "inkling_text inkling2_text inkling2_loop_text",
    Rule("decoder", None, _inkling, linear="short_conv", windows=True, unsupported=("relative_position_bias",)),
)

# Attention that API 1 names and the planner refuses.
register("bloom", Rule("decoder", unsupported=("alibi",)))


def _baichuan(view: View) -> Mapping[str, Any]:
    """The 13B models use ALiBi and state no max_position_embeddings; the 7B models use rotary embeddings."""
    return {} if view.states("max_position_embeddings") else {"@unsupported": ("alibi",)}


def _jais(view: View) -> Mapping[str, Any]:
    """Width-parametrised models divide scores by the head width, not by its root."""
    width = view.need(*HIDDEN) // view.need(*HEADS)
    named = ("alibi",) if (view.text("position_embedding_type") or "alibi") == "alibi" else ()
    return {"@scale": 1.0 / width if view.flag("mup_scale_qk_dot_by_d") else width**-0.5, "@unsupported": named}


register("baichuan", Rule("decoder", None, _baichuan))
register("jais", Rule("decoder", None, _jais))
register("diffllama", Rule("decoder", unsupported=("differential_attention",)))
register("doge", Rule("decoder", windows=True, unsupported=("dynamic_mask",)))
register("hrm_text", Rule("decoder"))


def _dory(view: View) -> Mapping[str, Any]:
    """Older files list the feed-forward blocks as layers of their own."""
    kinds = view.items("layer_types") or []
    return {"layer_types": kinds[::2], "num_hidden_layers": len(kinds[::2])} if "mlp" in kinds else {}


register("dory", Rule("decoder", every(4), _dory, windows=True, unsupported=("looped_layers",)))
register("git deepseek_ocr2_encoder", Rule("decoder", unsupported=("prefix_lm",)))
register("paligemma colpali pi0", Rule("composite", unsupported=("prefix_lm",)))
register(
    "cpmant", Rule("decoder", None, rename(head_dim="dim_head"), unsupported=("relative_position_bias", "prefix_lm"))
)
register("phi3small", Rule("decoder", unsupported=("block_sparse_attention",)))
register("unlimited_ocr_text", Rule("decoder", lambda view, count: ["reference_sliding_attention"] * count))
