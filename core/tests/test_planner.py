"""The planner on toys: the rules that are true of every backend. What shipped manifests say is tested elsewhere."""

from __future__ import annotations

import json
import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core.errors import PlanError, UsageError
from attn_core.geometry import Model
from attn_core.manifest import Manifest
from attn_core.options import Options
from attn_core.plan import Plan, load_plan
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from toys import hybrid_model, mha_model, mixed_model, mla_model, toy

ARCHS = ["sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"]


def plan(model: Model, manifests: list[Manifest], platform: str = "cuda:sm90,cuda=13.0", **options: Any) -> Plan:
    order = options.pop("order", {})
    return solve_plan(model, parse_platform(platform), Options.of(options), manifests, tie_order=order)


def served(found: Plan, group: str = "full", model: str = "target") -> dict[str, str]:
    return {phase: p.backend for phase, p in found.group(group, model).phases.items()}


# --- eligibility --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [["sm100", "sm103"], ["sm90"], ["sm120"], ["sm80", "sm121"]])
@pytest.mark.parametrize("arch", ARCHS)
def test_c02_a_backend_is_eligible_exactly_on_its_archs(arch: str, declared: list[str]) -> None:
    """C02: architectures are sets, never bounds."""
    manifests = [toy("b", arch=declared)]
    if arch in declared:
        assert served(plan(mha_model(), manifests, f"cuda:{arch}", dtype="float16")) == {"prefill": "b", "decode": "b"}
    else:
        with pytest.raises(PlanError) as caught:
            plan(mha_model(), manifests, f"cuda:{arch}", dtype="float16")
        reason = caught.value.rejected[0].reasons[0]
        assert (reason.code, reason.have) == ("arch", arch)
        assert all(name in reason.need for name in declared)


@given(
    archs=st.sets(st.sampled_from(ARCHS), min_size=1),
    dims=st.sampled_from([64, 128, 192, 256]),
    limit=st.sampled_from([64, 128, 256]),
    softcap=st.booleans(),
    arch=st.sampled_from(ARCHS),
)
@settings(max_examples=60, deadline=None)
def test_auto_and_explicit_agree_on_eligibility(
    archs: set[str], dims: int, limit: int, softcap: bool, arch: str
) -> None:
    model = mha_model(qk_dim=dims, v_dim=dims, softcap=30.0 if softcap else None)
    manifests = [
        toy("limited", arch=sorted(archs), head_dims={"max": limit}, features=["lse"]),
        toy("able", arch=[arch]),
    ]
    auto = plan(model, manifests, f"cuda:{arch}", dtype="float16")
    rejected = {r.backend for r in auto.rejected if all(x.code not in ("outranked",) for x in r.reasons)}
    try:
        plan(model, manifests, f"cuda:{arch}", dtype="float16", attention_backend="limited")
        explicit = True
    except PlanError:
        explicit = False
    assert explicit == ("limited" not in rejected)


@given(order=st.permutations(["a", "b", "c", "d"]), ranks=st.lists(st.integers(1, 99), min_size=4, max_size=4))
@settings(max_examples=40, deadline=None)
def test_the_order_of_discovery_does_not_matter(order: list[str], ranks: list[int]) -> None:
    made = {name: toy(name, order=[{"rank": rank}]) for name, rank in zip("abcd", ranks, strict=True)}
    found = plan(mha_model(), [made[name] for name in order])
    assert found.to_json() == plan(mha_model(), [made[name] for name in "abcd"]).to_json()
    best = min(zip(ranks, "abcd", strict=True))
    assert served(found)["decode"] == best[1]


@given(pages=st.sets(st.sampled_from([1, 16, 32, 64]), min_size=1), rank=st.integers(1, 99))
@settings(max_examples=40, deadline=None)
def test_another_plugin_never_makes_a_plan_worse(pages: set[int], rank: int) -> None:
    base = [toy("old", order=[{"rank": 30}], page_size=[16, 32])]
    before = plan(mha_model(), base)
    after = plan(mha_model(), [*base, toy("new", order=[{"rank": rank}], page_size=sorted(pages))])
    rank_of = lambda found: sum(p.rank for _, _, p in found.phase_plans())  # noqa: E731
    assert rank_of(after) <= rank_of(before)
    explicit = plan(mha_model(), [*base, toy("new", order=[{"rank": rank}])], attention_backend="old")
    assert served(explicit) == served(before)


