"""Speculative decoding of tiny models: the output is plain decoding's, whatever drafts, masks, pages and backends are used."""

from __future__ import annotations

import pytest
import torch
from draft_oracle import Oracle, oracle_shape
from tiny_models import PROMPTS, alone, make

from attn_core.discovery import Registry
from attn_core.errors import BatchError, PlanError, UsageError
from attn_core.graphs import RerunRecorder
from attn_core.model import parse_model
from attn_core.options import Options
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.testing import reference_backend
from attn_transformers.speculative import engine, slots
from attn_transformers.speculative.build import build
from attn_transformers.speculative.draft_model import ModelDrafter, truncated
from attn_transformers.speculative.trees import Shape

NEW = 12
SPLIT = {"prefill_attention_backend": "torch_native", "decode_attention_backend": "flex_attention:eager"}


@pytest.fixture(scope="module")
def model():
    return make("llama")


@pytest.fixture(scope="module")
def expected(model):
    return alone(model, new=NEW).tolist()


def run(model, shape, prompts=PROMPTS, new=NEW, **options):
    """(outcome, mismatches, outcome of plain decoding)."""
    with build(model, shape, prompts, new, **options) as speculator:
        outcome = speculator.generate(prompts, new)
        return outcome, *speculator.check(prompts, outcome.tokens)


# --- the matrix -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("split", [{}, SPLIT], ids=["one", "split"])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_output_is_plain_decodings(model, expected, topk, mode, split, page_size):
    shape = oracle_shape(topk)
    drafter = Oracle(shape, expected)
    options = {"page_size": page_size, "speculative_attention_mode": mode, **split}
    outcome, mismatches, plain = run(model, shape, drafter=drafter, **options)
    assert outcome.tokens == expected
    assert mismatches == []
    assert 0.5 < outcome.acceptance < 1.0
    assert (outcome.moved > 0) == (topk == 2)
    verifies = "torch_native" if mode == "prefill" or not split else "flex_attention"
    decodes = "flex_attention" if split else "torch_native"
    assert outcome.calls[verifies]["verify"] == 3 * outcome.verify_steps
    assert "decode" not in {phase for phases in outcome.calls.values() for phase in phases}
    assert plain.calls[decodes]["decode"] == 3 * (NEW - 1)
    assert sorted(drafter.dropped)[: len(PROMPTS)] == list(range(len(PROMPTS)))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("draft", "layers"), [("ngram", 0), ("truncated", 1)])
@pytest.mark.parametrize("shape", [Shape.of(1, 3), Shape.of(3, 3), Shape.of(2, 1)], ids=["chain", "tree", "one step"])
def test_real_drafters(model, expected, draft, layers, shape, page_size):
    outcome, mismatches, _ = run(model, shape, draft=draft, draft_layers=layers, page_size=page_size)
    assert outcome.tokens == expected
    assert mismatches == []
    phases = outcome.calls["torch_native"]
    assert ("draft_extend" in phases) == (draft == "truncated")
    assert ("draft" in phases) == (draft == "truncated" and shape.steps > 1)


def test_a_sliding_window_model_with_two_pools():
    model = make("qwen2")
    expected = alone(model, new=NEW).tolist()
    shape = oracle_shape(2)
    outcome, mismatches, _ = run(model, shape, drafter=Oracle(shape, expected), page_size=4)
    assert (outcome.tokens, mismatches) == (expected, [])
    assert outcome.moved


def test_answers_end_at_the_end_token_in_the_middle_of_an_accepted_path(model, expected):
    shape = oracle_shape(1)
    end = expected[0][2]
    cut = [line[: line.index(end) + 1] if end in line else line for line in expected]
    with build(model, shape, PROMPTS, NEW, drafter=Oracle(shape, expected)) as speculator:
        outcome = speculator.generate(PROMPTS, NEW, {end})
        free = speculator.target.kv.stats().pools[0]
    assert outcome.tokens == cut
    assert free.free == free.total


@pytest.mark.parametrize("new", [1, 2, 5])
def test_no_token_too_many(model, expected, new):
    shape = oracle_shape(1)
    outcome, _, _ = run(model, shape, new=new, drafter=Oracle(shape, expected))
    assert outcome.tokens == [line[:new] for line in expected]


# --- drafts of a model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_draft_as_good_as_the_target_is_always_accepted(model, expected, page_size):
    """Every draft of a chain is the target's token only if the draft's own keys are right: prefix, branches and steps."""
    outcome, _, _ = run(model, Shape.of(1, 4), new=11, draft="truncated", draft_layers=3, page_size=page_size)
    assert outcome.tokens == [line[:11] for line in expected]
    assert outcome.acceptance == 1.0
    assert outcome.verify_steps == 2  # ten tokens after the first, five a step


