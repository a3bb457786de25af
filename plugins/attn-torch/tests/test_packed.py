"""Packed attention (mm/torch_native, and the ragged role of mha/torch_native) against the float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core.batch import AttentionBatch, Part, Segment
from attn_core.context import Context
from attn_core.errors import BatchError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import MhaLayer
from attn_core.testing import oracle_mm
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.elements import dtype_name
from attn_torch import engines, packed
from attn_torch.native import TorchNative
from attn_torch.vision import TorchVision

Lengths = list[tuple[int, int]]


def offsets_of(lengths: list[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def batch_of(lengths: Lengths, pad: int = 0, lse: bool = True, partial: bool = False) -> AttentionBatch:
    queries, keys = ([pair[side] for pair in lengths] for side in (0, 1))
    tokens = sum(queries)
    return AttentionBatch(
        len(lengths), tokens, (Segment("prefill", slice(0, len(lengths)), slice(0, tokens)),),
        torch.tensor(offsets_of(queries), dtype=torch.int32), max([1, *queries]), padded_tokens=tokens + pad,
        key_offsets=torch.tensor(offsets_of(keys), dtype=torch.int32), max_key_len=max([1, *keys]),
        needs_lse=lse, partial=partial,
    )  # fmt: skip


def check(
    geometry: MhaGeometry,
    lengths: Lengths,
    *,
    dtype: torch.dtype = torch.float32,
    pad: int = 0,
    lse: bool = True,
    strided: bool = False,
    sinks: bool = False,
    kind: str = "mm",
) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    batch = batch_of(lengths, pad, lse)
    tokens, keys = batch.padded_tokens, sum(pair[1] for pair in lengths)
    shapes = ((tokens, geometry.q_heads, geometry.qk_dim), (keys, geometry.kv_heads, geometry.qk_dim))
    shapes += ((keys, geometry.kv_heads, geometry.v_dim),)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    if strided:
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    q[batch.num_tokens :] = math.nan
    group = LayerGroup("vision", "tower", "vit_full", (0,), geometry)
    layer = MhaLayer(0, group, torch.linspace(-1, 1, geometry.q_heads) if sinks else None)
    backend = (TorchVision if kind == "mm" else TorchNative)(Context(torch.device("cpu"), dtype, group))
    metadata = backend.attn_metadata(batch, group, "prefill", None, False)
    out, found_lse = backend.attn_ragged(q, k, v, layer, metadata, None)  # type: ignore[arg-type]
    want = oracle_mm.attend_packed(
        q[: batch.num_tokens], k, v, geometry, *(offsets_of([pair[side] for pair in lengths]) for side in (0, 1)),
        sinks=layer.sinks,
    )  # fmt: skip
    name = dtype_name(dtype)
    limits = tolerance(name, name, name)
    assert compare_out(out[: batch.num_tokens], want, limits.out, batch.num_tokens) is None
    assert (out[batch.num_tokens :] == 0).all()
    assert (found_lse is not None) is lse
    if found_lse is not None:
        assert compare_lse(found_lse[: batch.num_tokens], want, limits.lse, batch.num_tokens) is None


@st.composite
def packed_cases(draw: st.DrawFn) -> tuple[MhaGeometry, Lengths]:
    kv_heads, ratio = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 1, 2, 4)))
    dims = draw(st.sampled_from(((16, 16), (24, 8), (72, 72), (80, 80))))
    causal = draw(st.booleans())
    geometry = MhaGeometry(
        kv_heads * ratio, kv_heads, *dims, 0.2, causal=causal,
        window=draw(st.one_of(st.none(), st.integers(1, 9))),
        window_right=None if causal else draw(st.one_of(st.none(), st.integers(0, 4), st.just(50))),
        softcap=draw(st.sampled_from((None, None, 2.0))),
    )  # fmt: skip
    size = st.sampled_from((0, 1, 4, 4, 9, 13))
    pairs = st.one_of(st.tuples(size, size), size.map(lambda n: (n, n)))
    return geometry, draw(st.lists(pairs, max_size=6))


@pytest.mark.parametrize("budget", ["as it is", "tiny"])
@pytest.mark.parametrize("engine", ["fused", "naive", "sdpa"])
@settings(max_examples=50)
@given(case=packed_cases(), strided=st.booleans(), sinks=st.booleans(), pad=st.integers(0, 2), lse=st.booleans())
def test_any_packing(
    engine: str, budget: str, case: tuple[MhaGeometry, Lengths], strided: bool, sinks: bool, pad: int, lse: bool
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if budget == "tiny":
            patched.setattr(packed, "MASK", 40)
            patched.setattr(packed, "LOGITS", 100)
        if engine != "fused":
            chosen, original = getattr(engines, engine), engines.choose
            patched.setattr(
                "attn_torch.vision.choose", lambda device, cap: chosen if cap is None else original(device, cap)
            )
        check(*case, strided=strided, sinks=sinks, pad=pad, lse=lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [72, 80, 64, 96, 128])
def test_vision_head_dims(dtype: torch.dtype, dim: int) -> None:
    check(MhaGeometry(4, 4, dim, dim, dim**-0.5, causal=False), [(16, 16), (16, 16), (5, 5)], dtype=dtype)


@pytest.mark.parametrize("kind", ["mm", "mha"])
def test_causal_and_cross_lengths(kind: str) -> None:
    geometry = MhaGeometry(4, 2, 64, 64, 0.125)
    check(geometry, [(5, 5), (2, 7), (3, 0), (0, 4)], kind=kind)
    check(MhaGeometry(4, 2, 64, 48, 0.125, causal=False), [(9, 3), (1, 8)], kind=kind)


def test_windows_of_a_tower_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many segments of one size are computed at once, odd ones at the edges on their own."""
    calls: list[int] = []
    fused = engines._flash_cpu
    monkeypatch.setattr(engines, "_flash_cpu", lambda q, *a, **k: calls.append(q.shape[0]) or fused(q, *a, **k))
    check(MhaGeometry(2, 2, 16, 16, 0.25, causal=False), [(16, 16)] * 12 + [(8, 8)] * 3 + [(16, 16)] * 4)
    assert sorted(calls) == [3, 16]


