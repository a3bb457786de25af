"""What one (layer group, phase, role) asks of a candidate: axis values, needed features, and who asked for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attn_core.dtypes import LONG_NAMES, canonical, default_format
from attn_core.errors import PlanError
from attn_core.geometry import DsaGeometry, GdnGeometry, LayerGroup, MhaGeometry, MlaGeometry, Model
from attn_core.options import Options

if TYPE_CHECKING:
    from attn_core.platform import Platform

_SPECULATIVE = ("verify", "draft", "draft_extend")


@dataclass(frozen=True)
class Request:
    """Axis values and features that a candidate must satisfy. ``asked_by`` names the flag behind a value or feature."""

    group: LayerGroup
    phase: str
    role: str
    axes: Mapping[str, Any]
    features: Mapping[str, str] = field(default_factory=dict)  #: feature -> who asks
    asked_by: Mapping[str, str] = field(default_factory=dict)
    q_dtypes: tuple[str, ...] = ()
    #: Elements of the pool's largest tensor for a page of one token; None where the number of pages is not known.
    elements_per_slot: int | None = None
    #: How new tokens in expanded form meet a cached prefix: ``chunks`` if the row can, else ``absorbed``; "" without one.
    prefix: str = ""

    @cached_property
    def cacheless(self) -> bool:
        """The part reads no paged cache (vision towers, states)."""
        return "format.default" not in self.axes

    @cached_property
    def tree(self) -> bool:
        """A token tree is drafted or verified."""
        return "spec_tree" in self.features


@dataclass(frozen=True)
class Situation:
    """What is common to all requests of one model in one plan."""

    model: Model
    platform: Platform
    options: Options
    dtype: str
    kv_dtype: str
    is_draft: bool = False

    @cached_property
    def asked_by(self) -> Mapping[str, str]:
        """The flag behind an axis, where the user set one."""
        return _asked_by(self.options)

    @classmethod
    def of(cls, model: Model, platform: Platform, options: Options, is_draft: bool = False) -> Situation:
        """Resolve dtype and KV dtype. Raises :class:`PlanError` for a dtype the platform does not have."""
        dtype = options.dtype if options.dtype != "auto" else canonical(model.dtype or "bf16")
        kv_dtype = options.kv_cache_dtype if options.kv_cache_dtype != "auto" else dtype
        _check_platform_dtype(platform, dtype, options)
        return cls(model, platform, options, dtype, kv_dtype, is_draft)


def _check_platform_dtype(platform: Platform, dtype: str, options: Options) -> None:
    """What no kernel on this hardware can compute in is refused before any candidate is looked at."""
    reason = platform.refuses(dtype)
    if reason is not None:
        asked = "--dtype" if options.dtype != "auto" else "model config"
        raise PlanError(
            f"{LONG_NAMES.get(dtype, dtype)} needs {reason.need}",
            f"dtype    {LONG_NAMES.get(dtype, dtype)}   ({asked})",
            f"platform {platform}: {reason.have}",
            suggestions=[reason.fix],
        )


def base_axes(situation: Situation) -> dict[str, Any]:
    """Axis values of the platform, the options and the model."""
    options, model = situation.options, situation.model
    context = options.context_length or model.max_positions or 0
    return {
        **situation.platform.axes(),
        "platform.label": situation.platform.describe(),
        "traits": frozenset(model.traits),
        "topk": options.topk,
        "draft_tokens": options.speculative_num_draft_tokens if options.topk else 0,
        "max_kv_len": context,
        "chunked_prefill_size": max(options.chunked_prefill_size or 0, 0),
        "prefix_cache": not options.disable_prefix_cache,
        "dynamic_chunking": options.dynamic_chunking,
        "page_major": options.page_major,
        "hicache": options.hicache,
        "deterministic": options.deterministic,
        "async_schedule": options.async_schedule,
        "pd_role": options.pd_role,
        "lanes": options.lanes,
        "batch": options.max_running_requests,
        "host_lengths": options.host_lengths,
        "interleave": 1,
        "explicit.prefill": bool(options.prefill_attention_backend),
        "explicit.decode": bool(options.decode_attention_backend),
        "explicit.attention": bool(options.attention_backend),
        "explicit.linear": bool(options.linear_attn_prefill_backend or options.linear_attn_decode_backend),
        "explicit.linear_base": bool(options.linear_attn_backend),
        "explicit.page_size": options.page_size is not None,
        "explicit.kv_cache_dtype": options.kv_cache_dtype != "auto",
        "explicit.mm": bool(options.mm_attention_backend),
    }


def build_request(situation: Situation, group: LayerGroup, phase: str, role: str, base: Mapping[str, Any]) -> Request:
    """The request of one (group, phase, role)."""
    axes: dict[str, Any] = {**base, "phase": phase, "role": role}
    features: dict[str, str] = {}
    options, kind = situation.options, group.backend_kind
    _add_geometry(axes, features, group, role, situation)
    _add_phase(axes, features, phase, situation)
    for name in group.features:
        features.setdefault(name, "model config")
    if options.deterministic and kind != "mm":
        features["batch_invariant"] = "--deterministic"
    if options.dcp_size > 1 and phase == "decode" and kind in ("mha", "mla", "dsa"):
        features["lse"] = features["dcp_decode"] = "--dcp-size"
    prefix = ""
    if role == "ragged" and kind == "mla" and not options.disable_prefix_cache:
        prefix = "absorbed" if options.disable_chunked_prefix_cache else "chunks"
    slot = _elements_per_slot(axes, options) if "format.default" in axes else None
    return Request(group, phase, role, axes, features, situation.asked_by, _q_dtypes(situation, kind), slot, prefix)


def _q_dtypes(situation: Situation, kind: str) -> tuple[str, ...]:
    """Element types the queries may have: the model's, and e4m3 where the cache is quantised (adapters quantise q)."""
    quantised = situation.kv_dtype in ("fp8_e4m3", "fp4") and kind != "mm"
    return (situation.dtype, "fp8_e4m3") if quantised else (situation.dtype,)


