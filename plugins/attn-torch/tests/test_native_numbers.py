"""torch_native against the float64 oracle: every declared feature, on every path through the code."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_torch.native as native_module
from attn_core.geometry import MhaGeometry
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.spec import CaseSpec
from attn_torch import engines
from attn_torch.rules import StepLengths
from attn_torch.units import Sizes

TYPES = [
    ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"), ("fp32", "fp16"),
    ("fp32", "fp8_e4m3"), ("bf16", "fp8_e4m3"), ("fp16", "fp8_e4m3"),
    ("fp32", "fp8_e5m2"), ("bf16", "fp8_e5m2"), ("fp16", "fp8_e5m2"),
    ("fp32", "fp4"), ("bf16", "fp4"), ("fp16", "fp4"),
]  # fmt: skip

#: Paths: how rows are cut, which rows are long, how large masks and key blocks may be. None: as on this machine.
PATHS: dict[str, dict[str, Any] | None] = {
    "as it is": None,
    "units of 8 keys": {"chunk": 8, "short": 64, "mask": 1 << 20, "keys": None},
    "one unit a tile": {"chunk": 8, "short": 64, "mask": 1 << 20, "keys": None, "one_by_one": True},
    "long rows whole": {"chunk": 512, "short": 0, "mask": 1 << 20, "keys": None},
    "long rows in blocks": {"chunk": 4, "short": 0, "mask": 16, "keys": 4},
    "short and long": {"chunk": 8, "short": 2, "mask": 48, "keys": 5},
    "no fused kernel": {"chunk": 8, "short": 2, "mask": 48, "keys": 5, "engine": engines.naive},
    "a device": {"chunk": None, "short": 64, "mask": 1 << 20, "keys": None, "engine": engines.sdpa},
    "a device, no lengths": {
        "chunk": None, "short": 64, "mask": 1 << 20, "keys": None, "engine": engines.sdpa, "blind": True,
    },
}  # fmt: skip


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Force the code down one path, with sizes so small that tiny cases take every branch of it."""
    chosen = PATHS[request.param]
    if chosen is None:
        return
    backend = native_module.TorchNative
    sizes = Sizes(chosen["chunk"], 4, 24, chosen.get("one_by_one", False))
    monkeypatch.setattr(native_module, "SHORT", chosen["short"])
    monkeypatch.setattr(backend, "_sizes", lambda self, page_size: sizes)
    monkeypatch.setattr(backend, "_keys_at_once", lambda self: chosen["keys"])
    monkeypatch.setattr(backend, "_mask_elements", lambda self: chosen["mask"])
    engine = chosen.get("engine")
    if engine is not None:
        capped = engines.choose
        monkeypatch.setattr(native_module, "choose", lambda device, cap: engine if cap is None else capped(device, cap))
    if chosen.get("blind"):
        monkeypatch.setattr(StepLengths, "on_host", lambda self, batch, address: None)


@pytest.mark.usefixtures("path")
@settings(max_examples=60)
@given(data=st.data())
def test_any_step(native: BackendUnderTest, judge: Any, specs: Any, data: st.DataObject) -> None:
    judge(native, data.draw(specs()))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("rule", [{}, {"window": 3}, {"window": 7}, {"chunk": 4}], ids=str)
def test_trees_count_tree_positions(native: BackendUnderTest, judge: Any, rule: dict[str, int]) -> None:
    """Shallow trees: the last drafts stand at positions far below their numbers."""
    trees = ((-1, 0, 0, 0, 0, 0), (-1, -1, 0, 0, 1, 1), (-1, 0, 1, 2, 3, 4))
    spec = CaseSpec(MhaGeometry(2, 1, 16, 16, 0.25, **rule), "verify", (6,) * 3, (15, 22, 6), parents=trees)
    judge(native, spec.but(needs_lse=True))
    judge(native, spec.but(query_lens=(20,), kv_lens=(31,), parents=((-1,) + (0,) * 19,)))
    roots = ((-1,) * 6, (-1,) * 6)  # the first draft is the last key of a block, and only one draft sees it
    judge(native, spec.but(query_lens=(6, 6), kv_lens=(17, 21), parents=roots))


