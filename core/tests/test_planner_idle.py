"""Nothing that was asked for is passed over: a backend for what the plan lacks is refused, a setting without effect is noted."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from attn_core.errors import PlanError, UsageError
from attn_core.geometry import DsaGeometry, LayerGroup, MhaGeometry, MlaGeometry, Model
from attn_core.manifest import parse_manifest
from attn_core.options import Options
from attn_core.plan import Plan
from attn_core.planner import solve_plan
from attn_core.planner._slots import pin_of
from attn_core.platform import parse_platform
from toys import hybrid_model, mha_model, mixed_model, mla_model, toy

EAGLE = {"speculative_algorithm": "EAGLE"}


def vision_model() -> Model:
    """A decoder and a tower."""
    decoder = mha_model(layers=1)
    tower = LayerGroup("vision", "tower", "vit_full", (0,), MhaGeometry(16, 16, 64, 64, 0.125, causal=False), {})
    return Model("seeing", "ToyForCausalLM", "toy", "bf16", (*decoder.groups, tower), 2, max_positions=4096)


def tower_model() -> Model:
    """A tower alone."""
    whole = vision_model()
    return Model("tower", "ToyModel", "toy", "bf16", whole.groups[1:], 1, max_positions=4096)


def dsa_model() -> Model:
    """Sparse attention alone."""
    geometry = DsaGeometry(MlaGeometry(16, 512, 64, 128, 128, 192**-0.5), 64, 128, 2048)
    group = LayerGroup("target", "sparse", "mla_sparse_dsa", (0,), geometry, {"attend": "latent", "index": "index"})
    return Model("sparse", "ToyForCausalLM", "toy", "bf16", (group,), 1, frozenset({"mla"}), 4096)


def mamba_model() -> Model:
    """Attention beside layers that are left to the server."""
    states = LayerGroup("target", "state", "mamba2", (1, 2), None, {})
    return Model("mamba", "ToyForCausalLM", "toy", "bf16", (*mha_model(layers=1).groups, states), 3, max_positions=4096)


MODELS = {
    "mha": mha_model, "mla": mla_model, "hybrid": hybrid_model, "vision": vision_model, "tower": tower_model,
    "mamba": mamba_model, "mixed": mixed_model, "dsa": dsa_model,
}  # fmt: skip


def plan(model: str, platform: str = "cuda:sm90", draft: Model | None = None, **flags: Any) -> Plan:
    manifests = [toy(name, kind=kind) for kind in ("mha", "mla", "gdn", "mm") for name in ("alpha", "beta")]
    sparse = toy("alpha", kind="mla", role=["sparse", "index"], form=["absorbed"]).to_dict()
    sparse["kind"] = "dsa"
    sparse["variant"][0]["roles"] = ["sparse", "index"]
    for row in sparse["variant"][0]["allow"]:
        row["when"].pop("role")
        row["when"]["format.name"] = ["mla_plain", "index_132_planar"]
        row["when"]["dtypes"] = [{"q": q, "kv": kv} for q in ("bf16", "fp8_e4m3") for kv in ("bf16", "fp8_e4m3")]
    manifests.append(parse_manifest(sparse))
    return solve_plan(
        MODELS[model](), parse_platform(platform), Options.of(flags), manifests, tie_order={}, draft=draft
    )


# --- backends that were named ---------------------------------------------------------------------------------------------

REFUSED = [
    ("draft_attention_backend", "mha", {}, "no speculation"),
    ("draft_attention_backend", "mha", {"speculative_algorithm": "NGRAM"}, "NGRAM, which drafts without a model"),
    ("mm_attention_backend", "mha", {}, "full (mha)"),
    ("linear_attn_backend", "mha", {}, "full (mha)"),
    ("linear_attn_prefill_backend", "mla", {}, "mla (mla)"),
    ("linear_attn_decode_backend", "mamba", {}, "state (left to the server)"),
    ("dsa_prefill_backend", "mla", {}, "mla (mla)"),
    ("dsa_decode_backend", "mha", {}, "full (mha)"),
    ("attention_backend", "tower", {}, "tower (mm)"),
    ("prefill_attention_backend", "tower", {}, "tower (mm)"),
    ("decode_attention_backend", "tower", {}, "tower (mm)"),
]


@pytest.mark.parametrize(("name", "model", "flags", "found"), REFUSED)
def test_a_backend_for_what_the_plan_lacks_is_refused(name: str, model: str, flags: Any, found: str) -> None:
    flag = Options().flag_of(name)
    with pytest.raises(PlanError) as caught:
        plan(model, **{name: "alpha"}, **flags)
    text = str(caught.value)
    assert "AC-PLAN-001" in text
    assert f"asked    {flag} alpha" in text
    assert "needs    " in text
    assert found in next(line for line in text.splitlines() if "found    " in line)
    assert f"without {flag}" in caught.value.suggestions
    assert plan(model, **flags).ok, "the advice works"


def test_the_refusal_names_the_flag_of_the_layers_that_are_there() -> None:
    with pytest.raises(PlanError) as caught:
        plan("mha", mm_attention_backend="beta")
    assert "--attention-backend beta" in caught.value.suggestions
    with pytest.raises(PlanError) as caught:
        plan("tower", attention_backend="beta")
    assert "--mm-attention-backend beta" in caught.value.suggestions


def test_all_idle_backends_are_named_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        plan("mha", mm_attention_backend="alpha", linear_attn_backend="beta")
    assert sum(fact.startswith("asked") for fact in caught.value.facts) == 2


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ({"attention_backend": "full=alpha,state=beta"}, "--attention-backend state=beta"),
        ({"decode_attention_backend": "state=beta"}, "--decode-attention-backend state=beta"),
    ],
)
def test_a_map_that_names_layers_left_to_the_server_is_refused(flags: Any, asked: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan("mamba", **flags)
    assert f"asked    {asked}" in caught.value.facts


def test_decode_of_a_tower_is_refused_in_a_map() -> None:
    assert (
        plan("vision", prefill_attention_backend="tower=beta").group("tower", "vision").phases["prefill"].backend
        == "beta"
    )
    with pytest.raises(PlanError, match="names a backend for what this plan does not have"):
        plan("vision", decode_attention_backend="tower=beta")


def test_a_map_of_the_draft_model_names_its_groups() -> None:
    chosen = plan("mha", **EAGLE, draft_attention_backend="full=beta").group("full", "draft").phases["draft"]
    assert chosen.backend == "beta"
    with pytest.raises(UsageError, match="no layer group 'sliding'"):
        plan("mha", **EAGLE, draft_attention_backend="sliding=beta")


@pytest.mark.parametrize("flags", [{}, {"speculative_algorithm": "NGRAM"}])
def test_a_draft_model_that_nothing_drafts_with_is_refused(flags: Any) -> None:
    with pytest.raises(PlanError, match="a draft model was given") as caught:
        plan("mha", draft=mha_model(layers=1), **flags)
    assert "without --draft-model" in caught.value.suggestions
    with pytest.raises(PlanError, match="a draft model was given") as caught:
        plan("tower", draft=mha_model(layers=1), **EAGLE)
    assert "no layer of this model decodes" in str(caught.value)
    assert plan("mha", draft=mha_model(layers=1), **EAGLE).ok


def test_auto_names_nothing_and_is_never_refused() -> None:
    flags = {f.name: "auto" for f in fields(Options) if f.name.endswith("_backend")}
    assert plan("mha", **flags).warnings == ()


def test_the_family_s_own_name_is_a_choice() -> None:
    assert plan("dsa", attention_backend="dsa").warnings == ()
    assert plan("mla", prefill_attention_backend="mla").warnings == ()


# --- choices that others come before ----------------------------------------------------------------------------------------


def test_a_general_choice_behind_both_phases_is_noted() -> None:
    flags = {"attention_backend": "alpha", "prefill_attention_backend": "beta", "decode_attention_backend": "beta"}
    made = plan("mha", **flags)
    (note,) = made.warnings
    assert note.startswith(
        "--attention-backend alpha serves nothing here, behind --prefill-attention-backend and --decode"
    )
    assert plan("mha", attention_backend="alpha", decode_attention_backend="beta").warnings == ()


def test_a_choice_by_kind_behind_one_by_name_is_noted() -> None:
    made = plan("hybrid", attention_backend={"linear": "alpha", "linear_gdn": "beta", "full": "alpha"})
    assert made.group("linear").phases["prefill"].backend == "alpha"
    assert made.warnings == ("--attention-backend linear_gdn=beta serves nothing here, behind the name of the group",)


# --- settings -----------------------------------------------------------------------------------------------------------------

NOTED: list[tuple[str, Any, str, dict[str, Any], str]] = [
    ("page_size", 16, "tower", {}, "no layer keeps keys and values in pages"),
    ("num_pages", 64, "tower", {}, "no layer keeps keys and values in pages"),
    ("kv_cache_dtype", "fp16", "tower", {}, "no layer keeps keys and values in pages"),
    ("kv_layout", "HND", "tower", {}, "no layer keeps keys and values in pages"),
    ("dcp_size", 2, "tower", {}, "no layer keeps keys and values in pages"),
    ("mamba_ssm_dtype", "bf16", "mha", {}, "no recurrent state is planned here"),
    ("mamba_ssm_dtype", "bf16", "mamba", {}, "no recurrent state is planned here"),
    ("shared_allocation", True, "mha", {}, "recurrent states beside pages"),
    ("disable_chunked_prefix_cache", True, "mha", {}, "only latent attention"),
    ("disable_chunked_prefix_cache", True, "mla", {"disable_prefix_cache": True}, "leaves no cached prefix"),
    ("speculative_algorithm", "EAGLE", "tower", {}, "no layer of this model decodes"),
    ("speculative_eagle_topk", 4, "mha", {}, "there is no --speculative-algorithm"),
    ("speculative_num_draft_tokens", 8, "mha", {}, "there is no --speculative-algorithm"),
    ("speculative_num_steps", 5, "mha", {}, "there is no --speculative-algorithm"),
    ("speculative_attention_mode", "decode", "mha", {}, "there is no --speculative-algorithm"),
    ("speculative_attention_mode", "decode", "dsa", EAGLE, "always served by decode"),
    ("max_prefill_tokens", 16384, "mha", {}, "--chunked-prefill-size 8192 bounds a prefill step"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "model", "flags", "why"), NOTED)
def test_a_setting_without_effect_is_noted(name: str, value: Any, model: str, flags: Any, why: str) -> None:
    made = plan(model, **{name: value}, **flags)
    notes = [note for note in made.warnings if note.startswith(Options().flag_of(name) + " ")]
    assert len(notes) == 1, made.warnings
    assert "changes nothing here: " in notes[0]
    assert why in notes[0]
    assert Options().flag_of(name) not in "".join(plan(model, **flags).warnings), "said only where it was set"


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("mha", {"page_size": 16, "kv_cache_dtype": "fp16", "num_pages": 64, "speculative_eagle_topk": 4, **EAGLE}),
        ("mha", {"speculative_attention_mode": "decode", "speculative_num_draft_tokens": 8, **EAGLE}),
        ("hybrid", {"mamba_ssm_dtype": "bf16", "linear_attn_backend": "alpha", "shared_allocation": True}),
        ("mha", {"max_prefill_tokens": 16384, "chunked_prefill_size": -1}),
        ("vision", {"mm_attention_backend": "beta", "attention_backend": "alpha"}),
    ],
)
def test_a_setting_with_an_effect_is_not_noted(model: str, flags: Any) -> None:
    assert not [note for note in plan(model, **flags).warnings if "changes nothing" in note or "serves nothing" in note]


def test_options_of_a_backend_that_does_not_serve_are_noted() -> None:
    table = toy("beta").to_dict()
    table["options_schema"] = {"properties": {"level": {"type": "integer"}}}
    manifests = [toy("alpha"), parse_manifest(table)]
    flags = {"backend_options": {"beta": {"level": 3}}}
    for chosen, expected in (("alpha", 1), ("beta", 0)):
        options = Options.of(flags, attention_backend=chosen)
        made = solve_plan(mha_model(), parse_platform("cuda:sm90"), options, manifests, tie_order={})
        assert len([note for note in made.warnings if note.startswith("--backend-option beta.…")]) == expected


@pytest.mark.parametrize(
    ("platform", "asked", "note"),
    [
        ("cpu", "full", "--cuda-graph full becomes off: no graphs on cpu"),
        ("cpu", "decode", "--cuda-graph decode becomes off: no graphs on cpu"),
        ("cpu", "off", None),
        ("cpu", "auto", None),
        ("cuda:sm90", "full", None),
        ("cuda:sm90", "piecewise", None),
    ],
)
def test_a_graph_mode_that_is_not_kept_is_noted(platform: str, asked: str, note: str | None) -> None:
    made = plan("mha", platform, cuda_graph=asked)
    assert made.warnings == (() if note is None else (note,))


#: Options that every plan reads, whatever the model: who may serve, and facts about the server that any manifest may ask for.
ALWAYS_READ = {
    "exclude_backends", "prefer_backends", "disable_variants",  # a name that matches nobody is noted
    "allow_planned", "allow_experimental", "forbid_jit", "dtype", "tp_size", "deterministic", "context_length",
    "chunked_prefill_size", "page_major", "hicache", "disable_prefix_cache", "max_running_requests", "dynamic_chunking",
    "async_schedule", "lanes", "pd_role", "host_lengths",
}  # fmt: skip


def test_every_option_is_read_refused_or_noted() -> None:
    """A new option must say which of the three it is."""
    refused = {name for name, *_ in REFUSED}
    noted = {name for name, *_ in NOTED} | {"backend_options", "cuda_graph"}
    listed = [*ALWAYS_READ, *refused, *noted]
    assert sorted(listed) == sorted(f.name for f in fields(Options))


def test_auto_for_one_group_excepts_it_from_what_is_said_of_its_kind() -> None:
    group = replace(mixed_model().groups[1], name="window")
    choice = {group.kind: "triton", group.name: "auto"}
    assert pin_of(group, "decode", Options.of({"attention_backend": choice})) is None
    pin = pin_of(group, "decode", Options.of({"attention_backend": {group.kind: "triton"}}))
    assert pin is not None
    assert pin.name == "triton"