def _elements_per_slot(axes: Mapping[str, Any], options: Options) -> int | None:
    if not options.num_pages or "head_dims" not in axes:
        return None
    return int(options.num_pages * axes["kv_heads"] * max(axes["head_dims"]))


def _asked_by(options: Options) -> dict[str, str]:
    flags = {
        "page_size": ("page_size", None),
        "dtypes": ("kv_cache_dtype", "auto"),
        "format.dtype": ("kv_cache_dtype", "auto"),
        "topk": ("speculative_eagle_topk", 1),
        "state_dtype": ("mamba_ssm_dtype", None),
        "chunked_prefill_size": ("chunked_prefill_size", 8192),
        "hicache": ("hicache", False),
        "deterministic": ("deterministic", False),
        "q_heads": ("tp_size", 1),
        "kv_heads": ("tp_size", 1),
        "pool_elements": ("num_pages", None),
        "max_kv_len": ("context_length", None),
        "format.layout": ("kv_layout", None),
    }
    found = {
        axis: options.flag_of(name) for axis, (name, default) in flags.items() if getattr(options, name) != default
    }
    if "dtypes" not in found and options.dtype != "auto":
        found["dtypes"] = "--dtype"
    return found


def _add_phase(axes: dict[str, Any], features: dict[str, str], phase: str, situation: Situation) -> None:
    options = situation.options
    axes["query_len"] = options.speculative_num_draft_tokens if phase in ("verify", "draft_extend") else None
    if phase in _SPECULATIVE and options.topk:
        if options.topk > 1:
            features["spec_tree"] = "--speculative-eagle-topk"
        else:
            features["spec_topk1"] = "--speculative-algorithm"


def _add_geometry(
    axes: dict[str, Any], features: dict[str, str], group: LayerGroup, role: str, situation: Situation
) -> None:
    geometry = group.geometry
    axes["window"] = axes["chunk"] = 0
    if isinstance(geometry, MhaGeometry):
        _add_mha(axes, features, group, geometry, situation)
    elif isinstance(geometry, MlaGeometry):
        _add_mla(axes, geometry, role)
    elif isinstance(geometry, DsaGeometry):
        _add_mla(axes, geometry.mla, "absorbed")
        axes.update(index_topk=geometry.index_topk, index_heads=geometry.index_heads)
    elif isinstance(geometry, GdnGeometry):
        state_dtype = situation.options.mamba_ssm_dtype or geometry.state_dtype
        axes.update(
            state_dtype=situation.dtype if state_dtype == "auto" else canonical(state_dtype),
            state_dims=(geometry.k_dim, geometry.v_dim),
            q_heads=geometry.k_heads,
            kv_heads=geometry.v_heads,
        )
        return
    _add_cache_axes(axes, group, situation)


def _add_cache_axes(axes: dict[str, Any], group: LayerGroup, situation: Situation) -> None:
    if group.backend_kind == "mm":
        return  # towers keep no cache: its element type is nothing to them
    axes["format.dtype"] = situation.kv_dtype
    axes["format.default"] = default_format(situation.kv_dtype, group.backend_kind)


def _add_mha(
    axes: dict[str, Any],
    features: dict[str, str],
    group: LayerGroup,
    geometry: MhaGeometry,
    situation: Situation,
) -> None:
    axes.update(
        head_dims=(geometry.qk_dim, geometry.v_dim),
        q_heads=geometry.q_heads,
        kv_heads=geometry.kv_heads,
        gqa_ratio=geometry.ratio,
        window=geometry.window or 0,
        chunk=geometry.chunk or 0,
    )
    wanted = {
        "sliding_window": geometry.window is not None and group.backend_kind == "mha",
        "window_right": geometry.window_right is not None,
        "sinks": geometry.sinks,
        "softcap": geometry.softcap is not None,
        "chunked_local": geometry.chunk is not None,
        "cross": group.kind == "cross",
        "bidirectional": not geometry.causal and group.kind != "cross",
    }
    features.update({name: "model config" for name, needed in wanted.items() if needed})


def _add_mla(axes: dict[str, Any], geometry: MlaGeometry, role: str) -> None:
    ragged = role == "ragged"
    wide = (geometry.nope_dim + geometry.rope_dim, geometry.v_dim)
    axes.update(
        head_dims=wide if ragged else (geometry.latent_dim + geometry.rope_dim, geometry.latent_dim),
        mla_dims=f"{geometry.nope_dim},{geometry.rope_dim},{geometry.v_dim},{geometry.latent_dim}",
        q_heads=geometry.q_heads,
        kv_heads=geometry.q_heads if ragged else 1,
        gqa_ratio=1 if ragged else geometry.q_heads,
        form="ragged" if ragged else "absorbed",
    )