@pytest.mark.parametrize("types", TYPES, ids="/".join)
@pytest.mark.parametrize("phase", ["prefill", "decode", "verify", "draft", "draft_extend"])
def test_every_phase_and_type(native: BackendUnderTest, judge: Any, phase: str, types: tuple[str, str]) -> None:
    geometry = MhaGeometry(8, 2, 128, 128, 0.1)
    queries = {"prefill": (7, 1, 70), "draft_extend": (3, 1, 9), "verify": (4, 4, 4)}.get(phase, (1, 1, 1))
    kv_lens = tuple(n + extra for n, extra in zip(queries, (0, 33, 40), strict=True))
    scales = {"k_scale": 0.75, "v_scale": 2.5} if types[1].startswith("fp") and types[1][2:3] in "84" else {}
    judge(
        native,
        CaseSpec(
            geometry, phase, queries, kv_lens, dtype=types[0], kv_dtype=types[1], page_size=16, needs_lse=True, **scales
        ),
    )


@pytest.mark.parametrize(
    ("dims", "heads"),
    [
        ((64, 64), (9, 3)), ((72, 72), (1, 1)), ((80, 80), (4, 4)), ((96, 96), (6, 2)), ((192, 128), (4, 1)),
        ((40, 64), (4, 4)), ((256, 256), (8, 4)), ((8, 24), (16, 1)), ((3, 5), (2, 1)), ((512, 512), (2, 1)),
    ],
)  # fmt: skip
def test_head_dims_and_ratios(
    native: BackendUnderTest, judge: Any, dims: tuple[int, int], heads: tuple[int, int]
) -> None:
    geometry = MhaGeometry(*heads, *dims, 0.13)
    for phase, queries, keys in (("prefill", (5, 66), (9, 70)), ("decode", (1, 1), (9, 83))):
        judge(native, CaseSpec(geometry, phase, queries, keys, page_size=8, needs_lse=True))


@pytest.mark.parametrize("page_size", [1, 2, 5, 16, 48, 64, 128, 256, 1024])
def test_any_page_size(native: BackendUnderTest, judge: Any, page_size: int) -> None:
    for form in ("table", "csr"):
        kv_lens = (1, page_size, page_size + 1, 300)
        judge(
            native,
            CaseSpec(MhaGeometry(2, 1, 16, 16, 0.2), "decode", (1,) * 4, kv_lens, page_size=page_size, form=form),
        )


@pytest.mark.parametrize("q_given", ["model", "fp8"])
@pytest.mark.parametrize("out", ["bf16", "fp16"])
def test_fp8_queries(native: BackendUnderTest, judge: Any, q_given: str, out: str) -> None:
    geometry = MhaGeometry(8, 2, 64, 64, 0.1 / 16)
    spec = CaseSpec(
        geometry, "prefill", (3, 5), (20, 5), dtype="fp8_e4m3", kv_dtype="fp8_e4m3", out_dtype=out,
        q_scale=16.0, k_scale=0.75, v_scale=2.5, q_given=q_given, needs_lse=True,
    )  # fmt: skip
    judge(native, spec)


def test_long_contexts_take_several_units_and_key_blocks(native: BackendUnderTest, judge: Any) -> None:
    judge(
        native, CaseSpec(MhaGeometry(2, 1, 16, 16, 0.3), "decode", (1, 1), (5001, 2048), page_size=16, needs_lse=True)
    )


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp8_e4m3"])
def test_trimmed_pools(native: BackendUnderTest, kv_dtype: str) -> None:
    """Column 0 of a trimmed pool is at a position of its own; what lies before it is gone."""
    import torch

    from attn_core.testing import oracle_mha
    from attn_core.testing.batches import build
    from attn_core.testing.compare import compare_out

    window = MhaGeometry(4, 2, 16, 16, 0.3, window=9)
    for queries in (1, 3):
        case = build(CaseSpec(window, "verify", (queries,) * 2, (37, 22), kv_dtype=kv_dtype, page_size=4))
        want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
        address = case.batch.kv(case.pool_index)
        assert address.table is not None
        assert address.table_rows is not None
        address.origin = torch.tensor([24, 8], dtype=torch.int32)
        lines = address.table[address.table_rows.long()]
        address.table = torch.stack([lines[0].roll(-6), lines[1].roll(-2)])
        address.table_rows = None
        result = native.open(case).run(case)
        assert compare_out(result.out, want, 2e-5, case.batch.num_tokens) is None
