"""Drafters: who guesses the next tokens of every row. The n-gram drafter needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attn_transformers.speculative.trees import Proposal, Shape, graft


class Drafter(Protocol):
    """Guesses what follows. Rows are known by their number; a wrong guess costs time and never changes the output."""

    def propose(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Proposal]:
        """One proposal per row, of the shape's width; ``tokens[i]`` is all of row i, its last token the proposal's root."""

    def drop(self, row: int) -> None:
        """The row has ended."""


class NgramDrafter:
    """What followed the last tokens the time before: a lookup in the row itself, longest match first, newest first."""

    def __init__(self, shape: Shape, longest: int = 3) -> None:
        self.shape, self.longest = shape, longest

    def propose(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Proposal]:
        """Up to ``topk`` different continuations per row."""
        return [graft(self._continuations(list(row)), row[-1], self.shape) for row in tokens]

    def drop(self, row: int) -> None:
        """Nothing is kept."""

    def _continuations(self, row: list[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for size in range(min(self.longest, len(row) - 1), 0, -1):
            key = row[-size:]
            for end in range(len(row) - 1, size - 1, -1):
                if row[end - size : end] == key:
                    guess = row[end : end + self.shape.steps]
                    if guess not in found:
                        found.append(guess)
                    if len(found) == self.shape.topk:
                        return found
        return found
