"""Readers of layers with a recurrent state: gated delta networks, KDA, Mamba, lightning attention, short convolutions.

Only gated delta networks have a backend kind; the rest is described (shapes and bytes of the state) and left to the
server. Shapes are those of one sequence in one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attn_core.dtypes import canonical
from attn_core.errors import ModelError, UsageError
from attn_core.geometry import GdnGeometry
from attn_core.model._layers import Layer
from attn_core.model._view import HEADS, HIDDEN, View


def short_dtype(name: object) -> str | None:
    """``bfloat16`` or ``torch.bfloat16`` as ``bf16``; None for ``auto`` and what is no known dtype."""
    try:
        return canonical(str(name))
    except UsageError:
        return None


def state_dtype(view: View) -> str:
    """Element type of the recurrent state: the configuration's own key, else the model's dtype, else bf16."""
    own = view.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype", "linear_ssm_dtype", "ssm_state_dtype")
    return short_dtype(own) or short_dtype(view.get("@dtype")) or "bf16"


def conv_dtype(view: View) -> str:
    """Element type of the convolution state: the model's dtype, else bf16."""
    return short_dtype(view.get("@dtype")) or "bf16"


def read_gdn(view: View, index: int) -> Layer:
    """Gated delta network of the Qwen 3 Next family: one convolution over q, k and v together."""
    k_heads, v_heads = view.need("linear_num_key_heads"), view.need("linear_num_value_heads")
    k_dim, v_dim = view.need("linear_key_head_dim"), view.need("linear_value_head_dim")
    geometry = GdnGeometry(
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        conv_width=view.need("linear_conv_kernel_dim"),
        conv_dim=2 * k_heads * k_dim + v_heads * v_dim,
        state_dtype=state_dtype(view),
        conv_dtype=conv_dtype(view),
    )
    return Layer(index, "linear_gdn", geometry)


def read_jet(view: View, index: int) -> Layer:
    """Jet block (Jet-Nemotron): a gated delta network whose dynamic convolution, over v alone, stays with the model."""
    jet = view.table("efficient_attention_config").get("jet")
    if not isinstance(jet, Mapping):
        raise view.error("efficient_attention_config.jet is missing")
    inner = View(jet, view.kind, "efficient_attention_config.jet")
    heads, k_dim = inner.need("num_heads"), inner.need("head_dim")
    v_dim = round(k_dim * (inner.number("expand_v") or 1.0))
    geometry = GdnGeometry(
        k_heads=heads,
        v_heads=heads,
        k_dim=k_dim,
        v_dim=v_dim,
        conv_width=inner.need("conv_size"),
        conv_dim=heads * v_dim,
        external_conv=True,
        state_dtype=state_dtype(view),
        conv_dtype=conv_dtype(view),
    )
    return Layer(index, "linear_jet", geometry)


def read_kda(view: View, index: int) -> Layer:
    """Kimi delta attention: a gated delta network with one decay a channel. Its ``head_dim`` is its own."""
    nested = View(view.table("linear_attn_config"), view.kind, "linear_attn_config")
    heads = nested.integer("num_heads") or view.need("linear_num_heads", *HEADS)
    dim = nested.integer("head_dim") or view.need("linear_head_dim", "head_dim")
    width = nested.integer("short_conv_kernel_size") or view.need("linear_conv_kernel_dim", "short_conv_kernel_size")
    geometry = GdnGeometry(
        k_heads=heads,
        v_heads=heads,
        k_dim=dim,
        v_dim=dim,
        conv_width=width,
        conv_dim=3 * heads * dim,
        gate="vector",
        state_dtype=state_dtype(view),
        conv_dtype=conv_dtype(view),
    )
    return Layer(index, "linear_kda", geometry)


def read_mamba1(view: View, index: int) -> Layer:
    """Mamba-1: a state of ``[expand * hidden, state]`` for each layer, a convolution over the inner width."""
    inner = round((view.number("mamba_expand", "expand") or 2) * view.need(*HIDDEN))
    state = view.need("mamba_d_state", "state_size", "ssm_state_size")
    width = view.need("mamba_d_conv", "conv_kernel")
    facts = {
        "intermediate_size": inner,
        "state_size": state,
        "conv_kernel": width,
        "ssm_state_shape": (inner, state),
        "conv_state_shape": (inner, width - 1),
    }
    return _external(view, index, "mamba1", facts)


