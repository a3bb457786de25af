"""What a user may type, and what is refused."""

from __future__ import annotations

import pytest

from attn_core.errors import UsageError
from attn_vllm.asked import asked_options


def test_environment_and_configuration_say_the_same_things():
    environ = {"ATTN_PREFILL_BACKEND": "flex_attention", "ATTN_DECODE_BACKEND": "torch_native"}
    table = {"attn": {"prefill-attention-backend": "flex_attention", "decode_attention_backend": "torch_native"}}
    wanted = {"prefill_attention_backend": "flex_attention", "decode_attention_backend": "torch_native"}
    assert asked_options(environ, {}) == wanted
    assert asked_options({}, table) == wanted
    assert asked_options(environ, table) == wanted


def test_a_name_is_enough():
    assert asked_options({"ATTN_BACKEND": "triton"}, None) == {"attention_backend": "triton"}
    assert asked_options({}, {"attn": "triton"}) == {"attention_backend": "triton"}
    assert asked_options({"ATTN_BACKEND": ""}, {}) == {}


def test_more_options_are_a_json_object():
    environ = {"ATTN_BACKEND": "triton", "ATTN_OPTIONS": '{"kv_layout": "HND"}'}
    assert asked_options(environ, {}) == {"attention_backend": "triton", "kv_layout": "HND"}


def test_the_plan_that_the_parent_left_is_no_option():
    assert asked_options({}, {"attn": {"attention_backend": "triton", "plan": {"groups": []}}}) == {
        "attention_backend": "triton"
    }


@pytest.mark.parametrize(
    ("environ", "extra", "expected"),
    [
        ({"ATTN_BACKEND": "triton"}, {"attn": "torch_native"}, "asked for twice"),
        ({"ATTN_OPTIONS": "{"}, {}, "not JSON"),
        ({"ATTN_OPTIONS": "[1]"}, {}, "JSON object"),
        ({}, {"attn": 3}, "needed is a name or a table"),
        ({"ATTN_OPTIONS": '{"page_size": 16}'}, {}, "--block-size"),
        ({}, {"attn": {"kv_cache_dtype": "fp8"}}, "--kv-cache-dtype"),
        ({}, {"attn": {"tp-size": 2}}, "--tensor-parallel-size"),
    ],
)
def test_contradictions_and_what_vllm_decides(environ, extra, expected):
    with pytest.raises(UsageError) as error:
        asked_options(environ, extra)
    assert expected in str(error.value)