def test_branches_take_over_keys_of_the_branch_they_continue(model, monkeypatch):
    """Log-probabilities of a tree's nodes must be the target's own: checked by a draft of all layers."""
    shape = Shape.of(3, 4, 25)
    right = tree_scores(model, shape)
    assert right < 1e-3
    monkeypatch.setattr(ModelDrafter, "_take_over", lambda *_: None)
    assert tree_scores(model, shape) > 1e-2


def tree_scores(model, shape):
    """Largest difference between a node's score in the draft's tree and the same sum from plain forwards."""
    seen = {}
    kept = ModelDrafter._proposals

    def spy(self, last, levels):
        seen["levels"] = levels
        return kept(self, last, levels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelDrafter, "_proposals", spy)
        prompt = PROMPTS[2]
        with build(model, shape, [prompt], 4, draft="truncated", draft_layers=3, page_size=4) as speculator:
            proposal = speculator.drafter.propose([0], [[*prompt, 5]])[0]
    worst = 0.0
    scores = {}
    for level in seen["levels"]:
        for token, score in zip(level.tokens[0].tolist(), level.scores[0].tolist(), strict=True):
            scores.setdefault(token, []).append(score)
    for node in range(1, len(proposal.tokens)):
        line = []
        place = node
        while place > 0:
            line.append(proposal.tokens[place])
            place = proposal.parents[place]
        line = line[::-1]
        ids = torch.tensor([[*prompt, 5, *line]])
        logp = model(ids).logits[0].float().log_softmax(-1)
        first = len(prompt)
        total = sum(float(logp[first + i, token]) for i, token in enumerate(line))
        worst = max(worst, min(abs(total - score) for score in scores[line[-1]]))
    return worst


def test_a_truncated_model_shares_its_weights_and_leaves_the_model_alone(model):
    small = truncated(model, 2)
    assert len(small.model.layers) == small.config.num_hidden_layers == 2
    assert len(model.model.layers) == model.config.num_hidden_layers == 3
    assert small.lm_head.weight is model.lm_head.weight
    assert small.model.layers[1].mlp.up_proj.weight is model.model.layers[1].mlp.up_proj.weight
    with pytest.raises(UsageError, match="the model has 3"):
        truncated(model, 4)


# --- what must be caught ------------------------------------------------------------------------------------------------------


def test_a_mask_that_lets_siblings_see_each_other_is_caught(model, expected, monkeypatch):
    def all_before(parents):
        return [[(1 << node + 1) - 1] for node in range(len(parents))]

    monkeypatch.setattr("attn_transformers.speculative.trees.mask_words", all_before)
    caught(model, expected, topk=2)


def test_a_mask_without_an_ancestor_is_caught(model, expected, monkeypatch):
    monkeypatch.setattr(
        "attn_transformers.speculative.trees.mask_words", lambda parents: [[1 << node] for node in range(len(parents))]
    )
    caught(model, expected, topk=2)


def test_a_lost_commit_is_caught(model, expected, monkeypatch):
    """Rejected drafts are cut off, and the accepted ones behind them are not moved to their places."""

    def only_cut(kv, requests, prefixes, paths):
        for request, prefix, path in zip(requests, prefixes, paths, strict=True):
            kv.truncate(request, prefix + len(path))

    monkeypatch.setattr(engine, "keep_accepted", only_cut)
    caught(model, expected, topk=2)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_chain_that_keeps_rejected_keys_is_caught(model, expected, monkeypatch, page_size):
    kept = slots.keep_accepted

    def too_much(kv, requests, prefixes, paths):
        longer = [(*path, path[-1] + 1) if path[-1] + 1 < 4 else path for path in paths]
        kept(kv, requests, prefixes, longer)

    monkeypatch.setattr(engine, "keep_accepted", too_much)
    caught(model, expected, topk=1, page_size=page_size)


def test_a_chain_that_loses_an_accepted_key_is_caught(model, expected, monkeypatch):
    kept = slots.keep_accepted
    monkeypatch.setattr(
        engine,
        "keep_accepted",
        lambda kv, requests, prefixes, paths: kept(kv, requests, prefixes, [p[:1] for p in paths]),
    )
    caught(model, expected, topk=1)


def test_wrong_positions_of_a_tree_are_caught(model, expected, monkeypatch):
    monkeypatch.setattr("attn_transformers.speculative.trees.depths", lambda parents: list(range(len(parents))))
    caught(model, expected, topk=2)


