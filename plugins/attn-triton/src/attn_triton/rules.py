"""From a layer group to the compile-time constants of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.geometry import MhaGeometry

LOG2_E = 1.4426950408889634


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides visibility and logits. ``window`` and ``chunk`` 0 = none; ``right`` -1 = to the end of the keys."""

    window: int
    right: int
    chunk: int
    softcap: float
    scale: float

    @classmethod
    def of(cls, geometry: MhaGeometry, causal: bool | None = None) -> Rules:
        """The rules of a geometry. `causal` overrides it for one chunk of a prefix: False sees all keys of the chunk."""
        if causal is False:
            return cls(0, -1, 0, geometry.softcap or 0.0, geometry.scale)
        right = geometry.window_right
        if right is None:
            right = 0 if geometry.causal or causal else -1
        return cls(geometry.window or 0, right, geometry.chunk or 0, geometry.softcap or 0.0, geometry.scale)

    def factors(self, exponent: int) -> tuple[float, float]:
        """(factor, softcap) of the kernel: logits in base 2; ``2 ** exponent`` undoes how keys and queries are stored."""
        factor = self.scale * LOG2_E * 2.0**exponent
        if self.softcap:
            return factor * 2.0 / self.softcap, self.softcap * LOG2_E
        return factor, 0.0


@dataclass(frozen=True, slots=True)
class Tile:
    """How queries are cut: BLOCK_M rows hold ``tokens`` tokens times ``group`` heads of one KV head."""

    block_m: int
    block_n: int
    group: int
    head_blocks: int
    warps: int
    stages: int
    resident: int = 4
    ahead: bool = False  #: page numbers are read one block ahead
    hopper: bool = False  #: the warp-specialised kernel, where it fits
    processors: int = 1

    @property
    def tokens(self) -> int:
        """Tokens in one tile."""
        return self.block_m // self.group
