"""A plain ``mla`` backend in fp32 torch, both forms: MQA over latent rows, and packed MHA over expanded ones.

A latent row is one KV head: K is ``c_kv | k_pe``, V is its first ``latent_dim`` values. The scale is the model's, in both forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attn_core.availability import Availability
from attn_core.batch import Part
from attn_core.context import Context
from attn_core.formats import dequantize, dtype_name
from attn_core.geometry import MhaGeometry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, MlaCache, MlaInputs, MlaLayer
from attn_core.manifest import Manifest, load_toml, parse_manifests
from attn_core.testing.reference_packed import PackedBackend
from attn_core.testing.reference_plain import ReferenceMetadata, as_bytes


class MlaReference(PackedBackend):
    """The backend object. ``read`` is all that differs from MHA; queries are joined, values are cut out of the keys.

    The ragged form is packed MHA with a KV head for every query head.
    """

    @hookimpl
    def attn_ragged(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MlaLayer,
        metadata: ReferenceMetadata,
        part: Part | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q[T, H, nope + rope] over expanded k[Tk, H, nope + rope], v[Tk, H, v]."""
        geometry = layer.geometry
        wide = MhaGeometry(geometry.q_heads, geometry.q_heads, q.shape[-1], v.shape[-1], geometry.scale)
        plain = MhaLayer(layer.index, replace(layer.group, geometry=wide))
        return super().attn_ragged(q, k, v, plain, metadata, part)

    @hookimpl
    def attn_extend(  # type: ignore[override]
        self, inputs: MlaInputs, layer: MlaLayer, cache: MlaCache, metadata: ReferenceMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """prefill, draft_extend, verify: out_latent[T, H, latent]."""
        assert inputs.q_latent is not None
        query = torch.cat([inputs.q_latent, inputs.q_pe], dim=-1)
        plain = MhaLayer(layer.index, replace(layer.group, geometry=self.as_mha(layer)), k_scale=layer.k_scale)
        rows = MhaCache(cache.data, cache.data)
        return self.attend(MhaInputs(query), plain, rows, metadata, out)

    @hookimpl
    def attn_decode(  # type: ignore[override]
        self, inputs: MlaInputs, layer: MlaLayer, cache: MlaCache, metadata: ReferenceMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """decode and draft: the same."""
        return self.attn_extend(inputs, layer, cache, metadata, out)

    def as_mha(self, layer: MlaLayer) -> MhaGeometry:
        """MQA over latent rows."""
        geometry = layer.geometry
        width = geometry.latent_dim + geometry.rope_dim
        return MhaGeometry(geometry.q_heads, 1, width, geometry.latent_dim, geometry.scale)

    def read(
        self, cache: MhaCache, layer: MhaLayer, metadata: ReferenceMetadata, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys f32[R, B, 1, width] and values f32[R, B, 1, latent]; rows beyond a length are 0."""
        page, offset = self.locate(metadata, keys)
        stored = as_bytes(cache.k)[page, offset].view(cache.k.dtype)
        rows = dequantize(stored, None, dtype_name(stored.dtype), layer.k_scale)
        inside = (keys < metadata.kv_lens[:, None])[..., None]
        rows = torch.where(inside, rows, 0.0)[:, :, None]
        return rows, self.values(rows, layer.geometry)

    def values(self, rows: torch.Tensor, geometry: MhaGeometry) -> torch.Tensor:
        """The latent part of a row is its value."""
        return rows[..., : geometry.v_dim]


def load_mla_manifest() -> Manifest:
    """The manifest of the reference, parsed."""
    path = Path(__file__).with_name("reference_mla_manifest.toml")
    return parse_manifests(load_toml(path.read_text("utf-8"), path.name), package="attn-core", version="0")[0]


@hookimpl
def attn_probe(manifest: Manifest, platform: Any) -> Mapping[str, Availability]:
    """It runs wherever torch does."""
    return {variant.name: Availability(True) for variant in manifest.variants}


@hookimpl
def attn_create(manifest: Manifest, variant: str, context: Context) -> MlaReference:
    """The backend object."""
    return MlaReference(context)
