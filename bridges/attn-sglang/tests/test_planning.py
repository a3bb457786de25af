"""From a model's layers and the server's facts to a plan, and what is refused with which flag."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_server import Server, backend_of

from attn_core.discovery import Registry, discover
from attn_core.errors import PlanError, UsageError
from attn_core.manifest import load_toml, parse_manifests
from attn_sglang.facts import Speculation
from attn_sglang.layers import describe, find_layers
from attn_sglang.planning import _check_pages, make_plan, server_options, user_options


def described(server, sliding=frozenset()):
    return describe(find_layers(server.model), server.facts, sliding)


def paged_only(size):
    """A backend that reads pages of one size."""
    text = f"""
api = "1.0"
[[backend]]
kind = "mha"
name = "paged"
[[backend.variant]]
name = "only"
[[backend.variant.allow]]
features = ["mixed", "writes_out", "strided_q"]
[backend.variant.allow.when]
vendor = "cpu"
phase = ["prefill", "decode"]
dtypes = [{{ q = "fp32", kv = "fp32" }}]
page_size = {size}
format = {{ layout = ["NHD", "HND"] }}
head_dims = {{ min = 8 }}
"""
    return Registry.with_manifests(parse_manifests(load_toml(text, "x"), package="attn-paged", version="1"))


def test_groups_are_what_the_layers_say():
    server = Server(windows=(-1, 127, -1, 127), softcap=30.0, sinks=True)
    server.modules[2].use_irope = True
    server.facts = replace(server.facts, attention_chunk=64)
    groups = {group.name: group for group in described(server).model.groups}
    assert {name: group.layers for name, group in groups.items()} == {
        "full": (0,), "sliding": (1, 3), "chunked_local": (2,),
    }  # fmt: skip
    geometry = groups["sliding"].geometry
    assert (geometry.window, geometry.softcap, geometry.sinks) == (128, 30.0, True)  # a window counts the query itself
    assert groups["chunked_local"].geometry.chunk == 64
    assert {group.pools["attend"] for group in groups.values()} == {"main"}


def test_a_sliding_pool_and_a_shared_cache():
    server = Server(windows=(-1, 31, -1))
    server.modules[2].layer_id = 0
    layout = described(server, frozenset({1}))
    assert [(g.name, g.pools["attend"], g.layers) for g in layout.model.groups] == [
        ("full", "main", (0,)), ("sliding", "sliding", (1,)),
    ]  # fmt: skip
    assert layout.model.groups[0].features == {"shared_kv"}
    assert "swa_pools" in layout.model.traits
    assert [item.shared for item in layout.members["full"]] == [False, True]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("is_cross_attention", True, "cross attention"),
        ("pos_encoding_mode", "ALIBI", "ALIBI"),
        ("xai_temperature_len", 8192, "8192"),
    ],
)
def test_layers_that_cannot_be_expressed(name, value, text):
    server = Server()
    setattr(server.modules[1], name, value)
    with pytest.raises(PlanError, match=rf"layers.1.attn(.|\n)*{text}(.|\n)*SGLang's own"):
        described(server)


def test_a_model_without_attention_layers():
    with pytest.raises(PlanError, match="no attention layer was found"):
        describe(find_layers(torch.nn.Linear(2, 2)), Server().facts)


def test_the_page_size_is_enforced_with_the_flag_to_pass():
    server = Server(page=1)
    with pytest.raises(PlanError, match=r"attn-paged cannot run with SGLang's page size 1\n(.|\n)*--page-size 64"):
        make_plan(described(server).model, server.facts, paged_only(64), "attn-paged", "paged")
    server = Server(page=64)
    plan = make_plan(described(server).model, server.facts, paged_only(64), "attn-paged", "paged")
    assert plan.page_size == 64


def test_larger_pages_of_the_server_are_read_as_several():
    server = Server(page=128)
    plan = make_plan(described(server).model, server.facts, paged_only(64), "attn-paged", "paged")
    assert plan.page_size == 64
    with pytest.raises(PlanError, match="--page-size 64"):
        make_plan(described(server).model, server.facts, paged_only(64), "attn-paged", "paged", layout="HND")


def test_a_pool_that_sglang_does_not_have_is_refused():
    facts = Server(page=16).facts
    for page, form, said in ((64, "plain", "--page-size 64"), (16, "fp4_block16", "in format fp4_block16")):
        pool = SimpleNamespace(name="sliding", page_size=page, format=form)
        with pytest.raises(PlanError, match=said):
            _check_pages(SimpleNamespace(pools=(pool,)), facts)


def test_what_no_page_size_repairs_keeps_its_own_message():
    server = Server(page=64, dtype=torch.float16)
    with pytest.raises(PlanError) as caught:
        make_plan(described(server).model, server.facts, paged_only(64), "attn-paged", "paged")
    assert "page size" not in caught.value.message
    assert "fp16" in str(caught.value)


def test_server_features_that_are_not_served():
    server = Server(refused=(("an MLA model", "--attention-backend triton"), ("a draft model", "another flag")))
    with pytest.raises(PlanError, match=r"an MLA model and a draft model cannot be served(.|\n)*another flag"):
        make_plan(described(server).model, server.facts, discover(), "attn_core", None)


def test_a_split_pins_the_side_it_serves_and_nothing_else():
    server = Server()
    facts = replace(server.facts, prefill_name="attn-flex_attention", decode_name="attn-torch_native")
    model = described(server).model
    plan = make_plan(model, facts, discover(), "attn-torch_native", "torch_native")
    phases = plan.groups[0].phases
    assert phases["decode"].backend == "torch_native"
    assert phases["decode"].explicit
    assert not phases["prefill"].explicit
    plan = make_plan(model, facts, discover(), "attn-flex_attention", "flex_attention")
    assert plan.groups[0].phases["prefill"].backend == "flex_attention"


def test_the_routers_own_split(monkeypatch):
    monkeypatch.setenv(
        "ATTN_SGLANG_OPTIONS", "prefill_attention_backend=flex_attention; decode-attention-backend=torch_native"
    )
    server = Server()
    phases = make_plan(described(server).model, server.facts, discover(), "attn_core", None).groups[0].phases
    assert (phases["prefill"].backend, phases["decode"].backend) == ("flex_attention", "torch_native")


def test_options_of_the_user():
    assert user_options({}) == {}
    assert user_options({"ATTN_SGLANG_OPTIONS": '{"exclude_backends": ["flex_attention"], "lanes": 2}'}) == {
        "exclude_backends": ["flex_attention"], "lanes": 2,
    }  # fmt: skip
    assert user_options({"ATTN_SGLANG_OPTIONS": "lanes=2; forbid_jit=true; attention_backend=full=a,sliding=b;"}) == {
        "lanes": 2, "forbid_jit": True, "attention_backend": "full=a,sliding=b",
    }  # fmt: skip
    for text, said in (
        ("page_size=16", "SGLang's to decide(.|\n)*--page-size"),
        ("lanez=2", "unknown option 'lanez'"),
        ("lanes", "not name=value"),
        ("{lanes", "not JSON"),
    ):
        with pytest.raises(UsageError, match=said):
            user_options({"ATTN_SGLANG_OPTIONS": text})


def test_speculation_plans_verification_and_no_draft_model():
    facts = replace(Server().facts, speculation=Speculation("EAGLE", 8, tree=True, mode="decode"), graphs=True)
    values = server_options(facts, "HND")
    assert values["speculative_eagle_topk"] == 2
    assert values["cuda_graph"] == "decode"
    server = Server()
    plan = make_plan(described(server).model, facts, discover(), "attn-torch_native", "torch_native")
    assert set(plan.groups[0].phases) == {"prefill", "decode", "verify"}
    assert {group.group.model for group in plan.groups} == {"target"}


def test_a_failing_plugin_is_named_by_the_plan_error():
    server = Server()
    with pytest.raises(PlanError, match="nonesuch") as caught:
        backend_of(server, backend="nonesuch")
    assert caught.value.code == "AC-PLAN-001"
