"""From vLLM's configuration to a plan, and from a plan to vLLM's words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm_fakes import GPT_OSS, LLAMA, config

from attn_core.errors import BindError, PlanError, UsageError, WorkerMismatch
from attn_vllm import worker
from attn_vllm.parent import check_version
from attn_vllm.planning import _runnable, fit_block_size, make_plan, summary
from attn_vllm.worker import active_plan, graph_limits, reasons_against, verify_length

NATIVE = {"attention_backend": "torch_native"}
VENDOR = Path(__file__).parents[3] / "examples/attn-example-vendor/src/attn_example_vendor/attn_manifest.toml"


def test_the_page_is_the_planners_unless_the_user_said_one():
    free = make_plan(config(), "cpu", NATIVE)
    fixed = make_plan(config(block_size=64), "cpu", NATIVE)
    assert free.pools[0].page_size == 16
    assert fixed.pools[0].page_size == 64


def test_single_tokens_are_no_pages_for_vllm(monkeypatch):
    """A backend without a preferred page would get the smallest one; its table would be as long as the context."""
    from attn_core.discovery import Registry, discover
    from attn_core.testing import reference_backend

    [native] = [m for m in discover().manifests if (m.kind, m.name) == ("mha", "torch_native")]
    bare = replace(native, variants=tuple(replace(variant, prefer=()) for variant in native.variants))
    registry = Registry.with_manifests([bare], modules={bare.package: reference_backend})
    monkeypatch.setattr("attn_core.discovery.discover", lambda: registry)
    assert make_plan(config(), "cpu", NATIVE).pools[0].page_size == 16
    assert make_plan(config(block_size=4), "cpu", NATIVE).pools[0].page_size == 4


def test_heads_are_per_rank_and_the_cache_dtype_is_vllms():
    plan = make_plan(config(tp=2, cache_dtype="fp8", dtype=torch.bfloat16), "cpu", NATIVE)
    geometry = plan.groups[0].group.geometry
    assert (geometry.q_heads, geometry.kv_heads, plan.dtype, plan.pools[0].dtype) == (2, 1, "bf16", "fp8_e4m3")


def test_drafts_are_a_verify_phase_where_the_backend_has_one(caplog):
    config_ = config(spec=3)
    plan = make_plan(config_, "cpu", NATIVE)
    assert verify_length(config_, plan) == 4
    assert "verify" in plan.groups[0].phases
    assert not caplog.records


def test_drafts_are_short_prefills_where_it_has_none_and_that_is_said(caplog, monkeypatch):
    from attn_core.discovery import Registry
    from attn_core.manifest import load_toml, parse_manifests
    from attn_core.testing import reference_backend

    [vendor] = parse_manifests(load_toml(VENDOR.read_text()), package="attn-example-vendor", version="1.0")
    registry = Registry.with_manifests([vendor], modules={"attn-example-vendor": reference_backend})
    monkeypatch.setattr("attn_core.discovery.discover", lambda: registry)
    config_ = config(spec=3)
    plan = make_plan(config_, "cpu", {"attention_backend": "example_vendor"})
    assert verify_length(config_, plan) == 0
    assert "verified as short prefills" in caplog.text


def test_draft_models_are_refused():
    with pytest.raises(PlanError, match="draft model"):
        make_plan(config(spec=3, method="eagle"), "cpu", NATIVE)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "deepseek_v3",
                "hidden_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "kv_lora_rank": 32,
                "q_lora_rank": 32,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
            },
            "is mla",
        ),
        (
            {
                **LLAMA,
                "architectures": ["Llama4ForCausalLM"],
                "model_type": "llama4_text",
                "attention_chunk_size": 64,
                "num_hidden_layers": 4,
                "no_rope_layers": [1, 1, 1, 0],
                "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            },
            "chunked-local",
        ),
    ],
)
def test_other_kinds_are_left_to_vllm(model, expected):
    with pytest.raises(PlanError) as error:
        make_plan(config(model), "cpu", {})
    assert expected in str(error.value)
    assert "without ATTN_BACKEND" in str(error.value)


def test_cache_dtypes_with_layouts_of_their_own_are_refused():
    with pytest.raises(PlanError, match="fp8_per_token_head is not served"):
        make_plan(config(cache_dtype="fp8_per_token_head"), "cpu", NATIVE)
    with pytest.raises(PlanError, match="nvfp4 is not served"):
        make_plan(config(cache_dtype="nvfp4"), "cpu", NATIVE)


def test_what_only_a_what_if_plan_may_hold_is_refused():
    plan = make_plan(config(), "cpu", NATIVE)
    packed = replace(plan, pools=(replace(plan.pools[0], format="fp4_block16"),))
    with pytest.raises(PlanError, match="fp4_block16"):
        _runnable(packed)
    group = plan.groups[0]
    padded = {phase: replace(served, pads={"q_heads": 8}) for phase, served in group.phases.items()}
    with pytest.raises(PlanError, match="padding of q_heads"):
        _runnable(replace(plan, groups=(replace(group, phases=padded),)))


def test_decode_context_parallelism_is_refused():
    with pytest.raises(PlanError, match="context parallelism"):
        make_plan(config(dcp=2), "cpu", NATIVE)


def test_vllms_default_block_moves_and_a_users_choice_is_refused():
    plan = make_plan(config(), "cpu", NATIVE)
    free = config()
    fit_block_size(free, plan)
    assert free.cache_config.block_size == 128  # a multiple already: vLLM splits it
    free.cache_config.block_size = 24
    fit_block_size(free, plan)
    assert free.cache_config.block_size == 16
    fixed = config(block_size=24)
    with pytest.raises(UsageError, match="not a multiple"):
        fit_block_size(fixed, plan)


def test_the_summary_names_who_serves_and_the_fingerprint():
    plan = make_plan(config(GPT_OSS), "cpu", NATIVE)
    text = "\n".join(summary(plan))
    assert "sliding (1 layers): prefill torch_native:sdpa (attn-torch 0.1.0)" in text
    assert plan.fingerprint[:19] in text


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_supported_versions(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0.0", "0.3.2"])
def test_another_version_is_refused(version):
    with pytest.raises(UsageError) as error:
        check_version(version)
    assert f"vLLM {version} is not supported" in str(error.value)
    assert "0.32" in str(error.value)


# --- workers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(worker, "_active", None)


def with_plan(plan, **changes):
    return SimpleNamespace(additional_config={"attn": {"plan": {**plan.to_dict(), **changes}}})


def test_a_worker_takes_the_parents_plan(fresh):
    plan = make_plan(config(), "cpu", NATIVE)
    assert active_plan(with_plan(plan)).fingerprint == plan.fingerprint
    assert active_plan().fingerprint == plan.fingerprint  # later questions come without a configuration


def test_a_worker_with_another_version_stops(fresh):
    plan = make_plan(config(), "cpu", NATIVE)
    document = plan.to_dict()
    for phase in document["groups"][0]["phases"].values():
        phase["version"] = "9.9"
        for part in phase["parts"]:
            part["version"] = "9.9"
    document.pop("fingerprint")
    from attn_core.plan import load_plan

    document["fingerprint"] = load_plan(document).fingerprint
    with pytest.raises(WorkerMismatch, match="cannot run the plan"):
        active_plan(SimpleNamespace(additional_config={"attn": {"plan": document}}))


def test_a_plan_that_was_changed_is_refused(fresh):
    plan = make_plan(config(), "cpu", NATIVE)
    with pytest.raises(UsageError, match="was changed"):
        active_plan(with_plan(plan, page_size=32))


@pytest.mark.parametrize("extra", [{}, None, {"attn": "torch_native"}, {"attn": {}}])
def test_without_a_plan_nothing_is_served(fresh, extra):
    with pytest.raises(BindError, match="has no plan"):
        active_plan(SimpleNamespace(additional_config=extra))


def test_limits_cover_vllms_capture_sizes():
    config_ = config(spec=3, max_num_seqs=6)
    limits = graph_limits(config_, make_plan(config_, "cpu", NATIVE))
    assert limits.rows == (1, 2, 4, 6)
    assert (limits.max_query_len, limits.max_tokens, limits.max_kv_len) == (4, 24, 256)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"head_size": 32, "dtype": torch.float32, "use_mla": False, "attn_type": "decoder", "block_size": None}, []),
        ({"head_size": 64}, ["head_size 64; planned [32]"]),
        ({"use_mla": True}, ["multi-head latent attention not served by attn-vllm"]),
        ({"has_sink": True}, ["attention sinks; planned without"]),
        ({"has_sliding_window": True}, ["sliding window; planned without"]),
        ({"block_size": 40}, ["block_size 40; needed is a multiple of [16]"]),
        ({"use_batch_invariant": True}, ["batch invariance; planned without"]),
        ({"attn_type": "encoder_only"}, ["attention type encoder_only; only decoder layers are served"]),
        ({"use_something_new": True}, ["use_something_new=True, which this version of attn-vllm does not know"]),
        ({"use_something_new": False}, []),
    ],
)
def test_reasons(asked, expected):
    assert reasons_against(make_plan(config(), "cpu", NATIVE), asked) == expected
