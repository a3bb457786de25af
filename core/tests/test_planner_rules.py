"""The planner on toys: solving over pools, forms, padding, followers, sizes, messages; and that planning stays light."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core.availability import Availability
from attn_core.errors import ManifestError, PlanError
from attn_core.explain import as_html, as_text, as_tree, decisions
from attn_core.geometry import LayerGroup, MhaGeometry, Model
from attn_core.manifest import Manifest, parse_manifest
from attn_core.options import Options
from attn_core.plan import load_plan
from attn_core.planner import solve_plan
from attn_core.planner.routes import warmup_routes
from attn_core.platform import parse_platform
from attn_core.predicate import compile_when
from test_planner import plan, served
from toys import hybrid_model, mha_model, mixed_model, mla_model, toy

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parent / "data" / "models"
TREE = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}


def changed(manifest: Manifest, **rows: Any) -> Manifest:
    """A toy with keys of its only allow row, or of the variant, replaced."""
    table = manifest.to_dict()
    variant = table["variant"][0]
    for key, value in rows.items():
        (variant if key in ("workspace", "roles", "name") else variant["allow"][0])[key] = value
    return parse_manifest(table)


def ragged(name: str, *features: str, **when: Any) -> Manifest:
    """An MLA backend of two variants: expanded for prefill, absorbed for everything."""
    one = toy(name, kind="mla", **when).to_dict()
    first = json.loads(json.dumps(one["variant"][0]))
    first |= {"name": "ragged", "roles": ["ragged"]}
    first["allow"][0]["features"] = ["lse", *features]
    one["variant"] = [first, one["variant"][0]]
    return parse_manifest(one)


# --- pages and pools --------------------------------------------------------------------------------------------------------


def test_fixed_pages_are_not_made_out_of_larger_ones() -> None:
    """Emulation expands a page table to slots; 128 is no two pages of 64."""
    manifests = [toy("wide", page_size=[128]), toy("narrow", page_size=[32, 64]), toy("slots", page_size=[1])]
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), manifests, prefill_attention_backend="wide", decode_attention_backend="narrow")
    assert all(
        word in str(caught.value) for word in ("wide needs page 128", "narrow needs page 32, 64", "smallest set")
    )
    found = plan(mha_model(), manifests, prefill_attention_backend="wide", decode_attention_backend="slots")
    assert [p.kernel_page_size for p in found.group("full").phases.values()] == [128, 1]


def test_trees_are_not_served_by_splitting_pages() -> None:
    manifests = [toy("slots", page_size=[1])]
    assert plan(mha_model(), manifests, **TREE).page_size == 1
    assert plan(mha_model(), manifests, page_size=16, speculative_algorithm="EAGLE").ok
    with pytest.raises(PlanError, match="topk 4"):
        plan(mha_model(), manifests, page_size=16, **TREE)
    assert (
        plan(mha_model(), [*manifests, toy("paged")], page_size=16, **TREE).group("full").phases["verify"].backend
        == "paged"
    )


def test_page_size_names_the_main_pool() -> None:
    manifests = [
        toy("big", head_dims=[[512, 512]], page_size=[64]),
        toy("small", head_dims=[[256, 256]], page_size=[16]),
    ]
    found = plan(mixed_model(), manifests, page_size=64)
    assert {pool.name: pool.page_size for pool in found.pools} == {"kv": 64, "kv_sliding": 16}
    assert [(a.field, a.before, a.after) for a in found.adjustments] == [("sliding.page_size", 64, 16)]


def test_pools_differ_only_where_somebody_would_be_served_worse() -> None:
    best = toy("best", head_dims=[[256, 256]], page_size=[16], order=[{"rank": 1}])
    base = [toy("big", head_dims=[[512, 512]], page_size=[64]), toy("any", head_dims=[[256, 256]], order=[{"rank": 9}])]
    assert {pool.page_size for pool in plan(mixed_model(), base).pools} == {64}
    found = plan(mixed_model(), [*base, best])
    assert {pool.name: pool.page_size for pool in found.pools} == {"kv": 64, "kv_sliding": 16}


def test_groups_of_one_pool_share_its_page() -> None:
    geometry = MhaGeometry(8, 8, 64, 64, 0.1)
    groups = tuple(
        LayerGroup("target", name, kind, layers, shape, {"attend": "kv"})
        for name, kind, layers, shape in (
            ("full", "full", (0,), geometry),
            ("sliding", "sliding", (1,), MhaGeometry(8, 8, 64, 64, 0.1, window=128)),
        )
    )
    model = Model("one pool", "Toy", "toy", "bf16", groups, 2)
    manifests = [
        toy("w", page_size=[32], features=["sliding_window"]),
        toy("f", page_size=[16, 32], features=[], order=[{"rank": 1}]),
    ]
    found = plan(model, manifests)
    assert [(pool.name, pool.page_size, pool.layers) for pool in found.pools] == [("kv", 32, (0, 1))]


def test_a_shared_allocation_sets_the_page_and_kernels_read_parts_of_it() -> None:
    """48 x 128 x 128 fp32 are 3 MiB; K takes 4 x 256 x 2 bytes a token: exactly 1536 tokens."""
    manifests = [toy("f", page_size=[16, 32, 64]), toy("l", kind="gdn")]
    found = plan(hybrid_model(), manifests, shared_allocation=True)
    assert (found.page_size, found.group("full").phases["decode"].kernel_page_size) == (1536, 64)
    assert found.adjustments[0].by == "--shared-allocation"
    with pytest.raises(PlanError) as caught:
        plan(hybrid_model(), manifests, shared_allocation=True, page_size=2048)
    assert "1536" in str(caught.value)
    assert "--page-size 1536" in caught.value.suggestions
    assert plan(mha_model(), manifests, shared_allocation=True).page_size == 16


@given(
    heads=st.sampled_from([1, 2, 4, 8]), values=st.sampled_from([8, 16, 32, 48]), state=st.sampled_from(["fp32", "bf16"]),
    kv=st.sampled_from(["bf16", "fp8_e4m3"]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_regions_of_a_shared_allocation_are_disjoint(heads: int, values: int, state: str, kv: str) -> None:
    """C38: K's half of a page holds a whole state, and not a page more than needed; regions never overlap."""
    from dataclasses import replace

    model = hybrid_model()
    full, linear = model.groups
    full = replace(full, geometry=replace(full.geometry, q_heads=heads, kv_heads=heads))
    linear = replace(linear, geometry=replace(linear.geometry, v_heads=values))
    found = plan(
        replace(model, groups=(full, linear)), [toy("f"), toy("l", kind="gdn")],
        shared_allocation=True, mamba_ssm_dtype=state, kv_cache_dtype=kv,
    )  # fmt: skip
    keys = heads * 256 * (2 if kv == "bf16" else 1)
    size = values * 128 * 128 * (4 if state == "fp32" else 2)
    assert found.page_size * keys >= size
    assert (found.page_size - 16) * keys < size
    regions = sorted((block * found.page_size * keys, block * found.page_size * keys + size) for block in range(5))
    assert all(end <= start for (_, end), (start, _) in zip(regions, regions[1:], strict=False))


