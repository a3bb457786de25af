"""Every library call of the adapters against the signatures of the real wheels; re-derived from the wheels where they are at hand."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from derive_signatures import derive
from flashfakes import FIXTURES, Fa4, fa3_library, fa4_library

from attn_core.errors import BindError
from attn_flash import builds, cutedsl
from attn_flash.operators import Bound

WHEELS = os.environ.get("ATTN_FLASH_WHEELS", "")


@pytest.mark.parametrize("variant", list(builds.BUILDS))
def test_the_operators_have_what_the_adapter_gives(variant: str) -> None:
    with fa3_library(variant):
        forward, planner = builds.BUILDS[variant].load()
    assert forward.has(*builds.ARGUMENTS)
    assert planner is not None
    names = [argument.partition("=")[0].split()[-1] for argument in _arguments(variant, "fwd")]
    assert list(forward.names) == names  # the order of the wheel's text is the order of the call


def _arguments(variant: str, operator: str) -> list[str]:
    text = FIXTURES["operators"][builds.BUILDS[variant].distribution][operator]
    return text[text.index("(") + 1 : text.index(") ->")].split(", ")


@pytest.mark.parametrize("variant", list(builds.BUILDS))
def test_what_a_release_adds_gets_a_neutral_value(variant: str) -> None:
    with fa3_library(variant):
        forward, _ = builds.BUILDS[variant].load()
    call = dict(zip(forward.names, forward.template(), strict=True))
    assert call["k_new"] is None
    assert call["rotary_cos"] is None
    assert call["softcap"] == 0.0
    assert call["pack_gqa"] is None
    assert call.get("only_qv", False) is False
    assert call.get("sparse_mask_fine") is None


def test_an_operator_without_a_needed_argument_is_refused() -> None:
    library = torch.library.Library("attn_flash_old", "DEF")
    library.define("fwd(Tensor q, Tensor k, Tensor v, float softmax_scale) -> Tensor")
    bound = Bound.of_operator(torch.ops.attn_flash_old.fwd.default, "old: fwd")
    with pytest.raises(BindError, match="page_table"):
        bound.require(*builds.ARGUMENTS)


def test_a_library_that_does_not_load_is_a_bind_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(builds.importlib, "import_module", broken)
    with pytest.raises(BindError, match="libcudart") as error:
        builds.TOKENSPEED.load()
    assert "torch 2.11 or later" in str(error.value)


@pytest.mark.parametrize("name", ["_flash_attn_fwd", "flash_attn_varlen_func"])
def test_fa4_functions_have_what_the_adapter_gives(name: str) -> None:
    bound = Bound.of_function(Fa4(name), name)
    bound.require(*cutedsl.ARGUMENTS)
    assert bound.has(*cutedsl.INNER_ARGUMENTS) == (name == "_flash_attn_fwd")


def test_fa4_takes_the_public_function_where_the_inner_one_is_unknown() -> None:
    import logging

    log = logging.getLogger("test")
    with fa4_library(inner=True):
        assert "out" in cutedsl.load(log).place
    with fa4_library(inner=False):
        assert "window_size" in cutedsl.load(log).place


def test_fa4_of_an_unknown_form_is_refused() -> None:
    import logging
    import sys

    with fa4_library(inner=False):
        sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = lambda q, k, v: None  # type: ignore[attr-defined]
        with pytest.raises(BindError, match="page_table"):
            cutedsl.load(logging.getLogger("test"))


@pytest.mark.parametrize("function", ["flash_attn_with_kvcache"])
def test_the_direct_calls_of_the_benchmark_bind(function: str) -> None:
    table = FIXTURES["functions"]["tokenspeed-fa3"][function]
    signature = _signature(table)
    signature.bind(1, 2, 3, cache_seqlens=4, page_table=5, cu_seqlens_q=6, max_seqlen_q=7, softmax_scale=8, causal=True)
    public = _signature(FIXTURES["functions"]["flash-attn-4"]["flash_attn_varlen_func"])
    public.bind(1, 2, 3, cu_seqlens_q=4, max_seqlen_q=5, seqused_k=6, page_table=7, softmax_scale=8, causal=True)
    with pytest.raises(TypeError):
        signature.bind(1, 2, 3, no_such_argument=1)


def _signature(table: dict[str, Any]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    empty = inspect.Parameter.empty
    return inspect.Signature(
        inspect.Parameter(name, kind, default=empty if default == "<required>" else default)
        for name, default in zip(table["names"], table["defaults"], strict=True)
    )


@pytest.mark.skipif(not WHEELS, reason="ATTN_FLASH_WHEELS names no folder with the libraries' wheels")
def test_the_fixtures_are_what_the_wheels_say() -> None:
    found = 0
    for path in Path(WHEELS).glob("*.whl"):
        made = derive(path)
        for distribution, facts in made["wheels"].items():
            if FIXTURES["wheels"].get(distribution) != facts:
                continue
            found += 1
            for part in ("operators", "functions"):
                assert made[part].get(distribution) == FIXTURES[part].get(distribution)
    assert found
