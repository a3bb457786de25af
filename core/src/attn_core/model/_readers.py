"""Readers of attention layers: multi-head, latent and indexed geometries from the keys of one layer's view.

A rule leaves these keys of its own (see ``_rules.py``):

========================  =======================================================================================
``@scale``                the softmax scale
``@sinks``                learned attention sinks (one logit a head)
``@causal``               False: bidirectional
``@window``               keys seen on the left, the query's own position included
``@window_right``         keys seen on the right of the query's own position
``@chunk``                length of chunked-local attention
``@unsupported``          names of what API 1 cannot express (``@inherited``: those of the whole model)
``@wants``                soft features (``mm_spans``)
``@facts``                further facts for the description
``@layer``                function (index, kind) -> values settled for that layer
``@kv_from``              function (kinds) -> {layer: layer whose keys and values it reads}
========================  =======================================================================================
"""

from __future__ import annotations

import math
from dataclasses import replace

from attn_core.geometry import DsaGeometry, MhaGeometry, MlaGeometry
from attn_core.model._layers import Layer, window_of
from attn_core.model._view import CHUNK, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, View


def head_dim(view: View, heads: int) -> int:
    """Width of one head: as stated, else hidden size / heads. Raises :class:`ModelError` if that is not whole."""
    stated = view.integer(*HEAD_DIM)
    if stated is not None:
        return view.need(*HEAD_DIM)
    hidden = view.need(*HIDDEN)
    if hidden % heads:
        raise view.error(f"head_dim is missing and hidden_size {hidden} does not divide into {heads} heads")
    return hidden // heads


def softmax_scale(view: View, qk_dim: int) -> float:
    """The factor on q.k: settled by the family, ``attention_multiplier``, ``query_pre_attn_scalar``, else 1/sqrt(d)."""
    for value in (view.number("@scale"), view.number("attention_multiplier")):
        if value is not None:
            return value
    scalar = view.number("query_pre_attn_scalar")
    if scalar is not None and scalar <= 0:
        raise view.error(f"query_pre_attn_scalar is {scalar}, a positive number is needed")
    return float((qk_dim if scalar is None else scalar) ** -0.5)


def limits(view: View) -> tuple[str, ...]:
    """Names of what a configuration asks for beyond API 1, from keys that mean the same in every family."""
    found = [*(view.get("@unsupported") or ()), *(view.get("@inherited") or ())]
    position = (view.text("position_embedding_type") or "").lower()
    attention = view.table("attn_config")
    if view.flag("alibi", "use_alibi") or attention.get("alibi") or "alibi" in position:
        found.append("alibi")
    if position.startswith("relative"):
        found.append("relative_position_bias")
    if view.flag("prefix_lm") or attention.get("prefix_lm"):
        found.append("prefix_lm")
    if (view.get("attention_type") or "original_full") == "block_sparse":
        found.append("block_sparse_attention")
    if view.table("sparse_config") or view.table("sparse_attention_config"):
        found.append("sparse_attention")
    return tuple(dict.fromkeys(found))


def causal(view: View) -> bool:
    """Whether a query sees earlier positions only."""
    stated = view.flag("@causal")
    if stated is not None:
        return stated
    if view.get("use_bidirectional_attention") in (True, "all"):
        return False
    return view.flag("is_causal") is not False


def read_mha(view: View, index: int, kind: str) -> Layer:
    """A layer with separate keys and values. `kind` is ``full``, ``sliding`` or ``chunked``."""
    heads = view.need(*HEADS)
    kv_heads = view.need(*KV_HEADS) if view.integer(*KV_HEADS) is not None else heads
    if heads % kv_heads:
        raise view.error(f"layer {index}: {heads} query heads do not divide into {kv_heads} KV heads")
    qk_dim = head_dim(view, heads)
    v_dim = view.integer("v_head_dim") or qk_dim
    geometry = MhaGeometry(
        q_heads=heads,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        scale=softmax_scale(view, qk_dim),
        causal=causal(view),
        softcap=view.number("attn_logit_softcapping") or None,
        sinks=bool(view.flag("@sinks")),
    )
    return finish(view, Layer(index, "full", geometry), kind)