def test_the_address_range_counts_under_every_page() -> None:
    small = toy("small", pool_elements={"max": 1 << 20}, order=[{"rank": 1}])
    assert served(plan(mha_model(), [small, toy("b")], num_pages=64))["decode"] == "small"
    assert served(plan(mha_model(), [small, toy("b")], num_pages=64, page_size=64))["decode"] == "b"
    with pytest.raises(PlanError, match="pool_elements"):
        plan(mha_model(), [small], num_pages=64, page_size=64)


# --- forms, padding, followers ------------------------------------------------------------------------------------------------


def test_expanded_prefill_needs_somebody_for_cached_prefixes() -> None:
    chunks, none = ragged("chunks", "chunked_prefix"), ragged("none")
    form = lambda found: found.group("mla").phases["prefill"].form  # noqa: E731
    assert form(plan(mla_model(), [chunks])) == "ragged"
    assert form(plan(mla_model(), [none])) == "by_length(0)"
    assert form(plan(mla_model(), [chunks], disable_chunked_prefix_cache=True)) == "by_length(0)"
    assert form(plan(mla_model(), [none], disable_prefix_cache=True)) == "ragged"
    found = plan(mla_model(), [none])
    assert [part.role for part in found.group("mla").phases["prefill"].parts] == ["ragged", "absorbed"]
    assert {route.name for route in warmup_routes(found)} == {"extend_no_prefix", "extend_prefix", "decode"}
    alone = changed(toy("alone", kind="mla", phase=["prefill"]), roles=["ragged"], features=["lse"])
    decode = toy("decode", kind="mla", phase=["decode"])
    with pytest.raises(PlanError):
        plan(mla_model(), [alone, decode])


