"""A whole configuration taken apart: the language model, its towers, encoder-decoder pairs, wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attn_core.errors import ModelError
from attn_core.model._defaults import defaults_of, nested_type
from attn_core.model._evidence import judge, plain_tower
from attn_core.model._layers import Layer
from attn_core.model._rules import RULES, Rule, find_type
from attn_core.model._stacks import (
    cross_layer,
    of_layer,
    prepare,
    read_decoder,
    read_encoder,
    read_encoder_decoder,
    read_vision,
)
from attn_core.model._view import HEADS, LAYERS, WINDOW, View

#: Defaults worth a remark when a configuration leaves them out.
_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "sliding_window",
)

#: Where the parts of a composite configuration are kept.
WRAPPERS = ("thinker_config", "vlm_config")
TEXT = ("text_config", "language_config", "llm_config", "lm_config", "language_model_config")
VISION = ("vision_config", "visual_config", "vit_config", "image_config", "vision_tower_config")
AUDIO = ("audio_config", "speech_config", "audio_encoder_config", "speech_encoder_config", "encoder_config")
_ENCODERS = ("encoder", "encoder_config", "text_encoder")
_DECODERS = ("decoder", "decoder_config")


@dataclass
class Parts:
    """What was read: all layers, the view of the language model (or only part), remarks."""

    layers: list[Layer]
    main: View
    rule: Rule
    notes: list[str] = field(default_factory=list)


def root(config: Mapping[str, Any]) -> View:
    """The view of a whole configuration."""
    kind = find_type(str(config.get("model_type") or ""), _architectures(config)) or str(config.get("model_type") or "")
    return View(config, kind, "", defaults_of(kind))


def compose(view: View) -> Parts:
    """All layers of a configuration. Raises :class:`ModelError` for what cannot be described."""
    rule = RULES.get(view.kind)
    wrapped = _part(view, WRAPPERS)
    if wrapped is not None:
        return compose(wrapped.settle({"@inherited": rule.unsupported} if rule is not None else {}))
    if rule is not None and rule.stack == "outside":
        raise view.error(rule.reason)
    if rule is not None and rule.stack == "pair":
        return _pair(view, rule)
    vision, audio = _part(view, VISION), _part(view, AUDIO)
    if rule is not None and rule.stack == "towers":
        return _towers_only(view, vision, audio)
    parts = _language(view, vision)
    for tower, read in ((vision, _vision), (audio, _audio)):
        if tower is not None:
            layers, note = read(tower)
            named = sorted({name for layer in layers for name in layer.unsupported})
            if named:  # the server runs such a tower as it does today; that is no reason to refuse the language model
                layers, note = [], f"{tower.where} ({tower.kind}) is left to the server: {', '.join(named)}"
            parts.layers += layers
            parts.notes += [note] if note else _assumed(tower)
    parts.notes += _unread(view)
    return parts


def _assumed(view: View) -> list[str]:
    """A remark about the sizes that a configuration leaves to the defaults of its class."""
    said = [f"{key} {view.assumed[key]}" for key in _SIZES if key in view.assumed]
    place = f"{view.where}: " if view.where else ""
    return [f"{place}not stated, taken from the defaults of {view.kind}: {', '.join(said)}"] if said else []


def _unread(view: View) -> list[str]:
    """Remarks about nested models that nobody reads here (codecs, query formers, talkers)."""
    known = {key for keys in (WRAPPERS, TEXT, VISION, AUDIO) for key in keys}
    parts = [key for key, data in view.data.items() if isinstance(data, Mapping) and data.get("model_type")]
    return [f"{key} ({view.data[key]['model_type']}) is not described" for key in parts if key not in known]


def _language(view: View, vision: View | None) -> Parts:
    """The language model: a nested configuration, or the keys of `view` itself."""
    text = _part(view, TEXT)
    main = text or view
    if text is None and view.kind not in RULES:  # an older file of a composite family, with the text keys on top
        inner = nested_type(view.kind, "text_config")
        if inner is not None and view.states(*LAYERS, *HEADS):
            main = replace(view, kind=inner, defaults=defaults_of(inner))
    dtype = main.get("torch_dtype", "dtype") or view.get("torch_dtype", "dtype")
    whole = RULES.get(view.kind)
    inherited = whole.unsupported if whole is not None and whole.stack == "composite" else view.get("@inherited") or ()
    shared = {"@dtype": dtype, "@multimodal": vision is not None, "@vision": vision, "@inherited": inherited}
    if "prefix_lm" in inherited:  # bidirectional over the prefix only, whatever use_bidirectional_attention says
        shared["@causal"] = True
    main = main.settle(shared)
    rule = RULES.get(main.kind)
    notes: list[str] = []
    if rule is None:
        rule, note = judge(main, _architectures(main.data) or (() if text else _architectures(view.data)))
        notes.append(note)
    if rule.stack == "outside":
        raise main.error(rule.reason)
    if (
        not rule.windows
        and rule.stack == "decoder"
        and main.states(*WINDOW)
        and "sliding" not in str(main.get("layer_types"))
    ):
        notes += _ignored_window(main, rule)
    layers = _own(main, rule)
    return Parts(layers, main, rule, notes + _dual_chunk(main) + _assumed(main))


def _towers_only(view: View, vision: View | None, audio: View | None) -> Parts:
    """A model that is its tower (a CTC speech recogniser)."""
    parts = Parts([], view, Rule("towers"))
    for tower, read in ((vision, _vision), (audio, _audio)):
        if tower is not None:
            layers, note = read(tower)
            if note:
                raise view.error(note)
            parts.layers += layers
    if not parts.layers:
        raise view.error("the configuration of its encoder is missing")
    return parts


def _ignored_window(view: View, rule: Rule) -> list[str]:
    window = view.get(*WINDOW)
    if rule.layout is not None or view.flag("use_sliding_window") is False or not window:
        return []
    return [f"sliding_window {window} is not read by the code of {view.kind}; its layers are full"]


def _dual_chunk(view: View) -> list[str]:
    """Models with dual chunk attention run as ordinary attention, too: which of the two is the server's decision."""
    if not view.get("dual_chunk_attention_config"):
        return []
    return [
        "dual_chunk_attention_config is not planned for: attention is ordinary unless a backend with dual_chunk is asked "
        "for by name, with these sizes as its options"
    ]


