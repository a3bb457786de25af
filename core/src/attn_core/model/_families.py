"""Language models whose layers hold keys and values: which families there are, and what their keys do not say.

Where an entry follows code rather than a key, it was compared with the family's modeling file in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attn_core.model._layers import layer_count
from attn_core.model._rules import Rule, at, both, every, fixed, per_kind, register, rename
from attn_core.model._view import HEADS, HIDDEN, LAYERS, View

SINKS = fixed(_sinks=True)

# Multi-head attention as the keys say, causal, all layers full.
register(
    "aimv2_text_model llama apertus apertus1p5_text arcee aria_text bitnet biogpt clip_text_model clipseg_text_model "
    "cohere csm csm_depth_decoder_model ctrl cosmos3_edge_text deepseek_ocr2_text emu3_text_model ernie4_5 "
    "ernie4_5_moe ernie4_5_vl_moe_text exaone flex_olmo gemma glm glm4 glm4_moe glm4v_text glm4v_moe_text "
    "glm_image_text glm_ocr_text gpt_neox gpt_neox_japanese gptj codegen granite granitemoe granitemoeshared "
    "granite4_vision_text granite_docling_text groupvit_text_model helium higgs_audio_v2 hunyuan_v1_dense "
    "hunyuan_v1_moe hunyuan_vl_text hy_v3 hyperclovax internlm3 iquestcoder jais2 kosmos_2_text_model "
    "kosmos_2_5_text_model metaclip_2_text_model minimax_m2 molmo2_text nanochat nemotron olmo olmo2 olmoe openai-gpt "
    "opt owlv2_text_model owlvit_text_model paddleocr_vl_text persimmon phi qwen3_vl_text qwen3_vl_moe_text "
    "sarvam_moe seed_oss solar_open stablelm xclip_text_model xglm chameleon clvp_decoder gradium_phonon_tts "
    "pocket_tts musicgen_decoder musicgen_melody_decoder canary_decoder"
    # families whose code lives outside transformers and that spell their keys the common way
    "internlm internlm2 Yi aquila orion xverse deepseek minicpm bailing_moe ernie4_5_moe_vl mimo telechat arctic",
    Rule("decoder"),
)

# The same with a window on every layer, on the layers past max_window_layers, or on every n-th.
register(
    "mistral ministral ministral3 mixtral starcoder2 phi3 phimoe phi4_multimodal qwen2 qwen2_vl_text qwen2_5_vl_text "
    "qwen2_5_omni_text qwen2_5_omni_talker qwen3 qwen3_moe qwen3_omni_moe_text qwen3_omni_moe_talker_text "
    "qwen3_omni_moe_talker_code_predictor dots1 voxtral_realtime_text moshi moshi_depth kyutai_speech_to_text mellum "
    "paddleocr_vl",
    Rule("decoder", windows=True),
)


def _qwen2_moe(view: View, count: int) -> list[str]:
    """Every second layer below ``max_window_layers``, as Qwen2MoeConfig has it."""
    last = view.integer("max_window_layers") or 0
    used = bool(view.flag("use_sliding_window"))
    return ["sliding" if used and (i + 1) % 2 and i < last else "full" for i in range(count)]


register("qwen2_moe", Rule("decoder", _qwen2_moe, windows=True))
register("olmo3", Rule("decoder", every(4), windows=True))
register("afmoe", Rule("decoder", every(4, "global_attn_every_n_layers"), windows=True))
register("beam", Rule("decoder", at(lambda i, n: (i + 1) % 6 == 0 or i == n - 1), windows=True))
register("cwm", Rule("decoder", every(4, first=True), windows=True))
register("kolibri1", Rule("decoder", every(5), windows=True))
register("muse_glimmer_text muse_spark_text", Rule("decoder", at(lambda i, n: (n - 1 - i) % 4 == 0), windows=True))
register("flint", Rule("decoder", at(lambda i, n: i < 2 or i % 4 == 1 or i == n - 1), SINKS, windows=True))
register("granite_swa granitemoe_swa", Rule("decoder", every(4, first=True), SINKS, windows=True))
register("modernbert-decoder", Rule("decoder", every(3, "global_attn_every_n_layers", first=True),
         lambda view: {"@window": (view.integer("local_attention") or 128) // 2}, windows=True))  # fmt: skip


def _cohere2(view: View) -> Mapping[str, Any]:
    """Cohere2Config overwrites any stated head_dim."""
    return {"head_dim": view.need(*HIDDEN) // view.need(*HEADS)}


def _cohere2_moe(view: View, count: int) -> list[str]:
    """Dense layers first with a period of their own, then the others."""
    dense = view.integer("first_k_dense_replace") or 0
    early = every(1, "prefix_dense_sliding_window_pattern")(view, dense)
    return early + every(4, "sliding_window_pattern")(view, count - dense)


def _exaone4(view: View, count: int) -> list[str]:
    """``sliding_window_pattern`` is a period or letters such as ``LLLG``; no window: all layers are full."""
    pattern = view.get("sliding_window_pattern")
    if not view.get("sliding_window"):
        return ["full"] * count
    if isinstance(pattern, str):
        kinds = [{"L": "sliding", "G": "full"}.get(letter, letter) for letter in pattern]
        return [kinds[i % len(kinds)] if i < count - 1 else "full" for i in range(count)]
    return every(4, "sliding_window_pattern")(view, count)


def _smollm3(view: View, count: int) -> list[str]:
    """Layers without rotary embedding slide when ``use_sliding_window`` is set."""
    period = view.integer("no_rope_layer_interval") or 4
    rope = view.items("no_rope_layers") or [int((i + 1) % period != 0) for i in range(count)]
    used = bool(view.flag("use_sliding_window")) and view.integer("sliding_window") is not None
    return ["sliding" if used and not rope[i] else "full" for i in range(count)]


register("cohere2", Rule("decoder", every(4, "sliding_window_pattern"), _cohere2, windows=True))
register("cohere_compass_text", Rule("decoder", None, _cohere2, windows=True))
register("cohere2_moe", Rule("decoder", _cohere2_moe, windows=True))
register("exaone4 exaone_moe", Rule("decoder", _exaone4, windows=True))
register("smollm3", Rule("decoder", _smollm3, windows=True))
register("gpt_oss", Rule("decoder", every(2), SINKS, windows=True))  # no key announces the sinks


def _llama4(view: View, count: int) -> list[str]:
    """Chunked where rotary embedding is used, full where it is not (1 in ``no_rope_layers`` means *with* rotary)."""
    period = view.integer("no_rope_layer_interval") or 4
    rope = view.items("no_rope_layers") or [int((i + 1) % period != 0) for i in range(count)]
    if len(rope) != count:
        raise view.error(f"no_rope_layers has {len(rope)} entries for {count} layers")
    chunk = view.integer("attention_chunk_size")
    return ["chunked" if chunk and rope[i] else "full" for i in range(count)]


register("llama4_text", Rule("decoder", _llama4, per_kind(full={"@facts": {"note": "NoPE layers"}})))

# Gemma: scale from query_pre_attn_scalar or 1 (q and k are normalised), alternating windows, wide global heads.


def _spans(*kinds: str) -> Callable[[View], Mapping[str, Any]]:
    """Image tokens see one another inside their span, on layers of these kinds, when the model has a vision tower."""

    def settle(view: View) -> Mapping[str, Any]:
        wanted = view.get("@multimodal") and view.get("use_bidirectional_attention") not in ("all", True)
        wants = {"@wants": ("mm_spans",)} if wanted else {}
        return {"@layer": lambda index, kind: wants if kind in kinds else {}}

    return settle


def _both_ways(view: View) -> Mapping[str, Any]:
    """``use_bidirectional_attention``: half the window on either side, ``|q - kv| < window // 2 + 1``."""
    if view.get("use_bidirectional_attention") not in (True, "all"):
        return {}
    side = view.need("sliding_window") // 2
    return {"@causal": False, "@window": side + 1, "@window_right": side}


