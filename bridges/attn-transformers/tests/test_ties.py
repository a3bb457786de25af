"""What is a difference, what is a tie, and how far apart logits are."""

from __future__ import annotations

import pytest
import torch

from attn_transformers import ties
from attn_transformers.ties import Best, Distance, Mismatch, firsts, judge, kept_best, told


def test_of_equal_logits_the_first_is_the_choice():
    logits = torch.tensor([1.0, 4.0, 4.0, 0.0], dtype=torch.bfloat16)
    assert judge(0, 0, 1, logits) is None
    found = judge(2, 5, 2, logits)
    assert found == Mismatch(2, 5, 2, 1, 0.0, 0.0)
    assert found.tie(0.0)


def test_gaps_of_both_sides():
    own = kept_best(torch.tensor([[9.0, 9.0, 9.0], [2.0, 5.0, 4.0]]))
    found = judge(0, 1, 1, torch.tensor([3.0, 3.5, 5.5]), own)
    assert found == Mismatch(0, 1, 1, 2, 2.0, 2.0, 1.0, 1.0)
    assert not found.tie(1.5)
    assert found.tie(2.0)
    assert not Mismatch(0, 0, 1, 2, 0.1, 0.1, 0.3).tie(0.25)


def test_a_choice_that_was_not_kept_gives_a_lower_bound(monkeypatch):
    monkeypatch.setattr(ties, "KEPT", 2)
    own = kept_best(torch.tensor([[2.0, 5.0, 4.0]]))
    assert own.tokens.tolist() == [[1, 2]]
    found = judge(0, 0, 1, torch.tensor([7.0, 1.0, 0.0]), own)
    assert found is not None
    assert (found.choice, found.own_gap) == (0, 1.0)


def test_distances():
    one = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0]])]
    other = [torch.tensor([[1.5, 2.0], [3.0, 2.0]]), torch.tensor([[0.0, -1.0]])]
    assert Distance.between(one, other) == Distance(1.0, 2.0)
    assert Distance.between([], []).to_dict() == {"median": 0.0, "largest": 0.0}


def test_firsts():
    late, early, other = Mismatch(1, 5, 0, 0, 0, 0), Mismatch(1, 2, 0, 0, 0, 0), Mismatch(0, 9, 0, 0, 0, 0)
    assert firsts([late, early, other], 3) == [other, early, None]


@pytest.mark.parametrize(("most", "word"), [(0.25, "tie"), (0.1, "DIFFERENT"), (None, "not judged")])
def test_one_line(most, word):
    line = told(Mismatch(0, 3, 7, 8, 0.125, 0.125, 0.0625, 0.0625), most)
    assert line.startswith(f"prompt 1, token 3: {word}: 7 instead of 8, logit gap 1.25e-01")
    assert "its own logits are 6.25e-02 apart" in line
    assert Best(torch.zeros(1), torch.zeros(1)).values.shape == (1,)
