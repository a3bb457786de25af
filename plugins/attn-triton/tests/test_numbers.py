"""Numbers against the float64 oracle: in the interpreter (fp16 and fp32), or on a GPU with bf16 as well."""

from __future__ import annotations

import pytest
import torch

import attn_triton
from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import make_case
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.oracle_mha import attend

pytestmark = pytest.mark.needs_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = ("bf16", "fp16", "fp32") if DEVICE == "cuda" else ("fp16",)
SINKS = (0.1, 0.5, -1.0, 2.0)


def geometry(**fields):
    return MhaGeometry(4, 2, fields.pop("qk", 32), fields.pop("v", 16), 0.3, **fields)


def backend():
    from attn_triton.crosscompile import _manifests

    return BackendUnderTest.of_module(attn_triton, _manifests()["mha"])


def examine(shape, phase, *, invariant=False, **fields):
    """Run one step and compare out, lse, the cache and everything that may not be written."""
    case = make_case(shape, phase, needs_lse=True, device=DEVICE, **fields)
    want = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    session = backend().open(case)
    session.context.batch_invariant = invariant
    result = session.run(case)
    limits, tokens = tolerance(case.spec.dtype, case.spec.kv, case.spec.out), case.batch.num_tokens
    found = [compare_out(result.out, want, limits.out, tokens), compare_lse(result.lse, want, limits.lse, tokens)]
    assert [str(problem) for problem in found if problem] + case.problems() == []
    assert not result.out[tokens:].any()
    return result.out


DECODE = {
    "plain": (geometry(), {}),
    "split over programs": (geometry(), {"kv_lens": (1, 700)}),
    "fixed shares": (geometry(), {"kv_lens": (5, 1100), "invariant": True}),
    "pages of 12": (geometry(), {"page_size": 12}),
    "slots": (geometry(), {"page_size": 1, "form": "csr"}),
    "one page": (geometry(), {"page_size": 64, "kv_lens": (3, 64)}),
    "window, cap, sinks": (geometry(window=9, softcap=5.0, sinks=True), {"sinks": SINKS}),
    "sinks of parts": (geometry(sinks=True), {"sinks": SINKS, "partial": True, "kv_lens": (2, 600)}),
    "odd dims and ratio": (MhaGeometry(10, 2, 80, 96, 0.2), {}),
    "shared pages": (geometry(), {"shared": 2, "kv_lens": (20, 33)}),
}
EXTEND = {
    "ragged": (geometry(), {"query_lens": (3, 0, 1), "kv_lens": (3, 9, 40)}),
    "two tiles": (geometry(qk=16), {"query_lens": (3, 140), "kv_lens": (3, 150), "page_size": 16}),
    "window over tiles": (geometry(qk=16, window=20), {"query_lens": (140,), "kv_lens": (200,), "page_size": 16}),
    "window to the right": (geometry(window=9, window_right=3), {"query_lens": (30,), "kv_lens": (40,)}),
    "chunks": (geometry(chunk=16), {"query_lens": (30,), "kv_lens": (40,)}),
    "cross": (geometry(causal=False), {"query_lens": (5, 3), "kv_lens": (20, 0), "store": False, "give_kv": False}),
    "spans": (geometry(window=6), {"query_lens": (30,), "kv_lens": (35,), "spans": ((0, 8, 17), (0, 14, 25))}),
    "fused and hnd": (geometry(), {"query_lens": (5,), "kv_lens": (20,), "strides": "fused", "storage": "hnd"}),
    "transposed, joint": (
        geometry(),
        {"query_lens": (5,), "kv_lens": (20,), "strides": "transposed", "storage": "joint"},
    ),
    "padding": (geometry(), {"query_lens": (5,), "kv_lens": (20,), "pad_rows": 2, "pad_tokens": 40}),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", DECODE)
def test_decode(name, dtype):
    shape, fields = DECODE[name]
    fields = {"kv_lens": (1, 7, 40), "pad_rows": 1, **fields}
    examine(shape, "decode", dtype=dtype, **fields)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", EXTEND)
def test_extend(name, dtype):
    shape, fields = EXTEND[name]
    examine(shape, "prefill", dtype=dtype, **fields)


def test_fp32_is_fp32():
    examine(geometry(), "prefill", query_lens=(5, 9), kv_lens=(5, 30), dtype="fp32")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("kv", ["fp8_e4m3", "fp8_e5m2", "fp4"])
def test_narrow_caches_are_stored_and_read(kv, phase):
    lens = {"kv_lens": (3, 40)} if phase == "decode" else {"query_lens": (3, 9), "kv_lens": (3, 40)}
    examine(geometry(v=32), phase, dtype="fp16", kv_dtype=kv, k_scale=(0.5, 2.0), v_scale=1.5, page_size=16, **lens)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("qk", "v"), [(16, 48), (64, 128)])  # scales read as bytes, and in words of four
def test_fp4_head_dims(qk, v, phase):
    lens = {"kv_lens": (3, 40)} if phase == "decode" else {"query_lens": (3, 9), "kv_lens": (3, 40)}
    examine(geometry(qk=qk, v=v), phase, dtype="fp16", kv_dtype="fp4", k_scale=0.5, page_size=12, **lens)


@pytest.mark.parametrize("window", [None, 5])
def test_trees(window):
    trees = ((-1, 0, 0, 1), (-1, 0, 1, 1))
    examine(geometry(window=window), "verify", query_lens=(4, 4), kv_lens=(4, 40), parents=trees, dtype="fp16")


def test_a_tree_wider_than_a_word():
    tree = tuple([-1] + [(i - 1) // 2 for i in range(1, 40)])
    examine(geometry(qk=16), "verify", query_lens=(40,), kv_lens=(60,), parents=(tree,), dtype="fp16")


def test_a_row_does_not_depend_on_the_batch():
    fields = {"dtype": "fp16", "invariant": True, "strides": "contiguous"}
    both = examine(geometry(), "decode", kv_lens=(1100, 30), **fields)
    alone = examine(geometry(), "decode", kv_lens=(1100,), spare_pages=10, **fields)
    assert both.shape[0] == 2
    assert alone.shape[0] == 1
