"""flex_attention: the uncompiled variant against the oracle, the compiled one's plan without a compiler, a few real forms."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_mask

from attn_core.errors import BatchError
from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import build
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.spec import CaseSpec
from attn_torch import flex as flex_module
from attn_torch import forms
from attn_torch.flexplan import FlexCall

PLAIN = MhaGeometry(4, 2, 64, 64, 0.125)
TYPES = (
    ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8_e4m3"), ("fp32", "fp8_e5m2"),
    ("fp32", "fp4"), ("bf16", "fp4"),
)  # fmt: skip


@settings(max_examples=80)
@given(data=st.data())
def test_uncompiled(flex: BackendUnderTest, judge: Any, specs: Any, data: st.DataObject) -> None:
    judge(flex, data.draw(specs(dtypes=TYPES)), "eager")


@pytest.mark.parametrize("dims", [(16, 16), (48, 48), (80, 80), (128, 128), (192, 128), (32, 64)])
def test_uncompiled_head_dims(flex: BackendUnderTest, judge: Any, dims: tuple[int, int]) -> None:
    geometry = MhaGeometry(6, 2, *dims, 0.11)
    for phase, queries, keys in (("prefill", (5, 30), (9, 41)), ("decode", (1, 1), (9, 200))):
        judge(flex, CaseSpec(geometry, phase, queries, keys, page_size=16, needs_lse=True), "eager")


# --- the compiled variant's plan: the same calls, with blocks taken at their word ------------------------------------------


class _Honest:
    """What a generated kernel computes: only the listed blocks are read, and everything in them must be finite."""

    def __init__(self, key: forms.FormKey) -> None:
        self.key = key

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: BlockMask,
        modify: Any,
        log: logging.Logger,
    ) -> torch.Tensor:
        key = self.key
        assert q.shape == (key.rows, key.q_heads, key.queries, key.qk_dim)
        assert k.shape == (key.rows, key.kv_heads, key.keys, key.qk_dim)
        assert v.shape == (key.rows, key.kv_heads, key.keys, key.v_dim)
        masked = self.blocks_of(mask.kv_num_blocks, mask.kv_indices)
        whole = self.blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices)
        read = masked | whole
        seen = create_mask(mask.mask_mod, key.rows, 1, key.queries, key.keys, device=str(q.device))[:, 0]
        seen = (seen & masked) | whole
        ratio = key.q_heads // key.kv_heads
        touched = read.any(1)[:, None, :, None]
        k, v = (torch.where(touched, x, 0).repeat_interleave(ratio, 1).float() for x in (k, v))
        logits = q.float() @ k.transpose(-1, -2) * key.scale
        if modify is not None:
            heads = torch.arange(key.q_heads)[None, :, None, None]
            logits = modify(logits, None, heads, None, None)
        logits = logits.masked_fill(~seen[:, None], -math.inf)
        return torch.softmax(logits, -1).to(q.dtype).float().matmul(v).to(q.dtype)

    def blocks_of(self, numbers: Any, indices: Any) -> torch.Tensor:
        """bool[n, L, S] of a list of blocks."""
        key, size = self.key, forms.BLOCK
        numbers, indices = numbers[:, 0], indices[:, 0]
        listed = torch.zeros(key.rows, numbers.shape[1], -(-key.keys // size), dtype=torch.bool)
        for row in range(key.rows):
            for block in range(numbers.shape[1]):
                listed[row, block, indices[row, block, : numbers[row, block]].long()] = True
        spread = listed.repeat_interleave(size, 1).repeat_interleave(size, 2)
        return spread[:, : key.queries, : key.keys]


@settings(max_examples=80)
@given(data=st.data())
def test_plan_of_compiled_calls(flex: BackendUnderTest, judge: Any, specs: Any, data: st.DataObject) -> None:
    spec = data.draw(specs(dtypes=TYPES, sinks=False, lse=False, page_sizes=(1, 4, 12, 16)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flex_module, "form", _Honest)
        judge(flex, spec, "compiled")


@pytest.mark.parametrize(
    ("page_size", "rule"),
    [
        (16, {}),
        (1, {"window": 150}),
        (256, {"chunk": 200}),
        (16, {"causal": False}),
        (256, {"softcap": 3.0}),
        (12, {"window": 40}),
    ],
)
def test_plan_of_long_rows(
    flex: BackendUnderTest, judge: Any, monkeypatch: pytest.MonkeyPatch, page_size: int, rule: dict[str, Any]
) -> None:
    monkeypatch.setattr(flex_module, "form", _Honest)
    geometry = MhaGeometry(2, 1, 16, 16, 0.25, **rule)
    judge(flex, CaseSpec(geometry, "prefill", (140, 3), (300, 130), page_size=page_size), "compiled")
    judge(flex, CaseSpec(geometry, "decode", (1, 1, 1), (300, 130, 1), page_size=page_size), "compiled")


@pytest.mark.parametrize("variant", ["eager", "compiled"])
def test_queries_without_keys(flex: BackendUnderTest, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Case C75: rows without keys, without queries, and with more queries than keys."""
    monkeypatch.setattr(flex_module, "form", _Honest)
    case = build(CaseSpec(PLAIN, "prefill", (0, 1, 3, 4), (5, 1, 3, 4), needs_lse=variant == "eager"))
    address = case.batch.kv(case.pool_index)
    address.kv_lens[2], address.kv_lens[3] = 0, 2
    out, lse = flex.open(case, variant).run(case)
    assert (out[1:6] == 0).all()
    assert out.isfinite().all()
    assert (out[[0, 6, 7]] != 0).all()
    if lse is not None:
        assert (lse[1:6] == -math.inf).all()
        assert lse[[0, 6, 7]].isfinite().all()