def _own(view: View, rule: Rule) -> list[Layer]:
    if rule.stack == "encoder":
        return read_encoder(view, rule)
    if rule.stack == "audio":
        return read_encoder(view, rule, tower="audio")
    if rule.stack == "vision":
        return read_vision(view, rule)
    if rule.stack == "encoder_decoder":
        return read_encoder_decoder(view, rule)
    if rule.stack in ("pair", "composite", "towers"):
        raise view.error("the configuration of its language model is missing")
    return read_decoder(view, rule)


def _vision(tower: View) -> tuple[list[Layer], str]:
    rule = RULES.get(tower.kind)
    if rule is None and plain_tower(tower):
        return read_vision(
            tower, Rule("vision")
        ), f"{tower.where}: {tower.kind or 'no type'} is read as a plain vision transformer"
    return _tower(tower, rule)


def _audio(tower: View) -> tuple[list[Layer], str]:
    return _tower(tower, RULES.get(tower.kind))


def _tower(tower: View, rule: Rule | None) -> tuple[list[Layer], str]:
    """A tower's layers, or a note that says why it is left to the server; the language model is planned anyway."""
    kind = tower.kind or "no type"
    if rule is None or rule.stack not in ("vision", "audio", "encoder"):
        reason = rule.reason if rule is not None and rule.reason else "its attention is not known here"
        return [], f"{tower.where} ({kind}) is not described: {reason}"
    try:
        if rule.stack == "vision":
            layers = [replace(layer, listed=rule.listed) for layer in read_vision(tower, rule)]
        else:
            layers = read_encoder(tower.settle({"is_decoder": False}), rule, tower="audio")
    except ModelError as error:
        return [], f"{tower.where} ({kind}) is not described: {error.message}"
    return layers, ""


