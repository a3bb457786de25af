"""What a layer computes: geometries, layer groups, pools and models, as plain data.

Nothing here imports torch. All head counts of a :class:`LayerGroup` are *per rank* once
:meth:`Model.shard` has been called; a parsed model starts with the whole model's counts (tp 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attn_core.errors import ModelError

#: Kinds of backends (what a plugin implements). ``external`` groups are named and planned around, left to the server.
BACKEND_KINDS = ("mha", "mla", "gdn", "dsa", "mm")

#: Which backend kind serves a layer-group kind (the `kind` of a group is the name used by model files).
#: Kinds that are absent here have no backend in API 1 and are ``external``.
SERVED_BY: Mapping[str, str] = {
    "full": "mha",
    "sliding": "mha",
    "chunked_local": "mha",
    "cross": "mha",
    "encoder_bidirectional": "mm",
    "mla": "mla",
    "mla_sparse_dsa": "dsa",
    "linear_gdn": "gdn",
    "linear_jet": "gdn",
}


@dataclass(frozen=True, slots=True)
class MhaGeometry:
    """Multi-head attention with separate K and V (MHA, GQA, MQA).

    ``window`` counts the query's own position; ``scale`` multiplies q.k and is never recomputed from a width;
    ``chunk`` is the length of chunked-local attention (Llama 4): a query sees only keys of its own chunk.
    """

    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    causal: bool = True
    window: int | None = None
    window_right: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class MlaGeometry:
    """Multi-head latent attention. The cache row is ``latent_dim + rope_dim`` wide and shared by all heads.

    Absorbed form: q/k width ``latent_dim + rope_dim``, v width ``latent_dim``, one KV head.
    Ragged (expanded) form: q/k width ``nope_dim + rope_dim``, v width ``v_dim``, ``q_heads`` KV heads.
    """

    q_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    scale: float


@dataclass(frozen=True, slots=True)
class GdnGeometry:
    """Gated delta network: recurrent state ``[v_heads, v_dim, k_dim]`` and a short convolution state."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    conv_dim: int
    gate: str = "scalar"
    external_conv: bool = False
    state_chunk: int = 64
    state_dtype: str = "fp32"
    conv_dtype: str = "bf16"


@dataclass(frozen=True, slots=True)
class DsaGeometry:
    """DeepSeek sparse attention: a lightning indexer in front of MLA."""

    mla: MlaGeometry
    index_heads: int
    index_dim: int
    index_topk: int
    index_from: Mapping[int, int] = field(default_factory=dict)


Geometry = MhaGeometry | MlaGeometry | GdnGeometry | DsaGeometry


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of a model that share one attention geometry.

    ``features`` are hard requirements beyond the geometry (``shared_kv``, ``cross``); ``wants`` are used only by some
    requests (``mm_spans``) and do not exclude a backend. ``unsupported`` names what API 1 cannot express (ALiBi, additive
    bias, prefix LM …): the planner refuses such a group and says so. ``facts`` holds what the description of the model
    adds for people and for ``attn model`` (state shapes, towers, notes); no decision reads it.
    """

    model: str
    name: str
    kind: str
    layers: tuple[int, ...]
    geometry: Geometry | None
    pools: Mapping[str, str] = field(default_factory=dict)
    kv_from: Mapping[int, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    wants: frozenset[str] = frozenset()
    unsupported: tuple[str, ...] = ()
    kv_len: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def backend_kind(self) -> str:
        """Who serves this group: ``mha``, ``mla``, ``gdn``, ``dsa``, ``mm`` or ``external``."""
        if self.kind.startswith("vit_"):
            return "mm"
        return SERVED_BY.get(self.kind, "external")


@dataclass(frozen=True, slots=True)
class Model:
    """A parsed model: its layer groups and what the planner needs to know about it."""

    name: str
    architecture: str
    model_type: str
    dtype: str | None
    groups: tuple[LayerGroup, ...]
    layers_counted: int
    traits: frozenset[str] = frozenset()
    max_positions: int | None = None
    mtp_layers: int = 0
    tp: int = 1
    notes: tuple[str, ...] = ()

    def group(self, name: str) -> LayerGroup:
        """The group called `name`. Raises :class:`ModelError` if there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise ModelError(f"model {self.name!r} has no layer group {name!r}; it has {[g.name for g in self.groups]}")

    def shard(self, tp: int) -> Model:
        """This model as one of `tp` tensor-parallel ranks sees it.

        Query heads are divided; KV heads are divided, or replicated when there are fewer than ranks; MLA's latent is
        replicated. Raises :class:`ModelError` when a head count does not divide.
        """
        if tp < 1:
            raise ModelError(f"{tp} tensor-parallel ranks: needed is 1 or more")
        if tp == 1:
            return self
        if self.tp != 1:
            raise ModelError(f"model {self.name!r} is sharded already (tp {self.tp})")
        groups = tuple(_shard_group(group, tp) for group in self.groups)
        return replace(self, groups=groups, tp=tp)


def _divide(what: str, heads: int, tp: int, group: LayerGroup) -> int:
    if heads % tp:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ModelError(
            f"layer group {group.name!r}: {heads} {what} heads do not divide over {tp} ranks; --tp-size can be {fitting}"
        )
    return heads // tp


def _divide_or_replicate(heads: int, tp: int, group: LayerGroup) -> int:
    if heads >= tp:
        return _divide("KV", heads, tp, group)
    if tp % heads:
        raise ModelError(
            f"layer group {group.name!r}: {heads} KV heads can be neither split nor replicated evenly over {tp} ranks"
        )
    return 1


def _shard_group(group: LayerGroup, tp: int) -> LayerGroup:
    geometry = group.geometry
    if isinstance(geometry, MhaGeometry):
        sharded: Geometry = replace(
            geometry,
            q_heads=_divide("query", geometry.q_heads, tp, group),
            kv_heads=_divide_or_replicate(geometry.kv_heads, tp, group),
        )
    elif isinstance(geometry, MlaGeometry):
        sharded = replace(geometry, q_heads=_divide("query", geometry.q_heads, tp, group))
    elif isinstance(geometry, DsaGeometry):
        mla = replace(geometry.mla, q_heads=_divide("query", geometry.mla.q_heads, tp, group))
        sharded = replace(geometry, mla=mla)  # the indexer is replicated: every rank needs all indices
    elif isinstance(geometry, GdnGeometry):
        sharded = replace(
            geometry,
            k_heads=_divide("key", geometry.k_heads, tp, group),
            v_heads=_divide("value", geometry.v_heads, tp, group),
            conv_dim=geometry.conv_dim // tp,
        )
    else:
        return group
    return replace(group, geometry=sharded)


def select_kinds(groups: Iterable[LayerGroup], *kinds: str) -> tuple[LayerGroup, ...]:
    """The groups whose backend kind is one of `kinds`."""
    return tuple(group for group in groups if group.backend_kind in kinds)
