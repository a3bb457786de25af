"""Token trees for verify steps: from a list of parents to depth and mask bits (CONTRACT, ``Tree``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_core.batch import Tree

#: Named shapes: parents of each draft, -1 for a root.
TREES = {
    "chain": lambda drafts: [i - 1 for i in range(drafts)],
    "star": lambda drafts: [-1] + [0] * (drafts - 1),
    "binary": lambda drafts: [-1] + [(i - 1) // 2 for i in range(1, drafts)],
    "forest": lambda drafts: [-1 if i < 2 else i - 2 for i in range(drafts)],
}


def depths(parents: Sequence[int]) -> list[int]:
    """Distance of each draft from its root. Raises ValueError where a parent does not come before its child."""
    depth: list[int] = []
    for draft, parent in enumerate(parents):
        if not -1 <= parent < draft:
            raise ValueError(f"draft {draft} has parent {parent}; parents come before their children")
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return depth


def ancestors(parents: Sequence[int], draft: int) -> list[int]:
    """`draft` itself and all drafts on the way to its root."""
    line = []
    while draft >= 0:
        line.append(draft)
        draft = parents[draft]
    return line


def mask_words(parents: Sequence[int], words: int | None = None) -> list[list[int]]:
    """Signed 32-bit words of each draft's mask: bit j % 32 of word j // 32 is set when the draft sees draft j."""
    count = words or (len(parents) + 31) // 32
    rows = []
    for draft in range(len(parents)):
        line = [0] * count
        for seen in ancestors(parents, draft):
            line[seen // 32] |= 1 << (seen % 32)
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in line])
    return rows


def build_tree(
    parents: Sequence[Sequence[int]], *, padded_rows: int | None = None, device: torch.device | str = "cpu"
) -> Tree:
    """The tree of a verify step from the parents of each row. Rows of padding are chains."""
    drafts = len(parents[0]) if parents else 1
    rows = [list(row) for row in parents]
    rows += [list(TREES["chain"](drafts)) for _ in range((padded_rows or len(rows)) - len(rows))]

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Tree(
        parents=tensor(rows).view(len(rows), drafts),
        depth=tensor([depths(row) for row in rows]).view(len(rows), drafts),
        mask_bits=tensor([mask_words(row) for row in rows]).view(len(rows), drafts, (drafts + 31) // 32),
    )