def test_a_plan_survives_json_and_pickle_and_refuses_edits() -> None:
    found = plan(mixed_model(), [toy("a"), toy("b", head_dims={"max": 256})], speculative_algorithm="EAGLE")
    again = load_plan(found.to_json())
    assert again.to_dict() == found.to_dict()
    assert pickle.loads(pickle.dumps(found)).fingerprint == found.fingerprint
    edited = json.loads(found.to_json())
    edited["page_size"] = 7
    with pytest.raises(UsageError, match="changed after it was made"):
        load_plan(edited)


# --- choice -------------------------------------------------------------------------------------------------------------

NAMES = [None, "a", "b"]


@pytest.mark.parametrize("general", NAMES)
@pytest.mark.parametrize("prefill", NAMES)
@pytest.mark.parametrize("decode", NAMES)
def test_c30_phase_flags_inherit_the_general_one(general: str | None, prefill: str | None, decode: str | None) -> None:
    """C30: prefill = prefill or general or auto; equality is not special."""
    options = {"attention_backend": general, "prefill_attention_backend": prefill, "decode_attention_backend": decode}
    found = plan(mha_model(), [toy("a"), toy("b"), toy("c", order=[{"rank": 1}])], **options)
    assert served(found) == {"prefill": prefill or general or "c", "decode": decode or general or "c"}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_verify_follows_the_speculative_attention_mode(mode: str) -> None:
    found = plan(
        mha_model(),
        [toy("a"), toy("b")],
        prefill_attention_backend="a",
        decode_attention_backend="b",
        speculative_algorithm="EAGLE",
        speculative_attention_mode=mode,
    )
    assert served(found)["verify"] == {"prefill": "a", "decode": "b"}[mode]


def test_c44_the_draft_model_never_inherits() -> None:
    """C44: target flag and draft flag are independent."""
    manifests = [toy("a"), toy("b"), toy("c", order=[{"rank": 1}])]
    for target, draft in [(None, None), ("a", None), (None, "b"), ("a", "b")]:
        found = plan(
            mha_model(),
            manifests,
            attention_backend=target,
            draft_attention_backend=draft,
            speculative_algorithm="EAGLE",
        )
        assert served(found)["decode"] == (target or "c")
        assert set(served(found, model="draft").values()) == {draft or "c"}


def test_verify_can_pull_auto_to_a_backend_that_verifies() -> None:
    manifests = [toy("fast", order=[{"rank": 1}], phase=["prefill", "decode"]), toy("able")]
    assert set(served(plan(mha_model(), manifests)).values()) == {"fast"}
    found = plan(mha_model(), manifests, speculative_algorithm="NGRAM")
    assert served(found)["verify"] == served(found)["prefill"] == "able"
    assert served(found)["decode"] == "fast"


def test_c121_an_explicit_choice_that_one_group_cannot_have_is_an_error() -> None:
    """C21, C121: the error names the group, its size, and the map flag that would work."""
    manifests = [toy("small", head_dims={"max": 256}), toy("big")]
    with pytest.raises(PlanError) as caught:
        plan(mixed_model(), manifests, attention_backend="small")
    text = str(caught.value)
    assert "2 full layers" in text
    assert "512" in text
    assert "sliding=small" in text
    found = plan(mixed_model(), manifests, attention_backend={"sliding": "small", "full": "big"})
    assert (served(found)["decode"], served(found, "sliding")["decode"]) == ("big", "small")
    with pytest.raises(UsageError, match="no layer group 'slidin'"):
        plan(mixed_model(), manifests, attention_backend={"slidin": "small"})


def test_experimental_backends_are_for_those_who_name_them() -> None:
    risky = toy("risky", order=[{"rank": 1}])
    object.__setattr__(risky, "status", "experimental")
    assert served(plan(mha_model(), [risky, toy("b")]))["decode"] == "b"
    assert served(plan(mha_model(), [risky, toy("b")], attention_backend="risky"))["decode"] == "risky"
    assert served(plan(mha_model(), [risky, toy("b")], allow_experimental=True))["decode"] == "risky"


def test_planned_backends_are_for_what_if_plans() -> None:
    future = toy("future", order=[{"rank": 1}])
    object.__setattr__(future, "status", "planned")
    assert served(plan(mha_model(), [future, toy("b")]))["decode"] == "b"
    found = plan(mha_model(), [future, toy("b")], allow_planned=True)
    assert served(found)["decode"] == "future"
    assert any("planned" in warning for warning in found.warnings)


def test_exclude_and_prefer() -> None:
    manifests = [toy("a", order=[{"rank": 1}]), toy("b"), toy("c")]
    assert served(plan(mha_model(), manifests, exclude_backends="a"))["decode"] == "b"
    assert served(plan(mha_model(), manifests, prefer_backends="c,b"))["decode"] == "c"
    with pytest.raises(PlanError):
        plan(mha_model(), manifests, exclude_backends="a", attention_backend="a")