@pytest.mark.parametrize(("accepted", "after"), [([64], 64), ([16, 64], None), ({"min": 32, "multiple": 32}, 32)])
def test_query_heads_are_padded_up_where_a_row_says_so(accepted: Any, after: int | None) -> None:
    manifest = changed(toy("m", kind="mla", q_heads=accepted), pads=["q_heads"])
    versions = {"mla/m": {"default": Availability(True, versions={"kernels": "0.6.13"})}}
    found = solve_plan(mla_model(), parse_platform("cuda:sm90"), Options.of({}), [manifest], versions)
    decode = found.group("mla").phases["decode"]
    assert decode.pads == ({"q_heads": [16, after]} if after else {})
    assert (f"padded 16->{after} (library 0.6.13)" in as_text(found)) is bool(after)
    with pytest.raises(PlanError, match="q_heads"):
        plan(mla_model(), [toy("m", kind="mla", q_heads=[32])])


def test_padding_v_says_what_it_costs_and_loses_to_a_native_path() -> None:
    wide = mha_model(qk_dim=192, v_dim=128)
    pad = changed(toy("pad", head_dims={"equal": True}), pads=["v_dim"])
    found = plan(wide, [pad])
    assert found.pools[0].bytes_per_page == 4 * 8 * (192 + 192) * 2 * found.page_size
    assert any("pad V to 192" in a.reason and "1024 bytes more" in a.reason for a in found.adjustments)
    native = plan(wide, [pad, toy("zz", order=[{"rank": 50}])])
    assert native.ok
    again = load_plan(found.to_json())
    assert again.group("full").phases["decode"].pads == {"v_dim": [128, 192]}


def test_a_companion_verifies_what_its_backend_cannot() -> None:
    table = toy("chains", kind="gdn", features=["spec_topk1"]).to_dict()
    table["companion"] = [
        {"phase": "verify", "backend": "trees", "reason": "chains only", "when": {"topk": {"min": 2}}}
    ]
    manifests = [toy("f"), parse_manifest(table), toy("trees", kind="gdn")]
    named = {"linear_attn_backend": "chains"}
    chain = plan(hybrid_model(), manifests, **named, speculative_algorithm="EAGLE")
    assert served(chain, "linear")["verify"] == "chains"
    tree = plan(hybrid_model(), manifests, **named, **TREE)
    assert served(tree, "linear") == {"prefill": "chains", "decode": "chains", "verify": "trees"}
    assert [(a.before, a.after, a.by) for a in tree.adjustments if a.field == "linear.verify"] == [
        ("chains", "trees", "chains")
    ]


