"""From a layer group to the arguments that every call of the library takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_core.context import Context
from attn_core.errors import BindError
from attn_core.formats import torch_dtype
from attn_core.geometry import MhaGeometry

#: Scratch memory of split keys, a lane; what the manifest declares.
WORKSPACE_BYTES = 134_217_728


@dataclass(frozen=True, slots=True)
class Rules:
    """What does not change between steps. ``window`` 0 = none, counting the query itself; ``window_left`` does not count it."""

    variant: str
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    causal: bool
    window: int
    softcap: float
    sinks: bool
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    invariant: bool

    @property
    def window_left(self) -> int:
        """The library's meaning: keys before the query's own, -1 = all."""
        return self.window - 1 if self.window else -1

    @property
    def backend(self) -> str:
        """The library's word for the kernel family; its own ``auto`` is never used."""
        return "fa3" if self.variant == "fa3" else "fa2"

    @property
    def quantised(self) -> bool:
        """Whether the cache has scales."""
        return self.kv_dtype.itemsize == 1

    @property
    def key(self) -> str:
        """Names the compiled module: one key a set of compile-time choices."""
        kinds = f"{_short(self.q_dtype)}-{_short(self.kv_dtype)}"
        window, cap = "-window" if self.window else "", "-cap" if self.softcap else ""
        return f"flashinfer-{self.variant}-{kinds}-d{self.qk_dim}x{self.v_dim}{window}{cap}"

    @classmethod
    def of(cls, variant: str, context: Context) -> Rules:
        """The rules of a group. Raises :class:`BindError` for what no kernel of the library computes."""
        geometry = context.group.geometry
        assert isinstance(geometry, MhaGeometry)
        _refuse(variant, geometry)
        pool = context.pools.get("attend") or context.pools.get("cross")
        stored = context.dtype if pool is None else torch_dtype(pool.dtype)
        return cls(
            variant,
            geometry.q_heads,
            geometry.kv_heads,
            geometry.qk_dim,
            geometry.v_dim,
            geometry.scale,
            geometry.causal,
            geometry.window or 0,
            geometry.softcap or 0.0,
            geometry.sinks,
            context.dtype,
            stored,
            context.batch_invariant,
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(variant: str, geometry: MhaGeometry) -> None:
    """Raise for a geometry that the manifest does not declare: it would be ignored by a kernel, not refused."""
    faults = []
    if geometry.window_right is not None:
        faults.append("a right window")
    if geometry.chunk is not None:
        faults.append("chunked-local attention")
    if geometry.window and not geometry.causal:
        faults.append("a window without a causal mask")
    if geometry.sinks and variant != "sink":
        faults.append("attention sinks (only the variant sink adds them; the others would ignore them)")
    if geometry.softcap and variant == "sink":
        faults.append("a soft cap together with attention sinks")
    if faults:
        raise BindError(
            f"mha/flashinfer:{variant} does not compute {', '.join(faults)}",
            f"group    {geometry}",
            fix="--attention-backend triton",
        )