def test_sizes_are_rounded_to_few_buckets(flex: BackendUnderTest) -> None:
    shapes = set()
    for length in (1, 40, 129, 200, 255):
        for rows in (2, 3, 4):
            case = build(CaseSpec(PLAIN, "decode", (1,) * rows, (length,) * rows, page_size=16))
            shapes |= {_shape(call) for call in _calls(flex, case)}
    assert shapes == {(4, 1, 256)}
    assert [forms.query_bucket(n) for n in (1, 2, 16, 17, 128, 129, 513)] == [1, 16, 16, 128, 128, 512, 2048]


def _calls(flex: BackendUnderTest, case: Any) -> list[FlexCall]:
    metadata = flex.open(case, "compiled").metadata(case.batch, case.phase)
    return metadata.calls  # type: ignore[attr-defined, no-any-return]


def _shape(call: FlexCall) -> tuple[int, int, int]:
    return call.rows, call.queries, call.keys


def test_blocks_out_of_sight_are_skipped(flex: BackendUnderTest) -> None:
    window = MhaGeometry(2, 1, 16, 16, 0.25, window=100)
    (call,) = _calls(flex, build(CaseSpec(window, "decode", (1,), (900,), page_size=16)))
    assert call.keys == 1024
    assert call.mask.kv_num_blocks.tolist() == [[[2]]]  # keys 800 … 899 lie in blocks 6 and 7
    assert call.mask.kv_indices[0, 0, 0, :2].tolist() == [6, 7]
    assert call.source.numel() == 7  # pages 50 … 56


def test_a_graph_is_refused(flex: BackendUnderTest) -> None:
    case = build(CaseSpec(PLAIN, "decode", (1,), (3,)))
    for variant in ("eager", "compiled"):
        with pytest.raises(BatchError, match="captured"):
            flex.open(case, variant).metadata(case.batch, "decode", None, capture=True)


def test_one_thread_compiles_a_form(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    compiled: list[str] = []

    def fake_compile(function: Any, **options: Any) -> Any:
        assert options == {"dynamic": False, "fullgraph": True}
        state = {"ready": False}

        def call(q: torch.Tensor, *rest: Any) -> torch.Tensor:
            if not state["ready"]:
                compiled.append(function.__code__.co_name)
                state["ready"] = True
            return q

        return call

    monkeypatch.setattr(torch, "compile", fake_compile)
    key = forms.FormKey(1, 1, 256, 256, 2, 1, 16, 16, torch.float32, "cpu", (0, None, None, False), None, 0.25)
    one, other = forms.Form(key), forms.Form(key._replace(keys=1024))
    log, q = logging.getLogger("attn_core"), torch.zeros(1)
    with caplog.at_level(logging.INFO, logger="attn_core"):
        threads = [threading.Thread(target=one, args=(q, q, q, None, None, log)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(compiled) == 1
    assert [r.message.startswith("flex_attention: compiling for 1 x 1 queries, 256 keys") for r in caplog.records] == [
        True, False,
    ]  # fmt: skip
    other(q, q, q, None, None, log)
    assert len(set(compiled)) == 2, "every form needs code of its own, or torch gives up after eight"
    assert forms.form(key) is forms.form(key)


# --- real forms ------------------------------------------------------------------------------------------------------------

_FORMS = {
    "decode fp32, window": CaseSpec(
        MhaGeometry(4, 2, 64, 64, 0.125, window=100), "decode", (1, 1, 1), (130, 300, 7), page_size=16
    ),
    "decode bf16, fp4 keys, soft cap": CaseSpec(
        MhaGeometry(9, 3, 64, 64, 0.125, softcap=5.0), "decode", (1, 1), (33, 200), dtype="bf16", kv_dtype="fp4",
        k_scale=0.75, v_scale=2.5, page_size=16,
    ),
    "prefill fp32, prefix": CaseSpec(
        MhaGeometry(4, 2, 64, 64, 0.125), "prefill", (70, 128, 0), (90, 128, 5), page_size=64, strides="fused"
    ),
    "prefill fp16, wide keys, dim 80": CaseSpec(
        MhaGeometry(4, 4, 80, 48, 0.1, causal=False), "prefill", (30,), (130,), dtype="fp16", page_size=4
    ),
    "verify bf16, tree": CaseSpec(
        MhaGeometry(4, 2, 128, 128, 0.1), "verify", (4, 4), (44, 4), dtype="bf16",
        parents=((-1, 0, 0, 1), (-1, 0, 1, 1)), page_size=16,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", _FORMS)
def test_compiled(flex: BackendUnderTest, judge: Any, name: str) -> None:
    """Each compiles once, 5 to 20 seconds; the second step, with other lengths, must find the form ready."""
    spec = _FORMS[name]
    judge(flex, spec, "compiled")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    judge(flex, spec.but(seed=5, kv_lens=tuple(n + 2 if n else n for n in spec.kv_lens)), "compiled")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "compiled again for the same form"


def test_blocks_seen_as_a_whole_need_no_mask(flex: BackendUnderTest) -> None:
    (call,) = _calls(flex, build(CaseSpec(PLAIN, "prefill", (140,), (500,), page_size=16)))
    assert call.mask.full_kv_num_blocks is not None
    assert call.mask.full_kv_num_blocks[0, 0, :2].tolist() == [2, 3]  # queries at 360 and 488: blocks 0 and 1; 0 to 2
    assert call.mask.kv_num_blocks[0, 0, :2].tolist() == [2, 1]
