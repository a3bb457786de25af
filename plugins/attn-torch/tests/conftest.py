"""Shared by the tests: the backends, a judge against the float64 oracle, and strategies with every declared feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from attn_core.testing import oracle_mha
from attn_core.testing.batches import build
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.elements import torch_dtype
from attn_core.testing.harness import BackendUnderTest, Result
from attn_core.testing.spec import Case, CaseSpec
from attn_core.testing.strategies import case_specs

Judge = Callable[..., None]

settings.register_profile(
    "attn-torch", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
settings.load_profile("attn-torch")

TYPES = (
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "bf16"),
    ("bf16", "fp8_e4m3"),
    ("fp32", "fp8_e5m2"),
    ("fp16", "fp8_e4m3"),
    ("bf16", "fp4"),
    ("fp32", "fp4"),
)


def run(backend: BackendUnderTest, variant: str, case: Case, **more: Any) -> Result:
    """One step of a case on a fresh backend object."""
    return backend.open(case, variant, **more).run(case)


def problems_of(backend: BackendUnderTest, variant: str, spec: CaseSpec) -> list[str]:
    """Everything that is wrong with a backend's answer to `spec`: numbers, types, padding, writes out of place."""
    case = build(spec)
    if case.batch.idle:
        return []
    result = run(backend, variant, case)
    want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    limits, tokens = tolerance(spec.dtype, spec.kv, spec.out), case.batch.num_tokens
    found = [compare_out(result.out, want, limits.out, tokens)]
    if spec.needs_lse:
        found.append(compare_lse(result.lse, want, limits.lse, tokens))
    problems = [str(item) for item in found if item is not None] + case.problems()
    if result.out.dtype != torch_dtype(spec.out):
        problems.append(f"out has type {result.out.dtype}")
    if result.out.data_ptr() != case.out.data_ptr():
        problems.append("out was not used")
    if bool((result.out[tokens:] != 0).any()):
        problems.append("padding is not zero")
    if not spec.needs_lse and result.lse is not None:
        problems.append("an LSE that nobody asked for")
    return problems


@pytest.fixture(scope="session")
def judge() -> Judge:
    """Run a spec and fail with everything that is wrong."""

    def check(backend: BackendUnderTest, spec: CaseSpec, variant: str = "sdpa") -> None:
        found = problems_of(backend, variant, spec)
        assert not found, "\n".join([str(spec), *found])

    return check


@pytest.fixture(scope="session")
def native() -> BackendUnderTest:
    return BackendUnderTest.installed("mha", "torch_native")


@pytest.fixture(scope="session")
def flex() -> BackendUnderTest:
    return BackendUnderTest.installed("mha", "flex_attention")


@st.composite
def wide_specs(
    draw: st.DrawFn, sinks: bool = True, lse: bool = True, dtypes: Any = TYPES, page_sizes: Any = (1, 3, 4, 16)
) -> CaseSpec:
    """What the kit's strategy makes, and besides: sinks, partial results, spans, scales by head, mixed batches."""
    spec = draw(case_specs(dtypes=dtypes, page_sizes=page_sizes))
    geometry, changes = spec.geometry, {}
    if sinks and draw(st.booleans()):
        values = st.sampled_from((-2.0, 0.0, 1.5))
        changes["sinks"] = tuple(draw(values) for _ in range(geometry.q_heads))
    if lse:
        changes["partial"] = draw(st.booleans())
    else:
        changes["needs_lse"] = False
    if spec.k_scale is not None and draw(st.booleans()):
        changes["k_scale"] = tuple(draw(st.sampled_from((0.75, 1.25, 2.0))) for _ in range(geometry.kv_heads))
        changes["v_scale"] = tuple(draw(st.sampled_from((0.375, 2.5))) for _ in range(geometry.kv_heads))
    if spec.phase == "prefill" and spec.query_lens:
        if draw(st.booleans()):
            changes["spans"] = tuple(
                (draw(st.integers(0, len(spec.query_lens) - 1)), start, start + draw(st.integers(1, 6)))
                for start in draw(st.lists(st.integers(0, 12), max_size=2))
            )
        elif spec.query_lens[0] == 1:
            changes["decode_rows"] = 1
    return spec.but(**changes)


@pytest.fixture(scope="session")
def specs() -> Callable[..., st.SearchStrategy[CaseSpec]]:
    """:func:`wide_specs`, for ``data.draw``."""
    return wide_specs
