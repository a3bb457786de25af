"""Drafts of one row as a small tree: what a drafter proposes, what verify sees, and which path the target accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attn_core.batch import Tree
from attn_core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is drafted: `steps` levels, `topk` of the best tokens kept per level, `width` tokens verified per row.

    ``width`` counts the row's last token too, whose keys are not in the cache yet: it is the root of every tree. A chain
    (``topk`` 1) has ``steps + 1`` of them.
    """

    topk: int
    steps: int
    width: int

    @classmethod
    def of(cls, topk: int, steps: int, width: int | None = None) -> Shape:
        """The shape with its usual width: ``1 + topk * steps``. Raises :class:`UsageError` for one that cannot be filled."""
        if topk < 1 or steps < 1:
            raise UsageError(f"topk {topk} and {steps} draft steps: both must be positive")
        usual = 1 + topk * steps
        most = 1 + topk + (steps - 1) * topk * topk
        width = usual if width is None else width
        if topk == 1 and width != usual:
            raise UsageError(
                f"a chain of {steps} drafts has {usual} tokens with the row's last one; {width} were asked for",
                fix=f"--speculative-num-draft-tokens {usual}, or --topk above 1",
            )
        if not 2 <= width <= most:
            raise UsageError(
                f"{width} tokens a row cannot be drafted in {steps} steps of topk {topk}",
                f"possible 2 to {most}, the row's last token included",
            )
        return cls(topk, steps, width)

    @property
    def chain(self) -> bool:
        """No branches: verify needs no mask."""
        return self.topk == 1


class Proposal(NamedTuple):
    """The drafts of one row. ``tokens[0]`` is the row's last token; ``parents[i] < i``, -1 for the root alone."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


class Accepted(NamedTuple):
    """What verify kept: the nodes whose keys stay (root first) and the tokens that the row gains, one a node."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def depths(parents: Sequence[int]) -> list[int]:
    """Distance of each node from the root. Raises ValueError where a parent does not come before its child."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node or (parent < 0) != (node == 0):
            raise ValueError(f"node {node} has parent {parent}: parents come first, and only node 0 is a root")
        found.append(found[parent] + 1 if node else 0)
    return found


def mask_words(parents: Sequence[int]) -> list[list[int]]:
    """Signed 32-bit words of each node's mask: bit j % 32 of word j // 32 is set for the node itself and its ancestors."""
    words = -(-len(parents) // 32)
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    lines = [[bits >> 32 * word & 0xFFFFFFFF for word in range(words)] for bits in seen]
    return [[word - (1 << 32) if word >> 31 else word for word in line] for line in lines]


def pack(proposals: Sequence[Proposal], device: torch.device | str) -> Tree:
    """The :class:`Tree` of a verify step: parents and depth i32[R, S], mask_bits i32[R, S, ceil(S / 32)]."""

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    return Tree(
        tensor([proposal.parents for proposal in proposals]),
        tensor([depths(proposal.parents) for proposal in proposals]),
        tensor([mask_words(proposal.parents) for proposal in proposals]),
    )


def accept(proposal: Proposal, choices: Sequence[int]) -> Accepted:
    """Greedy acceptance: from the root to the child that holds the target's choice, until no child does.

    ``choices[i]`` is the target's next token after node i. The last token gained has no node: it is the row's new last one.
    """
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(proposal.tokens)):
        children.setdefault((proposal.parents[node], proposal.tokens[node]), node)
    path, gained = [0], [choices[0]]
    while (node := children.get((path[-1], gained[-1]), -1)) > 0:
        path.append(node)
        gained.append(choices[node])
    return Accepted(tuple(path), tuple(gained))


def graft(chains: Sequence[Sequence[int]], last: int, shape: Shape) -> Proposal:
    """A proposal from guesses of what follows `last`: chains that begin alike share their nodes.

    What is missing to the width is filled with `last` itself: below the end of a chain, else below the root.
    """
    tokens, parents = [last], [-1]
    known: dict[tuple[int, int], int] = {}
    for chain in chains:
        node = 0
        for token in chain[: shape.steps]:
            child = known.get((node, token))
            if child is None:
                if len(tokens) == shape.width:
                    break
                child = known[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
    while len(tokens) < shape.width:
        parents.append(len(tokens) - 1 if shape.chain else 0)
        tokens.append(last)
    return Proposal(tuple(tokens), tuple(parents))
