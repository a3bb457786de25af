"""Trees, acceptance, n-gram lookup and the moving of keys, each by itself."""

from __future__ import annotations

import pytest
import torch

from attn_core.cache import PagedKVCache
from attn_core.testing.trees import TREES, build_tree
from attn_transformers.speculative.drafts import NgramDrafter
from attn_transformers.speculative.slots import keep_accepted, slot_of
from attn_transformers.speculative.trees import Proposal, Shape, accept, depths, graft, pack


@pytest.mark.parametrize("drafts", [1, 5, 31, 32, 33, 70])
@pytest.mark.parametrize("name", ["chain", "star", "binary"])
def test_trees_are_packed_as_the_kit_packs_them(name, drafts):
    parents = TREES[name](drafts)
    ours, kits = pack([Proposal((0,) * drafts, tuple(parents))], "cpu"), build_tree([parents])
    for field in ("parents", "depth", "mask_bits"):
        assert torch.equal(getattr(ours, field), getattr(kits, field)), field
        assert getattr(ours, field).dtype == torch.int32


@pytest.mark.parametrize("parents", [(-1, 2, 0), (0, 0), (-1, -1)])
def test_impossible_trees(parents):
    with pytest.raises(ValueError, match="parents come first"):
        depths(parents)


def test_acceptance_walks_from_the_root_to_the_first_choice_that_nobody_drafted():
    #            0:1 -> 1:5, 2:6;  2 -> 3:7, 4:8;  4 -> 5:9
    proposal = Proposal((1, 5, 6, 7, 8, 9), (-1, 0, 0, 2, 2, 4))
    assert accept(proposal, [6, 0, 8, 0, 9, 3]) == ((0, 2, 4, 5), (6, 8, 9, 3))
    assert accept(proposal, [5, 4, 8, 0, 9, 3]) == ((0, 1), (5, 4))
    assert accept(proposal, [9, 0, 0, 0, 0, 0]) == ((0,), (9,))


def test_grafted_chains_share_what_they_begin_with():
    made = graft([[4, 5, 6], [4, 7]], 1, Shape.of(2, 3))
    assert made == Proposal((1, 4, 5, 6, 7, 1, 1), (-1, 0, 1, 2, 1, 0, 0))
    assert graft([[4]], 1, Shape.of(1, 3)) == Proposal((1, 4, 1, 1), (-1, 0, 1, 2))
    assert len(graft([[n] for n in range(9)], 1, Shape.of(2, 1)).tokens) == 3


def test_lookup_takes_the_longest_match_first_and_the_newest_of_equals():
    row = [1, 2, 3, 8, 9, 2, 3, 5, 3, 6, 1, 2, 3]
    chain = NgramDrafter(Shape.of(1, 2)).propose([0], [row])[0]
    assert chain.tokens == (3, 8, 9)
    tree = NgramDrafter(Shape.of(3, 2)).propose([0], [row])[0]
    assert tree.tokens[1:] == (8, 9, 5, 3, 6, 1)
    assert tree.parents == (-1, 0, 1, 0, 3, 0, 5)
    assert NgramDrafter(Shape.of(1, 2)).propose([0], [[4]])[0].tokens == (4, 4, 4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8_e4m3", "fp4"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_accepted_keys_move_and_nothing_else_changes(page_size, dtype, layout):
    if dtype == "fp4" and layout == "HND":
        pytest.skip("one layout of packed elements is enough")
    kv = PagedKVCache.plain(
        layers=2, kv_heads=2, head_dims=(16, 32), page_size=page_size, num_pages=40, dtype=dtype, layout=layout
    )
    rows = [kv.new_request() for _ in range(3)]
    for row, prefix in zip(rows, (3, 5, 0), strict=True):
        kv.extend(row, prefix + 6)
    planes = [
        plane.view(torch.uint8)
        for layer in range(2)
        for plane in (kv.layer(layer).k, kv.layer(layer).v, kv.layer(layer).k_blocks, kv.layer(layer).v_blocks)
        if plane is not None
    ]
    for plane in planes:
        plane.copy_(torch.randint(0, 100, plane.shape, dtype=torch.uint8))
    before = [plane.clone() for plane in planes]
    paths = [(0, 2, 3), (0, 1), (0, 1, 4, 5)]
    pages = [list(row.pages[0]) for row in rows]
    keep_accepted(kv, rows, [3, 5, 0], paths)
    assert [row.length for row in rows] == [6, 7, 4]
    moves = [(0, 3, 2, 1), (0, 3, 3, 2), (2, 0, 4, 2), (2, 0, 5, 3)]
    for plane, old in zip(planes, before, strict=True):
        wanted = old.clone()
        for row, prefix, node, depth in moves:
            source = slot_of(pages[row], page_size, prefix + node)
            target = slot_of(pages[row], page_size, prefix + depth)
            wanted[target // page_size, target % page_size] = old[source // page_size, source % page_size]
        assert torch.equal(plane, wanted)
