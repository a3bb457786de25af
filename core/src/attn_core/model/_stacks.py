"""From a configuration to its layers: decoders, encoders, encoder-decoders, vision and audio towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attn_core.geometry import MhaGeometry
from attn_core.model._layers import PARTS, Layer, layer_count, layer_kinds
from attn_core.model._readers import head_dim, limits, read_dsa, read_mha, read_mla, softmax_scale
from attn_core.model._rules import Rule
from attn_core.model._states import read_linear, read_short_conv
from attn_core.model._view import HEADS, HIDDEN, KV_HEADS, LAYERS, View

#: Layers that are named and left alone: (kind of the group, what API 1 cannot express).
NAMED: Mapping[str, tuple[str, str]] = {
    "qsa": ("qwen_sparse_attention", "qwen_sparse_attention"),
    "msa": ("minimax_sparse_attention", "minimax_sparse_attention"),
    "compressed": ("compressed_sparse_attention", "compressed_kv_pools"),
    "reference_sliding": ("reference_sliding_attention", "reference_sliding_window"),
}
NO_ATTENTION = "no_attention_mlp_or_moe"


def prepare(view: View, rule: Rule) -> View:
    """The view with what the family's rule settles."""
    if rule.unsupported:
        view = view.settle({"@unsupported": rule.unsupported})
    return view.settle(rule.prepare(view)) if rule.prepare else view


def read_decoder(view: View, rule: Rule) -> list[Layer]:
    """Layers of a language model, in order; a layer with two mixers gives two records."""
    view = prepare(view, rule)
    kinds = layer_kinds(view, rule)
    if view.integer("num_kv_shared_layers") == len(kinds):  # a draft that reads the cache of its target
        named = view.get("@inherited") or ()
        view = view.settle({"num_kv_shared_layers": 0, "@inherited": (*named, "kv_of_target_model")})
    layers = [
        read_layer(of_layer(view, index, kind), rule, index, part)
        for index, kind in enumerate(kinds)
        for part in PARTS.get(kind, (kind,))
    ]
    layers = _share_kv(view, kinds, layers)
    layers = _share_index(view, layers)
    if view.flag("add_cross_attention"):
        layers += [cross_layer(of_layer(view, index, "cross"), index) for index in range(len(kinds))]
    return layers


def of_layer(view: View, index: int, kind: str) -> View:
    """The view of one layer: the rule's values for it, then ``per_layer_config``'s (keys ``5``, ``"5"``, ``"05"``)."""
    rule_of_layer = view.call("@layer")
    if rule_of_layer:
        view = view.settle(rule_of_layer(index, kind))
    for key, values in view.table("per_layer_config").items():
        if str(key).isdigit() and int(key) == index and isinstance(values, Mapping):
            return view.settle(values)
    return view


def read_layer(view: View, rule: Rule, index: int, kind: str) -> Layer:
    """One layer by its kind."""
    if kind in ("full", "sliding", "chunked"):
        return (read_mla if rule.attention == "mla" else read_mha)(view, index, kind)
    if kind == "indexed" and rule.indexed == "dsa":
        return read_dsa(view, index, kind)
    if kind == "linear":
        return read_linear(view, index, rule.linear)
    if kind == "conv":
        return read_short_conv(view, index)
    if kind == "none":
        return Layer(index, NO_ATTENTION)
    if kind == "cross":
        return cross_layer(view, index)
    named = NAMED.get(rule.indexed if kind == "indexed" else kind)
    if named is None:
        raise view.error(f"unknown architecture: layer {index} is of kind {kind!r}, which no reader takes")
    return Layer(index, named[0], unsupported=(named[1],))


def cross_layer(view: View, index: int) -> Layer:
    """Cross attention: keys and values are written once a request, ``kv_len`` of them at most, and are not causal."""
    layer = read_mha(view.settle({"@causal": True}), index, "full")
    assert isinstance(layer.geometry, MhaGeometry)
    return replace(
        layer,
        kind="cross",
        geometry=replace(layer.geometry, causal=False),
        tower="decoder_cross",
        features=frozenset({"cross"}),
        kv_len=view.integer("@kv_len"),
    )


def _share_kv(view: View, kinds: list[str], layers: list[Layer]) -> list[Layer]:
    """Mark layers that read another layer's keys and values.

    ``num_kv_shared_layers`` (Gemma 3n, Gemma 4): the last that many layers read the last earlier layer of their kind.
    """
    custom = view.call("@kv_from")
    owners: Mapping[int, int] = custom(kinds) if custom else _last_of_kind(view, kinds)
    if not owners:
        return layers
    return [
        replace(layer, kv_from=owners[layer.index]) if layer.index in owners and layer.geometry else layer
        for layer in layers
    ]