def test_an_unknown_name_says_what_is_there() -> None:
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), [toy("triangle")], attention_backend="triangel")
    assert "not installed" in str(caught.value)
    assert "triangle" in str(caught.value)


# --- pages, formats, layouts --------------------------------------------------------------------------------------------


def test_the_page_size_is_an_intersection() -> None:
    manifests = [toy("a", page_size=[64, 128]), toy("b", page_size=[16, 64])]
    found = plan(mha_model(), manifests, prefill_attention_backend="a", decode_attention_backend="b")
    assert found.page_size == 64
    assert [(a.field, a.before, a.after) for a in found.adjustments] == [("page_size", 1, 64)]


def test_c32_an_empty_intersection_names_both_sets() -> None:
    """C32: 128 against 32 and 64, nobody is snapped."""
    manifests = [toy("wide", page_size=[128]), toy("narrow", page_size=[32, 64])]
    with pytest.raises(PlanError) as caught:
        plan(
            mha_model(), manifests, prefill_attention_backend="wide", decode_attention_backend="narrow", kv_layout="HND"
        )
    with pytest.raises(PlanError) as caught:
        manifests = [
            toy("wide", page_size={"exactly": 128}),
            toy("narrow", page_size={"exactly": 64}),
        ]
        plan(mha_model(), manifests, prefill_attention_backend="wide", decode_attention_backend="narrow")
    text = str(caught.value)
    assert all(word in text for word in ("wide", "128", "narrow", "64"))


def test_emulation_splits_pages_only_in_token_major_layouts() -> None:
    slots = toy("slots", page_size=[1], format__layout=["NHD", "HND"])
    found = plan(mha_model(), [slots], page_size=64)
    assert found.group("full").phases["decode"].kernel_page_size == 1
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), [slots], page_size=64, kv_layout="HND")
    assert "page" in str(caught.value)


def test_exactly_is_about_the_pool_and_cannot_be_emulated() -> None:
    """C38: a layout that needs one exact page size does not take a multiple of it."""
    manifests = [toy("exact", page_size={"exactly": 1024})]
    assert plan(mha_model(), manifests).page_size == 1024
    with pytest.raises(PlanError, match="1024"):
        plan(mha_model(), manifests, page_size=2048)


def test_c36_joint_limits_are_deny_rows() -> None:
    """C36: page 16 with head dim 256 is refused as a pair, each alone is fine."""
    deny = [
        {"code": "page_head_dim", "reason": "known wrong results", "when": {"page_size": 16, "head_dims": [[256, 256]]}}
    ]
    manifests = [toy("t", page_size=[16, 32, 64], deny=deny)]
    wide = mha_model(qk_dim=256, v_dim=256)
    assert plan(wide, manifests).page_size in (32, 64)
    assert plan(mha_model(), manifests, page_size=16).page_size == 16
    with pytest.raises(PlanError, match="known wrong results"):
        plan(wide, manifests, page_size=16)


def test_a_preferred_page_wins_among_equals() -> None:
    found = plan(mha_model(), [toy("t", prefer=[{"page_size": 32}])])
    assert found.page_size == 32
    assert found.adjustments[0].by == "t"


def test_pools_may_differ_where_they_must() -> None:
    manifests = [
        toy("big", head_dims=[[512, 512]], page_size={"exactly": 64}),
        toy("small", head_dims=[[256, 256]], page_size={"exactly": 16}),
    ]
    found = plan(mixed_model(), manifests)
    assert {pool.name: pool.page_size for pool in found.pools} == {"kv": 64, "kv_sliding": 16}


def test_peer_rules_speak_about_the_other_phase() -> None:
    deny = [{"reason": "not beside itself", "when": {"peer": {"decode": ["a"]}, "phase": "prefill"}}]
    manifests = [toy("a", order=[{"rank": 1}], deny=deny), toy("b")]
    found = plan(mha_model(), manifests)
    assert served(found) in ({"prefill": "b", "decode": "a"}, {"prefill": "a", "decode": "b"})
    with pytest.raises(PlanError, match="not beside itself"):
        plan(mha_model(), manifests, attention_backend="a")


# --- other axes ---------------------------------------------------------------------------------------------------------


def test_tensor_parallel_heads() -> None:
    found = plan(mha_model(), [toy("a", gqa_ratio=[4])], tp_size=4)
    geometry = found.group("full").group.geometry
    assert (geometry.q_heads, geometry.kv_heads) == (8, 2)
    assert (
        plan(mla_model(), [toy("m", kind="mla", q_heads=[2])], tp_size=8).group("mla").phases["decode"].backend == "m"
    )


