"""Names under which a user finds the installed backends."""

from __future__ import annotations

import pytest

from attn_core.discovery import Cause, PluginProblem
from attn_core.errors import UsageError
from attn_sglang.names import Registration, registrations

OWN = {"triton", "torch_native", "flashinfer"}


def names(backends, problems=(), taken=OWN, hints=None, **environment):
    return {item.name: item for item in registrations(backends, problems, taken, environment, hints)}


def test_a_name_of_sglangs_own_is_left_alone():
    found = names(["triton", "vendor"])
    assert found == {
        "attn_core": Registration("attn_core"),
        "attn-triton": Registration("attn-triton", "triton"),
        "attn-vendor": Registration("attn-vendor", "vendor"),
        "vendor": Registration("vendor", "vendor"),
    }


def test_another_prefix_and_none_at_all():
    assert set(names(["triton"], ATTN_SGLANG_PREFIX="core:")) == {"attn_core", "core:triton"}
    assert set(names(["triton", "vendor"], ATTN_SGLANG_PREFIX="")) == {"attn_core", "vendor"}


def test_a_name_is_taken_over_on_request_only():
    found = names(["triton", "torch_native"], ATTN_SGLANG_OVERRIDE="triton")
    assert found["triton"] == Registration("triton", "triton", replaces=True)
    assert "torch_native" not in found
    assert {"triton", "torch_native"} <= set(names(["triton", "torch_native"], ATTN_SGLANG_OVERRIDE="*"))
    found = names(["vendor"], ATTN_SGLANG_OVERRIDE="triton=vendor, flashinfer=attn_core, new=vendor")
    assert found["triton"] == Registration("triton", "vendor", replaces=True)
    assert found["flashinfer"] == Registration("flashinfer", None, replaces=True)
    assert found["new"] == Registration("new", "vendor")
    with pytest.raises(UsageError, match=r"'tritn', which no installed plugin provides(.|\n)*did you mean triton"):
        names(["triton"], ATTN_SGLANG_OVERRIDE="tritn")


def test_a_prefix_that_makes_two_names_one_is_refused():
    with pytest.raises(UsageError, match="'attn_core' would stand for"):
        names(["core"], ATTN_SGLANG_PREFIX="attn_")
    with pytest.raises(UsageError, match="a backend of SGLang's own"):
        names(["new"], taken={"attn-new"})


def problem(backends=(), fatal=True):
    return PluginProblem("attn-broken", "1.0", "broken", Cause.MANIFEST, "no TOML", backends=backends, fatal=fatal)


def test_a_broken_plugin_has_names_that_report_it():
    known = names(["vendor"], [problem(("mha/fast", "mla/other"))])
    assert {name for name, item in known.items() if item.problem} == {"attn-fast", "fast"}
    unknown = names(["vendor"], [problem()], hints={"quick": "attn-broken", "else": "attn-else"})
    assert {name for name, item in unknown.items() if item.problem} == {
        "attn-quick", "quick", "attn-broken", "broken", "attn-attn-broken",
    }  # fmt: skip
    assert not any(item.problem for item in names(["vendor"], [problem(fatal=False)]).values())


def test_a_problem_never_hides_what_works():
    found = names(["vendor"], [problem(("mha/vendor", "mha/triton"))])
    assert found["vendor"].problem is None
    assert "triton" not in found