def _last_of_kind(view: View, kinds: list[str]) -> dict[int, int]:
    first = len(kinds) - (view.integer("num_kv_shared_layers") or 0)
    if not 0 < first <= len(kinds):
        raise view.error(
            f"num_kv_shared_layers leaves {first} of {len(kinds)} layers with keys and values of their own"
        )
    owners: dict[int, int] = {}
    for index in range(first, len(kinds)):
        source = [i for i in range(first) if kinds[i] == kinds[index]]
        if not source:
            raise view.error(f"layer {index} shares keys and values, but no earlier layer is {kinds[index]} attention")
        owners[index] = source[-1]
    return owners


def _share_index(view: View, layers: list[Layer]) -> list[Layer]:
    """Mark indexed layers that take over the token choice of the last layer that made one (``indexer_types``)."""
    types = view.items("indexer_types")
    if types is None:
        return layers
    owner: int | None = None
    result = []
    for layer in layers:
        if layer.kind == "mla_sparse_dsa":
            kind = types[layer.index] if layer.index < len(types) else None
            if kind not in ("full", "shared"):
                raise view.error(f"indexer_types says {kind!r} for layer {layer.index}; known are full and shared")
            if kind == "full":
                owner = layer.index
            elif owner is None:
                raise view.error(f"layer {layer.index} shares an index, but no earlier layer has one")
            else:
                layer = replace(layer, index_from=owner)
        result.append(layer)
    return result


def read_encoder(view: View, rule: Rule, tower: str = "encoder") -> list[Layer]:
    """Layers of a bidirectional text or audio encoder; of a decoder when ``is_decoder`` is set."""
    if tower == "encoder" and view.flag("is_decoder"):
        return read_decoder(view, rule)
    layers = read_decoder(view.settle({"@causal": False, "add_cross_attention": False}), rule)
    return [replace(layer, model="encoder", tower=tower) for layer in layers]


def read_vision(view: View, rule: Rule) -> list[Layer]:
    """Layers of a vision tower. A window there is a segment of packed tokens (cu_seqlens), not a sliding window."""
    view = prepare(view, rule)
    count = layer_count(view)
    kinds = layer_kinds(view, rule) if view.states("layer_types") or rule.layout else ["full"] * count
    full = view.items("fullatt_block_indexes")
    pixels = view.integer("window_size")
    if full and pixels:
        kinds = ["full" if index in full else "window" for index in range(count)]
    return [_vision_layer(of_layer(view, index, kind), rule, index, kind) for index, kind in enumerate(kinds)]


def _vision_layer(view: View, rule: Rule, index: int, kind: str) -> Layer:
    if kind not in ("full", "window"):
        return replace(read_layer(view, rule, index, kind), model="vision", tower="vision")
    heads = view.need(*HEADS)
    kv_heads = view.integer(*KV_HEADS) or heads
    width = head_dim(view, heads)
    geometry = MhaGeometry(
        q_heads=heads,
        kv_heads=kv_heads,
        qk_dim=width,
        v_dim=width,
        scale=softmax_scale(view, width),
        causal=False,
        softcap=view.number("attn_logit_softcapping") or None,
    )
    pixels = view.integer("window_size") if kind == "window" else None
    return Layer(
        index,
        "vit_windowed_bidirectional" if kind == "window" else "vit_full_bidirectional",
        geometry,
        model="vision",
        tower="vision",
        unsupported=limits(view),
        facts={"window_pixels": pixels} if pixels else {},
    )


def read_encoder_decoder(view: View, rule: Rule) -> list[Layer]:
    """Layers of an encoder-decoder with one flat configuration (BART, T5, Whisper)."""
    view = prepare(view, rule)
    encoder = view.settle(_half(view, "encoder"))
    decoder = view.settle(_half(view, "decoder"))
    source = view.integer(
        "@kv_len", "max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings"
    )
    decoder = decoder.settle({"add_cross_attention": False, **({"@kv_len": source} if source else {})})
    plain = Rule("decoder")
    own = read_decoder(decoder, plain)
    cross = [cross_layer(decoder, index) for index in range(len(own))]
    return own + cross + read_encoder(encoder, plain)


def _half(view: View, side: str) -> dict[str, int]:
    """Canonical keys of one half of a flat encoder-decoder configuration."""
    spelled = {
        "num_hidden_layers": (f"{side}_layers", f"{side}_num_hidden_layers", f"num_{side}_layers"),
        "num_attention_heads": (
            f"{side}_attention_heads",
            f"{side}_num_attention_heads",
            f"num_{side}_attention_heads",
        ),
        "num_key_value_heads": (f"{side}_num_key_value_heads", f"{side}_key_value_heads"),
    }
    found: dict[str, int] = {}
    for key, names in spelled.items():
        value = view.integer(*names)
        if value is not None:
            found[key] = value
    if "num_hidden_layers" not in found and not any(view.integer(name) for name in LAYERS):
        raise view.error(f"{side}_layers is missing")
    hidden = view.integer(f"{side}_hidden_size", *HIDDEN)
    return {**found, **({"hidden_size": hidden} if hidden else {})}
