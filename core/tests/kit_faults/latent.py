"""Faults in latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_core.testing.reference_mla import MlaReference
from kit_faults._registry import fault

T = torch.Tensor
MLA = {"kind": "mla", "head_dims": (40, 32), "heads": (3, 1), "role": "absorbed"}


@fault("scale from the latent width", "absorbed_scale", **MLA)
class LatentWidthScale(MlaReference):
    def scale(self, geometry: Any) -> float:
        return float(geometry.qk_dim) ** -0.5


@fault("rope part of the row not attended to", "absorbed_numbers", **MLA)
class RopeDropped(MlaReference):
    def queries(self, q: T, layer: Any) -> T:
        joined = super().queries(q, layer)
        joined[..., layer.geometry.v_dim :] = 0
        return joined


@fault("values cut from the end of the row", "absorbed_numbers", **MLA)
class ValuesFromTheEnd(MlaReference):
    def values(self, rows: T, geometry: Any) -> T:
        return rows[..., -geometry.v_dim :]


@fault("latent scale dropped", "absorbed_numbers", **{**MLA, "dtypes": ("bf16", "fp8_e4m3", "bf16")})
class LatentScaleDropped(MlaReference):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        return super().read(cache, replace(layer, k_scale=None), metadata, keys)


@fault("latent scale applied to keys only", "absorbed_numbers", **{**MLA, "dtypes": ("bf16", "fp8_e4m3", "bf16")})
class LatentScaleKeysOnly(MlaReference):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        rows, values = super().read(cache, layer, metadata, keys)
        return rows, values / layer.k_scale.tensor


@fault("latent LSE in base 2", "absorbed_lse", **MLA)
class LatentLseBase2(MlaReference):
    def finish_lse(self, lse: T, none: T) -> T:
        return super().finish_lse(lse / 0.6931471805599453, none)


@fault("latent tree mask ignored", "latent_verify_tree", "verify", **MLA)
class LatentTreeIgnored(MlaReference):
    def tree_bit(self, tree: Any, row: T, me: T, other: T) -> T:
        return other <= me[:, None]


@fault("latent page read whole", "latent_unused_slots", **MLA)
class LatentWholePages(MlaReference):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        whole = replace(metadata, kv_lens=torch.full_like(metadata.kv_lens, 1 << 20))
        return super().read(cache, layer, whole, keys)


@fault("latent new tokens not causal", "absorbed_numbers", "prefill", **MLA)
class LatentNotCausal(MlaReference):
    def in_range(self, position: T, keys: T, geometry: Any) -> T:
        return super().in_range(position, keys, replace(geometry, causal=False))
