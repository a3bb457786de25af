"""SGLang's boolean draft masks as attn-core's tree: parents, depth, packed bits. Device work only, no waiting."""

from __future__ import annotations

import torch

from attn_core.batch import Tree
from attn_core.errors import BatchError


def draft_mask(
    mask: torch.Tensor, lens: torch.Tensor, rows: int, width: int, drafts_only: bool = False
) -> torch.Tensor:
    """bool[R, S, S]: which drafts each draft sees, from either of SGLang's layouts.

    Drafts only: ``R * S * S`` cells. Full: row r has S lines of ``lens[r] + S`` cells, the prefix first. `lens` i64[R]
    counts the prefix. A buffer for larger steps may be longer than needed: `drafts_only` says that it is of the first form.
    Raises :class:`BatchError` for a mask that is shorter than the drafts alone.
    """
    flat = mask.reshape(-1)
    cells = rows * width * width
    if flat.numel() < cells:
        raise BatchError(f"the draft mask has {flat.numel()} cells; {rows} rows of {width} drafts need {cells}")
    if drafts_only or flat.numel() == cells:
        return flat[:cells].view(rows, width, width).to(torch.bool)
    lens = lens.to(torch.int64)
    lines = lens + width
    starts = torch.cumsum(lines * width, 0) - lines * width
    draft = torch.arange(width, device=mask.device)
    places = (starts[:, None] + draft * lines[:, None] + lens[:, None])[:, :, None] + draft
    return flat[places.clamp_max(flat.numel() - 1)].to(torch.bool)


def tree_from(seen: torch.Tensor) -> Tree:
    """The tree of bool[R, S, S]. A draft always sees itself; its parent is the last earlier draft that it sees."""
    rows, width, _ = seen.shape
    index = torch.arange(width, device=seen.device)
    seen = (seen | (index[:, None] == index)) & (index[:, None] >= index)
    earlier = seen & (index[:, None] > index)
    parents = torch.where(earlier, index, -1).amax(-1)
    words = -(-width // 32)
    bits = seen.new_zeros((rows, width, words * 32), dtype=torch.int64)
    bits[..., :width] = seen
    packed = (bits.view(rows, width, words, 32) << torch.arange(32, device=seen.device)).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return Tree(parents.to(torch.int32), (seen.sum(-1) - 1).to(torch.int32), packed.to(torch.int32))


def tree_of(mask: torch.Tensor | None, lens: torch.Tensor, rows: int, width: int, drafts_only: bool = False) -> Tree:
    """The tree of a verify step; a chain where SGLang gives no mask (while capturing)."""
    if mask is None:
        chain = torch.ones(width, width, dtype=torch.bool, device=lens.device).tril()
        return tree_from(chain.expand(rows, -1, -1))
    return tree_from(draft_mask(mask, lens, rows, width, drafts_only))
