"""Configurations of families that nobody described: read when they are plain beyond doubt, refused otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from attn_core.model._defaults import in_transformers
from attn_core.model._rules import Rule
from attn_core.model._view import HEADS, LAYERS, View

#: Keys that announce something other than plain multi-head attention.
_SUSPICIOUS = re.compile(
    r"linear_|mamba|ssm|_lora_rank|latent|^index_|_index_|indexer|sparse|alibi|relative|position_bias|rel_pos|chunk"
    r"|conv|rwkv|retention|delta|hyena|sink|^kda|^gla|cross_attn|cross_attention|bidirectional|prefix_lm|diffusion"
    r"|compress|recurr|hybrid|share_factor|kv_shared|shared_kv|cla_|block_config|efficient_attention|attn_type"
    r"|attention_type|no_rope|nope_layer|differential|memory_|swa_|value_scale|qk_nope|lru_|lightning|parallel_ssm"
)
#: Keys that match and say nothing about attention.
_HARMLESS = re.compile(
    r"^(chunk_size_feed_forward|decoder_sparse_step|sparse_.*router.*|moe_.*|num_sparse_.*|router_.*|.*_token_index"
    r"|add_cross_attention|image_token_index|attention_sink_size|.*dropout.*|use_mamba_kernels)$"
)
#: Keys of towers, detectors and other models that are not language models.
_NOT_TEXT = (
    "patch_size",
    "image_size",
    "num_channels",
    "num_mel_bins",
    "type_vocab_size",
    "num_labels_in_head",
    "num_queries",
)
_LANGUAGE_CLASS = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")


def judge(view: View, architectures: Sequence[str]) -> tuple[Rule, str]:
    """The rule for an unknown family and the note to give. Raises :class:`ModelError` when anything is suspicious."""
    name = architectures[0] if architectures else view.kind or "without a model_type"
    if in_transformers(view.kind):
        raise view.error("unknown architecture: transformers has it, but its attention is not described here")
    if not (view.states(*LAYERS) and view.states(*HEADS)):
        raise view.error(f"unknown architecture {name}", "the configuration states neither layers nor attention heads")
    odd = [key for key, value in view.data.items() if _states_something(value) and suspicious(key)]
    odd += [key for key in _NOT_TEXT if view.states(key)]
    if odd:
        raise view.error(
            f"unknown architecture {name}",
            f"not read as plain attention because of the keys {', '.join(sorted(odd))}",
        )
    if architectures and not any(_LANGUAGE_CLASS.search(item) for item in architectures):
        raise view.error(f"unknown architecture {name}", "nothing says whether its attention is causal")
    note = f"architecture {name} is not known; read as plain multi-head attention from its config keys"
    return Rule("decoder", windows=True), note


def suspicious(key: str) -> bool:
    """Whether a key announces something other than plain multi-head attention."""
    return bool(_SUSPICIOUS.search(key)) and not _HARMLESS.match(key)


def plain_tower(view: View) -> bool:
    """Whether an unknown vision tower states its sizes and nothing odd."""
    odd = [key for key, value in view.data.items() if _states_something(value) and suspicious(key)]
    return view.states(*LAYERS) and view.states(*HEADS) and not odd and not view.states("window_size", "depths")


def _states_something(value: Any) -> bool:
    return value not in (None, False, 0, "", [], {})
