"""Real vLLM on the CPU: its own attention against attn-core backends, token by token. Run by ``make test-bridges``.

Not collected by the normal test run (the name does not match), because it needs an environment with vLLM:

    python -m pytest bridges/attn-vllm/tests_server/suite.py --vllm-python VENV/bin/python
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys

import pytest
from harness import HERE, NGRAM, versions

BASIC = ("plain", "prefix hit", "chunked prefill")
OWN = {"VLLM_LOGGING_LEVEL": "INFO"}
SPLIT = {"ATTN_PREFILL_BACKEND": "flex_attention:eager", "ATTN_DECODE_BACKEND": "torch_native"}
#: The keywords of vLLM's ``validate_configuration`` that the bridge answers.
KNOWN_QUESTIONS = {
    *("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix"),
    *("use_per_head_quant_scales", "device_capability", "attn_type", "has_sliding_window", "use_non_causal"),
    *("use_batch_invariant", "use_kv_connector", "use_pcp", "use_adaptive_verification", "use_dcp", "use_rswa"),
}
PROMPTS = ["The capital of France is", "Once upon a time there was a", "1, 2, 3, 4, 5,", "def fibonacci(n):\n    "]


def own(servers, model="llama"):
    """vLLM's own attention. It answers the n-gram prompts without drafts: greedy drafts must not change a token."""
    scenarios = (*BASIC, "n-gram") if model == "llama" else BASIC
    return servers.engine(f"own {model}", servers.tiny(model), scenarios, OWN)


def ours(servers, label, env, scenarios=BASIC, model="llama", **engine):
    return servers.engine(f"{label} {model}", servers.tiny(model), scenarios, env, **engine)


def compare(servers, run, reference, scenario, label, model="tiny llama"):
    """The row of the table, and the assertion."""
    assert run["rc"] == 0, run["log"][-3000:]
    assert reference["rc"] == 0, reference["log"][-3000:]
    mine, theirs = run["answers"][scenario], reference["answers"][scenario]
    servers.rows.append(
        {
            "server": f"vllm {run['vllm']}",
            "model": model,
            "backend": label,
            "scenario": scenario,
            "tokens": sum(map(len, mine["tokens"])),
            "identical": mine["tokens"] == theirs["tokens"],
            "cached": mine["cached"],
            "calls": run["calls"],
            "versions": versions(run["reports"][0]),
        }
    )
    assert mine["tokens"] == theirs["tokens"]
    assert mine["cached"] == theirs["cached"]


@pytest.mark.parametrize("scenario", BASIC)
def test_torch_native(servers, scenario):
    run = ours(servers, "torch_native", {"ATTN_BACKEND": "torch_native"})
    compare(servers, run, own(servers), scenario, "torch_native")
    assert set(run["calls"]) == {"torch_native"}
    assert {"prefill", "decode"} <= set(run["calls"]["torch_native"])


def test_prefix_cache_is_hit(servers):
    answers = own(servers)["answers"]["prefix hit"]
    assert all(count >= 128 for count in answers["cached"])


@pytest.mark.parametrize("scenario", BASIC)
def test_prefill_and_decode_split(servers, scenario):
    run = ours(servers, "split", SPLIT)
    compare(servers, run, own(servers), scenario, "flex_attention / torch_native")
    assert set(run["calls"]["flex_attention"]) == {"prefill"}
    assert set(run["calls"]["torch_native"]) == {"decode"}


@pytest.mark.parametrize("scenario", BASIC)
def test_a_vendor_who_wrote_no_line_about_servers(servers, scenario):
    run = ours(servers, "vendor", {"ATTN_BACKEND": "example_vendor"}, (*BASIC,))
    compare(servers, run, own(servers), scenario, "example_vendor")
    assert set(run["calls"]) == {"example_vendor"}


def test_n_gram_with_a_vendor_who_declares_no_verify(servers):
    run = ours(servers, "vendor n-gram", {"ATTN_BACKEND": "example_vendor"}, ("n-gram",), **NGRAM)
    compare(servers, run, own(servers), "n-gram", "example_vendor")
    assert "verified as short prefills" in run["log"]


def test_n_gram(servers):
    """A real model, whose text repeats itself, so that drafts are accepted."""
    model = servers.smollm2()
    reference = servers.engine("own n-gram", model, ("n-gram",), OWN, **NGRAM)
    run = servers.engine("torch_native n-gram", model, ("n-gram",), {"ATTN_BACKEND": "torch_native"}, **NGRAM)
    compare(servers, run, reference, "n-gram", "torch_native", "SmolLM2-135M")
    assert run["calls"]["torch_native"]["verify"] > 0


@pytest.mark.parametrize("scenario", BASIC)
@pytest.mark.parametrize("model", ["gemma2", "gptoss"])
def test_windows_soft_cap_and_sinks_in_several_cache_groups(servers, model, scenario):
    run = ours(servers, "torch_native", {"ATTN_BACKEND": "torch_native"}, model=model)
    compare(servers, run, own(servers, model), scenario, "torch_native", f"tiny {model}")