def test_keys_are_where_the_queries_are_without_key_offsets() -> None:
    geometry = MhaGeometry(2, 2, 16, 16, 0.25, causal=False)
    group = LayerGroup("vision", "tower", "vit_full", (0,), geometry)
    backend = TorchVision(Context(torch.device("cpu"), torch.float32, group))
    batch, q = batch_of([(3, 3), (5, 5)]), torch.randn(8, 2, 16)
    results = []
    for offsets in (batch.key_offsets, None):
        batch.key_offsets = offsets
        metadata = backend.attn_metadata(batch, group, "prefill", None, False)
        results.append(backend.attn_ragged(q, q, q, MhaLayer(0, group), metadata, None)[0])
    assert torch.equal(*results)


def test_parts_of_a_prefix_merge_to_the_whole() -> None:
    """Two unmasked parts and the causal new part of two rows, one without a prefix (cases C125, C126)."""
    geometry = MhaGeometry(4, 2, 32, 32, 0.2)
    group = LayerGroup("target", "full", "full", (0,), geometry)
    backend = TorchNative(Context(torch.device("cpu"), torch.float32, group))
    prefix, new = (7, 0), (3, 2)
    q, k, v = torch.randn(5, 4, 32), torch.randn(12, 2, 32), torch.randn(12, 2, 32)
    whole = oracle_mm.attend_packed(q, k, v, geometry, [0, 3, 5], [0, 10, 12])
    answers = []
    spans = [((0, 4), (0, 0)), ((4, 7), (0, 0)), ((7, 10), (0, 2))]
    layer = MhaLayer(0, group)
    for index, rows in enumerate(spans):
        lens = [end - begin for begin, end in rows]
        keys = [*range(*rows[0]), *(10 + j for j in range(*rows[1]))]
        part = Part(
            index, torch.tensor(offsets_of(lens), dtype=torch.int32),
            torch.tensor([begin for begin, _ in rows], dtype=torch.int32), max(lens), 0 in lens, index == 2,
        )  # fmt: skip
        batch = batch_of(list(zip(new, lens, strict=True)))
        metadata = backend.attn_metadata(batch, group, "prefill", None, False)
        out, lse = backend.attn_ragged(q, k[keys], v[keys], layer, metadata, part)
        assert lse is not None
        answers.append(oracle_mm.Answer(out.double(), lse.double()))
    merged = oracle_mm.merge(answers)
    torch.testing.assert_close(merged.out, whole.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged.lse, whole.lse, atol=1e-5, rtol=1e-5)
    assert prefix[1] == 0


def test_a_batch_without_packed_keys_is_refused() -> None:
    geometry = MhaGeometry(2, 2, 16, 16, 0.25)
    group = LayerGroup("target", "full", "full", (0,), geometry)
    backend = TorchNative(Context(torch.device("cpu"), torch.float32, group))
    batch = batch_of([(3, 3)])
    batch.key_offsets = None
    metadata = backend.attn_metadata(batch, group, "prefill", None, False)
    q = torch.randn(3, 2, 16)
    with pytest.raises(BatchError, match="key_offsets"):
        backend.attn_ragged(q, q, q, MhaLayer(0, group), metadata, None)