def test_the_verify_row_says_how_states_are_kept() -> None:
    slots = toy("slots", kind="gdn", verify_state=["slots"])
    pool = lambda found: next(p for p in found.pools if p.kind == "state")  # noqa: E731
    assert pool(plan(hybrid_model(), [toy("f"), slots], speculative_algorithm="EAGLE")).verify_state == "slots"
    assert (
        pool(plan(hybrid_model(), [toy("f"), toy("l", kind="gdn")], speculative_algorithm="EAGLE")).verify_state
        == "intermediate"
    )
    assert pool(plan(hybrid_model(), [toy("f"), slots])).verify_state is None


def test_a_map_may_name_linear_groups() -> None:
    manifests = [toy("f"), toy("a", kind="gdn"), toy("b", kind="gdn")]
    found = plan(hybrid_model(), manifests, attention_backend={"linear": "b", "full": "f"})
    assert served(found, "linear") == {"prefill": "b", "decode": "b"}


# --- sizes -----------------------------------------------------------------------------------------------------------------------


def test_workspaces_take_the_largest_row_that_applies() -> None:
    scratch = {"bytes": 100, "per_row_head": 2, "rows": [{"when": {"deterministic": True}, "bytes": 5000}]}
    manifest = changed(toy("w"), workspace=scratch)
    found = plan(mha_model(), [manifest], max_running_requests=8)
    assert found.limits["workspace_bytes"] == 100 + 2 * 8 * 32
    assert plan(mha_model(), [manifest], deterministic=True).limits["workspace_bytes"] == 5000
    with pytest.raises(ManifestError, match="byts"):
        changed(toy("w"), workspace={"byts": 1})
    with pytest.raises(ManifestError, match="unknown axis 'moon'"):
        changed(toy("w"), workspace={"rows": [{"when": {"moon": 1}, "bytes": 1}]})


def test_heads_that_do_not_divide_name_the_sizes_that_do() -> None:
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), [toy("a")], tp_size=3)
    assert "--tp-size 1 or 2 or 4" in caught.value.suggestions[0]
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), [toy("a", q_heads=[8])])
    assert any(text.startswith("--tp-size 4") for text in caught.value.suggestions)


def test_kv_heads_are_replicated_when_there_are_fewer_than_ranks() -> None:
    geometry = plan(mha_model(), [toy("a")], tp_size=16).group("full").group.geometry
    assert (geometry.q_heads, geometry.kv_heads, geometry.ratio) == (2, 1, 2)


# --- messages ----------------------------------------------------------------------------------------------------------------------


def test_denials_are_told_even_where_no_allow_row_holds() -> None:
    deny = [
        {
            "code": "fp8",
            "reason": "fp8 only elsewhere",
            "fix": "--kv-cache-dtype auto",
            "when": {"format": {"dtype": "fp8_e4m3"}},
        }
    ]
    with pytest.raises(PlanError, match="fp8 only elsewhere"):
        plan(mha_model(), [toy("a", deny=deny, arch=["sm100"])], kv_cache_dtype="fp8_e4m3")


def test_who_is_outranked_learns_why() -> None:
    manifests = [
        toy("a", order=[{"rank": 1, "reason": "made for this GPU"}]),
        toy("b", order=[{"rank": 60, "reason": "only by name"}]),
    ]
    found = plan(mha_model(), manifests)
    reason = next(r.reasons[0] for r in found.rejected if r.backend == "b")
    assert reason.code == "outranked"
    assert "only by name" in reason.need
    assert "made for this GPU" in reason.need
    assert "made for this GPU" in found.group("full").phases["decode"].reason


def test_hardware_refusals_name_the_device() -> None:
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), [toy("a", arch=["sm100"])], "cuda:sm121,name=NVIDIA GB10", attention_backend="a")
    assert all(word in str(caught.value) for word in ("NVIDIA GB10 (sm121)", "sm100", "--attention-backend"))


