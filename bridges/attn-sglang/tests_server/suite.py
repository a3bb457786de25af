"""Real SGLang on the CPU: its own attention against attn-core backends, token by token. Run by ``make test-bridges``.

Not collected by the normal test run (the name does not match), because it needs an environment with SGLang:

    ATTN_SGLANG_PYTHON=VENV/bin/python python -m pytest bridges/attn-sglang/tests_server/suite.py

``ATTN_BRIDGE_REPORT`` is the folder for ``sglang.json`` and ``sglang.md``, models and logs (``build/bridges``).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_sglang.backend import CoreBackend
from attn_sglang.members import MEMBERS

sys.path.insert(0, str(Path(__file__).parent))
from harness import Engines

BASIC = ("plain", "prefix hit", "chunked prefill")
SPLIT = {"ATTN_SGLANG_OPTIONS": "prefill_attention_backend=flex_attention:eager; decode_attention_backend=torch_native"}
LAYERS = 2
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}


@pytest.fixture(scope="session")
def engines():
    python = os.environ.get("ATTN_SGLANG_PYTHON")
    if not python:
        pytest.exit("ATTN_SGLANG_PYTHON names the python of an environment with SGLang", 2)
    made = Engines(Path(python), Path(os.environ.get("ATTN_BRIDGE_REPORT", "build/bridges")).resolve())
    yield made
    made.write_table()


def own(engines):
    """SGLang's own attention, which has no verify step: it answers the n-gram prompts without drafts."""
    return engines.engine("own llama", engines.tiny("llama"), (*BASIC, "n-gram"), attention_backend="torch_native")


def ours(engines, label, scenarios=BASIC, env=None, model="llama", **engine):
    return engines.engine(f"{label} {model}", engines.tiny(model), scenarios, env, **engine)


def row(engines, run, scenario, label, model, identical):
    mine = run["answers"][scenario]
    engines.rows.append(
        {
            "server": f"sglang {run['sglang']}",
            "model": model,
            "backend": label,
            "scenario": scenario,
            "tokens": sum(map(len, mine["tokens"])),
            "identical": identical,
            "cached": mine["cached"],
            "calls": run["calls"],
            "versions": engines.versions(),
        }
    )


def compare(engines, run, reference, scenario, label, model="tiny llama", cached=True):
    """The row of the table, and the assertion."""
    for one in (run, reference):
        assert one["rc"] == 0, one["log"][-3000:]
    mine, theirs = run["answers"][scenario], reference["answers"][scenario]
    row(engines, run, scenario, label, model, mine["tokens"] == theirs["tokens"])
    assert mine["tokens"] == theirs["tokens"]
    if cached:
        assert mine["cached"] == theirs["cached"]


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_own_attention_is_not_counted(engines):
    run = own(engines)
    assert run["rc"] == 0, run["log"][-3000:]
    assert run["calls"] == {}
    assert all(count >= 128 for count in run["answers"]["prefix hit"]["cached"])  # the scenario is what it says


@pytest.mark.parametrize("scenario", BASIC)
def test_torch_native_in_pages(engines, scenario):
    run = ours(engines, "torch_native", attention_backend="attn-torch_native", page_size=16)
    compare(engines, run, own(engines), scenario, "torch_native, page 16", cached=False)
    assert set(run["calls"]) == {"torch_native"}
    assert all(count >= 128 for count in run["answers"]["prefix hit"]["cached"])


@pytest.mark.parametrize("scenario", BASIC)
def test_prefill_decode_split_by_the_router(engines, scenario):
    run = ours(engines, "split", env=SPLIT, attention_backend="attn_core")
    compare(engines, run, own(engines), scenario, "split in attn_core: flex_attention / torch_native")
    assert set(run["calls"]["flex_attention"]) == {"prefill"}
    assert set(run["calls"]["torch_native"]) == {"decode"}


@pytest.mark.parametrize("scenario", BASIC)
def test_prefill_decode_split_by_sglang(engines, scenario):
    """SGLang's HybridAttnBackend around two backends of the bridge."""
    run = ours(
        engines, "hybrid", prefill_attention_backend="attn-torch_native", decode_attention_backend="example_vendor"
    )
    compare(engines, run, own(engines), scenario, "split in SGLang: torch_native / example_vendor")
    assert set(run["calls"]["torch_native"]) == {"prefill"}
    assert set(run["calls"]["example_vendor"]) == {"decode"}
    assert len(run["reports"]) == 2


