"""Token trees for a kernel that knows no masks: every draft token becomes a row of its own with a list of the slots it sees.

Without a window the prefix, which all drafts of a row see whole, is attended to in one pass and the drafts in another; core
merges the two by LSE. With a window each draft sees another part of the prefix, so the list holds that part, too, and one pass
is enough. Pages are slots here: a list of single tokens cannot be made of larger pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attn_flash.rules import OFF, Rules

if TYPE_CHECKING:
    from attn_core.batch import Tree
    from attn_flash.steps import Buffers, FlashMetadata


@dataclass(slots=True)
class TreeStep:
    """What the passes over a tree read: prefix i32[R], counts i32[T], slots i32[T, C]. ``cascade``: prefix in a pass of its own."""

    prefix: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor
    token_offsets: torch.Tensor
    cascade: bool
    prefix_call: list[object] | None = None
    own_call: list[object] | None = None


def list_width(drafts: int, rules: Rules, max_kv_len: int) -> int:
    """Entries of a token's list: all drafts, and with a window as many keys of the prefix as it can hold. One spare."""
    return drafts + 1 + (0 if rules.left == OFF else min(rules.left, max_kv_len))


def tree_step(buffers: Buffers, rows: int, tokens: int, width: int, rules: Rules) -> TreeStep:
    """The parts of `buffers` that a step of these sizes uses."""
    slots = buffers.own[: tokens * width].view(tokens, width)
    return TreeStep(
        buffers.prefix[:rows],
        buffers.counts[:tokens],
        slots,
        buffers.token_offsets[: tokens + 1],
        cascade=rules.left == OFF,
    )


def fill_tree(metadata: FlashMetadata, rules: Rules) -> None:
    """Lengths of prefixes, and every token's list, from the tree's bits. Device work only; sizes come from the host."""
    step, tree, lens, table = metadata.tree, metadata.masks, metadata.key_lens, metadata.table
    assert step is not None
    assert tree is not None
    assert lens is not None
    assert table is not None
    rows, drafts = tree.mask_bits.shape[:2]
    prefix = (lens - drafts).clamp(min=0)
    step.prefix.copy_(prefix)
    sees = visible(tree, drafts, rules) & (lens > 0)[:, None, None]
    line = torch.arange(rows, device=lens.device) if metadata.table_rows is None else metadata.table_rows.long()
    first = prefix.long()[:, None]
    own = lookup(table, line[:, None], first + torch.arange(drafts, device=lens.device))  # [R, S]
    ranks = torch.where(sees, sees.cumsum(-1) - 1, step.slots.shape[1] - 1)  # unseen drafts go to the spare column
    used = rows * drafts
    listed = step.slots[:used].view(rows, drafts, -1)
    listed.scatter_(2, ranks, own[:, None, :].expand(-1, drafts, -1))
    count = sees.sum(-1)  # [R, S]
    if not step.cascade:
        count = _add_prefix(listed, count, table, line, first, tree.depth, rules, lens)
    step.counts[:used].copy_(count.flatten())
    step.counts[used:].zero_()


def visible(tree: Tree, drafts: int, rules: Rules) -> torch.Tensor:
    """bool[R, S, S]: draft i sees draft j, by the bits, not beyond its own depth, and with a window not too far above it."""
    place = torch.arange(drafts, device=tree.mask_bits.device)
    sees = (tree.mask_bits[:, :, place // 32] >> (place % 32).to(torch.int32) & 1).bool()
    above = tree.depth[:, :, None] - tree.depth[:, None, :]
    if rules.causal:
        sees &= above >= 0
    if rules.left != OFF:
        sees &= above <= rules.left
    return sees


def lookup(table: torch.Tensor, lines: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """i32: entries of a table; a column outside it gives some entry of its line."""
    return table[lines, columns.clamp(0, table.shape[1] - 1)]


def _add_prefix(
    listed: torch.Tensor,
    count: torch.Tensor,
    table: torch.Tensor,
    line: torch.Tensor,
    prefix: torch.Tensor,
    depth: torch.Tensor,
    rules: Rules,
    lens: torch.Tensor,
) -> torch.Tensor:
    """Append the keys of the prefix inside each draft's window to its list; the new number of entries, i64[R, S]."""
    start = torch.minimum((prefix + depth - rules.left).clamp(min=0), prefix)
    more = torch.where((lens > 0)[:, None], prefix - start, 0)
    column = torch.arange(listed.shape[2], device=listed.device)
    key = start[:, :, None] + column - count[:, :, None]
    inside = (column >= count[:, :, None]) & (column < (count + more)[:, :, None])
    found = lookup(table, line[:, None, None], key)
    listed.copy_(torch.where(inside, found, listed))
    return count + more