def test_other_backends_that_would_do_are_named() -> None:
    manifests = [toy("x", features=[]), toy("y"), toy("z", phase=["prefill"])]
    with pytest.raises(PlanError) as caught:
        plan(mha_model(), manifests, dcp_size=2, attention_backend="x")
    assert "--attention-backend y" in caught.value.suggestions
    assert "--attention-backend z" not in caught.value.suggestions


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ({"arch": ["sm90", "hopper"]}, ["hopper", "gfx942", "xpu"]),
        ({"arch": ["sm_90"]}, ["sm_90"]),
        ({"arch": {"not": ["sm09"]}}, ["sm09"]),
        ({"vendor": "intell"}, ["intell", "nvidia, amd, ascend, intel, cpu"]),
        ({"traits": "sink"}, ["sink", "sinks", "hybrid_linear"]),
        ({"head_dims": {"first": "x"}}, ["first", "whole number"] if False else ["whole number"]),
        ({"page_size": {"equal": True}}, ["two numbers of a pair"]),
    ],
)  # fmt: skip
def test_a_typo_in_a_row_is_an_error_not_a_row_that_never_holds(when: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ManifestError) as caught:
        compile_when(when)
    assert all(word in str(caught.value) for word in words)


def test_conditions_on_one_number_of_a_pair_and_on_several_exact_values() -> None:
    (first,) = compile_when({"state_dims": {"first": [128], "second": {"multiple": 64}}})
    assert [first.accepts(pair) for pair in ((128, 64), (128, 128), (64, 64), (128, 32))] == [True, True, False, False]
    assert first.need == "first 128 and second a multiple of 64"
    (exact,) = compile_when({"page_size": {"exactly": [32, 64]}})
    assert (exact.exact, exact.accepts(64), exact.accepts(128)) == (True, True, False)


def test_explanations_for_every_reader() -> None:
    manifests = [toy("a"), toy("b", arch=["gfx942"]), toy("c", arch=["sm100"])]
    found = plan(mixed_model(), manifests)
    (first, *_) = decisions(found)
    assert (first.winner, first.elsewhere) == ("a:default", ("b:default",))
    assert [rival.name for rival in first.rivals] == ["c:default"]
    assert "for other hardware: b:default" in as_text(found)
    page = as_html(found)
    assert "<script" not in page
    assert "http" not in page
    assert page.count("a:default") >= 4
    with pytest.raises(PlanError) as caught:
        plan(mixed_model(), manifests, attention_backend="c")
    assert "arch: needs sm100" in as_html(caught.value)
    assert as_tree(found).children


# --- properties ---------------------------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> list[Manifest]:
    """Random backends: pages, ranks, features and phases of their own."""
    found = []
    for index in range(draw(st.integers(2, 6))):
        pages = draw(st.sampled_from([[1], [16], [64], [16, 64], {"min": 1}, {"min": 16, "multiple": 16}]))
        features = draw(
            st.sampled_from([["lse"], ["lse", "sliding_window"], ["lse", "sliding_window", "spec_topk1", "spec_tree"]])
        )
        when: dict[str, Any] = {"page_size": pages}
        if draw(st.booleans()):
            when["phase"] = draw(st.sampled_from([["prefill"], ["decode"], ["prefill", "decode"]]))
        if draw(st.booleans()):
            when["head_dims"] = draw(st.sampled_from([[[512, 512]], [[256, 256]], {"max": 256}]))
        found.append(toy(f"t{index}", features=features, order=[{"rank": draw(st.integers(1, 99))}], **when))
    return found


OPTIONS = st.fixed_dictionaries({}, optional={
    "page_size": st.sampled_from([1, 16, 64]), "speculative_algorithm": st.just("EAGLE"),
    "speculative_eagle_topk": st.sampled_from([1, 4]), "attention_backend": st.sampled_from(["t0", "t1"]),
})  # fmt: skip


