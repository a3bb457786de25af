"""Two ways to compute the same model, compared token by token: what differs, how far apart the logits are, and what is a tie."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

#: A tie, by the model's dtype: on both sides the two tokens' logits are no further apart than this. Two computations that add
#: in another order differ by as much; a wrong mask or a lost key moves logits by whole numbers.
TIES: Mapping[str, float] = {"fp32": 1e-3, "fp16": 3e-2, "bf16": 0.25}

#: How many of the best logits are kept of each token of an answer.
KEPT = 32


class Best(NamedTuple):
    """The best logits behind each token of one answer, best first: values f32[n, KEPT] and their tokens i64[n, KEPT]."""

    values: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class Mismatch:
    """A token that is not the reference's choice behind the same prefix.

    Places count from 0 in each answer. ``gap`` is the reference's best logit less its logit of `token`, ``top2`` its best less
    its second. ``own_gap`` is the answer's own logit of `token` less its own of `choice`, ``own_top2`` its own best less its
    second; None where the own logits were not kept. `own_gap` is a lower bound where `choice` is not among its own best.
    """

    row: int
    place: int
    token: int
    choice: int
    gap: float
    top2: float
    own_gap: float | None = None
    own_top2: float | None = None

    def tie(self, most: float) -> bool:
        """Whether both sides hold the two tokens to be as good, within `most`."""
        return self.gap <= most and (self.own_gap is None or self.own_gap <= most)


def kept_best(logits: torch.Tensor) -> Best:
    """The best logits of each line of [n, V]."""
    return Best(*logits.float().topk(min(KEPT, logits.shape[-1]), -1))


def judge(row: int, place: int, token: int, logits: torch.Tensor, own: Best | None = None) -> Mismatch | None:
    """Compare a token with the best of the reference's logits [V]; `own` are those of the whole answer.

    Of equal logits the first is the choice, as in greedy decoding.
    """
    choice = int(logits.argmax())
    if choice == token:
        return None
    line = logits.float()
    best = line.topk(2).values
    gap, top2 = float(best[0] - line[token]), float(best[0] - best[1])
    if own is None:
        return Mismatch(row, place, token, choice, gap, top2)
    values, tokens = own.values[place], own.tokens[place].tolist()
    mine = float(values[tokens.index(token)]) if token in tokens else float(values[-1])
    other = float(values[tokens.index(choice)]) if choice in tokens else float(values[-1])
    return Mismatch(row, place, token, choice, gap, top2, mine - other, float(values[0] - values[1]))


@dataclass(frozen=True)
class Distance:
    """How far apart the logits of two computations are: per token the largest difference among the kept ones."""

    median: float
    largest: float

    @classmethod
    def between(cls, one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> Distance:
        """Of the same tokens' logits, a tensor [n, k] an answer."""
        apart: list[float] = []
        for mine, theirs in zip(one, other, strict=True):
            apart += (mine - theirs).abs().amax(-1).tolist()
        return cls(statistics.median(apart), max(apart)) if apart else cls(0.0, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"median": self.median, "largest": self.largest}


def firsts(mismatches: Sequence[Mismatch], rows: int) -> list[Mismatch | None]:
    """The first mismatch of each of `rows` answers."""
    found: list[Mismatch | None] = [None] * rows
    for one in mismatches:
        earlier = found[one.row]
        if earlier is None or one.place < earlier.place:
            found[one.row] = one
    return found


def told(one: Mismatch, most: float | None) -> str:
    """One line about a mismatch; `most` None: it is not judged."""
    kind = "not judged" if most is None else "tie" if one.tie(most) else "DIFFERENT"
    own = "" if one.own_gap is None else f"; its own logits are {one.own_gap:.2e} apart"
    return (
        f"prompt {one.row + 1}, token {one.place}: {kind}: {one.token} instead of {one.choice}, logit gap {one.gap:.2e}, "
        f"top 2 apart by {one.top2:.2e}{own}{'' if most is None else f' (tolerance {most:g})'}"
    )
