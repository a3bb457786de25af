"""What the package declares, what the planner makes of it, and what the probe answers on a machine that has nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import attn_core
import attn_trtllm
from attn_core.errors import BindError, PlanError
from attn_core.manifest import load_toml, parse_manifests
from attn_core.platform import parse_platform
from attn_trtllm import library, probe

SOURCE = Path(attn_trtllm.__file__).parent
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "num_hidden_layers": 2,
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100,
    "max_position_embeddings": 8192,
}  # fmt: skip


def manifests():
    return parse_manifests(load_toml((SOURCE / "attn_manifest.toml").read_text(encoding="utf-8")))


def plan(arch: str, **options):
    options = {"attention_backend": "trtllm_mha", "page_size": 64, **options}
    return attn_core.plan(LLAMA, platform=f"cuda:{arch}", **options)


def variants(found) -> dict[str, str]:
    return {phase: route.variant for phase, route in found.groups[0].phases.items()}


def test_mha_is_implemented_and_mla_is_not():
    assert [(m.id, m.status) for m in manifests()] == [("mha/trtllm_mha", "implemented"), ("mla/trtllm_mla", "planned")]


@pytest.mark.parametrize(
    ("arch", "prefill", "decode"),
    [
        ("sm90", "fmha_v2", "xqa"),
        ("sm120", "fmha_v2", "xqa"),
        ("sm121", "fmha_v2", "xqa"),
        ("sm100", "trtllm-gen", "trtllm-gen"),
        ("sm103", "trtllm-gen", "trtllm-gen"),
    ],
)
def test_each_architecture_gets_its_variants(arch, prefill, decode):
    found = variants(plan(arch))
    assert (found["prefill"], found["decode"]) == (prefill, decode)


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm110"])
def test_other_architectures_are_refused(arch):
    with pytest.raises(PlanError):
        plan(arch)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_pages_of_the_kernels_are_planned_as_asked(page):
    for arch in ("sm90", "sm100"):
        assert {p.kernel_page_size for p in plan(arch, page_size=page).groups[0].phases.values()} == {page}


def test_chains_are_verified_and_trees_refused():
    chain = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}  # fmt: skip
    assert variants(plan("sm90", **chain))["verify"] == "xqa"
    with pytest.raises(PlanError, match="speculative-eagle-topk"):
        plan("sm90", **{**chain, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8})


def test_fp8_caches_take_16_bit_queries_in_decode_and_fp8_queries_in_prefill():
    found = plan("sm90", kv_cache_dtype="fp8_e4m3").groups[0].phases
    assert {phase: route.q_dtype for phase, route in found.items()} == {"prefill": "fp8_e4m3", "decode": "bf16"}
    with pytest.raises(PlanError):
        plan("sm90", kv_cache_dtype="fp4")
    assert set(variants(plan("sm100", kv_cache_dtype="fp4")).values()) == {"trtllm-gen"}


def test_no_variant_for_hopper_needs_the_network():
    """Kernels that are downloaded serve sm100 and sm103 only."""
    for variant in manifests()[0].variants:
        archs = {arch for row in variant.allow for arch in row.when["arch"]}
        assert bool(variant.network) == (archs == {"sm100", "sm103"})


# --- the probe ------------------------------------------------------------------------------------------------------------


def test_the_probe_names_everything_that_is_missing(monkeypatch):
    monkeypatch.setattr(probe, "_version", lambda name: None)
    monkeypatch.setattr(probe, "_find", lambda tool: None)
    answers = attn_trtllm.attn_probe(manifests()[0], parse_platform("cpu"))
    assert {name: answer.ok for name, answer in answers.items()} == dict.fromkeys(answers, False)
    codes = [reason.code for reason in answers["xqa"].reasons]
    assert codes == ["library", "toolkit", "toolkit", "device"]
    assert answers["xqa"].needs == "pip install 'flashinfer-python>=0.6.13'"
    assert all(reason.fix for reason in answers["xqa"].reasons if reason.code != "device")
    assert "cpu" in answers["trtllm-gen"].reasons[-1].have


def test_the_probe_is_content_with_a_complete_machine(monkeypatch):
    text = (Path(__file__).parent / "data" / "flashinfer-0.7.4.txt").read_text(encoding="utf-8")
    monkeypatch.setattr(probe, "_version", lambda name: "0.7.4")
    monkeypatch.setattr(probe, "_find", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(probe, "_source", lambda module, version: text.replace("): ...", "):"))
    answers = attn_trtllm.attn_probe(manifests()[0], parse_platform("cuda:sm90"))
    assert {name: answer.ok for name, answer in answers.items()} == {"xqa": True, "fmha_v2": True, "trtllm-gen": False}
    assert answers["xqa"].versions == {"flashinfer-python": "0.7.4"}
    assert [reason.code for reason in answers["trtllm-gen"].reasons] == ["device"]


def test_an_older_or_changed_library_is_named(monkeypatch):
    monkeypatch.setattr(probe, "_find", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(probe, "_version", lambda name: "0.5.0")
    old = attn_trtllm.attn_probe(manifests()[0], parse_platform("cuda:sm90"))["xqa"]
    assert (old.reasons[0].have, old.needs) == ("0.5.0", "pip install 'flashinfer-python>=0.6.13'")
    monkeypatch.setattr(probe, "_version", lambda name: "9.0")
    monkeypatch.setattr(
        probe, "_source", lambda m, v: "def xqa_batch_decode_with_kv_cache(\n    query,\n    novelty,\n):\n"
    )
    new = attn_trtllm.attn_probe(manifests()[0], parse_platform("cuda:sm90"))["xqa"]
    assert "demands novelty" in new.reasons[0].have
    assert "missing kv_cache" in new.reasons[0].have


def test_the_probe_and_the_module_load_neither_torch_nor_the_library():
    import subprocess

    code = (
        "import sys, attn_trtllm, attn_trtllm.probe; from attn_core.platform import parse_platform;"
        "from attn_core.manifest import load_toml, parse_manifests;"
        f"m = parse_manifests(load_toml(open({str(SOURCE / 'attn_manifest.toml')!r}).read()));"
        "[attn_trtllm.attn_probe(x, parse_platform('cuda:sm90')) for x in m];"
        "print([n for n in ('torch', 'flashinfer', 'triton') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_mla_stays_declared_only():
    mla = manifests()[1]
    assert [reason.code for reason in attn_trtllm.attn_probe(mla, parse_platform("cuda:sm100")).reasons] == ["planned"]
    with pytest.raises(BindError, match="declared only"):
        attn_trtllm.attn_create(mla, "trtllm-gen", None)
    assert set(library.ENTRIES) == {variant.name for variant in manifests()[0].variants}