@given(world=worlds(), options=OPTIONS, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_plan_is_whole_deterministic_and_survives_json(world: list[Manifest], options: dict, seed: int) -> None:
    def attempt(manifests: list[Manifest]) -> Any:
        try:
            return plan(mixed_model(), manifests, **options)
        except PlanError as error:
            return str(error)

    first = attempt(world)
    shuffled = list(world)
    random.Random(seed).shuffle(shuffled)
    second = attempt(shuffled)
    if isinstance(first, str):
        assert first == second
        return
    assert first.to_json() == second.to_json()
    assert load_plan(first.to_json()).to_dict() == first.to_dict()
    for group, phase, found in first.phase_plans():
        page = next(p.page_size for p in first.pools if p.name in group.group.pools.values())
        assert page % found.kernel_page_size == 0
        if phase in ("verify", "draft", "draft_extend") and options.get("speculative_eagle_topk") == 4:
            assert found.kernel_page_size == page
    if "attention_backend" in options:
        assert {p.backend for g, _, p in first.phase_plans() if g.group.model == "target"} == {
            options["attention_backend"]
        }


@given(world=worlds(), rank=st.integers(1, 99))
@settings(max_examples=40, deadline=None)
def test_one_more_plugin_never_makes_ranks_worse(world: list[Manifest], rank: int) -> None:
    ranks = lambda found: sum(p.rank for _, _, p in found.phase_plans())  # noqa: E731
    try:
        before = ranks(plan(mixed_model(), world))
    except PlanError:
        return
    assert ranks(plan(mixed_model(), [*world, toy("new", order=[{"rank": rank}])])) <= before


# --- the command line ------------------------------------------------------------------------------------------------------------------


def attn(*arguments: str) -> subprocess.CompletedProcess[str]:
    start = "import sys; from attn_core.cli import main; sys.exit(main())"
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", start, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_planning_imports_no_plugin_no_torch_no_rich_and_no_schema_library() -> None:
    script = (
        "import sys\nfrom attn_core.cli import main\n"
        f"sys.argv = ['attn', 'plan', '--model', r'{MODELS / 'llama-3.1-8b.json'}', '--platform', 'cuda:sm90,cuda=13.0',"
        " '--allow-planned', '--json']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ok"]
    loaded = set(eval(done.stderr.splitlines()[-1]))
    plugins = {path.name for path in (ROOT / "plugins").glob("*/src/*") if path.is_dir()}
    assert not loaded & ({"torch", "rich", "jsonschema", "numpy", "jinja2", "transformers", "pluggy"} | plugins)


def test_diff_of_two_nodes(tmp_path: Path) -> None:
    files = []
    for tp in ("1", "4"):
        files.append(str(tmp_path / f"tp{tp}.json"))
        model = str(MODELS / "gpt-oss-120b.json")
        flags = ("--model", model, "--platform", "cuda:sm90,cuda=13.0", "--allow-planned", "--tp-size", tp)
        assert attn("plan", *flags, "--output", files[-1]).returncode == 0
    same = attn("plan", "--diff", files[0], files[0])
    assert (same.returncode, "can be exchanged" in same.stdout) == (0, True)
    other = attn("plan", "--diff", *files)
    assert other.returncode == 1
    assert "kv_heads_per_rank: 8 here, 2 there" in other.stdout
    table = json.loads(attn("plan", "--diff", *files, "--json").stdout)
    assert table["compatible"] is False
    assert any(d["field"].endswith("kv_heads_per_rank") and d["fatal"] for d in table["differences"])


def test_explain_as_page_and_exit_status(tmp_path: Path) -> None:
    flags = ("--model", str(MODELS / "gpt-oss-20b.json"), "--platform", "cuda:sm120,cuda=13.0", "--allow-planned")
    page = tmp_path / "page.html"
    done = attn("explain", *flags, "--html", str(page))
    assert done.returncode == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "triton:default" in text
    failed = attn("explain", *flags, "--plain", "--attention-backend", "fa3")
    assert failed.returncode == 3
    assert "arch: needs sm90; have sm120" in failed.stdout
