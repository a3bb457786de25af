"""The same steps on a GPU: numbers against the oracle, and the phases that must not wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import build
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.spec import CaseSpec
from attn_core.testing.trees import TREES

TYPES = [
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("bf16", "fp8_e4m3"),
    ("fp32", "fp8_e5m2"),
    ("bf16", "fp4"),
]
PARENTS = tuple(tuple(TREES[name](6)) for name in ("binary", "star", "chain"))

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def geometry(**changes: Any) -> MhaGeometry:
    shape = {"q_heads": 6, "kv_heads": 2, "qk_dim": 64, "v_dim": 32, "scale": 0.2, **changes}
    return MhaGeometry(**shape)


def spec(phase: str, queries: tuple[int, ...], lens: tuple[int, ...], types: tuple[str, str], **more: Any) -> CaseSpec:
    shape = more.pop("geometry", geometry())
    return CaseSpec(
        shape, phase, query_lens=queries, kv_lens=lens, dtype=types[0], kv_dtype=types[1], device="cuda", **more
    )


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize(
    ("phase", "queries", "lens", "more"),
    [
        ("decode", (1, 1, 1, 1), (1, 17, 300, 2049), {}),
        ("decode", (1, 1), (40, 7), {"sinks": (0.5,) * 6, "needs_lse": True}),
        ("verify", (6, 6, 6), (6, 50, 333), {"parents": PARENTS}),
        ("verify", (4, 4), (4, 90), {}),
        ("draft_extend", (1, 4, 2), (9, 33, 130), {}),
        ("prefill", (5, 1, 300), (5, 70, 400), {"needs_lse": True}),
        ("prefill", (80, 20), (160, 20), {"geometry": geometry(window=33, softcap=20.0)}),
        ("prefill", (9, 12), (9, 44), {"spans": ((0, 2, 6), (1, 33, 40))}),
    ],
    ids=["decode", "sinks", "tree", "chain", "draft_extend", "prefill", "window", "spans"],
)
def test_numbers(
    native: BackendUnderTest, judge: Any, phase: str, queries: Any, lens: Any, more: Any, types: Any, page_size: int
) -> None:
    judge(native, spec(phase, queries, lens, types, page_size=page_size, **more))


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("phase", "query_len", "parents"), [("decode", 1, None), ("verify", 6, PARENTS), ("verify", 3, None)]
)
def test_with_bounds_only_nothing_waits_for_the_device(
    native: BackendUnderTest, phase: str, query_len: int, parents: Any, request: pytest.FixtureRequest
) -> None:
    """``host_lengths = "bound"`` of decode and verify: neither metadata nor a layer asks the device for a number."""
    case = build(spec(phase, (query_len,) * 3, (9, 40, 260), ("bf16", "bf16"), host="bound", parents=parents))
    session = native.open(case, "sdpa")
    session.run(build(case.spec))  # buffers and kernels are there
    request.getfixturevalue("no_sync")
    metadata = session.metadata(case.batch, case.phase)
    session.in_graph(metadata)
    session.store(case)
    result = session.attend(case, metadata, case.out)
    torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.isfinite(result.out).all())


@pytest.mark.parametrize(("phase", "queries", "lens"), [("decode", (1, 1), (9, 300)), ("prefill", (5, 80), (9, 80))])
def test_a_layer_of_uncompiled_flex_attention_does_not_wait(
    flex: BackendUnderTest, judge: Any, phase: str, queries: Any, lens: Any, request: pytest.FixtureRequest
) -> None:
    """Its metadata may (exact host lengths are declared); its layers may not, the first one of a step included."""
    described = spec(
        phase, queries, lens, ("bf16", "bf16"), geometry=geometry(softcap=9.0), page_size=16, needs_lse=True
    )
    judge(flex, described, "eager")
    case = build(described)
    session = flex.open(case, "eager")
    session.run(build(described))
    metadata = session.metadata(case.batch, case.phase)
    request.getfixturevalue("no_sync")
    session.store(case)
    session.attend(case, metadata, case.out)
