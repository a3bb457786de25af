"""torch_native beyond numbers: what depends on what, what is allocated, how rows are cut, what a device would see."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import attn_torch.native as native_module
from attn_core.context import Context
from attn_core.errors import BindError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.testing import oracle_mha
from attn_core.testing.batches import build
from attn_core.testing.compare import compare_out
from attn_core.testing.guards import same_bits
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.spec import Case, CaseSpec
from attn_torch import engines
from attn_torch.native import NativeMetadata, TorchNative
from attn_torch.reader import split_pages
from attn_torch.rules import StepLengths
from attn_torch.units import Sizes, width_classes

PLAIN = MhaGeometry(8, 2, 64, 64, 0.125)


def metadata_of(native: BackendUnderTest, case: Case) -> NativeMetadata:
    return native.open(case).metadata(case.batch, case.phase)  # type: ignore[return-value]


# --- cutting -------------------------------------------------------------------------------------------------------------


def test_decode_is_a_handful_of_calls_whatever_the_batch(
    native: BackendUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loop over requests: 4 and 64 rows of random lengths differ by tiles, not by rows."""
    calls = []
    fused = engines._flash_cpu
    monkeypatch.setattr(engines, "_flash_cpu", lambda *a, **k: calls.append(1) or fused(*a, **k))
    counts = {}
    for rows in (4, 64):
        calls.clear()
        rng = random.Random(rows)
        spec = CaseSpec(PLAIN, "decode", (1,) * rows, tuple(rng.randint(1, 240) for _ in range(rows)), page_size=16)
        case = build(spec)
        native.open(case).run(case)
        counts[rows] = len(calls)
    assert counts[64] <= 6
    assert counts[64] - counts[4] <= 4


@pytest.mark.parametrize(("page_size", "smallest"), [(1, 32), (16, 32), (16, 256), (48, 64), (256, 32), (1024, 128)])
def test_a_tail_is_rounded_up_by_little(page_size: int, smallest: int) -> None:
    chunk = max(1, 2048 // page_size)
    widths = width_classes(chunk, smallest, page_size).tolist()
    for pages, width in enumerate(widths):
        assert pages <= width <= chunk
        tokens, wide = pages * page_size, width * page_size
        assert wide - tokens < max(tokens, 256) or wide <= max(smallest, page_size)
    assert len(set(widths)) <= 14
    assert widths == sorted(widths)


def test_a_row_is_cut_the_same_in_any_company(native: BackendUnderTest) -> None:
    def units(lens: tuple[int, ...]) -> list[tuple[int, int]]:
        case = build(CaseSpec(PLAIN, "decode", (1,) * len(lens), lens, page_size=16))
        metadata = metadata_of(native, case)
        plan = metadata.units[0]
        mine = len(lens) - 1  # the last row
        found = []
        for tile in plan.tiles:
            tokens = plan.tokens[tile.units]
            found += [(tile.block.width, int(n)) for n in [(tokens == mine).sum()] if int(n)]
        return sorted(found)

    assert units((5000,)) == units((17, 5000)) == units((2048, 1, 9000, 5000))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (80, 48)])
def test_batch_invariance(native: BackendUnderTest, dtype: str, dims: tuple[int, int]) -> None:
    """As ``--deterministic`` asks for it: a row alone, among others and with padding has the same bits."""
    rng = random.Random(7)
    for phase, queries in (("decode", 1), ("verify", 3), ("prefill", 70)):
        geometry = MhaGeometry(6, 2, *dims, 0.2)
        lens = tuple(queries + rng.choice((0, 15, 31, 250, 700, 2100)) for _ in range(7))
        spec = CaseSpec(geometry, phase, (queries,) * 7, lens, dtype=dtype, page_size=16, needs_lse=True)
        whole = build(spec)
        whole.cache = whole.expected
        out, lse = _run(native, whole)
        for row in (0, 3, 6):
            for pads in (0, 3):
                alone = build(spec.but(query_lens=(queries,), kv_lens=(lens[row],), pad_rows=pads, pad_tokens=pads))
                _borrow(alone, whole, row, queries)
                ours, our_lse = _run(native, alone)
                tokens = slice(row * queries, (row + 1) * queries)
                assert same_bits(ours[:queries], out[tokens]), (phase, row, pads)
                assert torch.equal(our_lse[:queries], lse[tokens])


