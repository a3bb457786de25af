"""One layer as data, and the kind of every layer of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.geometry import Geometry
from attn_core.model._rules import Rule
from attn_core.model._view import LAYERS, MTP, WINDOW, View


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention, state or empty layer before layers are gathered into groups.

    ``tower`` names the part of the model (``vision``, ``audio``, ``encoder``, ``decoder_cross``; None: the language
    model). ``kv_from`` and ``index_from`` are layer indices. ``facts`` is what the description adds.
    """

    index: int
    kind: str
    geometry: Geometry | None = None
    model: str = "target"
    tower: str | None = None
    features: frozenset[str] = frozenset()
    wants: frozenset[str] = frozenset()
    unsupported: tuple[str, ...] = ()
    kv_len: int | None = None
    kv_from: int | None = None
    index_from: int | None = None
    listed: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)


#: What configurations call the kinds of layers. A name that is not here is an error, never "full attention".
NAMES: Mapping[str, str] = {
    **dict.fromkeys(("full", "full_attention", "attention", "attn", "global", "global_attention", "*"), "full"),
    **dict.fromkeys(("sliding", "sliding_attention", "sliding_window", "swa", "local", "local_attention"), "sliding"),
    **dict.fromkeys(("chunked", "chunked_attention"), "chunked"),
    **dict.fromkeys(
        ("linear", "linear_attention", "mamba", "mamba2", "recurrent", "jet", "kda", "gdn", "lightning", "M"), "linear"
    ),
    **dict.fromkeys(("conv", "short_conv"), "conv"),
    **dict.fromkeys(("none", "moe", "mlp", "dense", "sparse", "-", "E"), "none"),
    **dict.fromkeys(("indexed", "indexed_attention", "deepseek_sparse_attention"), "indexed"),
    **dict.fromkeys(("window", "window_attention"), "window"),
    "qwen_sparse_attention": "qsa",
    "minimax_m3_sparse": "msa",
    "compressed_sparse_attention": "compressed",
    "heavily_compressed_attention": "compressed",
    "reference_sliding_attention": "reference_sliding",
    "cross": "cross",
    "cross_attention": "cross",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid_sliding",
}

#: Layers that run two mixers side by side.
PARTS: Mapping[str, tuple[str, ...]] = {"hybrid": ("full", "linear"), "hybrid_sliding": ("sliding", "linear")}


def layer_count(view: View) -> int:
    """Number of layers: as stated, else the length of the list of layer kinds."""
    if view.integer(*LAYERS) is None:
        kinds = view.items("layer_types", "layers_block_type")
        if kinds:
            return len(kinds)
    return view.need(*LAYERS)


def window_of(view: View) -> int | None:
    """The stated sliding window; None when there is none or ``use_sliding_window`` is false.

    The flag beats the number: Qwen checkpoints state a window of 32768 next to ``use_sliding_window: false``.
    """
    if view.flag("use_sliding_window") is False:
        return None
    window = view.integer(*WINDOW)
    return window if window and window > 0 else None


def layer_kinds(view: View, rule: Rule) -> list[str]:
    """The kind of every layer: as listed, by the family's layout, else by the sliding-window keys."""
    stated = view.items("layer_types", "layers_block_type")
    count = layer_count(view)
    if stated is not None:
        kinds = [_name(view, entry) for entry in stated]
        if len(kinds) != count:
            kinds = _trim(view, kinds, count)
    elif rule.layout is not None:
        kinds = [_name(view, entry) for entry in rule.layout(view, count)]
    else:
        kinds = _by_window(view, rule, count)
    if "sliding" in kinds and view.flag("use_sliding_window") is False:
        kinds = ["full" if kind == "sliding" else kind for kind in kinds]
    return kinds


def _name(view: View, entry: Any) -> str:
    kind = NAMES.get(entry) if isinstance(entry, str) else None
    if kind is None:
        raise view.error(
            f"unknown architecture: layer kind {entry!r} is not known", f"known are {', '.join(sorted(NAMES))}"
        )
    return kind


def _trim(view: View, kinds: list[str], count: int) -> list[str]:
    drafts = view.integer(*MTP) or 0
    if len(kinds) == count + drafts:  # the list goes on over the draft layers
        return kinds[:count]
    raise view.error(f"{len(kinds)} layer kinds are listed for {count} layers")


def _by_window(view: View, rule: Rule, count: int) -> list[str]:
    window = window_of(view)
    if window is None or not rule.windows:
        return ["full"] * count
    period = view.integer("sliding_window_pattern")
    if period is not None and period > 0:
        return ["full" if (i + 1) % period == 0 else "sliding" for i in range(count)]
    first = view.integer("max_window_layers") if view.flag("use_sliding_window") else None
    return ["sliding" if i >= (first or 0) else "full" for i in range(count)]
