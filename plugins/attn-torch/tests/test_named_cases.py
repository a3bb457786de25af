"""Faults that users of such systems reported, by their ids: each with its small input and the right answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attn_core.context import Context
from attn_core.errors import BatchError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import MhaLayer, Scale
from attn_core.testing import oracle_mha
from attn_core.testing.batches import build
from attn_core.testing.guards import same_bits
from attn_core.testing.harness import BackendUnderTest, Result
from attn_core.testing.spec import Case, CaseSpec
from attn_torch.engines import choose
from attn_torch.native import TorchNative
from attn_torch.rules import Rules, StepLengths, visible

PLAIN = MhaGeometry(8, 2, 128, 128, 128**-0.5)


def run(native: BackendUnderTest, case: Case) -> Result:
    return native.open(case).run(case)


def want(case: Case) -> oracle_mha.Answer:
    return oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)


@pytest.mark.parametrize(("sink", "expected"), [(0.0, 0.5), (-math.inf, 1.0), (math.log(3), 0.25)])
@pytest.mark.parametrize("needs_lse", [False, True])
def test_c18_a_sink_adds_to_the_denominator_only(
    native: BackendUnderTest, sink: float, expected: float, needs_lse: bool
) -> None:
    case = build(CaseSpec(MhaGeometry(1, 1, 64, 64, 1.0), "decode", (1,), (1,), sinks=(sink,), needs_lse=needs_lse))
    case.inputs.q.zero_()
    assert case.inputs.v is not None
    case.inputs.v.fill_(1.0)
    out, lse = run(native, case)
    assert torch.allclose(out, torch.full_like(out, expected))
    if needs_lse:
        assert lse is not None
        assert float(lse) == pytest.approx(math.log(1 + math.exp(sink)), abs=1e-6)


def test_c18_a_partial_result_leaves_sinks_to_the_merge(native: BackendUnderTest) -> None:
    geometry = MhaGeometry(1, 1, 64, 64, 1.0)
    case = build(CaseSpec(geometry, "decode", (1,), (1,), sinks=(0.0,), needs_lse=True, partial=True))
    case.inputs.q.zero_()
    out, lse = run(native, case)
    assert case.inputs.v is not None
    assert torch.allclose(out, case.inputs.v)
    assert lse is not None
    assert float(lse) == 0.0


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256])
def test_c37_every_declared_page_size(native: BackendUnderTest, judge: Any, page_size: int) -> None:
    p, heads = page_size, MhaGeometry(8, 2, 128, 128, 128**-0.5)
    for kv_lens in ((1, max(p - 1, 1), p), (p + 1, 3 * p + 5, 1)):
        judge(native, CaseSpec(heads, "decode", (1, 1, 1), kv_lens, dtype="bf16", page_size=p))


def test_c43_verify_of_a_tree_in_a_window() -> None:
    """Prefix 10, window 4, tree [root, a, b, a1]: exactly the listed keys, by tree positions."""
    geometry = MhaGeometry(2, 1, 16, 16, 0.25, window=4)
    case = build(CaseSpec(geometry, "verify", (4,), (14,), parents=((-1, 0, 0, 1),)))
    step = StepLengths.of(case.batch, case.batch.kv(case.pool_index))
    seen = visible(Rules.of(geometry), step, torch.tensor([0]), torch.arange(4), torch.arange(14)[None])[0]
    keys = [line.nonzero().flatten().tolist() for line in seen]
    assert keys == [[7, 8, 9, 10], [8, 9, 10, 11], [8, 9, 10, 12], [9, 10, 11, 13]]


def test_c43_end_to_end(native: BackendUnderTest, judge: Any) -> None:
    geometry = MhaGeometry(2, 1, 16, 16, 0.25, window=4)
    judge(native, CaseSpec(geometry, "verify", (4,), (14,), parents=((-1, 0, 0, 1),), needs_lse=True))


def test_c53_soft_cap_after_the_scale_before_the_mask(native: BackendUnderTest) -> None:
    geometry = MhaGeometry(1, 1, 16, 16, 0.25, softcap=50.0)
    case = build(CaseSpec(geometry, "prefill", (1,), (1,), needs_lse=True))
    case.inputs.q.fill_(5.0)
    assert case.inputs.k is not None
    case.inputs.k.fill_(5.0)  # 16 * 25 * 0.25 = 100
    _, lse = run(native, case)
    assert lse is not None
    assert float(lse) == pytest.approx(48.2013790, abs=1e-5)


@pytest.mark.parametrize("with_q_scale", [True, False])
def test_c63_fp8_queries_need_their_scale(native: BackendUnderTest, with_q_scale: bool) -> None:
    """|q| up to 100 as fp8 with a scale is within 5% of the real values; without the scale it must not be."""
    geometry = MhaGeometry(8, 2, 128, 128, 128**-0.5)
    spec = CaseSpec(
        geometry, "decode", (1,), (300,), dtype="fp8_e4m3", kv_dtype="fp8_e4m3", out_dtype="bf16",
        k_scale=0.75, v_scale=0.5, q_scale=32.0, q_given="fp8", page_size=16,
    )  # fmt: skip
    case = build(spec)
    if not with_q_scale:
        case.layer.q_scale = None
    out = run(native, case).out.double()
    case.layer.q_scale = Scale(torch.tensor([32.0]), 32.0)
    expected = want(case).out
    error = float((out - expected).norm() / expected.norm())
    assert (error < 0.05) is with_q_scale


@pytest.mark.parametrize("k_scale", [0.125, 1.0, 8.0])
def test_c64_scales_belong_to_stored_keys_only(native: BackendUnderTest, judge: Any, k_scale: float) -> None:
    """Prefix in fp8, new tokens in bf16: new tokens are stored with the scale, never multiplied with it again."""
    for values in (k_scale, (k_scale, 2 * k_scale)):
        spec = CaseSpec(
            MhaGeometry(8, 2, 64, 64, 0.1 / k_scale), "prefill", (16,), (80,), dtype="bf16", kv_dtype="fp8_e4m3",
            k_scale=values, v_scale=0.5, page_size=16, needs_lse=True,
        )  # fmt: skip
        judge(native, spec)


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp8_e4m3", "fp8_e5m2", "fp4"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_c70_what_lies_in_unused_slots_changes_no_bit(native: BackendUnderTest, kv_dtype: str, phase: str) -> None:
    results = {}
    for unused in ("zero", "nan", "inf", "big"):
        spec = CaseSpec(PLAIN, phase, (1, 1) if phase == "decode" else (5, 70), (13, 71), kv_dtype=kv_dtype)
        case = build(spec.but(unused=unused, page_size=4, needs_lse=True))
        results[unused] = run(native, case)
    for unused in ("nan", "inf", "big"):
        assert same_bits(results[unused].out, results["zero"].out), unused
        assert results[unused].out.isfinite().all()
        assert torch.equal(results[unused].lse, results["zero"].lse)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_c74_views_give_what_contiguous_tensors_give(native: BackendUnderTest, dtype: str) -> None:
    found = []
    for strides in ("contiguous", "fused", "transposed"):
        case = build(CaseSpec(PLAIN, "prefill", (7, 33), (7, 33), dtype=dtype, strides=strides, page_size=16))
        found.append(run(native, case).out)
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_c75_empty_rows_and_an_empty_batch(native: BackendUnderTest) -> None:
    case = build(CaseSpec(MhaGeometry(2, 1, 16, 16, 0.25), "prefill", (0, 1, 3, 1), (5, 1, 3, 4), needs_lse=True))
    address = case.batch.kv(case.pool_index)
    address.kv_lens[2] = 0  # three queries, no key
    out, lse = run(native, case)
    assert lse is not None
    assert (out[1:4] == 0).all()
    assert (lse[1:4] == -math.inf).all()
    assert out.isfinite().all()
    assert lse[[0, 4]].isfinite().all()


def test_c75_no_rows_at_all(native: BackendUnderTest) -> None:
    case = build(CaseSpec(PLAIN, "prefill", (), (), needs_lse=True))
    out, lse = run(native, case)
    assert out.shape == (0, 8, 128)
    assert lse is not None
    assert lse.shape == (0, 8)


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_c76_padded_tokens_are_zero_and_touch_no_slot(native: BackendUnderTest, judge: Any, phase: str) -> None:
    queries = 1 if phase == "decode" else 3
    for pad_kv_len in (0, 1):
        judge(
            native, CaseSpec(PLAIN, phase, (queries,), (queries + 2,), pad_rows=5, pad_tokens=5, pad_kv_len=pad_kv_len)
        )
        judge(native, CaseSpec(PLAIN, phase, (), (), pad_rows=2, pad_tokens=2, pad_kv_len=pad_kv_len))


@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 2e-6), ("bf16", 8e-3)])
def test_c77_chunks_equal_one_shot(native: BackendUnderTest, dtype: str, limit: float) -> None:
    """A 700-token prompt in chunks over random pages: every row as in a single pass (bf16: one unit in the last place)."""
    spec = CaseSpec(PLAIN, "prefill", (700,), (700,), dtype=dtype, page_size=16)
    whole = build(spec)
    expected = run(native, whole).out.float()
    address, start, found = whole.batch.kv(whole.pool_index), 0, []
    for chunk in (1, 63, 64, 65, 255, 252):
        part = build(spec.but(query_lens=(chunk,), kv_lens=(start + chunk,)))
        theirs = part.batch.kv(part.pool_index)
        theirs.table, theirs.table_rows = address.table, address.table_rows
        inputs = part.inputs._replace(q=whole.inputs.q[start : start + chunk])
        session = native.open(part)
        metadata = session.metadata(part.batch, "prefill")
        out = session.call("attn_extend", inputs, part.layer, whole.cache, metadata, None)[0]
        found.append(out.float())
        start += chunk
    error = (torch.cat(found) - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(error.max()) < limit


@pytest.mark.parametrize(("window", "kv_lens"), [(4, (2, 3, 4, 5, 17)), (4096, (4095, 4096, 4097, 5000))])
def test_c80_a_row_of_extend_equals_decode(native: BackendUnderTest, window: int, kv_lens: tuple[int, ...]) -> None:
    geometry = MhaGeometry(2, 1, 16, 16, 0.25, window=window)
    case = build(CaseSpec(geometry, "prefill", (max(kv_lens),), (max(kv_lens),), page_size=16))
    extended = run(native, case).out
    for kv_len in kv_lens:
        decode = build(CaseSpec(geometry, "decode", (1,), (kv_len,), page_size=16))
        address = case.batch.kv(case.pool_index)
        theirs = decode.batch.kv(decode.pool_index)
        theirs.table, theirs.table_rows = address.table, address.table_rows
        session = native.open(decode)
        metadata = session.metadata(decode.batch, "decode")
        inputs = decode.inputs._replace(q=case.inputs.q[kv_len - 1 : kv_len])
        out = session.call("attn_decode", inputs, decode.layer, case.cache, metadata, None)[0]
        torch.testing.assert_close(out[0], extended[kv_len - 1], atol=1e-5, rtol=1e-5)


def test_c80_the_first_key_of_the_window() -> None:
    rules = Rules.of(MhaGeometry(1, 1, 16, 16, 1.0, window=4096))
    assert int(rules.first_key(torch.tensor(4999), False)) == 904


def test_c126_an_empty_part_is_no_part(native: BackendUnderTest) -> None:
    """A sequence without keys in a packed part has out 0 and lse -inf; nothing else is touched."""
    from attn_core.batch import AttentionBatch, Segment

    geometry = MhaGeometry(16, 16, 192, 128, 0.07)
    group = LayerGroup("target", "full", "full", (0,), geometry)
    batch = AttentionBatch(
        2, 16, (Segment("prefill", slice(0, 2), slice(0, 16)),), torch.tensor([0, 8, 16], dtype=torch.int32), 8,
        key_offsets=torch.tensor([0, 1280, 1280], dtype=torch.int32), max_key_len=1280, needs_lse=True,
    )  # fmt: skip
    backend = TorchNative(Context(torch.device("cpu"), torch.float32, group))
    metadata = backend.attn_metadata(batch, group, "prefill", None, False)
    q, k, v = torch.randn(16, 16, 192), torch.randn(1280, 16, 192), torch.randn(1280, 16, 128)
    out, lse = backend.attn_ragged(q, k, v, MhaLayer(0, group), metadata, None)
    assert lse is not None
    assert (out[8:] == 0).all()
    assert (lse[8:] == -math.inf).all()
    assert out[:8].isfinite().all()


def test_a_graph_is_refused(native: BackendUnderTest) -> None:
    case = build(CaseSpec(PLAIN, "decode", (1,), (3,)))
    with pytest.raises(BatchError, match="captured"):
        native.open(case).metadata(case.batch, "decode", None, capture=True)


def test_soft_caps_never_take_the_fused_kernel() -> None:
    capped = choose(torch.device("cpu"), 1.0)
    q = torch.ones(1, 1, 1, 4)
    _, lse = capped(q * 100, q, q, scale=1.0)
    assert float(lse) == pytest.approx(1.0)
