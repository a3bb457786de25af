"""Families that are refused by name: no attention to plan, or parts that a reading of their keys would get wrong."""

from __future__ import annotations

from attn_core.model._rules import Rule, register

_REASON = "not an attention model: it is made of convolutions, codebooks or other layers without attention"

register(
    "align_vision_model apertus1p5_vision_tokenizer bit chameleon_vqgan convnext convnextv2 dac dinov3_convnext "
    "edgetam_prompt_encoder edgetam_video_prompt_encoder efficientnet emu3_vqgan encodec "
    "fastspeech2_conformer_hifigan flava_image_codebook fnet focalnet gemma3n_vision gemma4_unified_audio "
    "gemma4_unified_vision glm_image_vqmodel hgnet_v2 higgs_audio_v2_tokenizer inkling_audio inkling_vision "
    "mobilenet_v1 mobilenet_v2 patchtsmixer poolformer pp_lcnet pp_lcnet_v3 pp_lcnet_v4 pp_ocrv5_mobile_det "
    "pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det qwen2_5_omni_bigvgan regnet resnet rt_detr_resnet "
    "sam2_prompt_encoder sam2_video_prompt_encoder sam3_tracker_prompt_encoder sam3_tracker_video_prompt_encoder "
    "sam_hq_prompt_encoder sam_prompt_encoder sapiens2_head speecht5_hifigan superpoint textnet timm_backbone "
    "timm_wrapper univnet upernet uvdoc uvdoc_backbone vibevoice_acoustic_tokenizer "
    "vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder vibevoice_diffusion wavtokenizer "
    "wavtokenizer_encoder",
    Rule("outside", reason=_REASON),
)

register(
    "blt clvp conditional_detr d_fine dab-detr deformable_detr deimv2 detr grounding-dino idefics lw_detr mask2former "
    "maskformer mm-grounding-dino omdet-turbo oneformer rf_detr rt_detr rt_detr_v2 sam sam2 sam2_video sam3 "
    "sam3_lite_text sam3_tracker sam3_tracker_video sam3_video sam_hq table-transformer tvp",
    Rule("outside", reason="unknown architecture: a model of many parts whose attention is not described here"),
)