@pytest.mark.parametrize("scenario", BASIC)
def test_a_vendor_who_wrote_no_line_about_servers(engines, scenario):
    """Chosen by attn-core itself: among the installed backends it ranks first on a CPU."""
    run = ours(engines, "vendor", attention_backend="attn_core")
    compare(engines, run, own(engines), scenario, "attn_core (example_vendor)")
    assert set(run["calls"]) == {"example_vendor"}


def test_every_layer_call_is_counted(engines):
    """Decode steps times layers; a step that only prefills counts as one prefill a layer."""
    run = ours(engines, "vendor", attention_backend="attn_core")
    phases = run["calls"]["example_vendor"]
    assert phases["decode"] >= LAYERS * (23 + 3 + 15 + 23)
    assert all(count % LAYERS == 0 for count in phases.values())


def test_n_gram_trees(engines):
    """Drafts must not change a greedy token; fewer forwards than tokens show that drafts were accepted."""
    run = ours(engines, "ngram", ("n-gram",), attention_backend="attn-torch_native", **NGRAM)
    compare(engines, run, own(engines), "n-gram", "torch_native", cached=False)
    phases = run["calls"]["torch_native"]
    assert set(phases) == {"prefill", "verify"}
    assert phases["verify"] < LAYERS * (23 + 39)


def smollm2(engines):
    """SmolLM2-135M by SGLang's own attention, and by ours in pages."""
    model = engines.smollm2()
    reference = engines.engine("own smollm2", model, BASIC, attention_backend="torch_native")
    run = engines.engine("torch_native smollm2", model, BASIC, attention_backend="attn-torch_native", page_size=16)
    return reference, run


@pytest.mark.parametrize("scenario", BASIC)
def test_a_real_model(engines, scenario):
    reference, run = smollm2(engines)
    compare(engines, run, reference, scenario, "torch_native, page 16", "SmolLM2-135M", cached=False)
    assert set(run["calls"]) == {"torch_native"}


@pytest.mark.parametrize("scenario", BASIC)
def test_windows_and_soft_cap(engines, scenario):
    """SGLang's ``torch_native`` leaves out soft caps, so the reference is transformers' eager attention."""
    # SGLang's Gemma 2 reads a config field that transformers 5 has renamed
    override = {"json_model_override_args": '{"hidden_act": "gelu_pytorch_tanh"}'}
    run = ours(engines, "torch_native", model="gemma2", attention_backend="attn-torch_native", **override)
    compare_with_transformers(engines, run, scenario, "gemma2")


@pytest.mark.parametrize("scenario", BASIC)
def test_sinks_under_a_name_that_sglang_admits(engines, scenario):
    """SGLang takes eight names for GPT-OSS, none of a plugin's; one of them is given to attn-core."""
    env = {"ATTN_SGLANG_OVERRIDE": "triton=torch_native"}
    run = ours(engines, "torch_native", env=env, model="gptoss", attention_backend="triton")
    compare_with_transformers(engines, run, scenario, "gptoss")
    assert run["reports"][0]["pools"] == {"sliding": 1, "main": 1}  # SGLang's sliding-window pool beside the full one


def compare_with_transformers(engines, run, scenario, model):
    assert run["rc"] == 0, run["log"][-3000:]
    wanted = engines.transformers(engines.tiny(model), BASIC)[scenario]
    mine = run["answers"][scenario]["tokens"]
    row(engines, run, scenario, "torch_native (reference: transformers)", f"tiny {model}", mine == wanted)
    assert mine == wanted
    assert set(run["calls"]) == {"torch_native"}


# --- the registry -----------------------------------------------------------------------------------------------------


def test_what_the_entry_point_registers_and_imports(engines):
    found = engines.check("attn_core", "attn-torch_native", "nonesuch")
    assert found["failure"] == ""
    assert found["accepted"] == ["attn_core", "attn-torch_native"]
    assert {"attn_core", "attn-torch_native", "attn-flex_attention", "attn-example_vendor", "example_vendor"} <= set(
        found["new"]
    )
    assert found["changed"] == []  # nothing of SGLang's own was overwritten
    assert found["offered"] == []  # argparse offers every new name
    assert found["twice"] == []
    assert not any(name.startswith(("attn_torch", "attn_example_vendor")) for name in found["imports"])
    engines.imports = {name: found[name] for name in ("imports", "other imports", "milliseconds")}


def test_a_name_of_sglangs_own_is_taken_on_request(engines):
    found = engines.check(ATTN_SGLANG_OVERRIDE="torch_native", ATTN_SGLANG_PREFIX="core-")
    assert found["changed"] == ["torch_native"]
    assert "core-flex_attention" in found["new"]
    assert "torch_native of SGLang's own was replaced by attn-core's torch_native" in found["log"]


CODE = """
from attn_core import hookimpl

@hookimpl
def attn_create(manifest, variant, context):
    raise NotImplementedError("never planned here")
"""


