"""The makers of cases: what they promise about pages, poison, strides and canaries; the reference on random cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from attn_core.geometry import MhaGeometry
from attn_core.testing import oracle_mha
from attn_core.testing.batches import build, make_case
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.guards import guarded, same_bits
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.spec import CaseSpec
from attn_core.testing.strategies import case_specs
from attn_core.testing.trees import build_tree, depths

GEOMETRY = MhaGeometry(4, 2, 16, 8, 0.3)


def test_pages_are_permuted_and_idle_entries_point_to_poison() -> None:
    case = make_case(GEOMETRY, "decode", kv_lens=(9, 13, 1))
    address = case.batch.kv(case.pool_index)
    assert address.table is not None
    assert address.table_rows is not None
    assert address.table.shape[0] > 3
    assert address.table_rows.tolist() != sorted(address.table_rows.tolist()) or case.spec.seed == 0
    used = {slot // 4 for row in range(3) for slot in oracle_mha.token_slots(address, row)}
    assert 0 not in used
    lines = address.table[address.table_rows.long()]
    idle = {int(page) for row, kv in enumerate((9, 13, 1)) for page in lines[row, -(-kv // 4) :]}
    assert idle
    assert not idle & used
    for page in {0, *idle}:
        assert case.expected.k[page].isnan().all()


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp4"])
def test_slots_that_nobody_owns_are_poisoned(kv_dtype: str) -> None:
    spec = CaseSpec(MhaGeometry(2, 1, 32, 16, 0.3), "decode", (1,), (6,), "bf16", kv_dtype)
    case = build(spec)
    slots = oracle_mha.token_slots(case.batch.kv(1), 0)
    keys, _ = oracle_mha.read_row(case.expected, case.batch.kv(1), 0, case.layer)
    assert keys.isfinite().all()
    unused = [slot for slot in range(case.expected.k.shape[0] * 4) if slot not in slots]
    picked = case.expected.k_blocks if kv_dtype == "fp4" else case.expected.k
    assert picked is not None
    assert picked.flatten(0, 1)[unused].float().isnan().all()


def test_the_cache_lacks_new_tokens_until_they_are_stored() -> None:
    case = make_case(GEOMETRY, "prefill", query_lens=(3,), kv_lens=(8,))
    new = case.batch.kv(1).new_slots
    assert case.cache.k.flatten(0, 1)[new].isnan().all()
    assert any("cache.k" in line for line in case.problems())
    case.cache.k[new // 4, new % 4] = case.inputs.k
    case.cache.v[new // 4, new % 4] = case.inputs.v
    assert case.problems() == []


def test_joint_storage_shares_memory_before_and_after() -> None:
    case = make_case(GEOMETRY, "decode", kv_lens=(5,), storage="joint")
    for cache in (case.cache, case.expected):
        assert cache.k.untyped_storage().data_ptr() == cache.v.untyped_storage().data_ptr()
    assert case.cache.k.stride() == case.expected.k.stride()
    assert case.cache.k.untyped_storage().data_ptr() != case.expected.k.untyped_storage().data_ptr()


@pytest.mark.parametrize("strides", ["fused", "transposed"])
def test_strided_inputs_hold_the_same_numbers(strides: str) -> None:
    plain = make_case(GEOMETRY, "prefill", query_lens=(3, 2), kv_lens=(3, 6))
    other = make_case(GEOMETRY, "prefill", query_lens=(3, 2), kv_lens=(3, 6), strides=strides)
    for name in ("q", "k", "v"):
        a, b = getattr(plain.inputs, name), getattr(other.inputs, name)
        assert torch.equal(a, b)
        assert not b.is_contiguous()
        assert b.stride(-1) == 1


def test_shared_pages_are_those_of_row_zero() -> None:
    case = make_case(GEOMETRY, "decode", kv_lens=(10, 14, 3), shared=2)
    rows = [oracle_mha.token_slots(case.batch.kv(1), row) for row in range(3)]
    assert rows[0][:8] == rows[1][:8]
    assert not set(rows[0][8:]) & set(rows[1][8:])
    assert not set(rows[2]) & set(rows[0])


def test_rows_with_fewer_keys_than_queries_own_just_their_pages() -> None:
    geometry = MhaGeometry(4, 2, 16, 8, 0.3, causal=False)
    case = make_case(geometry, "prefill", query_lens=(5, 5, 5), kv_lens=(2, 3, 7), page_size=1, store=False, shared=1)
    assert case.cache.k.shape[0] == 1 + 12 + case.spec.spare_pages


def test_guards_see_a_single_byte() -> None:
    guard = guarded("out", (3, 5), torch.float32)
    assert guard.tensor.isnan().all()
    assert guard.problems() == []
    guard.buffer[-1] = 0
    assert len(guard.problems()) == 1
    assert "after" in guard.problems()[0]


def test_a_changed_table_is_reported_with_its_place() -> None:
    case = make_case(GEOMETRY, "decode", kv_lens=(5,), store=False)
    assert case.problems() == []
    address = case.batch.kv(1)
    assert address.table is not None
    address.table[1, 2] += 1
    assert case.problems() == ["addresses[1].table: 1 elements were changed, the first at [1, 2]"]


def test_the_same_spec_gives_the_same_bits_and_prints_as_its_call() -> None:
    spec = CaseSpec(GEOMETRY, "prefill", (3,), (7,), seed=4)
    assert same_bits(build(spec).expected.k, build(spec).expected.k)
    namespace = {"make_case": make_case, "MhaGeometry": MhaGeometry}
    again = eval(str(spec), namespace)  # the text of a report is code
    assert again.spec == spec


def test_tree_words_and_depths() -> None:
    tree = build_tree([[-1, 0, 0, 2]], padded_rows=2)
    assert tree.depth.tolist() == [[0, 1, 1, 2], [0, 1, 2, 3]]
    assert tree.mask_bits[0, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1101]
    wide = build_tree([[i - 1 for i in range(40)]])
    assert wide.mask_bits.shape == (1, 40, 2)
    assert wide.mask_bits[0, 31].tolist() == [-1, 0]
    assert wide.mask_bits[0, 33].tolist() == [-1, 3]
    with pytest.raises(ValueError, match="parents come before"):
        depths([0])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case_specs(dtypes=(("fp32", "fp32"), ("bf16", "fp8_e4m3"), ("bf16", "fp4")), trimmed=True))
def test_reference_is_right_on_random_cases(spec: CaseSpec) -> None:
    case = build(spec)
    want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    got = BackendUnderTest.installed("mha", "reference").open(case).run(case)
    limits = tolerance(spec.dtype, spec.kv, spec.out)
    assert compare_out(got.out, want, limits.out, case.batch.num_tokens) is None
    if spec.needs_lse:
        assert compare_lse(got.lse, want, limits.lse, case.batch.num_tokens) is None
    assert case.problems() == []
    assert not got.out[case.batch.num_tokens :].any()
