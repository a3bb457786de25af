"""The ragged batch inside a padded one: which of the new columns of each row are real tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn_core.errors import BatchError
from attn_transformers.checks import check_mask


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The real tokens among ``[rows, width]`` new columns. ``place`` is None when all of them are real."""

    rows: int
    width: int
    counts: tuple[int, ...]
    place: tuple[torch.Tensor, torch.Tensor] | None = None  #: (row i64[T], column i64[T])

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """``[rows, H, width, D]`` as contiguous ``[T, H, D]``."""
        columns = states.transpose(1, 2)
        if self.place is not None:
            return columns[self.place]
        return columns.reshape(-1, *columns.shape[2:])

    def unpack(self, out: torch.Tensor) -> torch.Tensor:
        """``[T, H, D]`` as ``[rows, width, H, D]``; padded columns are 0."""
        if self.place is None:
            return out.view(self.rows, self.width, *out.shape[1:])
        full = out.new_zeros((self.rows, self.width, *out.shape[1:]))
        full[self.place] = out
        return full


def new_tokens(mask: torch.Tensor | None, rows: int, width: int, columns: int, stored: Sequence[int]) -> NewTokens:
    """The real tokens of this forward. `columns` is what the cache has seen, `stored` how many of them were real, per row.

    `mask` is the padding mask ``[rows, columns + width]``, or None when nothing is padded. Raises :class:`BatchError` for
    another shape, for a mask that changed its mind about tokens in the cache, and for padding between tokens.
    """
    check_mask(mask, rows, columns + width)
    if mask is None:
        _check_stored([columns] * rows, stored)
        return NewTokens(rows, width, (width,) * rows)
    real = mask.to(torch.bool)
    _check_stored(real[:, :columns].sum(1).tolist(), stored)
    if bool((real[:, 1:] < real[:, :-1]).any()):
        raise BatchError(
            "the attention mask has padding after a token; only padding on the left can be left out of a batch",
            fix="tokenizer.padding_side = 'left'",
        )
    fresh = real[:, columns:]
    counts = tuple(fresh.sum(1).tolist())
    if counts == (width,) * rows:
        return NewTokens(rows, width, counts)
    row, column = fresh.nonzero(as_tuple=True)
    return NewTokens(rows, width, counts, (row, column))


def _check_stored(marked: Sequence[int], stored: Sequence[int]) -> None:
    if list(marked) != list(stored):
        raise BatchError(
            "the attention mask and the cache disagree about tokens that were seen before",
            f"mask     {list(marked)[:8]} real tokens a row",
            f"cache    {list(stored)[:8]}",
            fix="pass the same padding in every forward, with one more column for each new token",
        )