def read_mamba2(view: View, index: int) -> Layer:
    """Mamba-2: a state of ``[heads, head_dim, state]``; the convolution also covers the groups' B and C."""
    heads = view.need("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    inner = view.integer("mamba_d_ssm")
    dim = view.get("mamba_head_dim", "mamba_d_head", "mamba_headdim", "@mamba_head_dim")
    if not isinstance(dim, int):  # "auto" or absent: the inner width in equal parts
        inner = inner or round((view.number("mamba_expand", "expand") or 2) * view.need(*HIDDEN))
        dim = inner // heads
    groups = view.integer("n_groups", "mamba_n_groups", "mamba_ngroups") or 1
    state = view.need("ssm_state_size", "mamba_d_state", "state_size")
    width = view.need("conv_kernel", "mamba_d_conv")
    conv = heads * dim + 2 * groups * state
    facts = {
        "num_heads": heads,
        "head_dim": dim,
        "state_size": state,
        "n_groups": groups,
        "conv_kernel": width,
        "conv_dim": conv,
        "ssm_state_shape": (heads, dim, state),
        "conv_state_shape": (conv, width - 1),
    }
    return _external(view, index, "mamba2", facts)


def read_lightning(view: View, index: int) -> Layer:
    """Lightning attention (MiniMax): a ``[heads, d, d]`` state with a fixed decay for each head."""
    heads = view.need(*HEADS)
    dim = view.integer("head_dim") or view.need(*HIDDEN) // heads
    return _external(view, index, "linear_lightning", {"num_heads": heads, "ssm_state_shape": (heads, dim, dim)})


def read_rg_lru(view: View, index: int) -> Layer:
    """Griffin's gated linear recurrent unit: one number a channel, and a convolution."""
    width = view.integer("lru_width") or view.need(*HIDDEN)
    kernel = view.need("conv1d_width", "conv_kernel")
    return _external(view, index, "rg_lru", {"ssm_state_shape": (width,), "conv_state_shape": (width, kernel - 1)})


def read_short_conv(view: View, index: int) -> Layer:
    """Gated short convolution (LFM2): the last ``conv_L_cache - 1`` inputs are the state."""
    width = view.integer("conv_L_cache", "conv_kernel", "short_conv_kernel_size", "@conv_kernel")
    shape = {"conv_state_shape": (view.need(*HIDDEN), width - 1)} if width else {}
    return _external(view, index, "short_conv", shape)


def _opaque(kind: str) -> Callable[[View, int], Layer]:
    """A recurrent layer whose state this package does not size."""
    return lambda view, index: _external(view, index, kind, {})


def _external(view: View, index: int, kind: str, facts: Mapping[str, Any]) -> Layer:
    return Layer(index, kind, facts={**facts, "state_dtype": state_dtype(view), "conv_dtype": conv_dtype(view)})


#: What a rule's ``linear`` may be.
LINEAR: Mapping[str, Callable[[View, int], Layer]] = {
    "gdn": read_gdn,
    "jet": read_jet,
    "kda": read_kda,
    "mamba1": read_mamba1,
    "mamba2": read_mamba2,
    "lightning": read_lightning,
    "rg_lru": read_rg_lru,
    "short_conv": read_short_conv,
    "rwkv": _opaque("rwkv"),
    "xlstm": _opaque("xlstm"),
}


def read_linear(view: View, index: int, meaning: str | None) -> Layer:
    """A linear layer by what it means in its family. Raises :class:`ModelError` where that is not known."""
    if meaning is None:
        raise unknown_linear(view, index)
    return LINEAR[meaning](view, index)


def unknown_linear(view: View, index: int) -> ModelError:
    """The error for a linear layer of a family whose rule does not say what that is."""
    return view.error(f"unknown architecture: layer {index} is a linear layer, of a kind that is not known here")