def _pair(view: View, rule: Rule) -> Parts:
    """An encoder and a decoder with a configuration each."""
    view = prepare(view, rule)
    encoder, decoder = _part(view, _ENCODERS), _part(view, _DECODERS) or view
    if encoder is None:
        raise view.error("the configuration of its encoder is missing")
    front = _encoder_side(encoder)
    side = Rule("decoder") if decoder is view else RULES.get(decoder.kind)
    if side is None or side.stack not in ("decoder", "encoder", "encoder_decoder"):
        raise decoder.error(f"unknown architecture {decoder.kind}")
    decoder = decoder.settle(
        {"is_decoder": True, "add_cross_attention": False, "@causal": True, **_passed_on(view, encoder)}
    )
    if side.stack == "encoder_decoder":  # BART as a decoder: its own decoder half
        return Parts(front + [layer for layer in _own(decoder, side) if layer.model == "target"], decoder, side)
    own = read_decoder(decoder, side)
    settled = prepare(decoder, side)
    cross = [cross_layer(of_layer(settled, index, "cross"), index) for index in sorted({layer.index for layer in own})]
    return Parts(own + cross + front, decoder, side, _assumed(decoder) + _assumed(encoder))


def _passed_on(view: View, encoder: View) -> dict[str, Any]:
    """What the decoder of a pair needs to know: limits of the whole, and how long its cross attention can get."""
    values: dict[str, Any] = {}
    if view.get("@unsupported"):
        values["@unsupported"] = view.get("@unsupported")
    length = encoder.integer("max_source_positions", "max_position_embeddings", "n_positions")
    patch, image = encoder.get("patch_size"), encoder.get("image_size")
    if isinstance(patch, int) and isinstance(image, int) and patch > 0:
        length = (image // patch) ** 2 + 1
    return {**values, "@kv_len": length} if length else values


def _encoder_side(encoder: View) -> list[Layer]:
    rule = RULES.get(encoder.kind)
    if rule is not None and rule.stack == "vision":
        return read_vision(encoder, rule)
    text = _part(encoder, TEXT)
    if rule is None and text is not None:
        tower = _part(encoder, VISION)
        return _encoder_side(text) + (_vision(tower)[0] if tower is not None else [])
    if rule is None or rule.stack == "outside":
        raise encoder.error(f"unknown architecture {encoder.kind}")
    layers = (
        read_encoder_decoder(encoder, rule)
        if rule.stack == "encoder_decoder"
        else read_encoder(encoder.settle({"is_decoder": False}), rule)
    )
    return [replace(layer, model="encoder", tower="encoder") for layer in layers if layer.model == "encoder"]


def _part(view: View, keys: Sequence[str]) -> View | None:
    """The nested configuration under the first of `keys` that is there."""
    for key in keys:
        data = view.data.get(key)
        if isinstance(data, Mapping):
            kind = _part_kind(view, key, data)
            where = f"{view.where}.{key}" if view.where else key
            dtype = data.get("torch_dtype") or data.get("dtype") or view.get("@dtype", "torch_dtype", "dtype")
            return View(data, kind, where, defaults_of(kind), {"@dtype": dtype})
    return None


def _part_kind(view: View, key: str, data: Mapping[str, Any]) -> str:
    """The type of a nested configuration. Files often repeat the name of the whole there (``qwen2_5_vl``)."""
    stated = str(data.get("model_type") or "")
    known = find_type(stated, _architectures(data))
    if known is not None and (key not in VISION or RULES[known].stack in ("vision", "outside")):
        return known
    implied = nested_type(view.kind, key)
    if implied is not None and stated in ("", view.kind, str(view.data.get("model_type"))):
        return implied
    return stated


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures")
    return tuple(str(name) for name in names) if isinstance(names, (list, tuple)) else ()