def _run(native: BackendUnderTest, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    session = native.open(case, batch_invariant=True)
    metadata = session.metadata(case.batch, case.phase)
    hook = "attn_decode" if case.phase == "decode" else "attn_extend"
    out, lse = session.call(hook, case.inputs, case.layer, case.cache, metadata, None)
    return out, lse


def _borrow(alone: Case, whole: Case, row: int, queries: int) -> None:
    """Let the only row of `alone` be row `row` of `whole`: its keys, its queries."""
    ours, theirs = alone.batch.kv(alone.pool_index), whole.batch.kv(whole.pool_index)
    assert theirs.table is not None
    assert theirs.table_rows is not None
    ours.table, ours.indices, ours.indptr = theirs.table, None, None
    ours.table_rows = torch.full((alone.batch.padded_rows,), int(theirs.table_rows[row]), dtype=torch.int32)
    alone.cache = whole.expected
    q = torch.zeros(alone.batch.padded_tokens, *whole.inputs.q.shape[1:], dtype=whole.inputs.q.dtype)
    q[:queries] = whole.inputs.q[row * queries : (row + 1) * queries]
    alone.inputs = alone.inputs._replace(q=q)


# --- memory --------------------------------------------------------------------------------------------------------------


def test_workspaces_serve_all_layers_and_steps(native: BackendUnderTest) -> None:
    case = build(CaseSpec(PLAIN, "decode", (1, 1), (700, 300), page_size=16))
    session = native.open(case)
    session.run(case)
    first = {name: buffer.data_ptr() for name, buffer in session.context._workspaces.items()}
    session.context.frozen = True
    session.run(case)
    assert {name: buffer.data_ptr() for name, buffer in session.context._workspaces.items()} == first


def test_lanes_share_no_workspace(native: BackendUnderTest) -> None:
    cases = [build(CaseSpec(PLAIN, "decode", (1, 1), (70, 30), seed=lane, lane=lane)) for lane in (0, 1)]
    session = native.open(cases[0], lanes=2)
    steps = [session.metadata(case.batch, "decode") for case in cases]
    for case in cases:
        session.store(case)
    results = [session.attend(case, step) for case, step in zip(cases, steps, strict=True)]
    for case, result in zip(cases, results, strict=True):
        want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
        assert compare_out(result.out, want, 2e-5, 2) is None
    assert {lane for _, lane in session.context._workspaces} == {0, 1}


@pytest.mark.parametrize(("queries", "keys"), [(600, 900), (3000, 3000)])
def test_masks_and_key_blocks_stay_within_their_limits(
    native: BackendUnderTest, monkeypatch: pytest.MonkeyPatch, queries: int, keys: int
) -> None:
    monkeypatch.setattr(native_module, "MASK", 50_000)
    monkeypatch.setattr(native_module, "KEPT_MASKS", 120_000)
    monkeypatch.setattr(native_module, "KEY_BLOCK_BYTES", 1 << 19)
    case = build(CaseSpec(MhaGeometry(2, 1, 16, 16, 0.25, window=1500), "prefill", (queries,), (keys,), page_size=16))
    metadata = metadata_of(native, case)
    pieces = [piece for block in metadata.long_rows[0].blocks for piece in block.pieces]
    masks = [piece.mask for piece in pieces if piece.mask is not None]
    sizes = [(m.queries[1] - m.queries[0]) * (m.keys[1] - m.keys[0]) for m in masks]
    assert masks
    assert max(sizes) <= 50_000
    assert sum(size for size, mask in zip(sizes, masks, strict=True) if mask.keep) <= 120_000
    assert all(block.block.width <= 4096 + 16 for block in metadata.long_rows[0].blocks)


def test_a_fresh_prompt_needs_no_mask(native: BackendUnderTest) -> None:
    case = build(CaseSpec(PLAIN, "prefill", (300,), (300,), page_size=16))
    pieces = metadata_of(native, case).long_rows[0].blocks[0].pieces
    assert [(piece.causal, piece.mask) for piece in pieces] == [(True, None)]


def test_small_pages_of_a_large_page(native: BackendUnderTest) -> None:
    pages = torch.randn(3, 8, 2, 4)
    assert torch.equal(split_pages(pages, 4), pages.view(6, 4, 2, 4))
    assert split_pages(pages, 4).data_ptr() == pages.data_ptr()
    with pytest.raises(BindError, match="cannot be read"):
        split_pages(pages.transpose(1, 2).contiguous().transpose(1, 2), 4)


def test_gradients_are_not_recorded(native: BackendUnderTest) -> None:
    case = build(CaseSpec(PLAIN, "decode", (1,), (9,)))
    case.inputs = case.inputs._replace(q=case.inputs.q.requires_grad_())
    assert not native.open(case).run(case).out.requires_grad


# --- devices -------------------------------------------------------------------------------------------------------------


class _NoSync(TorchFunctionMode):
    """Fails on everything that would make a host wait for a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "unique"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("phase", "queries"), [("decode", 1), ("verify", 4)])
def test_a_device_is_never_waited_for_in_decode(
    native: BackendUnderTest, monkeypatch: pytest.MonkeyPatch, phase: str, queries: int
) -> None:
    """With lengths that only a device knows, a step reads nothing back: neither its plan nor its layers."""
    monkeypatch.setattr(StepLengths, "on_host", lambda self, batch, address: None)
    monkeypatch.setattr(native_module, "choose", lambda device, cap: engines.sdpa)
    monkeypatch.setattr(TorchNative, "_sizes", lambda self, page_size: Sizes(None, 32, 1 << 16))
    monkeypatch.setattr("attn_torch.units.as_slice", lambda tokens: None)
    spec = CaseSpec(PLAIN, phase, (queries,) * 3, (70, 33, queries), host="none", needs_lse=False)
    case = build(spec)
    session = native.open(case)
    session.store(case)
    with monkeypatch.context() as patched:
        # the tests' tensors are on the CPU, where blanks are index lists; a device takes the boolean form
        patched.setattr("attn_torch.units._blank", lambda unseen: unseen)
        with _NoSync():
            metadata = session.metadata(case.batch, phase)
            result = session.attend(case, metadata, case.out)
    want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    assert compare_out(result.out, want, 2e-5, case.batch.num_tokens) is None


def test_host_lengths_that_are_only_bounds_are_not_trusted() -> None:
    case = build(CaseSpec(PLAIN, "decode", (1, 1), (9, 4), host="bound"))
    address = case.batch.kv(case.pool_index)
    step = StepLengths.of(case.batch, address)
    assert step.on_host(case.batch, address) is step  # on a CPU the tensors themselves are on the host
    elsewhere = StepLengths(
        *(torch.empty(2, dtype=torch.int64, device="meta") for _ in range(3)), origin=None, tree=None, spans=None
    )
    assert elsewhere.on_host(case.batch, address) is None
    exact = build(CaseSpec(PLAIN, "decode", (1, 1), (9, 4), host="exact"))
    found = elsewhere.on_host(exact.batch, exact.batch.kv(exact.pool_index))
    assert found is not None
    assert found.kv_len.tolist() == [9, 4]


def test_a_context_of_8_bit_queries_computes_in_bf16() -> None:
    group = LayerGroup("target", "full", "full", (0,), PLAIN)
    backend = TorchNative(Context(torch.device("cpu"), torch.float8_e4m3fn, group))
    assert backend.compute == torch.bfloat16
