"""From a layer group to what FlashAttention calls take: masks, windows, scale; and which pages a kernel may read whole."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.geometry import MhaGeometry

#: Windows that are off, as both libraries' adapters here write them; FA4 wants None instead.
OFF = -1


@dataclass(frozen=True, slots=True)
class Rules:
    """``left`` and ``right`` are keys before and after a query's own, both inclusive, -1 without a limit; ``chunk`` 0 = none."""

    causal: bool
    left: int
    right: int
    chunk: int
    softcap: float
    scale: float

    @classmethod
    def of(cls, geometry: MhaGeometry) -> Rules:
        """The rules of a geometry. A window of N counts the query's own position: N - 1 keys before it."""
        causal = geometry.causal and geometry.window_right is None
        left = OFF if geometry.window is None else geometry.window - 1
        right = 0 if causal and left != OFF else OFF
        if not causal and geometry.window_right is not None:
            right = geometry.window_right
        return cls(causal, left, right, geometry.chunk or 0, geometry.softcap or 0.0, geometry.scale)

    def without_mask(self) -> Rules:
        """The same logits with every key visible: one chunk of a prefix."""
        return Rules(False, OFF, OFF, 0, self.softcap, self.scale)

    @property
    def local(self) -> bool:
        """Whether the mask is more than causal or nothing."""
        return bool(self.left != OFF or (self.right != OFF and not self.causal) or self.chunk)


def largest_part(page: int, limit: int) -> int:
    """The largest divisor of `page` that is not over `limit`."""
    return max(part for part in range(1, min(page, limit) + 1) if page % part == 0)
