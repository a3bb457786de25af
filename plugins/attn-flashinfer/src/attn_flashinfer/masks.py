"""The packed mask of a token tree: a bit for each (draft, key), least significant first, each row from a byte boundary on.

The library's custom mask replaces its causal mask and covers the whole row, prefix included. Windows and causality of a tree
count positions (prefix + depth), which the library does not know: they go into the mask.
"""

from __future__ import annotations

import numpy as np
import torch

from attn_core.batch import Tree


def build_mask(
    mask: torch.Tensor,
    mask_offsets: torch.Tensor,
    page_offsets: torch.Tensor,
    last_page: torch.Tensor,
    tree: Tree,
    page_size: int,
    window: int,
) -> None:
    """Fill ``mask`` u8[bytes] from device data alone: it may be recorded into a graph.

    ``mask_offsets`` i32[n + 1] are byte offsets, ``page_offsets`` i32[n + 1] and ``last_page`` i32[n] the row's pages.
    """
    if mask.device.type == "cuda":
        from attn_flashinfer.kernels import tree_mask

        drafts, words = tree.mask_bits.shape[1:]
        rows = last_page.numel()
        tree_mask[(-(-mask.numel() // 256),)](
            mask, mask_offsets, page_offsets, last_page, tree.mask_bits, tree.depth, rows, page_size, drafts, words, window,
            WINDOW=window > 0, STEPS=(rows + 1).bit_length(), BLOCK=256, num_warps=4,
        )  # fmt: skip
        return
    for row, packed in enumerate(_rows(page_offsets, last_page, tree, page_size, window)):
        start = int(mask_offsets[row])
        mask[start : start + packed.numel()].copy_(packed)


def _rows(
    page_offsets: torch.Tensor, last_page: torch.Tensor, tree: Tree, page_size: int, window: int
) -> list[torch.Tensor]:
    """The packed mask of each row, on a CPU."""
    drafts = tree.mask_bits.shape[1]
    found = []
    for row in range(last_page.numel()):
        pages = int(page_offsets[row + 1] - page_offsets[row])
        keys = max((pages - 1) * page_size + int(last_page[row]), 0)
        depth = tree.depth[row].long()
        key = torch.arange(keys) - (keys - drafts)  # negative: prefix
        draft = key.clamp(min=0)
        words = tree.mask_bits[row].long() & 0xFFFFFFFF
        bits = words[:, draft // 32] >> (draft % 32) & 1
        place = torch.where(key < 0, key, depth[draft])  # positions relative to the prefix's end
        sees = ((key < 0)[None, :] | (bits == 1)) & (place[None, :] <= depth[:, None])
        if window:
            sees &= place[None, :] > depth[:, None] - window
        found.append(torch.from_numpy(np.packbits(sees.flatten().numpy(), bitorder="little")))
    return found
