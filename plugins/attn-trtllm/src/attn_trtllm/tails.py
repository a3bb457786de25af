"""Last pages that are not full: what follows a row's last key may hold anything, and 0 times NaN is NaN.

Kernels that load whole pages get a copy of each row's last page with zeros after its last key. One step keeps one buffer for
the copies, which its layers use one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True, eq=False)
class Tails:
    """The last pages of a step: ``pages`` i64[R], their ``columns`` in the table i64[R, 1], ``drop`` bool[R, P, 1, 1]."""

    columns: torch.Tensor
    pages: torch.Tensor
    drop: torch.Tensor
    buffers: dict[tuple[torch.dtype, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, table: torch.Tensor, kv_lens: torch.Tensor, page: int) -> Tails:
        """From a table i32[R, W] and lengths i32[R] of at least 1; nothing waits for the device."""
        last = (kv_lens.to(torch.int64) - 1).clamp(min=0)[:, None]
        columns = last // page
        place = torch.arange(page, device=table.device)
        return cls(columns, table.gather(1, columns)[:, 0].to(torch.int64), (place > last % page)[..., None, None])

    def clean(self, k: torch.Tensor, v: torch.Tensor, base: int, heads_first: bool) -> torch.Tensor:
        """The copies, [2 * R, ...] like pages of k: first those of K, then those of V, whole blocks from address `base`."""
        rows, block, size = len(self.pages), k[0].numel(), k.element_size()
        key = k.dtype, block
        buffer = self.buffers.get(key)
        if buffer is None:
            buffer = self.buffers[key] = torch.empty((2 * rows + 1) * block, dtype=k.dtype, device=k.device)
        start = (base - buffer.data_ptr()) % (block * size) // size
        copies = buffer[start : start + 2 * rows * block].view(2 * rows, *k.shape[1:])
        drop = self.drop.transpose(1, 2) if heads_first else self.drop
        for source, target in ((k, copies[:rows]), (v, copies[rows:])):
            raw, clean = (t.view(torch.uint8) if size == 1 else t for t in (source, target))
            clean.copy_(raw.index_select(0, self.pages).masked_fill_(drop, 0))
        return copies
