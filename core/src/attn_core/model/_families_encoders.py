"""Encoders, encoder-decoders, vision and audio towers, and the families that are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.model._layers import layer_count
from attn_core.model._rules import Rule, at, every, fixed, register, rename
from attn_core.model._view import HEADS, View

_BIAS = ("relative_position_bias",)

# Bidirectional text encoders (causal decoders when is_decoder is set).
register(
    "albert align_text_model altclip_text_model bert bert-generation big_bird bridgetower_text_model camembert "
    "chinese_clip_text_model clap_text_model clvp_encoder data2vec-text distilbert dpr electra ernie esm esmc "
    "eurobert flaubert flava_text_model flava_multimodal_model gte jina_embeddings_v3 layoutlm markuplm megatron-bert "
    "nomic_bert rembert roberta roberta-prelayernorm roc_bert roformer siglip_text_model siglip2_text_model splinter "
    "nemotron3_5_transcribe_word_timestamp squeezebert tapas tipsv2_text_model vilt visual_bert xlm xlm-roberta "
    "xlm-roberta-xl xmod",
    Rule("encoder"),
)
register("mpnet layoutlmv2 layoutlmv3 layoutxlm deberta deberta-v2 bros lilt",
         Rule("encoder", unsupported=_BIAS))  # fmt: skip
register("blip_text_model blip_2_qformer instructblip_qformer instructblipvideo_qformer", Rule("encoder"))
register("mobilebert", Rule("encoder", None, rename(hidden_size="true_hidden_size")))


def _modernbert(view: View) -> Mapping[str, Any]:
    """``local_attention`` is the whole width: half of it on either side."""
    side = (view.integer("local_attention") or 128) // 2
    return {"@window": side + 1, "@window_right": side}


def _ultrabert(view: View) -> Mapping[str, Any]:
    windows = view.items("attention_windows")
    if not windows:
        return {}
    kinds = ["sliding" if window else "full" for window in windows]
    return {"layer_types": kinds, "sliding_window": next((window for window in windows if window), None)}


def _neomme(view: View) -> Mapping[str, Any]:
    """Sliding layers alternate between ``sliding_window`` and a window of 1024 tokens on either side."""
    count = layer_count(view)
    kinds = view.items("layer_types") or [
        "full" if (i + 1) % 6 == 0 or i == count - 1 else "sliding" for i in range(count)
    ]
    slides = [i for i, kind in enumerate(kinds) if str(kind).startswith("sliding")]
    wide = set(slides[1::2])
    return {"layer_types": kinds, "@layer": lambda index, kind: {"sliding_window": 1024} if index in wide else {}}


register("modernbert", Rule("encoder", every(3, "global_attn_every_n_layers", first=True), _modernbert, windows=True))
register("ultrabert", Rule("encoder", every(3), _ultrabert, windows=True))
register("neomme", Rule("encoder", None, _neomme, windows=True))
register("openai_privacy_filter", Rule("encoder", at(lambda i, n: False), fixed(_sinks=True), windows=True))
register(
    "muse_glimmer_assistant",
    Rule("decoder", at(lambda i, n: False), windows=True, unsupported=("block_diffusion_mask",)),
)

# Encoder-decoders with one flat configuration.
register(
    "bart marian mbart m2m_100 mvp pegasus plbart blenderbot blenderbot-small fsmt nllb-moe speech_to_text whisper "
    "moonshine pp_formulanet_text",
    Rule("encoder_decoder"),
)
register(
    "t5 mt5 umt5 switch_transformers pop2piano longt5 udop",
    Rule("encoder_decoder", None, fixed(_scale=1.0), unsupported=_BIAS),
)
register("speecht5", Rule("encoder_decoder", unsupported=_BIAS))
register("bigbird_pegasus", Rule("encoder_decoder"))
register("led", Rule("encoder_decoder", unsupported=("local_and_global_windows",)))
register("pegasus_x", Rule("encoder_decoder", unsupported=("block_local_attention",)))
register("prophetnet", Rule("encoder_decoder", unsupported=("ngram_streams", *_BIAS)))
register("pix2struct_text_model", Rule("decoder", None, fixed(_scale=1.0, add_cross_attention=True), unsupported=_BIAS))

# An encoder and a decoder with a configuration each.


def _dia(view: View) -> Mapping[str, Any]:
    """Cross attention has head counts of its own."""
    spelled = {"num_attention_heads": "cross_num_attention_heads", "num_key_value_heads": "cross_num_key_value_heads",
               "head_dim": "cross_head_dim"}  # fmt: skip
    cross = {key: view.get(name) for key, name in spelled.items() if view.get(name) is not None}
    return {"@scale": 1.0, "@layer": lambda index, kind: cross if kind == "cross" else {}}


register("dia_decoder", Rule("decoder", None, _dia))
register("dia_encoder", Rule("encoder", None, fixed(_scale=1.0)))
register(
    "trocr",
    Rule("decoder", None, rename(num_hidden_layers="decoder_layers", num_attention_heads="decoder_attention_heads")),
)
register(
    "encoder-decoder vision-encoder-decoder speech-encoder-decoder t5gemma t5gemma2 dia musicgen musicgen_melody "
    "canary cohere_asr moonshine_streaming",
    Rule("pair"),
)

# Vision towers: bidirectional over the patches of an image.
register(
    "aimv2_vision_model altclip_vision_model audio-spectrogram-transformer blip_2_vision_model blip_vision_model "
    "chinese_clip_vision_model clip_vision_model clipseg_vision_model cohere_compass_vision cosmos3_edge_vision deit "
    "dinov2 dinov2_with_registers dinov3_vit dots3_note_vision_encoder dpt eomt eomt_dinov3 ernie4_5_vl_moe_vision "
    "exaone4_5_vision flava_image_model git_vision_model glm4v_moe_vision glm4v_vision glm5_next_vision "
    "glm_image_vision glm_ocr_vision granite_docling_vision groupvit_vision_model hunyuan_vl_vision hy_v4_vl_vision "
    "idefics2_vision idefics3_vision idefics_vision ijepa inkling2_vision instructblip_vision_model "
    "instructblipvideo_vision_model internvl_vision janus_vision_model kosmos_2_vision_model "
    "kosmos_2_5_vision_model lfm3_vl_vision llama4_vision_model metaclip_2_vision_model mgp-str minicpm_ocr_vision "
    "minicpmv4_6_vision minicpmv4_7_vision minimax_m3_vl_vision mlcd mlcd_vision_model molmo2_vision "
    "muse_glimmer_vision muse_spark_vision ovis2_vision owlv2_vision_model owlvit_vision_model paddleocr_vl_vision "
    "phi4_multimodal_vision pixio pixtral qianfan_ocr_vision qwen2_5_omni_vision_encoder qwen2_5_vl_vision "
    "qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision "
    "qwen4_exp_vision radio siglip2_vision_model siglip_vision_model smolvlm_vision step3p5_vision timesformer "
    "tipsv2_vision_model unlimited_ocr_vision_encoder video_llama_3_vision videomae videomt vit vit_mae vit_msn "
    "vitpose_backbone vivit vjepa2 xclip_vision_model yolos intern_vit_6b moonvit kimi_vl_vision",
    Rule("vision"),
)
#: Planned like any tower, but not part of the published description of the model.
register("gemma4_vision", Rule("vision", None, fixed(_scale=1.0), listed=False))
_VT = {key: f"vt_{key}" for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
register("kimi_k25_vision", Rule("vision", None, rename(**_VT)))
register("qwen2_vl_vision", Rule("vision", None, rename(hidden_size="embed_dim")))  # hidden_size is the output width


def _relative(view: View) -> Mapping[str, Any]:
    """Decomposed relative positions added to the scores, unless switched off."""
    keys = (
        "use_rel_pos",
        "use_relative_position_bias",
        "use_shared_relative_position_bias",
        "use_relative_position_embeddings",
    )
    on = any(view.flag(key) for key in keys)
    windowed = view.items("global_attn_indexes") or view.items("window_block_indices", "window_block_indexes")
    named = (*(_BIAS if on else ()), *(("window_partition",) if windowed else ()))
    return {"@unsupported": named, "window_size": None}


register(
    "beit data2vec-vision deepseek_ocr2_sam_vision_model got_ocr2_vision lw_detr_vit pp_chart2table_vision "
    "pp_formulanet_vision rf_detr_dinov2 sam3_vit_model sam_hq_vision_model sam_vision_model seggpt slanext_vision "
    "unlimited_ocr_sam_vision_model vitdet",
    Rule("vision", None, _relative),
)


def _mllama_vision(view: View) -> Mapping[str, Any]:
    local, gated = view.need("num_hidden_layers"), view.integer("num_global_layers") or 0
    return {"num_hidden_layers": local + gated, "num_attention_heads": view.integer("attention_heads", *HEADS)}


register("mllama_vision_model", Rule("vision", None, _mllama_vision))
register("pix2struct_vision_model", Rule("vision", None, fixed(_scale=1.0)))
register("videoprism_text_model", Rule("decoder"))

# Audio encoders.


def _audio_keys(view: View) -> Mapping[str, Any]:
    """Whisper's spelling: ``encoder_layers``, ``encoder_attention_heads``."""
    return rename(num_hidden_layers="encoder_layers", num_attention_heads="encoder_attention_heads")(view)


