"""What the kit hands to a backend: trimmed pools, the flag of ``--deterministic``, static batches with CSR views."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attn_core.binding import BindError
from attn_core.context import Context, GraphKey, GraphLimits
from attn_core.errors import BatchError
from attn_core.geometry import MhaGeometry
from attn_core.testing import oracle_mha
from attn_core.testing.batches import build, make_case
from attn_core.testing.bench import Bench
from attn_core.testing.cells import FAILED, PASSED, SKIPPED, Cell, CellResult, run_cell
from attn_core.testing.checks.masks import _pool_pages, _trimmed_spec
from attn_core.testing.declared import Ask
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.reference_backend import ReferenceBackend, load_manifest
from attn_core.testing.reference_plain import ReferenceMetadata
from attn_core.testing.shrink import shrink
from attn_core.testing.spec import CaseSpec
from kit_faults.memory import OriginIgnored
from kit_faults.steps import BatchDependent

WINDOW = MhaGeometry(4, 2, 16, 8, 0.3, window=5)
T = torch.Tensor


def backend_of(cls: type) -> BackendUnderTest:
    return BackendUnderTest(load_manifest(), lambda manifest, variant, context: cls(context))


def run_check(cls: type, check: str, phase: str = "decode", page_size: int = 4, turn: int = 0) -> CellResult:
    backend = backend_of(cls)
    variant = backend.manifest.variants[0]
    ask = Ask(phase, ("fp32", "fp32", "fp32"), page_size, (32, 16), (4, 2))
    return run_cell(backend, Cell(check, variant.name, ask, variant.allow[0], turn))


# --- trimmed pools --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["table", "csr"])
def test_columns_of_a_trimmed_row_start_at_its_origin(form: str) -> None:
    case = make_case(WINDOW, "prefill", query_lens=(2, 2, 1), kv_lens=(20, 14, 3), origins=(12, 4, 0), form=form)
    address = case.batch.kv(1)
    assert address.origin is not None
    assert address.origin.tolist() == [12, 4, 0]
    assert address.kv_lens.tolist() == [20, 14, 3]
    slots = [oracle_mha.token_slots(address, row) for row in range(3)]
    assert slots[0][:12] == [-1] * 12
    owned = sorted(slot for line in slots for slot in line if slot >= 0)
    assert len(owned) == 8 + 10 + 3
    others = [slot for slot in range(case.expected.k.shape[0] * 4) if slot not in owned]
    assert case.expected.k.flatten(0, 1)[others].isnan().all()
    assert case.expected.k.flatten(0, 1)[owned].isfinite().all()
    assert case.batch.kv(1).new_slots.tolist() == [*slots[0][-2:], *slots[1][-2:], *slots[2][-1:]]
    assert case.batch.positions is not None
    assert case.batch.positions.tolist() == [18, 19, 12, 13, 2]
    answer = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=1)
    assert answer.out.isfinite().all()


def test_origins_that_cut_off_visible_keys_or_pages_are_no_case() -> None:
    assert CaseSpec(WINDOW, "decode", (1,), (13,)).latest_origin(0) == 8  # the query at 12 sees 8 to 12
    for fields in ({"origins": (12,)}, {"origins": (6,)}, {"origins": (-4,)}, {"origins": (4, 0)}):
        with pytest.raises(ValueError, match=r"cannot start at|zip\(\)"):
            make_case(WINDOW, "decode", kv_lens=(13,), **fields)
    with pytest.raises(ValueError, match="cannot start at 4"):
        make_case(replace(WINDOW, window=None), "decode", kv_lens=(13,), origins=(4,))
    with pytest.raises(ValueError, match="share no pages"):
        make_case(WINDOW, "decode", kv_lens=(13, 13), origins=(4, 0), shared=1)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_the_check_mixes_trimmed_and_whole_rows_and_splits_pages(phase: str, page_size: int) -> None:
    row = load_manifest().variants[0].allow[0]
    ask = Ask(phase, ("fp32", "fp32", "fp32"), page_size, (32, 16), (4, 2))
    bench = Bench(backend_of(ReferenceBackend), "torch", row, ask)
    assert _pool_pages(bench) == [(page_size, page_size)]  # a page that the kernel takes is not split
    listed = replace(row, when={**row.when, "page_size": [1, 4, 64]})
    assert _pool_pages(replace(bench, row=listed)) == [(page_size, page_size), (16, 1)]
    spec = _trimmed_spec(bench, 5, page_size)
    assert spec.origins[0] == spec.origins[-1] == 0 < min(spec.origins[1:4])
    assert spec.origins[4] == spec.latest_origin(4) - page_size
    assert build(spec).batch.kv(1).origin is not None


def test_a_backend_may_refuse_trimmed_pools_at_its_metadata() -> None:
    class Refuses(ReferenceBackend):
        def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
            if batch.kv(self.context.address_index()).origin is not None:
                raise BatchError("this backend reads whole rows")
            return super().new_metadata(batch, phase, state)

    class RefusesAll(ReferenceBackend):
        def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
            raise BatchError("no batch is good enough")

    result = run_check(Refuses, "trimmed")
    assert result.outcome == SKIPPED
    assert (
        "refuses trimmed pools: table, pages of 4 read as 4: [AC-BAT-001] this backend reads whole rows"
        in result.reason
    )
    assert run_check(RefusesAll, "trimmed").outcome == FAILED
    assert run_check(ReferenceBackend, "trimmed", turn=1).outcome == PASSED


def test_the_smallest_trimmed_batch_is_one_trimmed_row() -> None:
    result = run_check(OriginIgnored, "trimmed")
    assert result.outcome == FAILED
    assert "query_lens=(1,)" in result.smallest
    assert "origins=(4,)" in result.smallest
    spec = CaseSpec(WINDOW, "decode", (1, 1), (30, 9), origins=(24, 4))
    small = shrink(spec, lambda s: ["found"] if any(build(s).spec.origins) else [])
    assert (small.kv_lens, small.origins) == ((9,), (4,))


@pytest.mark.parametrize("form", ["table", "csr"])
def test_the_reference_gathers_what_a_trimmed_row_has(form: str) -> None:
    case = make_case(WINDOW, "decode", kv_lens=(20, 3), origins=(12, 0), form=form, store=False)
    session = backend_of(ReferenceBackend).open(case)
    k, v = session.call("attn_gather", case.cache, case.batch.kv(1), None, case.layer)
    for row, (start, stop) in enumerate(((12, 20), (0, 3))):
        keys, values = oracle_mha.read_row(case.expected, case.batch.kv(1), row, case.layer)
        place = slice(0, 8) if row == 0 else slice(8, 11)
        assert torch.equal(k[place].double(), keys[start:stop])
        assert torch.equal(v[place].double(), values[start:stop])


def test_a_graph_captured_without_origins_serves_trimmed_rows() -> None:
    whole = make_case(WINDOW, "decode", kv_lens=(20, 3), pad_kv_len=0)
    trimmed = build(whole.spec.but(origins=(12, 0), seed=1))
    limits = GraphLimits((2,), 2, 1, 32, 16)
    session = backend_of(ReferenceBackend).open(whole, limits=limits)
    state = session.graph_state(limits, ("decode",))
    for case in (whole, trimmed, whole):
        found = session.run(build(case.spec), state=state).out
        want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=1)
        assert torch.allclose(found.double(), want.out, atol=1e-5)


# --- the flag of --deterministic --------------------------------------------------------------------------------------------


def test_batch_invariance_is_checked_with_the_flag_and_nothing_else_is() -> None:
    seen: list[bool] = []

    class OnDemand(BatchDependent):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            seen.append(context.batch_invariant)

        def logits(self, *arguments: Any) -> T:
            right = ReferenceBackend if self.context.batch_invariant else BatchDependent
            return right.logits(self, *arguments)

    assert run_check(OnDemand, "batch_invariance").outcome == PASSED
    assert set(seen) == {True}
    seen.clear()
    assert run_check(OnDemand, "attend_numbers").outcome == PASSED
    assert set(seen) == {False}


# --- static batches ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CsrMetadata(ReferenceMetadata):
    indices: T | None = None
    indptr: T | None = None


class ReadsCsr(ReferenceBackend):
    """Reads pages from CSR views: of a static batch it keeps the tensors themselves, which each step rewrites in place."""

    form, page = "csr", 0

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.known: dict[Any, CsrMetadata] = {}

    def new_metadata(self, batch: Any, phase: str, state: Any) -> Any:
        size = self.page or self.context.kernel_page_size(phase)
        view = batch.view(self.context.address_index(), self.form, size)
        key = (state.lane, GraphKey(phase, batch.padded_rows, batch.padded_tokens)) if state is not None else None
        if key in self.known:
            return self.known[key]
        plain = super().new_metadata(batch, phase, None)
        metadata = CsrMetadata(
            phase, batch.num_tokens, page_size=size, max_kv_len=view.max_kv_len, kv_lens=view.kv_lens,
            query_offsets=batch.query_offsets, row=plain.row, index=plain.index, live=plain.live,
            indices=self.kept(view.indices), indptr=view.indptr,
        )  # fmt: skip
        if key is not None:
            self.known[key] = metadata
        return metadata

    def kept(self, indices: T) -> T:
        return indices

    def locate(self, metadata: Any, keys: T) -> tuple[T, T]:
        place = metadata.indptr[:-1, None].long() + keys // metadata.page_size
        return metadata.indices[place.clamp(max=len(metadata.indices) - 1)].long(), keys % metadata.page_size


class ReadsSlots(ReadsCsr):
    form, page = "slots", 1


class CopiesCsr(ReadsCsr):
    def kept(self, indices: T) -> T:
        return indices.clone()


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("check", ["graph_replay", "graph_padding", "graph_captured_small", "graph_lanes"])
@pytest.mark.parametrize("cls", [ReadsCsr, ReadsSlots])
def test_backends_that_read_csr_are_checked_under_replay(cls: type, check: str, phase: str) -> None:
    result = run_check(cls, check, phase)
    assert result.outcome == PASSED, result.problems


def test_a_csr_copied_at_capture_is_caught() -> None:
    result = run_check(CopiesCsr, "graph_replay")
    assert result.outcome == FAILED
    assert "replay" in result.problems[0]
    assert BindError.__name__ not in result.problems[0]