def test_linear_layers_have_flags_of_their_own() -> None:
    manifests = [toy("full"), toy("one", kind="gdn"), toy("two", kind="gdn", state_dtype=["bf16"])]
    assert served(plan(hybrid_model(), manifests), "linear")["prefill"] == "one"
    assert served(plan(hybrid_model(), manifests, attention_backend="full"), "linear")["decode"] == "one"
    found = plan(hybrid_model(), manifests, linear_attn_prefill_backend="two", mamba_ssm_dtype="bfloat16")
    assert served(found, "linear") == {"prefill": "two", "decode": "one"}
    with pytest.raises(PlanError, match="state_dtype"):
        plan(hybrid_model(), manifests, linear_attn_backend="two")


def test_c10_old_gpus_have_no_bfloat16() -> None:
    """C10: refused before any candidate, with the flag to use."""
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), [toy("a")], "cuda:sm75", dtype="bfloat16")
    assert all(word in str(caught.value) for word in ("bfloat16", "sm75", "--dtype float16"))
    assert plan(mha_model(), [toy("a")], "cuda:sm75", dtype="float16").ok


def test_c97_graph_level_is_the_minimum_and_says_who() -> None:
    """C97: full was asked for, verify needs uniform_query, the backend declares less."""
    manifests = [toy("t")]
    weak = manifests[0].to_dict()
    weak["variant"][0]["allow"][0]["graph"] = {"level": "uniform_decode"}
    from attn_core.manifest import parse_manifest

    found = plan(mha_model(), [parse_manifest(weak)], speculative_algorithm="EAGLE", cuda_graph="full")
    assert found.cuda_graph["mode"] == "piecewise"
    assert "uniform_decode" in found.cuda_graph["reason"]
    assert plan(mha_model(), manifests, speculative_algorithm="EAGLE", cuda_graph="full").cuda_graph["mode"] == "full"
    assert plan(mha_model(), manifests, "cpu").cuda_graph["mode"] == "off"


def test_c107_backend_options_are_checked_by_the_backends_schema() -> None:
    """C107: stored in the plan, unknown keys refused with the known ones."""
    table = toy("t").to_dict() | {"options_schema": {"properties": {"level": {"type": "integer"}}}}
    from attn_core.manifest import parse_manifest

    manifests = [parse_manifest(table)]
    found = plan(mha_model(), manifests, backend_options={"t": {"level": 3}})
    assert found.options["backend_options"] == {"t": {"level": 3}}
    assert found.group("full").phases["decode"].parts[0].options == {"level": 3}
    with pytest.raises(UsageError) as caught:
        plan(mha_model(), manifests, backend_options={"t": {"levl": 3}})
    assert "levl" in str(caught.value)
    assert "level" in str(caught.value)


def test_c85_two_nodes_compare_cache_contracts() -> None:
    """C85: tp 1 and tp 4 differ in KV heads per rank, field by field."""
    one, four = (plan(mha_model(), [toy("a")], tp_size=tp) for tp in (1, 4))
    assert "groups.target/full.kv_heads_per_rank" in {d.field for d in one.differences(four)}
    assert one.differences(plan(mha_model(), [toy("a")], cuda_graph="off")) == []


def test_suggestions_are_changes_that_work() -> None:
    manifests = [toy("a", page_size={"exactly": 64})]
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), manifests, page_size=16)
    assert "without --page-size" in caught.value.suggestions
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), [toy("a", format__dtype=["bf16"])], kv_cache_dtype="fp8_e4m3")
    assert "--kv-cache-dtype auto" in caught.value.suggestions


def test_unknown_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="page_size"):
        Options.of({"page_sise": 16})


def test_planning_is_fast_enough_with_many_plugins() -> None:
    import time

    manifests = [
        toy(f"t{i}", order=[{"rank": 1 + i}], page_size=random.Random(i).sample([1, 16, 32, 64], 2)) for i in range(25)
    ]
    plan(mha_model(), manifests)
    started = time.perf_counter()
    for _ in range(5):
        plan(mha_model(), manifests)
    assert (time.perf_counter() - started) / 5 < 0.25  # generous: the benchmark records the real figure


def test_names_in_preferences_that_match_nothing_are_said() -> None:
    found = plan(mha_model(), [toy("triangle")], exclude_backends="triangel", prefer_backends="other/thing")
    assert any("--exclude-backends: 'triangel'" in w and "did you mean triangle" in w for w in found.warnings)
    assert any("--prefer-backends: 'other/thing'" in w for w in found.warnings)
