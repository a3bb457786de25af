"""Dual chunk attention over a kernel in plain torch against the float64 oracles: boundaries, prefixes, forms of queries, mistakes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attn_core.geometry import MhaGeometry
from attn_core.manifest import parse_manifests
from attn_core.testing import oracle_mha
from attn_core.testing.batches import build
from attn_core.testing.cells import FAILED, list_cells, run_cell
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.elements import random_values
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.oracle_dual_chunk import ChunkSizes, attend_rotated
from attn_core.testing.oracle_mha import Answer
from attn_core.testing.pieces import answer_of, piece
from attn_core.testing.spec import Case, CaseSpec
from attn_flash.dual_chunk import Chunks, DualChunk, as_versions, parts, plain, rotary
from attn_flash.dual_chunk import backend as backend_module

GEOMETRY = MhaGeometry(4, 2, 32, 32, 0.23)
SIZES = ChunkSizes(12, 4)  # chunks of 8
OPTIONS = {"chunk_size": 12, "local_size": 4}
ROW = {
    "features": ["dual_chunk", "lse", "mixed", "strided_q", "writes_out", "zero_rows"],
    "fuses": ["rope"],
    "padded_out": "zero",
    "when": {
        "vendor": "cpu",
        "phase": ["prefill", "decode"],
        "dtypes": [{"q": name, "kv": name} for name in ("fp32", "fp16", "bf16")],
        "page_size": {"min": 1, "max": 1024},
        "head_dims": {"equal": True, "min": 16, "max": 256, "multiple": 8},
    },
}
VARIANT = {"name": "default", "host_lengths": "exact", "allow": [ROW]}
TABLE = {"api": "1.0", "backend": [{"kind": "mha", "name": "dual_chunk_flash_attn", "variant": [VARIANT]}]}


def backend_over(attend=plain.attend) -> BackendUnderTest:
    """The backend as the kit sees it, on a CPU."""
    return BackendUnderTest(parse_manifests(TABLE)[0], lambda manifest, variant, context: DualChunk(context, attend))


def case_of(phase: str, queries, keys, dtype: str = "fp32", page: int = 4, **more) -> Case:
    """A case whose queries come in five versions."""
    spec = CaseSpec(GEOMETRY, phase, tuple(queries), tuple(keys), dtype=dtype, page_size=page, needs_lse=True, **more)
    case = build(spec)
    shape = (case.batch.padded_tokens, GEOMETRY.q_heads, 5, GEOMETRY.qk_dim)
    q = random_values(shape, dtype, torch.Generator().manual_seed(spec.seed + 7))
    case.inputs = case.inputs._replace(q=q)
    return case


def oracle(case: Case, sizes: ChunkSizes = SIZES) -> Answer:
    return attend_rotated(case.batch, case.layer, case.expected, case.inputs.q, sizes, pool=case.pool_index)


def problems(case: Case, result, want: Answer, more: float = 1.0) -> list[str]:
    limits, tokens = tolerance(case.spec.dtype, case.spec.kv), case.batch.num_tokens
    found = [
        compare_out(result.out, want, limits.out * more, tokens),
        compare_lse(result.lse, want, limits.lse * more, tokens),
    ]
    return [str(item) for item in found if item is not None] + case.problems_outside_cache()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("page", [1, 4, 6, 16])  # of chunks of 8: read in parts of 1, 4, 2 and 8
@pytest.mark.parametrize("keys", [1, 7, 8, 9, 15, 16, 17, 24, 25, 41])
def test_decode_at_every_boundary(keys: int, page: int, dtype: str) -> None:
    case = case_of("decode", (1, 1), (keys, 3), dtype, page)
    result = backend_over().open(case, options=OPTIONS).run(case)
    assert problems(case, result, oracle(case)) == []


@pytest.mark.parametrize("queries", [1, 7, 8, 9, 16, 17, 26])
@pytest.mark.parametrize("keys", [26, 32])
def test_prefill_with_a_prefix_of_any_length(queries: int, keys: int) -> None:
    case = case_of("prefill", (queries, 2, 5), (keys, 9, 5), pad_tokens=3)
    result = backend_over().open(case, options=OPTIONS).run(case)
    assert problems(case, result, oracle(case)) == []
    assert not result.out[case.batch.num_tokens :].any()


def test_a_prompt_in_chunks_is_the_prompt_in_one() -> None:
    case = case_of("prefill", (29,), (29,))
    want = oracle(case)
    session = backend_over().open(case, options=OPTIONS)
    cuts = (0, 1, 7, 8, 9, 16, 23, 25, 29)
    for start, stop in zip(cuts, cuts[1:], strict=False):
        part = piece(case, [(start, stop)])
        assert problems(part, session.run(part), answer_of(want, case, [(start, stop)])) == [], (start, stop)


def test_decode_goes_on_where_prefill_ended_over_two_boundaries() -> None:
    case = case_of("prefill", (26, 26), (26, 26))
    want = oracle(case)
    first = piece(case, [(0, 6)] * 2)
    session = backend_over().open(case, options=OPTIONS, phases=("prefill", "decode"))
    assert problems(first, session.run(first), answer_of(want, case, [(0, 6)] * 2)) == []
    for position in range(6, 26):
        ranges = [(position, position + 1)] * 2
        part = piece(case, ranges, "decode")
        assert problems(part, session.run(part), answer_of(want, case, ranges)) == [], position


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_chunk_over_everything_is_ordinary_attention(phase: str) -> None:
    queries = (4, 9) if phase == "prefill" else (1, 1)
    spec = CaseSpec(GEOMETRY, phase, queries, (20, 9), needs_lse=True)
    case = build(spec)
    want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    result = backend_over().open(case, options={"chunk_size": 24, "local_size": 4}).run(case)
    assert problems(case, result, want) == []
    # and the same query in all versions is ordinary attention over any chunks: merging loses nothing
    case = build(spec)
    case.inputs = case.inputs._replace(q=case.inputs.q[:, :, None].expand(-1, -1, 3, -1))
    result = backend_over().open(case, options=OPTIONS).run(case)
    assert problems(case, result, want) == []


def test_logits_of_long_rows_are_scaled_row_by_row() -> None:
    sizes = ChunkSizes(12, 4, original=8)
    case = case_of("decode", (1, 1, 1), (8, 9, 40))
    options = {**OPTIONS, "original_max_position_embeddings": 8}
    result = backend_over().open(case, options=options).run(case, give_out=False)
    assert problems(case, result, oracle(case, sizes), more=3.0) == []
    assert problems(case, result, oracle(case), more=3.0) != []
    fixed = backend_over().open(case, options={**options, "scaling_length": 40}).run(case, give_out=False)
    factors = {kv_len: Chunks(12, 4, 8, 40).factor(kv_len) for kv_len in (8, 40)}
    assert factors[8] == factors[40] == pytest.approx(sizes.factor(40))
    assert not torch.equal(fixed.out[:2], result.out[:2])
    assert torch.equal(fixed.out[2], result.out[2])


def test_what_a_rotary_layer_returns_becomes_versions_without_a_copy() -> None:
    flat = torch.randn(6, 5 * 4 * 32)
    q = as_versions(flat, 4)
    assert q.shape == (6, 4, 5, 32)
    assert q.data_ptr() == flat.data_ptr()
    torch.testing.assert_close(q[:, :, 2].reshape(6, -1), flat[:, 2 * 128 : 3 * 128])


@pytest.mark.parametrize("storage", ["separate", "joint"])
def test_pools_with_larger_pages_than_the_kernel_reads(storage: str) -> None:
    case = case_of("decode", (1, 1), (25, 9), page=8, storage=storage, kernel_page=4)
    result = backend_over().open(case, options=OPTIONS).run(case)
    assert problems(case, result, oracle(case)) == []


def test_positions_of_both_sides_by_hand() -> None:
    chunks = Chunks(12, 4)  # L = 8, S = 12
    at = torch.tensor([0, 3, 7, 8, 21])
    assert rotary.query_positions(rotary.INTRA, at, chunks).tolist() == [0, 3, 7, 0, 5]
    assert rotary.query_positions(rotary.SUCC, at, chunks).tolist() == [8, 11, 12, 8, 12]
    assert rotary.query_positions(rotary.INTER, at, chunks).tolist() == [12] * 5
    assert rotary.query_positions(rotary.INTER, at, Chunks(12, 1)).tolist() == [12] * 5
    assert rotary.query_positions(rotary.INTER, at, Chunks(64, 60)).tolist() == [7] * 5  # 2 L - 1 below the chunk size


def test_pieces_by_hand() -> None:
    assert parts.cut((5, 1, 0), (10, 17, 3), 4) == [
        parts.Piece(0, 1, 5, 8),
        parts.Piece(0, 2, 8, 10),
        parts.Piece(1, 4, 16, 17),
    ]
    piece_ = parts.Piece(0, 4, 16, 17)
    assert [parts.key_range(piece_, version, 4) for version in (0, 1, 2)] == [(16, 1), (12, 4), (0, 12)]
    first = parts.Piece(0, 0, 1, 3)
    assert [parts.key_range(first, version, 4)[1] for version in (0, 1, 2)] == [3, 0, 0]


# --- the kit, and mistakes that it must find ----------------------------------------------------------------------------


def test_the_kit_finds_nothing() -> None:
    backend = backend_over()
    cells = list_cells(backend, "cpu", quick=True)
    assert {"dual_chunk", "dual_chunk_rope"} <= {cell.check for cell in cells}
    failures = [(r.cell.id, r.problems) for r in (run_cell(backend, cell) for cell in cells) if r.outcome == FAILED]
    assert failures == []


def _dual_chunk_outcomes(check: str = "dual_chunk") -> set[str]:
    backend = backend_over()
    cells = [cell for cell in list_cells(backend, "cpu", quick=True) if cell.check == check]
    return {run_cell(backend, cell, minimise=False).outcome for cell in cells}


def test_mistakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = parts.key_range

    def all_intra(self, inputs, version, metadata, original=DualChunk._query):
        return original(self, inputs, 0, metadata)

    def short_inter(piece, version, length):
        first, count = right(piece, version, length)
        return (first, count - 1) if version == 2 and count else (first, count)

    def succ_is_one_before(piece, version, length):
        first, count = right(piece, version, length)
        return (max(first - length, 0), count) if version == 1 and count else (first, count)

    with monkeypatch.context() as patch:
        patch.setattr(DualChunk, "_query", all_intra)
        assert _dual_chunk_outcomes() == {FAILED}
    for wrong in (short_inter, succ_is_one_before):
        with monkeypatch.context() as patch:
            patch.setattr(parts, "key_range", wrong)
            assert _dual_chunk_outcomes() == {FAILED}
    with monkeypatch.context() as patch:
        patch.setattr(Chunks, "factor", lambda self, kv_len: 1.0)
        assert _dual_chunk_outcomes() == {FAILED}


def test_wrong_rotations_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rotary.query_positions

    def unclamped(version, positions, chunks):
        return positions % chunks.length + chunks.length if version == 1 else right(version, positions, chunks)

    def inter_one_less(version, positions, chunks):
        return right(version, positions, chunks) - (1 if version == 2 else 0)

    def keys_by_position(version, positions, chunks):
        return positions.clamp(max=chunks.chunk_size) if version == 0 else right(version, positions, chunks)

    assert _dual_chunk_outcomes("dual_chunk_rope") == {"passed"}
    for wrong in (unclamped, inter_one_less, keys_by_position):
        with monkeypatch.context() as patch:
            patch.setattr(backend_module, "query_positions", wrong)
            patch.setattr(backend_module, "check_rope", lambda *arguments: None)
            assert _dual_chunk_outcomes("dual_chunk_rope") == {FAILED}, wrong.__name__


def test_a_mutant_of_the_merge_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(given, out=None):
        value = torch.stack([part for part, _ in given]).mean(0)
        return (value if out is None else out.copy_(value)), given[0][1]

    monkeypatch.setattr(backend_module, "merge_many", mean)
    assert _dual_chunk_outcomes() == {FAILED}


def test_metadata_is_a_plain_record() -> None:
    case = case_of("decode", (1, 1), (25, 3))
    metadata = backend_over().open(case, options=OPTIONS).metadata(case.batch, "decode")
    assert [call.version for call in metadata.calls] == [0, 1, 2]
    assert [call.key_lens.tolist() for call in metadata.calls] == [[1, 3], [8, 0], [16, 0]]
    assert [call.causal for call in metadata.calls] == [True, False, False]
    assert dataclasses.is_dataclass(metadata.calls[0])