def caught(model, expected, topk, **options):
    """The fault shows in the tokens, and plain decoding says so with gaps that no tie explains."""
    shape = oracle_shape(topk)
    outcome, mismatches, _ = run(model, shape, drafter=Oracle(shape, expected), **options)
    assert outcome.tokens != expected
    assert max(one.gap for one in mismatches) > 0.05
    assert all(one.gap >= one.top2 for one in mismatches)


# --- graphs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_verify_under_the_graph_protocol(model, expected, topk):
    """Static batches, padded rows and re-written masks, acted out on a CPU with the kit's reference backend."""
    shape = oracle_shape(topk)
    manifest = reference_backend.load_manifest()
    flags = {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": shape.width, "speculative_num_steps": 3}
    options = Options.of(page_size=4, dtype="float32", allow_experimental=True, speculative_algorithm="NGRAM", **flags)
    plan = solve_plan(parse_model(model.config), parse_platform("cuda:sm90"), options, [manifest], tie_order={})
    registry = Registry.with_manifests([manifest], modules={manifest.package: reference_backend})
    drafter = Oracle(shape, expected)
    with build(model, shape, PROMPTS, NEW, plan=plan, drafter=drafter, registry=registry) as speculator:
        with torch.enable_grad():
            assert speculator.capture_verify(len(PROMPTS), 64, RerunRecorder()) == [4, 2, 1]
        assert not speculator.target.kv.layer(0).k.requires_grad
        outcome = speculator.generate(PROMPTS, NEW)
        three = speculator.generate(PROMPTS[:3], NEW)
    assert outcome.tokens == expected
    assert outcome.replays == outcome.verify_steps
    assert three.tokens == expected[:3]
    assert three.replays == three.verify_steps


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("split", [("triton", "triton"), ("torch_native", "triton"), ("triton", "torch_native")])
def test_splits_on_a_gpu(split, topk, mode, graphs):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    verifies = split[mode == "decode"]
    if graphs and verifies != "triton":
        pytest.skip(f"{verifies} is not captured")
    model = make("llama")
    expected = alone(model, new=NEW).tolist()
    shape = oracle_shape(topk)
    options = {"prefill_attention_backend": split[0], "decode_attention_backend": split[1], "page_size": 16}
    more = {"speculative_attention_mode": mode, "drafter": Oracle(shape, expected)}
    with build(model.cuda(), shape, PROMPTS, NEW, **options, **more) as speculator:
        if graphs:
            speculator.capture_verify(len(PROMPTS), 64)
        outcome = speculator.generate(PROMPTS, NEW)
        mismatches, _ = speculator.check(PROMPTS, outcome.tokens)
    assert (outcome.tokens, mismatches) == (expected, [])
    assert outcome.replays == (outcome.verify_steps if graphs else 0)
    if not graphs:
        assert outcome.calls[verifies]["verify"] == 3 * outcome.verify_steps


# --- refusals ---------------------------------------------------------------------------------------------------------------


def test_shapes():
    assert Shape.of(1, 3).width == 4
    assert Shape.of(3, 2).width == 7
    with pytest.raises(UsageError, match="a chain of 3 drafts has 4 tokens"):
        Shape.of(1, 3, 6)
    with pytest.raises(UsageError, match="possible 2 to 7"):
        Shape.of(2, 2, 8)
    with pytest.raises(UsageError, match="positive"):
        Shape.of(1, 0)


def test_the_model_is_its_own_again_even_after_a_failure(model):
    class Broken:
        def propose(self, rows, tokens):
            raise RuntimeError("no idea")

        def drop(self, row):
            pass

    former = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="no idea"):
        run(model, Shape.of(1, 2), drafter=Broken())
    assert model.config._attn_implementation == former
    assert alone(model, new=2).shape == (4, 2)


def test_refusals(model):
    shape = Shape.of(1, 2)
    with pytest.raises(UsageError, match="known are ngram, truncated"), build(model, shape, PROMPTS, 4, draft="medusa"):
        pass
    with pytest.raises(PlanError), build(model, shape, PROMPTS, 4, decode_attention_backend="nobody"):
        pass
    with (
        pytest.raises(UsageError, match="several pools"),
        build(make("qwen2"), shape, PROMPTS, 4, draft="truncated", draft_layers=3),
    ):
        pass
    with build(model, shape, PROMPTS, 4):
        with pytest.raises(BatchError, match="outside a speculative step"):
            model(torch.tensor([[1, 2]]))
        with pytest.raises(UsageError, match="served by attn-core already"), build(model, shape, PROMPTS, 4):
            pass