def test_fp8_cache(servers):
    """Against the same backend and cache inside transformers: vLLM's own CPU kernel rounds FP8 differently."""
    model = servers.tiny("llama")
    done = subprocess.run(
        [sys.executable, HERE / "fp8_reference.py", model],
        check=True,
        capture_output=True,
        text=True,
        env=servers.env({}),
    )
    wanted = json.loads(done.stdout.splitlines()[-1])
    reference = {"rc": 0, "answers": {"plain": {"tokens": wanted, "cached": [0] * len(wanted)}}}
    run = servers.engine("fp8", model, ("plain",), {"ATTN_BACKEND": "torch_native"}, kv_cache_dtype="fp8")
    compare(servers, run, reference, "plain", "torch_native, fp8 KV (against transformers)")
    assert run["answers"]["plain"]["tokens"] != own(servers)["answers"]["plain"]["tokens"]


def test_http(servers):
    """``ATTN_BACKEND=torch_native vllm serve MODEL`` and requests over HTTP, four at once."""
    model = servers.smollm2()
    reference = servers.http("http own", model, PROMPTS, OWN)
    run = servers.http("http torch_native", model, PROMPTS, {"ATTN_BACKEND": "torch_native"})
    for what, key in (("until /health, s", "ready"), ("CPU seconds until then", "cpu")):
        servers.startup.append(
            {"what": f"vllm serve SmolLM2-135M, {what}", "without": reference[key], "with": run[key]}
        )
    servers.rows.append(
        {
            "server": f"vllm {run['reports'][0]['vllm']}",
            "model": "SmolLM2-135M",
            "backend": "torch_native",
            "scenario": "HTTP",
            "tokens": 24 * len(PROMPTS),
            "identical": run["texts"] == reference["texts"] and run["chat"] == reference["chat"],
            "calls": run["calls"],
            "versions": versions(run["reports"][0]),
        }
    )
    assert run["texts"] == reference["texts"]
    assert run["chat"] == reference["chat"]
    assert "Paris" in run["texts"][0]
    assert set(run["calls"]) == {"torch_native"}
    assert reference["calls"] == {}


def test_the_plan_is_made_in_the_parent_and_checked_in_the_worker(servers):
    run = ours(servers, "torch_native", {"ATTN_BACKEND": "torch_native"})
    fingerprint = run["reports"][0]["plan"][:19]
    assert f"attn-vllm: plan {fingerprint} checked in this worker" in run["log"]
    assert fingerprint in next(line for line in run["log"].splitlines() if "attn-vllm: kv" in line)


def test_the_interface_is_the_one_that_stand_ins_imitate(servers):
    """A release of vLLM that adds a field or a question is noticed here, and not by a wrong answer."""
    done = subprocess.run(
        [servers.python, HERE / "interface.py"], check=True, capture_output=True, text=True, env=servers.env({})
    )
    found = json.loads(done.stdout.splitlines()[-1])
    tree = ast.parse((HERE.parent / "tests" / "vllm_fakes.py").read_text())
    fake = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Common")
    fields = {node.target.id for node in fake.body if isinstance(node, ast.AnnAssign)}
    assert {"seq_lens", "slot_mapping"} <= fields <= set(found["common"])
    assert set(found["asked"]) <= KNOWN_QUESTIONS
    assert found["forward"] == found["our forward"]
    assert found["abstract"] == []
    assert (found["layouts"]["LBNHC"], found["layouts"]["LBHNC"]) == ([0, 1, 3, 2, 4], [0, 1, 2, 3, 4])


def test_without_a_request_nothing_happens(servers):
    run = own(servers)
    assert run["calls"] == {}
    assert "attn-vllm" not in run["log"]
    found = json.loads(
        subprocess.run(
            [servers.python, HERE / "imports.py"], check=True, capture_output=True, text=True, env=servers.env({})
        ).stdout.splitlines()[-1]
    )
    servers.imports = found
    assert found["modules"] == ["attn_vllm", "attn_vllm._install"]


def test_startup(servers):
    """CPU time is asserted; wall time depends on what else the machine does."""
    without, with_bridge = own(servers), ours(servers, "torch_native", {"ATTN_BACKEND": "torch_native"})
    for what, key in (("wall, s", "engine"), ("CPU seconds, imports too", "cpu")):
        servers.startup.append(
            {
                "what": f"LLM(tiny llama), {what}",
                "without": without["seconds"][key],
                "with": with_bridge["seconds"][key],
            }
        )
    planned = re.search(r"attn-vllm: planned in ([0-9.]+) s", with_bridge["log"])
    servers.startup.append(
        {"what": "of that the plan, in the parent, s", "without": 0, "with": float(planned.group(1))}
    )
    assert with_bridge["seconds"]["cpu"] < without["seconds"]["cpu"] * 1.3 + 3


def test_a_refusal_comes_from_the_parent_before_any_weight_is_loaded(servers):
    run = servers.engine("refused", servers.tiny("llama"), ("plain",), {"ATTN_BACKEND": "no_such"})
    assert run["rc"] != 0
    assert "no_such is not installed" in run["log"]
    assert "EngineCore" not in run["log"]
