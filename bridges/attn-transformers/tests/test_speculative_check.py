"""Plain decoding led along answers: each token's logits on both sides, mismatches, and batches with several of each row."""

from __future__ import annotations

import pytest
import torch
from draft_oracle import Oracle, oracle_shape
from tiny_models import PROMPTS, alone, make

from attn_transformers.speculative.build import build

NEW = 12


@pytest.fixture(scope="module")
def model():
    return make("llama")


@pytest.fixture(scope="module")
def expected(model):
    return alone(model, new=NEW).tolist()


def test_own_logits_are_those_behind_which_each_token_was_chosen(model, expected):
    """Of a tree whose accepted paths do not lie in one piece, with answers that end in the middle of a step."""
    shape = oracle_shape(2)
    with build(model, shape, PROMPTS, NEW - 1, drafter=Oracle(shape, expected)) as speculator:
        outcome = speculator.generate(PROMPTS, NEW - 1, keep_best=True)
        mismatches, plain = speculator.check(PROMPTS, outcome.tokens, own=outcome.best)
    assert mismatches == []
    for prompt, tokens, best, other in zip(PROMPTS, outcome.tokens, outcome.best, plain.best, strict=True):
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        wanted = logits.topk(32)
        assert torch.allclose(best.values, wanted.values, atol=1e-4)
        assert best.tokens[:, 0].tolist() == tokens
        assert torch.equal(best.tokens, other.tokens)
        assert torch.allclose(best.values, other.values, atol=1e-4)
        assert not torch.equal(best.values, other.values)


def test_a_mismatch_tells_both_sides(model, expected):
    shape = oracle_shape(1)
    with build(model, shape, PROMPTS, NEW, drafter=Oracle(shape, expected)) as speculator:
        outcome = speculator.generate(PROMPTS, NEW, keep_best=True)
        wrong = [list(line) for line in outcome.tokens]
        second = int(outcome.best[1].tokens[4, 1])
        wrong[1] = [*wrong[1][:4], second]
        mismatches, _ = speculator.check(PROMPTS, wrong, own=outcome.best)
    (one,) = mismatches
    assert (one.row, one.place, one.token, one.choice) == (1, 4, second, expected[1][4])
    assert one.gap == pytest.approx(one.top2)
    assert one.own_gap == pytest.approx(-one.gap, abs=1e-4)
    assert one.own_top2 == pytest.approx(one.top2, abs=1e-4)


@pytest.mark.parametrize("copies", [1, 3])
def test_copies_change_nothing_but_the_batch(model, expected, copies):
    shape, seen = oracle_shape(1), []
    with build(model, shape, PROMPTS, NEW, drafter=Oracle(shape, expected), copies=copies) as speculator:
        outcome = speculator.generate(PROMPTS, NEW, keep_best=True)
        kept = speculator.target.begin
        speculator.target.begin = lambda batch: (seen.append((batch.segments[0].phase, batch.num_rows)), kept(batch))[1]
        mismatches, control = speculator.check(PROMPTS, outcome.tokens, own=outcome.best, copies=copies)
        free = speculator.target.kv.stats().pools[0]
    assert mismatches == []
    assert (len(control.best), free.free) == (len(PROMPTS), free.total)
    assert seen == [("prefill", 4)] * copies + [("decode", 4 * copies)] * (NEW - 1)