register("qwen2_audio_encoder", Rule("audio", None, _audio_keys))
register("qwen2_5_omni_audio_encoder qwen3_omni_moe_audio_encoder qwen3_asr_encoder",
         Rule("audio", None, _audio_keys, unsupported=("audio_segments",)))  # fmt: skip
register(
    "audioflamingo3_encoder voxtral_encoder glmasr_encoder fun_asr_nano_encoder hubert wav2vec2 unispeech "
    "unispeech-sat sew data2vec-audio moss_transcribe_diarize_audio omniasr_audio lasr_encoder "
    "dots3_note_audio_encoder",
    Rule("audio"),
)
register("granite_speech_encoder granite_speech_plus_encoder",
         Rule("audio", None, rename(hidden_size="hidden_dim", head_dim="dim_head"), unsupported=_BIAS))  # fmt: skip
register("parakeet_encoder nemotron_asr_streaming_encoder nemotron3_5_transcribe_asr_audio wavlm sew-d wav2vec2-bert "
         "wav2vec2-conformer granite_speech5_encoder gemma4_audio",
         Rule("audio", unsupported=_BIAS))  # fmt: skip
register("nemotron3_diarization_audio", Rule("audio"))


def _moonshine(view: View) -> Mapping[str, Any]:
    """``sliding_windows`` has (left incl. the own position, right incl. it) for each layer."""
    windows = view.items("sliding_windows") or []
    sides = [{"@window": left, "@window_right": max(right - 1, 0)} for left, right in windows]
    kinds = ["sliding"] * len(sides)
    return {"layer_types": kinds, "@layer": lambda index, kind: sides[index]} if sides else {}


register("moonshine_streaming_encoder", Rule("audio", None, _moonshine, windows=True))
register("parakeet_ctc lasr_ctc omniasr_ctc granite_speech5_ctc", Rule("towers"))
register("voxtral_realtime_encoder mimi mimi_encoder mimi_decoder", Rule("decoder", windows=True))
