"""Padding with zeros, where a plan says that a variant takes only wider heads, or more of them.

The backend sees the padded group, layer, inputs and results; the caller sees the model's. Query heads are added to every KV head
alike, so that each keeps its group; columns are added behind. A cache that holds padded columns is zeroed there once, when it is
bound, and only zeros are written to them afterwards. The scale is the model's, whatever the width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn_core.geometry import DsaGeometry, Geometry, LayerGroup, MhaGeometry, MlaGeometry
from attn_core.layers import Cache, DsaLayer, Layer, MhaCache, MhaInputs, MhaLayer, MlaInputs, MmInputs

if TYPE_CHECKING:
    import torch

    from attn_core.binding import BoundBackend, Function


def padded_group(group: LayerGroup, pads: Mapping[str, Any]) -> LayerGroup:
    """`group` as a backend sees it under ``PhasePlan.pads`` (axis -> (from, to))."""
    return replace(group, geometry=_padded(group.geometry, pads)) if pads else group


def _padded(geometry: Geometry | None, pads: Mapping[str, Any]) -> Geometry | None:
    after = {axis: change[1] for axis, change in pads.items()}
    if isinstance(geometry, DsaGeometry):
        return replace(geometry, mla=replace(geometry.mla, q_heads=after.get("q_heads", geometry.mla.q_heads)))
    if isinstance(geometry, MlaGeometry):
        return replace(geometry, q_heads=after.get("q_heads", geometry.q_heads))
    if not isinstance(geometry, MhaGeometry):
        return geometry
    qk, v = after.get("head_dims", (geometry.qk_dim, after.get("v_dim", geometry.v_dim)))
    return replace(geometry, q_heads=after.get("q_heads", geometry.q_heads), qk_dim=qk, v_dim=v)


def clear_padding(cache: Cache | None, group: LayerGroup) -> None:
    """Zero the columns of a cache that are wider than the model's K and V; nothing else ever writes to them."""
    geometry = group.geometry
    if not isinstance(cache, MhaCache) or not isinstance(geometry, MhaGeometry):
        return
    from attn_core.formats import BLOCK

    packed = 2 if cache.format == "fp4_block16" else 1
    planes = ((cache.k, cache.k_blocks, geometry.qk_dim), (cache.v, cache.v_blocks, geometry.v_dim))
    for plane, blocks, width in planes:
        _zero(plane[..., width // packed :])
        if blocks is not None:
            _zero(blocks[..., width // BLOCK :])


def _zero(tensor: torch.Tensor) -> None:
    import torch

    if tensor.numel():
        (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).zero_()


def pad_backend(bound: BoundBackend, group: LayerGroup, wide: LayerGroup, stored: LayerGroup) -> BoundBackend:
    """`bound`, called with the model's shapes and given those of `wide`; the same object where nothing differs.

    `stored` are the widths that the cache has, which are those of the widest phase.
    """
    if wide == group and stored == group:
        return bound
    adapter = _Adapter(bound, group, wide)
    own: dict[str, Function] = {
        name: getattr(adapter, name)
        for name in (
            "attn_metadata", "attn_graph_state", "attn_draft_metadata", "attn_ragged", "attn_store", "attn_gather",
            "attn_index", "attn_commit", "attn_warmup",
        )
    }  # fmt: skip
    for name in ("attn_extend", "attn_decode", "attend_ragged"):
        own[name] = adapter.attends(getattr(bound, name))
    changed: dict[str, Any] = {**own}
    return replace(bound, **changed)


class _Adapter:
    """The functions of one backend with padding around them."""

    def __init__(self, bound: BoundBackend, group: LayerGroup, wide: LayerGroup) -> None:
        self.bound, self.group, self.wide = bound, group, wide
        self._layers: dict[Layer, Layer] = {}
        self._caches: dict[int, tuple[MhaCache, MhaCache]] = {}
        self.narrow_heads, self.wide_heads, self.groups = _heads(group.geometry, wide.geometry)
        own, other = group.geometry, wide.geometry
        self.widths: tuple[int, int] | None = None  #: of K and V, as the backend sees them; None for latent rows
        self.v_dim = 0
        if isinstance(own, MhaGeometry) and isinstance(other, MhaGeometry):
            self.widths, self.v_dim, self.qk_dim = (other.qk_dim, other.v_dim), own.v_dim, own.qk_dim

    # --- metadata: another group ------------------------------------------------------------------------------------------

    def attn_metadata(self, batch: Any, group: Any, phase: Any, state: Any, capture: Any) -> Any:
        return self.bound.attn_metadata(batch, self.wide, phase, state, capture)

    def attn_graph_state(self, group: Any, phases: Any, limits: Any, lane: Any) -> Any:
        return self.bound.attn_graph_state(self.wide, phases, limits, lane)

    def attn_draft_metadata(self, batch: Any, group: Any, draft: Any, state: Any) -> Any:
        return self.bound.attn_draft_metadata(batch, self.wide, draft, state)

    def attn_commit(self, batch: Any, group: Any, caches: Any, metadata: Any, accepted: Any) -> None:
        self.bound.attn_commit(batch, self.wide, caches, metadata, accepted)

    def attn_warmup(self, group: Any, phases: Any, limits: Any) -> None:
        self.bound.attn_warmup(self.wide, phases, limits)

    # --- layers -----------------------------------------------------------------------------------------------------------

    def attends(self, inner: Function) -> Function:
        """attn_extend, attn_decode, or attn_ragged in their form."""

        def attend(inputs: Any, layer: Layer, cache: Cache | None, metadata: Any, out: torch.Tensor | None) -> Any:
            found = inner(self.inputs(inputs), self.layer(layer), self.cache(cache), metadata, None)
            if found.__class__ is not tuple:
                return found
            made, lse = self.out(found[0]), None if found[1] is None else self.own_heads(found[1])
            return (made.contiguous() if out is None else out.copy_(made)), lse

        return attend

    def attn_ragged(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any, part: Any) -> Any:
        inputs = self.inputs(MmInputs(q, k, v))
        made, lse = self.bound.attn_ragged(inputs.q, inputs.k, inputs.v, self.layer(layer), metadata, part)
        return self.out(made), None if lse is None else self.own_heads(lse)

    def attn_store(self, inputs: Any, layer: Any, cache: Any, address: Any) -> None:
        self.bound.attn_store(self.inputs(inputs), self.layer(layer), self.cache(cache), address)

    def attn_gather(self, cache: Any, address: Any, part: Any, layer: Any) -> Any:
        first, second = self.bound.attn_gather(self.cache(cache), address, part, self.layer(layer))
        return (first, second) if self.widths is None else (first[..., : self.qk_dim], second[..., : self.v_dim])

    def attn_index(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        return self.bound.attn_index(inputs, self.layer(layer), cache, metadata, out)

    # --- shapes -----------------------------------------------------------------------------------------------------------

    def inputs(self, inputs: Any) -> Any:
        """Inputs with more heads and wider rows; other kinds as they are."""
        if isinstance(inputs, MlaInputs):
            return inputs._replace(
                q=self.more_heads(inputs.q),
                q_latent=self.more_heads(inputs.q_latent),
                q_pe=self.more_heads(inputs.q_pe),
            )
        if not isinstance(inputs, MhaInputs | MmInputs) or self.widths is None:
            return inputs
        qk, v = self.widths
        return inputs._replace(
            q=_wider(self.more_heads(inputs.q), -1, qk), k=_wider(inputs.k, -1, qk), v=_wider(inputs.v, -1, v)
        )

    def layer(self, layer: Layer) -> Layer:
        """The layer as one of the padded group: one object for each, brought up to date (a server may rewrite sinks)."""
        wide = self._layers.get(layer)
        if wide is None:
            wide = self._layers[layer] = self._wide_layer(layer)
        else:
            self._follow(layer, wide)
        return wide

    def _follow(self, layer: Layer, wide: Layer) -> None:
        """Bring what a server may have replaced in `layer` into the object that the backend holds."""
        if isinstance(layer, DsaLayer) and isinstance(wide, DsaLayer):
            if wide.mla is not layer.mla:
                self._follow(layer.mla, wide.mla)
            return
        old: Any = wide
        for name in ("k_scale", "v_scale", "q_scale"):
            if hasattr(layer, name):
                setattr(old, name, getattr(layer, name))
        if isinstance(layer, MhaLayer) and layer.sinks is not None:
            if self.wide_heads == self.narrow_heads or old.sinks is None:
                old.sinks = self.more_heads(layer.sinks[None])[0]
            else:  # in place: a captured graph reads this tensor
                old.sinks.copy_(self.more_heads(layer.sinks[None])[0])

    def _wide_layer(self, layer: Layer) -> Layer:
        if isinstance(layer, DsaLayer):
            return replace(layer, mla=replace(layer.mla, group=self.wide))
        wide: Any = replace(layer, group=self.wide)
        if isinstance(layer, MhaLayer) and layer.sinks is not None and self.wide_heads != self.narrow_heads:
            wide.sinks = self.more_heads(layer.sinks[None])[0].clone()
        return wide  # type: ignore[no-any-return]

    def cache(self, cache: Cache | None) -> Cache | None:
        """K and V no wider than this backend's: another phase may have asked for wider ones. One object for each cache."""
        if not isinstance(cache, MhaCache) or self.widths is None:
            return cache
        found = self._caches.get(id(cache))
        if found is None or found[0] is not cache:
            found = self._caches[id(cache)] = cache, self._narrowed(cache)
        return found[1]

    def _narrowed(self, cache: MhaCache) -> MhaCache:
        from attn_core.formats import BLOCK

        assert self.widths is not None
        (qk, v), packed = self.widths, 2 if cache.format == "fp4_block16" else 1
        if (cache.k.shape[-1], cache.v.shape[-1]) == (qk // packed, v // packed):
            return cache
        return MhaCache(
            cache.k[..., : qk // packed],
            cache.v[..., : v // packed],
            None if cache.k_blocks is None else cache.k_blocks[..., : qk // BLOCK],
            None if cache.v_blocks is None else cache.v_blocks[..., : v // BLOCK],
            cache.format,
        )

    def more_heads(self, tensor: Any) -> Any:
        """[T, H, ...] (or None) with zero heads added to every KV head's group."""
        if tensor is None or self.wide_heads == self.narrow_heads:
            return tensor
        return _wider(_grouped(tensor, self.groups), 2, self.wide_heads // self.groups).flatten(1, 2)

    def own_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] without the added heads."""
        if self.wide_heads == self.narrow_heads:
            return tensor
        return _grouped(tensor, self.groups)[:, :, : self.narrow_heads // self.groups].flatten(1, 2)

    def out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The model's heads and columns of a result."""
        tensor = self.own_heads(tensor)
        return tensor[..., : self.v_dim] if self.widths is not None else tensor


def _heads(own: Geometry | None, wide: Geometry | None) -> tuple[int, int, int]:
    """(query heads of the model, those of the backend, KV heads)."""
    own, wide = (g.mla if isinstance(g, DsaGeometry) else g for g in (own, wide))
    if isinstance(own, MhaGeometry) and isinstance(wide, MhaGeometry):
        return own.q_heads, wide.q_heads, own.kv_heads
    if isinstance(own, MlaGeometry) and isinstance(wide, MlaGeometry):
        return own.q_heads, wide.q_heads, 1
    return 1, 1, 1


def _grouped(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """[T, H, ...] as [T, groups, H / groups, ...]."""
    return tensor.reshape(tensor.shape[0], groups, tensor.shape[1] // groups, *tensor.shape[2:])


def _wider(tensor: Any, axis: int, size: int) -> Any:
    """A tensor (or None) with zeros behind, up to `size` along `axis`."""
    if tensor is None or tensor.shape[axis] == size:
        return tensor
    import torch

    dtype = tensor.dtype
    raw = tensor.contiguous().view(torch.uint8) if dtype.itemsize == 1 else tensor
    shape = list(raw.shape)
    shape[axis] = size - shape[axis]
    return torch.cat([raw, raw.new_zeros(shape)], axis).view(dtype)