def plugin(folder, distribution, entry_point, manifest):
    """A plugin, as pip would have installed it below `folder`."""
    name = distribution.replace("-", "_")
    package, info = folder / name, folder / f"{name}-1.0.dist-info"
    for path in (package, info):
        path.mkdir()
    (package / "__init__.py").write_text(CODE)
    (package / "attn_manifest.toml").write_text(manifest)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attn.backends]\n{entry_point} = {name}\n")
    (info / "RECORD").write_text("")
    return str(folder)


def test_a_plugin_that_failed_to_load_is_reported_by_name(engines, tmp_path):
    path = plugin(tmp_path, "attn-broken", "quick", "this is no manifest")
    found = engines.check("attn-quick", "quick", "nonesuch", PYTHONPATH=path)
    for name in ("attn-quick", "quick"):
        assert f"--attention-backend {name} cannot be used: its plugin failed to load" in found["said"][name]
        assert "attn-broken 1.0" in found["said"][name]
    assert found["said"]["nonesuch"] == "ValueError: Invalid attention backend: nonesuch"
    assert "attn-torch_native" in found["new"]  # the others are there


def test_a_bridge_that_failed_is_reported_when_it_is_asked_for(engines):
    found = engines.check("attn_core", "attn-torch_native", ATTN_SGLANG_OVERRIDE="nonesuch")
    assert "ATTN_SGLANG_OVERRIDE names 'nonesuch'" in found["failure"]
    for said in found["said"].values():
        assert "attn-sglang failed to load" in said
        assert "ATTN_SGLANG_OVERRIDE names 'nonesuch'" in said


def test_every_member_of_the_base_class_is_delegated(engines):
    """The list in the package against the installed wheel's source, and each signature against ours."""
    code = "import importlib.util as u; print(u.find_spec('sglang').origin)"
    origin = subprocess.run([engines.python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    source = Path(origin).parent / "srt" / "layers" / "attention" / "base_attn_backend.py"
    base = next(node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") == "AttentionBackend")
    names: list[str] = []
    for node in base.body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
            mine = vars(CoreBackend)[node.name]
            if not isinstance(mine, property):
                _check_signature(node, mine)
        elif isinstance(node, ast.AnnAssign):
            names.append(node.target.id)  # type: ignore[union-attr]
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets]  # type: ignore[attr-defined]
    assert tuple(names) == MEMBERS["0.5.23"]
    assert all(name in vars(CoreBackend) for name in names)


def _check_signature(node, mine):
    """Whatever SGLang may pass by position or keyword, ours takes under the same name and in the same place."""
    code = mine.__code__
    taken = code.co_varnames[: code.co_argcount]
    theirs = [argument.arg for argument in node.args.args]
    assert list(taken[: len(theirs)]) == theirs, node.name
    keywords = {argument.arg for argument in node.args.kwonlyargs}
    assert keywords <= set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]), node.name


# --- start-up and refusals ----------------------------------------------------------------------------------------------


def test_startup(engines):
    """Of the second pair of engines: files are in memory, byte code is there."""
    without, with_bridge = smollm2(engines)
    engines.startup.append(
        {
            "what": "Engine(SmolLM2-135M), without importing sglang",
            "without": without["seconds"]["engine"],
            "with": with_bridge["seconds"]["engine"],
        }
    )
    assert with_bridge["seconds"]["engine"] < without["seconds"]["engine"] + 20


PAGED = """
api = "1.0"
[[backend]]
kind = "mha"
name = "paged"
[[backend.variant]]
name = "only"
[[backend.variant.allow]]
features = ["mixed"]
[backend.variant.allow.when]
vendor = "cpu"
phase = ["prefill", "decode"]
dtypes = [{ q = "fp32", kv = "fp32" }]
page_size = 64
head_dims = { min = 8 }
"""


def test_a_page_size_that_does_not_fit_is_refused_with_the_flag(engines, tmp_path):
    env = {"PYTHONPATH": plugin(tmp_path, "attn-paged", "paged", PAGED)}
    run = ours(engines, "paged", ("plain",), env, attention_backend="paged")
    assert run["rc"] != 0
    assert "--attention-backend paged cannot run with SGLang's page size 1" in run["log"]
    assert "try      --page-size 64" in run["log"]


def test_a_vendor_who_declares_no_verify_is_refused_by_name(engines):
    run = ours(engines, "vendor n-gram", ("n-gram",), attention_backend="attn-example_vendor", **NGRAM)
    assert run["rc"] != 0
    assert "example_vendor:stream (verify)" in run["log"]
    assert "spec_tree is not declared" in run["log"]