def finish(view: View, layer: Layer, kind: str) -> Layer:
    """Add window, chunk, direction, limits and wishes to a layer of full attention."""
    geometry = layer.geometry
    assert isinstance(geometry, MhaGeometry)
    name = "full" if geometry.causal else "encoder_bidirectional"
    if kind == "sliding":
        name = "sliding" if geometry.causal else name
        left, right = _windows(view, layer.index, geometry.causal)
        geometry = replace(geometry, window=left, window_right=right)
    elif kind == "chunked":
        name = "chunked_local"
        geometry = replace(geometry, chunk=view.need("@chunk", *CHUNK))
    encoder = not geometry.causal and layer.model == "target"
    return replace(
        layer,
        kind=name,
        geometry=geometry,
        model="encoder" if encoder else layer.model,
        tower="encoder" if encoder else layer.tower,
        unsupported=limits(view),
        wants=frozenset(view.get("@wants") or ()),
        facts=dict(view.get("@facts") or {}),
    )


def _windows(view: View, index: int, is_causal: bool) -> tuple[int, int | None]:
    """(keys on the left incl. the own position, keys on the right).

    Hugging Face's causal mask keeps ``kv > q - sliding_window``: the number includes the query's own position. Its
    bidirectional mask keeps ``|q - kv| <= sliding_window``: that many on either side of it.
    """
    window = view.integer("@window") or window_of(view)
    if window is None or window <= 0:
        raise view.error(f"layer {index} is sliding, but no sliding_window is stated")
    if is_causal:
        return window, None
    right = view.integer("@window_right")
    return (window, right) if right is not None else (window + 1, window)


def yarn_scale(view: View, scale: float) -> float:
    """`scale` times the square of YaRN's temperature, as DeepSeek's latent attention applies it.

    transformers' ``yarn_apply_mscale``: ``m = 0.1 * mscale_all_dim * ln(factor) + 1`` when ``factor > 1``.
    """
    rope = view.table("rope_parameters") or view.table("rope_scaling")
    full = rope.get("full_attention")  # some families keep one table for each kind of layer
    rope = full if isinstance(full, dict) else rope
    inner = View(rope, view.kind, f"{view.where}.rope_scaling".lstrip("."))
    share, factor = inner.number("mscale_all_dim"), inner.number("factor")
    if (inner.text("rope_type", "type") or "default") == "default" or not share or not factor or factor <= 1.0:
        return scale
    temperature = 0.1 * share * math.log(factor) + 1.0
    return scale * temperature * temperature


def mla_geometry(view: View) -> MlaGeometry:
    """Latent sizes. ``head_dim`` is never read here: it means another width in every release."""
    nope = view.need("qk_nope_head_dim")
    rope = view.integer("qk_rope_head_dim") or 0
    stated = view.number("@scale")
    return MlaGeometry(
        q_heads=view.need(*HEADS),
        latent_dim=view.need("kv_lora_rank"),
        rope_dim=rope,
        nope_dim=nope,
        v_dim=view.need("v_head_dim"),
        scale=stated if stated is not None else yarn_scale(view, float((nope + rope) ** -0.5)),
    )


def read_mla(view: View, index: int, kind: str) -> Layer:
    """A layer of latent attention (plain multi-head attention where there is no latent)."""
    if view.integer("kv_lora_rank") is None or view.flag("use_mla") is False:
        return read_mha(view, index, kind)
    named = limits(view)
    if kind != "full":
        named = (*named, "sliding_window_over_latent")
    facts = {**(view.get("@facts") or {})}
    if view.flag("@sinks"):
        named = (*named, "sinks_over_latent")
    return Layer(index, "mla", mla_geometry(view), unsupported=named, facts=facts)


def read_dsa(view: View, index: int, kind: str) -> Layer:
    """A layer of DeepSeek sparse attention: an indexer picks ``index_topk`` tokens for latent attention."""
    base = read_mla(view, index, "full")
    if not isinstance(base.geometry, MlaGeometry):
        raise view.error(f"layer {index} is indexed, but kv_lora_rank is missing")
    named = base.unsupported
    if view.integer("index_kpool", "index_block_size", "index_topk_blocks"):
        named = (*named, "block_index")
    geometry = DsaGeometry(
        mla=base.geometry,
        index_heads=view.need("index_n_heads"),
        index_dim=view.need("index_head_dim"),
        index_topk=view.need("index_topk"),
    )
    return replace(base, kind="mla_sparse_dsa", geometry=geometry, unsupported=named)
