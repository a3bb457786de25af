"""The case files: those that were handed to us, and ours with other models and toys for every word of the vocabulary."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attn_core.testing import cases_words as words
from attn_core.testing.cases import MARKS, main, run_entry
from attn_core.testing.cases_expect import CHECKS
from attn_core.testing.cases_input import Library
from attn_core.testing.cases_toys import KEYS

DATA = Path(__file__).parent / "data"
FILES = (DATA / "cases.json", DATA / "cases_more.json")
LIBRARY = Library.beside(FILES[0])

EXPECT = [
    "adapter",
    "advice_mentions",
    "compatible",
    "cuda_graph",
    "decode",
    "decode_in",
    "diff",
    "draft_decode_in",
    "eligible_on",
    "error",
    "error_lists",
    "error_mentions",
    "error_or_buffer_ge",
    "error_or_other_backend",
    "explain_mentions",
    "first",
    "groups",
    "json_keys",
    "kernel_page_in",
    "kv_bytes_full_layer",
    "kv_bytes_per_token_per_rank_bf16",
    "kv_bytes_sliding_layer",
    "kv_heads_per_rank",
    "layout",
    "linear_decode",
    "linear_prefill",
    "log_mentions",
    "mixed_batch",
    "no_group_kind",
    "no_weights_loaded",
    "not_any_phase",
    "not_imported",
    "ok",
    "padded_heads",
    "page_size",
    "page_size_in",
    "plan_options",
    "pool_page_multiple_of_kernel_page",
    "pools",
    "prefill",
    "prefill_in",
    "problem_mentions",
    "rejected",
    "sliding_layers",
    "spec_topk",
    "state_bytes_per_seq_per_layer_ssm",
    "suggest_tp",
    "target_decode",
    "variant",
    "vision",
    "warmup_routes",
    "warning_mentions",
    "workspace_bytes_ge",
]
INSTALLED = [
    "adapter",
    "combos",
    "decode_ratios",
    "deny",
    "deterministic",
    "diff_kv",
    "diff_kv_with_sinks",
    "enable_with",
    "enabled",
    "gfx",
    "graph",
    "head_dim_max",
    "head_dim_multiple",
    "head_dims",
    "head_k_dim",
    "jit",
    "kv",
    "kv_prefill",
    "kv_rules",
    "layouts",
    "lib",
    "lib_version",
    "max_pool_elements",
    "mha_pages",
    "min_cuda",
    "mla_decode_pages",
    "mla_geometry",
    "mla_heads",
    "mla_heads_rule",
    "mla_pages",
    "needs_lds",
    "order",
    "page_multiple",
    "pages",
    "phases",
    "prebuilt",
    "prefill_ratios",
    "qkv",
    "ratios",
    "returns_lse",
    "roles",
    "self_test",
    "sliding",
    "sm",
    "softcap",
    "state_dtypes",
]
FLAGS = [
    "attention_backend",
    "attention_backend_per_kind",
    "backend_options",
    "chunked_prefill_size",
    "context_length",
    "cuda_graph",
    "dcp",
    "decode_attention_backend",
    "deterministic",
    "disable_chunked_prefix_cache",
    "disable_variants",
    "dtype",
    "exclude_backends",
    "forbid_jit",
    "hicache",
    "kv_cache_dtype",
    "max_prefill_tokens",
    "num_pages",
    "page_size",
    "prefill_attention_backend",
    "shared_allocation",
    "spec_algorithm",
    "spec_topk",
    "tp",
]


def entries() -> list[tuple[str, dict]]:
    found = [entry for file in FILES for entry in json.loads(file.read_text(encoding="utf-8"))]
    return [(entry["id"], entry) for entry in found if entry["mark"] in MARKS]


@pytest.mark.parametrize(("name", "entry"), entries(), ids=[name for name, _ in entries()])
def test_case(name: str, entry: dict) -> None:
    assert run_entry(entry, LIBRARY) == []


def keys_of(value: object, place: str) -> set[str]:
    """Every key of the tables called `place` (flags, expect) or inside them (installed), at any depth of an entry."""
    found: set[str] = set()
    if isinstance(value, dict):
        for key, item in value.items():
            if key == place and isinstance(item, dict):
                found |= {k for toy in item.values() for k in toy or {}} if place == "installed" else set(item)
            elif key == "backend" and place == "installed" and isinstance(item, dict):
                found |= set(item)
            found |= keys_of(item, place)
    elif isinstance(value, list):
        found |= set().union(*(keys_of(item, place) for item in value))
    return found


@pytest.mark.parametrize(("place", "listed"), [("expect", EXPECT), ("installed", INSTALLED), ("flags", FLAGS)])
def test_every_word_of_the_vocabulary_has_an_example(place: str, listed: list[str]) -> None:
    used = set().union(*(keys_of(entry["repro"], place) for _, entry in entries()))
    assert set(listed) - used == set()


def test_every_word_of_the_vocabulary_is_known() -> None:
    assert set(EXPECT) - set(CHECKS) == {"compatible", "diff"}  # about two plans
    assert set(INSTALLED) <= KEYS


@pytest.mark.parametrize(
    ("repro", "text"),
    [
        ({"expect": {"decod": "x"}}, "unknown key 'decod' of expect"),
        ({"installed": {"x": {"pagse": [1]}}, "expect": {}}, "unknown key(s) ['pagse'] of installed 'x'"),
        ({"flags": {"page_sise": 1}, "expect": {"ok": True}}, "unknown option"),
        ({"platfrom": {}, "expect": {}}, "unknown key(s) ['platfrom'] of repro"),
        ({"platform": {"device": "cuda", "sm": 90, "colour": 1}, "expect": {"ok": True}}, "colour"),
        ({"model": "no-such", "expect": {}}, "no model 'no-such'"),
        ({"installed": {"x": {"deny": [{"moon": 1}]}}, "expect": {}}, "unknown condition 'moon'"),
        ({"model": "qwen3-8b", "expect": {"page_size": 7}}, "expected 7, found 1"),
        ({"model": "qwen3-8b", "expect": {"error": True}}, "error: expected True, found a plan"),
        ({"model": "qwen3-8b", "expect": {"rejected": {"fa3": "moon"}}}, "no reason of fa3 contains 'moon'"),
    ],
)
def test_what_is_not_met_or_not_known_is_a_failure(repro: dict, text: str) -> None:
    failures = run_entry({"repro": repro}, LIBRARY)
    assert failures
    assert text in failures[0]


def test_the_command_prints_a_line_a_case_and_fails_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "cases.json"
    good = {"id": "A", "title": "good", "mark": "planner", "repro": {"model": "qwen3-8b", "expect": {"ok": True}}}
    bad = {"id": "B", "title": "bad", "mark": "ux", "repro": {"model": "qwen3-8b", "expect": {"ok": False}}}
    other = {"id": "C", "title": "for the kit", "mark": "kernel", "repro": {}}
    file.write_text(json.dumps([good, bad, other]))
    assert main([str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok   A good"
    assert lines[1] == "FAIL B bad"
    assert lines[-1] == "1 passed, 1 failed"
    file.write_text(json.dumps([good]))
    assert main([str(file)]) == 0


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attn_core.testing.cases"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "FILE.json" in done.stdout


@pytest.mark.parametrize(
    ("rule", "accepted", "refused"),
    [
        ("<=64 or ==128", [1, 64, 128], [65, 127, 129]),
        ("h <= 64 or h == 128", [64, 128], [100]),
        ("multiple of 16", [16, 128], [8, 24]),
        ("multiple_of:8", [8, 24], [12]),
        ("power of two", [1, 2, 64], [3, 48]),
        ("divides 128", [1, 32, 128], [3, 256]),
        ("16|32|64", [16, 64], [8, 128]),
        ("{16, 128}", [16, 128], [64]) ,
        ("in {16, 128}", [16, 128], [64]),
        ("16..128", [16, 100, 128], [8, 129]),
        (">=16 and <=64", [16, 64], [8, 65]),
        ("heads % 16 == 0", [16, 32], [8]),
        ([16, 128], [16, 128], [64]),
        ({"min": 8, "multiple": 8}, [8, 64], [4, 12]),
    ],
)  # fmt: skip
def test_rules_about_heads(rule: object, accepted: list[int], refused: list[int]) -> None:
    found = set(words.heads(rule) or ())
    assert set(accepted) <= found
    assert not set(refused) & found


@pytest.mark.parametrize("rule", ["__import__('os')", "h.real", "x <= 3", "lambda: 1", "h ** 2"])
def test_rules_about_heads_are_no_code(rule: str) -> None:
    with pytest.raises(words.CaseError, match="unknown head rule"):
        words.heads(rule)


@pytest.mark.parametrize(
    ("rule", "archs"),
    [("sm>=110", ["sm110", "sm120", "sm121"]), ("sm in 90,100", ["sm90", "sm100"]), ("gfx950", ["gfx950"]), ("sm100a", ["sm100"]),
     (["gfx942", 90], ["gfx942", "sm90"]), (False, []), ("sm<75", ["sm70", "sm72"])],
)  # fmt: skip
def test_rules_about_hardware(rule: object, archs: list[str]) -> None:
    assert words.hardware(rule) == archs


def test_the_file_names_no_place() -> None:
    for file in FILES:
        assert not re.search(r"/(work|root)/", file.read_text(encoding="utf-8"))
