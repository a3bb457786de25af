"""Inputs, layers and caches: what travels per layer. Shapes use the letters of :mod:`attn_core.batch`.

Inputs are NamedTuples, built once a layer and never kept. Layers hold what the checkpoint fixes; caches hold tensors whose
addresses never change. ``slot`` of a layer is its place in the router, set by ``Router.bind``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from attn_core.geometry import DsaGeometry, GdnGeometry, LayerGroup, MhaGeometry, MlaGeometry

if TYPE_CHECKING:
    import torch


class Rope(NamedTuple):
    """Rotary embedding to be applied by the backend: only where the variant fuses ``rope``."""

    cos_sin: torch.Tensor  #: [max_position, rope_dim]
    positions: torch.Tensor  #: i64[T]
    interleaved: bool


class MhaInputs(NamedTuple):
    """q[T, Hq, Dk]; k[T, Hk, Dk] and v[T, Hk, Dv], or None when the layer shares another layer's cache.

    ``store`` asks for k and v to be written to the batch's new slots before attention reads the cache; without it they
    are there already. When attention runs, the cache holds every key up to ``kv_lens``, the new ones included; a backend
    may read the new tokens from the cache or from ``k`` and ``v``. A variant with ``dual_chunk`` also takes q[T, Hq, 5, Dk]:
    rotated for keys of its own chunk, of the one before, of earlier ones, and twice more for sparse estimates.
    """

    q: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    rope: Rope | None = None
    store: bool = True


class MlaInputs(NamedTuple):
    """q[T, H, nope] (ragged) or q_latent[T, H, latent] (absorbed); q_pe[T, H, rope]; c_kv[T, latent]; k_pe[T, rope]."""

    q: torch.Tensor | None
    q_latent: torch.Tensor | None
    q_pe: torch.Tensor
    c_kv: torch.Tensor | None = None
    k_pe: torch.Tensor | None = None
    indices: torch.Tensor | None = None  #: i32[T, topk], -1 = none
    rope: Rope | None = None
    store: bool = True


class GdnInputs(NamedTuple):
    """mixed_qkv[T, conv_dim] before the convolution, or q[T, Hk, K], k[T, Hk, K], v[T, Hv, V]; a, b [T, Hv]; z gate."""

    mixed_qkv: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    z: torch.Tensor | None = None


class IndexInputs(NamedTuple):
    """Lightning indexer: q[T, Hi, Di], k[T, Di], weights[T, Hi]; before Hadamard and quantisation unless fused."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    rope: Rope | None = None
    store: bool = True


class MmInputs(NamedTuple):
    """Packed attention without a cache (vision towers, encoders): q[T, H, D], k[Tk, Hk, D], v[Tk, Hk, Dv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(slots=True)
class Scale:
    """A quantisation scale: real value = stored value * scale. ``tensor`` f32[1] or f32[Hk]; ``value`` the host copy.

    Scales of keys and values belong to 8-bit and 4-bit pools; binding takes them off layers of wider ones.
    """

    tensor: torch.Tensor
    value: float | None = None


@dataclass(slots=True, eq=False)
class MhaLayer:
    """One attention layer of an ``mha`` or ``mm`` group. ``sinks`` f32[Hq], natural-log logits."""

    index: int
    group: LayerGroup
    sinks: torch.Tensor | None = None
    k_scale: Scale | None = None
    v_scale: Scale | None = None
    q_scale: Scale | None = None
    out_scale: Scale | None = None
    kv_from: int | None = None
    slot: int = -1

    @property
    def geometry(self) -> MhaGeometry:
        """The group's geometry."""
        assert isinstance(self.group.geometry, MhaGeometry)
        return self.group.geometry


@dataclass(slots=True, eq=False)
class MlaLayer:
    """One MLA layer. ``expand(c_kv[n, latent]) -> (k_nope[n, H, nope], v[n, H, Dv])`` serves the ragged form."""

    index: int
    group: LayerGroup
    k_scale: Scale | None = None
    q_scale: Scale | None = None
    expand: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    slot: int = -1

    @property
    def geometry(self) -> MlaGeometry:
        """The MLA geometry of the group (of a sparse group, too)."""
        geometry = self.group.geometry
        return geometry.mla if isinstance(geometry, DsaGeometry) else geometry  # type: ignore[return-value]


@dataclass(slots=True, eq=False)
class GdnLayer:
    """One gated-delta-network layer: conv_weight[C, W], conv_bias[C], a_log f32[Hv], dt_bias[Hv]."""

    index: int
    group: LayerGroup
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    conv_weight: torch.Tensor | None = None
    conv_bias: torch.Tensor | None = None
    activation: str = "silu"
    l2norm: bool = True
    slot: int = -1

    @property
    def geometry(self) -> GdnGeometry:
        """The group's geometry."""
        assert isinstance(self.group.geometry, GdnGeometry)
        return self.group.geometry


@dataclass(slots=True, eq=False)
class DsaLayer:
    """One sparse layer: its MLA part, the indexer's scale, and the layer whose indices it re-uses (None: its own)."""

    mla: MlaLayer
    index_scale: float
    index_from: int | None = None
    slot: int = -1

    @property
    def group(self) -> LayerGroup:
        """The group of the MLA part."""
        return self.mla.group

    @property
    def index(self) -> int:
        """The layer's index in the model."""
        return self.mla.index


Layer = MhaLayer | MlaLayer | GdnLayer | DsaLayer


@dataclass(slots=True, eq=False)
class MhaCache:
    """K and V of one layer as logical views k[pages, P, Hk, Dk], v[pages, P, Hk, Dv] with any strides; they may share storage.

    ``format`` is ``plain`` (element type as stored) or ``fp4_block16``: then k, v are uint8 [..., D/2] and ``k_blocks``,
    ``v_blocks`` are e4m3 scales [..., D/16]. Page 0 is the dummy that padded rows point to.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_blocks: torch.Tensor | None = None
    v_blocks: torch.Tensor | None = None
    format: str = "plain"


@dataclass(slots=True, eq=False)
class MlaCache:
    """Latent cache data[pages, P, width]; c_kv and k_pe are views where the format allows them."""

    data: torch.Tensor
    c_kv: torch.Tensor | None = None
    k_pe: torch.Tensor | None = None
    format: str = "mla_plain"


@dataclass(slots=True, eq=False)
class IndexCache:
    """Indexer keys, planar per page: P * 128 fp8 bytes, then P fp32 scales; data u8[pages, P * 132]."""

    data: torch.Tensor
    format: str = "index_132_planar"


@dataclass(slots=True, eq=False)
class DsaCache:
    """Both caches of a sparse layer."""

    latent: MlaCache
    index: IndexCache


@dataclass(slots=True, eq=False)
class GdnCache:
    """Convolution state conv[slots, C, W-1] and recurrent state state[slots, Hv, V, K] (V first); step_* hold verify states."""

    conv: torch.Tensor
    state: torch.Tensor
    step_state: torch.Tensor | None = None
    step_conv: torch.Tensor | None = None
    format: str = "state_vk"


Cache = MhaCache | MlaCache | IndexCache | DsaCache | GdnCache
