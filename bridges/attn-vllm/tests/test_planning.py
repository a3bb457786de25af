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
from attn_vllm.planning import _runnable, fit_block_size, lengths_are_exact, make_plan, summary
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


# --- asynchronous scheduling of drafts -----------------------------------------------------------------------------------


def drafting(asynchronous: bool = True, **changes):
    """A GPU server whose drafts come from a draft model, which vLLM's own backend serves."""
    made = config(spec=3, method="eagle", **changes)
    made.speculative_config.attention_backend = SimpleNamespace(name="FLASH_ATTN")
    made.scheduler_config.async_scheduling = asynchronous
    return made


@pytest.fixture
def two_backends(monkeypatch):
    """``torch_native`` with upper bounds only, and ``hosted``: ranked first, and planning from exact lengths on the host."""
    from attn_core.discovery import Registry, discover
    from attn_core.platform import parse_platform
    from attn_core.testing import reference_backend

    [native] = [m for m in discover().manifests if (m.kind, m.name) == ("mha", "torch_native")]

    def needing(degree):
        rows = (tuple(replace(row, host_lengths=None) for row in variant.allow) for variant in native.variants)
        return tuple(replace(v, host_lengths=degree, allow=a) for v, a in zip(native.variants, rows, strict=True))

    first = tuple(replace(row, rank=1) for row in native.order)
    hosted = replace(native, name="hosted", package="attn-hosted", variants=needing("exact"), order=first)
    native = replace(native, variants=needing("bound"))
    modules = {native.package: reference_backend, "attn-hosted": reference_backend}
    registry = Registry.with_manifests([native, hosted], modules=modules)
    monkeypatch.setattr("attn_core.discovery.discover", lambda: registry)
    monkeypatch.setattr("attn_core.platform.detect_platform", lambda device: parse_platform("cuda:sm90"))


def test_exact_lengths_and_asynchronous_drafts_are_refused_in_the_plan(two_backends):
    with pytest.raises(PlanError) as error:
        make_plan(drafting(), "cuda", {"attention_backend": "hosted"})
    text = str(error.value)
    assert "hosted cannot be combined with asynchronous scheduling of drafts" in text
    assert "needed   hosted: exact lengths on the host" in text
    assert "speculative method 'eagle'" in text
    assert "--no-async-scheduling" in text
    assert any(reason.code == "host_lengths" for lost in error.value.rejected for reason in lost.reasons)


def test_it_is_refused_where_only_one_phase_needs_exact_lengths(two_backends):
    with pytest.raises(PlanError, match="hosted cannot be combined"):
        make_plan(drafting(), "cuda", {"attention_backend": "torch_native", "prefill_attention_backend": "hosted"})


@pytest.mark.parametrize(
    ("served", "device"),
    [(drafting(asynchronous=False), "cuda"), (config(spec=3), "cuda"), (config(), "cuda"), (drafting(), "cpu")],
)
def test_exact_lengths_are_served_where_the_host_knows_them(two_backends, served, device):
    plan = make_plan(served, device, {"attention_backend": "hosted"})
    assert {phase.host_lengths for _, _, phase in plan.phase_plans()} == {"exact"}
    assert lengths_are_exact(served, device)


def test_automatic_choice_leaves_them_out_and_says_why(two_backends):
    assert make_plan(drafting(asynchronous=False), "cuda", {}).groups[0].phases["decode"].backend == "hosted"
    plan = make_plan(drafting(), "cuda", {})
    assert {phase.host_lengths for _, _, phase in plan.phase_plans()} == {"bound"}
    lost = [lost for lost in plan.rejected if lost.backend == "hosted"]
    assert lost
    assert all("host_lengths" in [reason.code for reason in item.reasons] for item in lost)


def test_a_plan_that_fails_for_another_reason_keeps_that_reason(two_backends):
    with pytest.raises(PlanError) as error:
        make_plan(drafting(), "cuda", {"attention_backend": "nobody"})
    assert "asynchronous" not in str(error.value)


def test_what_is_planned_is_what_the_builder_tells_its_batches(two_backends):
    """Planning and run time ask one function, so that no plan passes whose batches are all refused."""
    source = Path(__file__).parents[1].joinpath("src/attn_vllm/backend.py").read_text(encoding="utf-8")
    assert "exact=lengths_are_exact(vllm_config, device.type)" in source


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


def test_what_vllms_cache_cannot_hold_is_refused():
    plan = make_plan(config(), "cpu", NATIVE)
    packed = replace(plan, pools=(replace(plan.pools[0], format="fp4_block16"),))
    with pytest.raises(PlanError, match="fp4_block16"):
        _runnable(packed)
    group = plan.groups[0]

    def padded(pads):
        phases = {phase: replace(served, pads=pads) for phase, served in group.phases.items()}
        return replace(plan, groups=(replace(group, phases=phases),))

    with pytest.raises(PlanError, match="needs wider keys and values"):
        _runnable(padded({"head_dims": [[32, 32], [64, 64]]}))
    heads = padded({"q_heads": [4, 16]})
    assert _runnable(heads) is heads


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