def _halved(view: View) -> Mapping[str, Any]:
    """T5Gemma 2's encoder: half the window on the left (own position included), half on the right."""
    window = view.need("sliding_window")
    return {"@window": (window + 1) // 2, "@window_right": window // 2}


def _gemma4(view: View) -> Mapping[str, Any]:
    """Full layers have their own head width and, with ``attention_k_eq_v``, their own KV heads; scale 1."""
    shared = bool(view.flag("attention_k_eq_v"))
    stated = view.integer("num_global_key_value_heads")
    wide: dict[str, Any] = {"head_dim": view.integer("global_head_dim") or 512}
    if shared and stated:
        wide["num_key_value_heads"] = stated
    if shared:
        wide["@facts"] = {"k_eq_v": True}
    spans = view.get("@multimodal") and view.get("use_bidirectional_attention") == "vision"
    slide = {"@wants": ("mm_spans",)} if spans else {}  # inside the image span, and never past the window
    return {"@scale": 1.0, "@layer": lambda index, kind: wide if kind == "full" else slide, **_last_is_full(view)}


def _last_is_full(view: View) -> Mapping[str, Any]:
    kinds = view.items("layer_types")
    return {"layer_types": [*kinds[:-1], "full_attention"]} if kinds else {}


def _embedding_gemma2(view: View) -> Mapping[str, Any]:
    wide = {
        "head_dim": view.integer("global_head_dim") or 512,
        "num_key_value_heads": view.integer("num_global_key_value_heads") or 1,
    }
    return {"@scale": 1.0, "@causal": False, "@layer": lambda index, kind: wide if kind == "full" else {}}


_SIX = every(6, "sliding_window_pattern")
_GEMMA4 = at(lambda i, n: (i + 1) % 6 == 0 or i == n - 1)
register("gemma2 vaultgemma t5_gemma_module", Rule("decoder", every(2), windows=True))
register(
    "gemma3_text gemma3_moe_text", Rule("decoder", _SIX, both(_both_ways, _spans("full", "sliding")), windows=True)
)
register("gemma3n_text", Rule("decoder", every(5), fixed(_scale=1.0), windows=True))
register("gemma4_text gemma4_unified_text", Rule("decoder", _GEMMA4, both(_both_ways, _gemma4), windows=True))
register("embedding_gemma2_text", Rule("decoder", _SIX, _embedding_gemma2, windows=True))
register(
    "diffusion_gemma_text",
    Rule("decoder", _GEMMA4, both(_both_ways, _gemma4), windows=True, unsupported=("block_diffusion_mask",)),
)
register("t5gemma2_text", Rule("encoder", _SIX, _halved, windows=True))
register("t5gemma2_decoder", Rule("decoder", _SIX, windows=True, unsupported=("merged_self_and_cross_attention",)))


def _mimo(view: View) -> Mapping[str, Any]:
    """MiMo-V2: 0 is full and 1 is sliding in ``hybrid_layer_pattern``; ``sliding_window_size`` counts previous tokens.

    Sliding layers have their own head counts (twice the KV heads when not stated) and sinks unless switched off.
    ``attention_chunk_size`` is not chunked attention here.
    """
    previous = view.integer("sliding_window_size")
    pattern = view.items("hybrid_layer_pattern")
    sliding = {
        "num_attention_heads": view.integer("swa_num_attention_heads", *HEADS),
        "num_key_value_heads": view.integer("swa_num_key_value_heads") or 2 * view.need("num_key_value_heads"),
        "head_dim": view.integer("swa_head_dim", "head_dim"),
        "v_head_dim": view.integer("swa_v_head_dim", "v_head_dim"),
        "@window": previous + 1 if previous else view.integer("sliding_window"),
        "@sinks": view.flag("add_swa_attention_sink_bias") is not False,
    }
    full = {"@sinks": view.flag("add_full_attention_sink_bias") is True}
    listed = {"layer_types": ["sliding" if entry else "full" for entry in pattern]} if pattern else {}
    return {"@layer": lambda index, kind: sliding if kind == "sliding" else full, **listed}


def _step3p5(view: View) -> Mapping[str, Any]:
    other = view.table("attention_other_setting").get("num_attention_heads")
    heads = view.integer("num_sliding_attention_heads") or other
    return {"@layer": lambda index, kind: {"num_attention_heads": heads} if heads and kind == "sliding" else {}}


def _laguna(view: View) -> Mapping[str, Any]:
    heads = view.items("num_attention_heads_per_layer")
    return {"@layer": lambda index, kind: {"num_attention_heads": heads[index]}} if heads else {}


register("mimo_v2_flash", Rule("decoder", at(lambda i, n: i == 0 or (i + 1) % 6 == 0), _mimo, windows=True))
register("step3p5", Rule("decoder", at(lambda i, n: True), _step3p5, windows=True))
register("laguna", Rule("decoder", at(lambda i, n: True), _laguna, windows=True))

# Older families with odd spellings.


def _gpt2(view: View) -> Mapping[str, Any]:
    """``scale_attn_weights`` false: scale 1; ``scale_attn_by_inverse_layer_idx``: divided by the layer's number."""
    base = (view.need(*HIDDEN) // view.need(*HEADS)) ** -0.5 if view.flag("scale_attn_weights") is not False else 1.0
    one_kv = {"num_key_value_heads": 1} if view.flag("multi_query") else {}
    if view.flag("scale_attn_by_inverse_layer_idx"):
        return {"@layer": lambda index, kind: {"@scale": base / (index + 1)}, **one_kv}
    return {"@scale": base, **one_kv}


def _gpt_neo(view: View) -> Mapping[str, Any]:
    """Unscaled scores; ``attention_types`` is ``[[["global", "local"], 12]]``; the window is ``window_size``."""
    kinds = view.items("attention_layers") or []
    if not kinds:
        for names, times in view.items("attention_types") or [[["global", "local"], layer_count(view) // 2]]:
            kinds += list(names) * times
    return {"@scale": 1.0, "layer_types": kinds, "@window": view.integer("window_size") or 256}


def _falcon(view: View) -> Mapping[str, Any]:
    """KV heads: ``num_kv_heads`` in the new decoder architecture, else 1 with ``multi_query``, else all."""
    if view.flag("new_decoder_architecture"):
        return {"num_key_value_heads": view.integer("num_kv_heads", *HEADS)}
    return {"num_key_value_heads": 1 if view.flag("multi_query") is not False else view.need(*HEADS)}


def _mpt(view: View) -> Mapping[str, Any]:
    """Nested ``attn_config``: KV heads, scale, ALiBi (on unless switched off)."""
    nested = view.table("attn_config")
    kv = nested.get("kv_n_heads") or (1 if nested.get("attn_type") == "multiquery_attention" else view.need(*HEADS))
    named = ("alibi",) if nested.get("alibi", view.kind == "mpt") else ()
    scale = {"@scale": nested["softmax_scale"]} if nested.get("softmax_scale") else {}
    return {"num_key_value_heads": kv, "@unsupported": named, **scale}


def _chatglm(view: View) -> Mapping[str, Any]:
    kv = view.integer("multi_query_group_num") if view.flag("multi_query_attention") else None
    return {"num_key_value_heads": kv or view.need(*HEADS)}


def _jetmoe(view: View) -> Mapping[str, Any]:
    """Each token runs ``num_experts_per_tok`` sets of query heads against the KV heads."""
    kv = view.need("num_key_value_heads")
    return {"num_attention_heads": kv * (view.integer("num_experts_per_tok") or 2)}


def _mllama(view: View) -> Mapping[str, Any]:
    """Cross-attention layers take the place of self-attention; their keys are the image tiles."""
    chosen = view.items("cross_attention_layers") or [3, 8, 13, 18, 23, 28, 33, 38]
    kinds = ["cross" if i in chosen else "full" for i in range(view.need(*LAYERS))]
    vision = view.get("@vision")
    tokens = None
    if isinstance(vision, View):
        side = (vision.integer("image_size") or 0) // (vision.integer("patch_size") or 1)
        tokens = (side * side + 1) * (vision.integer("max_num_tiles") or 1) if side else None
    return {"layer_types": kinds, "@kv_len": tokens}


def _openelm(view: View) -> Mapping[str, Any]:
    """Head counts are lists with one entry a layer."""
    heads, kv = view.items("num_query_heads"), view.items("num_kv_heads")
    if not heads or not kv:
        raise view.error("num_query_heads and num_kv_heads are needed, one entry a layer")
    return {
        "num_hidden_layers": view.integer("num_transformer_layers", *LAYERS),
        "@layer": lambda index, kind: {"num_attention_heads": heads[index], "num_key_value_heads": kv[index]},
    }


def _deci(view: View) -> Mapping[str, Any]:
    """Nemotron-NAS: ``block_configs`` gives every layer its group size, or no attention at all."""
    blocks = [dict(block).get("attention") or {} for block in view.items("block_configs") or []]
    if not blocks:
        raise view.error("block_configs is missing")
    heads = view.need(*HEADS)
    kinds = ["none" if block.get("no_op") or block.get("replace_with_linear") else "full" for block in blocks]
    return {
        "layer_types": kinds,
        "@layer": lambda index, kind: {"num_key_value_heads": heads // (blocks[index].get("n_heads_in_group") or 1)},
    }


def _hunyuan(view: View) -> Mapping[str, Any]:
    """Cross-layer attention: layers of one group of ``cla_share_factor`` read the keys of its first."""
    factor = (view.integer("cla_share_factor") or 1) if view.flag("use_cla") else 1
    return {"@kv_from": lambda kinds: {i: i - i % factor for i in range(len(kinds)) if i % factor}}


register("gpt2 gpt-sw3 imagegpt decision_transformer", Rule("decoder", None, _gpt2))
register("gpt_bigcode", Rule("decoder", None, _gpt2))
register("gpt_neo", Rule("decoder", None, _gpt_neo, windows=True))
register("falcon RefinedWeb RefinedWebModel", Rule("decoder", None, _falcon))
register("mpt dbrx", Rule("decoder", None, _mpt))
register("chatglm", Rule("decoder", None, _chatglm))
register("jetmoe", Rule("decoder", None, _jetmoe))
register("mllama_text_model", Rule("decoder", None, _mllama))
register("openelm", Rule("decoder", None, _openelm))
register("nemotron-nas", Rule("decoder", None, _deci))
register("hunyuan", Rule("decoder", None, _hunyuan))
register("qwen", Rule("decoder", None, rename(num_key_value_heads="num_attention_heads")))
register(
    "grok-1",
    Rule("decoder", None, lambda view: {"attn_logit_softcapping": view.number("attn_logit_softcapping") or 30.0}),
)
