"""Canaries and snapshots: proof that a backend wrote only where it may.

:func:`guarded` puts a tensor between two strips of known bytes; :class:`Watch` remembers the bytes of tensors and says
afterwards which of them changed, and where.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

#: Bytes on each side of a guarded tensor.
STRIP = 256
_CANARY = 0xA5


@dataclass(slots=True)
class Guarded:
    """A tensor inside a larger byte buffer. ``tensor`` is what a backend gets."""

    name: str
    tensor: torch.Tensor
    buffer: torch.Tensor

    def problems(self) -> list[str]:
        """One line for each strip that was written to."""
        found = []
        for side, strip in (("before", self.buffer[:STRIP]), ("after", self.buffer[-STRIP:])):
            changed = int((strip != _CANARY).sum())
            if changed:
                found.append(f"{self.name}: {changed} canary bytes {side} the tensor were overwritten")
        return found


def guarded(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Guarded:
    """A contiguous tensor, filled with NaN (or the largest integer), between two canary strips."""
    count = 1
    for size in shape:
        count *= size
    nbytes = count * torch.empty((), dtype=dtype).element_size()
    buffer = torch.full((STRIP + nbytes + (-nbytes) % STRIP + STRIP,), _CANARY, dtype=torch.uint8, device=device)
    tensor = buffer[STRIP : STRIP + nbytes].view(dtype).view(shape)
    tensor.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)
    return Guarded(name, tensor, buffer)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as bytes u8[numel, element size], whatever its strides."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).view(flat.numel(), tensor.element_size())


@dataclass(slots=True)
class Watch:
    """Remembers tensors by name and reports which changed since. ``allow`` lists names that may change."""

    seen: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor | None) -> None:
        """Remember the bytes of `tensor` (None is ignored)."""
        if tensor is not None:
            self.seen.append((name, tensor, bytes_of(tensor).clone()))

    def problems(self) -> list[str]:
        """One line a changed tensor, with the index of its first changed element."""
        found = []
        for name, tensor, before in self.seen:
            changed = (bytes_of(tensor) != before).any(dim=1)
            if bool(changed.any()):
                first = int(changed.nonzero()[0])
                place = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape))
                found.append(f"{name}: {int(changed.sum())} elements were changed, the first at {list(place)}")
        return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes (NaN equals NaN, -0 differs from 0)."""
    return a.shape == b.shape and a.dtype == b.dtype and bool((bytes_of(a) == bytes_of(b)).all())
