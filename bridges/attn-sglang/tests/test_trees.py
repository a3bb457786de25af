"""Draft masks as trees."""

from __future__ import annotations

import pytest
import torch

from attn_core.errors import BatchError
from attn_sglang.trees import draft_mask, tree_from, tree_of


def seen_of(parents):
    width = len(parents)
    seen = torch.zeros(width, width, dtype=torch.bool)
    for node in range(width):
        up = node
        while up >= 0:
            seen[node, up] = True
            up = parents[up]
    return seen


PARENTS = [[-1, 0, 0, 1, 1, 4], [-1, 0, 1, 2, 3, 4]]


def test_parents_depths_and_bits():
    tree = tree_from(torch.stack([seen_of(p) for p in PARENTS]))
    assert tree.parents.tolist() == PARENTS
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert tree.mask_bits[0, 5, 0] == 0b110011
    assert tree.mask_bits.dtype == tree.parents.dtype == torch.int32


def test_more_than_a_word_of_drafts():
    tree = tree_of(None, torch.tensor([3]), 1, 70)
    assert tree.mask_bits.shape == (1, 70, 3)
    assert tree.mask_bits[0, 69].tolist() == [-1, -1, 0b111111]
    assert tree.mask_bits[0, 31].tolist() == [-1, 0, 0]


def test_the_three_forms_of_a_mask_are_one():
    seen = torch.stack([seen_of(p) for p in PARENTS])
    lens = torch.tensor([7, 2])
    full = torch.cat(
        [torch.cat([torch.ones(6, int(n), dtype=torch.bool), s], 1).flatten() for n, s in zip(lens, seen, strict=True)]
    )
    buffer = torch.cat([seen.flatten(), torch.zeros(99, dtype=torch.bool)])
    assert torch.equal(draft_mask(full, lens, 2, 6), seen)
    assert torch.equal(draft_mask(seen.flatten(), lens, 2, 6), seen)
    assert torch.equal(draft_mask(buffer, lens, 2, 6, drafts_only=True), seen)
    assert torch.equal(draft_mask(torch.cat([full, full]), lens, 2, 6), seen)
    with pytest.raises(BatchError, match="has 71 cells"):
        draft_mask(buffer[:71], lens, 2, 6)


def test_a_draft_sees_itself_and_never_a_later_one():
    tree = tree_from(torch.tensor([[[0, 1], [0, 0]]], dtype=torch.bool))
    assert tree.mask_bits.flatten().tolist() == [1, 2]
    assert tree.parents.tolist() == [[-1, -1]]
