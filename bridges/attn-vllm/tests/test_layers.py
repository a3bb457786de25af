"""Layers against the plan: names, facts, caches."""

from __future__ import annotations

import pytest
import torch
from vllm_fakes import GPT_OSS, LLAMA, config

from attn_core.errors import BindError
from attn_vllm.layers import LayerFacts, check_against_any, group_of, layer_index, make_cache
from attn_vllm.planning import make_plan

FACTS = LayerFacts(4, 2, 32, 32**-0.5, None, None, False)
NATIVE = {"attention_backend": "torch_native"}


@pytest.fixture(scope="module")
def plan():
    return make_plan(config(LLAMA), "cpu", NATIVE)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.3.self_attn.attn", 3),
        ("language_model.model.layers.12.self_attn.attn", 12),
        ("transformer.h.7.attn.attn", 7),
        ("model.2.blocks.5.attn", 5),
        ("decoder.9.attn", 9),
    ],
)
def test_layer_numbers(name, index):
    assert layer_index(name) == index


def test_a_name_without_a_number_is_refused():
    with pytest.raises(BindError, match="no number"):
        layer_index("model.attn")


def test_each_difference_is_a_line(plan):
    assert group_of("model.layers.1.self_attn.attn", FACTS, plan).name == "full"
    for field, value in (("q_heads", 8), ("scale", 0.5), ("window", 16), ("softcap", 30.0), ("sinks", True)):
        other = FACTS._replace(**{field: value})
        with pytest.raises(BindError) as error:
            group_of("model.layers.1.self_attn.attn", other, plan)
        assert f"{field:9} vLLM {value}" in str(error.value)
        with pytest.raises(BindError, match="fits no planned group"):
            check_against_any(other, plan)
    check_against_any(FACTS, plan)


def test_a_layer_that_the_plan_does_not_have_is_refused(plan):
    with pytest.raises(BindError, match="in no group"):
        group_of("model.layers.2.self_attn.attn", FACTS, plan)


def test_the_window_belongs_to_its_own_layers():
    mixed = make_plan(config(GPT_OSS), "cpu", NATIVE)
    windowed = LayerFacts(4, 2, 32, 32**-0.5, 8, None, True)
    check_against_any(windowed, mixed)
    assert group_of("model.layers.0.attn.attn", windowed, mixed).name == "sliding"
    with pytest.raises(BindError, match="window"):
        group_of("model.layers.1.attn.attn", windowed, mixed)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_caches_are_views_of_vllms_memory(plan, order):
    memory = torch.zeros([(5, 2, 16, 64)[axis] for axis in order])
    logical = memory.permute(order)
    cache = make_cache(logical, 32, plan.pools[0])
    assert cache.k.shape == cache.v.shape == (5, 16, 2, 32)
    cache.k[3, 7, 1] = 1.0
    cache.v[3, 7, 1] = 2.0
    assert logical[3, 1, 7].tolist() == [1.0] * 32 + [2.0] * 32


def test_a_cache_of_another_dtype_is_refused(plan):
    with pytest.raises(BindError, match="planned as fp32"):
        make_cache(torch.zeros(5, 2, 16, 64, dtype=torch.bfloat16), 32, plan.pools[0])
