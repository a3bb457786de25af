"""Metadata: what is planned, from where, how often, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_core.context import GraphLimits
from attn_core.errors import BatchError, BindError
from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import build, make_case
from attn_core.testing.oracle_mha import attend
from attn_core.testing.replay import load, roomy, static_case
from attn_flashinfer.lengths import lengths_of


def geometry(**fields):
    return MhaGeometry(fields.pop("q_heads", 4), fields.pop("kv_heads", 2), 64, 64, 0.2, **fields)


def calls(fake, *names):
    return [name for name, _, _ in fake.CALLS if not names or name in names]


def run(backend, case, variant="fa2", **more):
    session = backend.open(case, variant, **more)
    result = session.run(case)
    want = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    torch.testing.assert_close(result.out.double()[: case.batch.num_tokens], want.out[: case.batch.num_tokens], rtol=2e-2, atol=2e-2)  # fmt: skip
    return session


# --- lengths -------------------------------------------------------------------------------------------------------------


def test_pages_and_last_pages_of_rows():
    case = make_case(geometry(), "prefill", query_lens=(2, 0, 4, 1), kv_lens=(8, 3, 9, 1), page_size=4, dtype="bf16")
    found = lengths_of(case.batch, case.batch.kv(1), 0, padded=False)
    assert found.query_offsets.tolist() == [0, 2, 2, 6, 7]
    assert found.page_offsets.tolist() == [0, 2, 3, 6, 7]
    assert found.last_page.tolist() == [4, 3, 1, 1]
    assert (found.pages, found.most_pages, found.first_page) == (7, 3, None)


def test_rows_of_a_window_begin_at_the_page_of_the_first_key_that_is_seen():
    case = make_case(geometry(window=5), "decode", kv_lens=(4, 9, 30), page_size=4, dtype="bf16")
    found = lengths_of(case.batch, case.batch.kv(1), 5, padded=False)
    assert found.first_page.tolist() == [0, 1, 6]  # keys 0, 4 and 25 are the first that are seen
    assert found.keys.tolist() == [4, 5, 6]
    assert found.page_offsets.tolist() == [0, 1, 3, 5]


def decode_lengths(kv_lens, page_size=4, last=None, query_lens=None):
    case = make_case(geometry(), "decode" if query_lens is None else "prefill", kv_lens=kv_lens, page_size=page_size, dtype="bf16", **({"query_lens": query_lens} if query_lens else {}))  # fmt: skip
    return lengths_of(case.batch, case.batch.kv(1), 0, padded=False, last=last)


@pytest.mark.parametrize("kv_lens", [(5, 9, 4), (8, 12, 1), (6, 11, 3)])
def test_lengths_follow_from_earlier_ones_while_no_row_changes_pages(kv_lens):
    last = decode_lengths((5, 9, 2))
    found, fresh = decode_lengths(kv_lens, last=last), decode_lengths(kv_lens)
    assert found.page_offsets is last.page_offsets
    for name in ("query_offsets", "page_offsets", "last_page", "keys"):
        assert getattr(found, name).tolist() == getattr(fresh, name).tolist(), name
        assert getattr(found, name).dtype == getattr(fresh, name).dtype, name
    assert (found.rows, found.tokens, found.most_pages, found.rows_without_keys()) == (3, 3, fresh.most_pages, [])
    assert decode_lengths((6, 10, 3), last=found).page_offsets is last.page_offsets, "and so on"


@pytest.mark.parametrize(
    ("before", "after", "queries"),
    [
        ((5, 9, 4), (5, 9, 5), None),  # a page more
        ((5, 9, 5), (5, 9, 4), None),  # a page less: a row that was replaced
        ((5, 9, 4), (5, 9, 4), (1, 2, 1)),  # other queries
        ((0, 9, 4), (0, 9, 4), (0, 1, 1)),  # a row without keys has no last page
    ],
)
def test_lengths_are_made_anew_where_pages_or_queries_change(before, after, queries):
    last = decode_lengths(before, query_lens=queries if 0 in before else None)
    found, fresh = decode_lengths(after, last=last, query_lens=queries), decode_lengths(after, query_lens=queries)
    assert found.page_offsets is not last.page_offsets
    for name in ("query_offsets", "page_offsets", "last_page", "keys"):
        assert getattr(found, name).tolist() == getattr(fresh, name).tolist(), name


def test_a_trimmed_pool_without_a_window_is_refused():
    case = make_case(geometry(), "decode", kv_lens=(9,), page_size=4, dtype="bf16")
    address = replace(case.batch.kv(1), origin=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(BatchError, match="window"):
        lengths_of(case.batch, address, 0, padded=False)


# --- plans ---------------------------------------------------------------------------------------------------------------


def test_one_plan_serves_all_layers(backend, fake):
    case = make_case(geometry(), "decode", kv_lens=(5, 9), dtype="bf16")
    session = backend.open(case, "fa2")
    metadata = session.metadata(case.batch, "decode")
    for _ in range(4):
        session.attend(case, metadata, case.out)
    assert len(calls(fake, "decode.plan")) == 1
    assert len(calls(fake, "decode.run")) == 4


def test_wrappers_are_lent_and_come_back(backend, fake):
    case = make_case(geometry(), "decode", kv_lens=(5, 9), dtype="bf16")
    session = backend.open(case, "fa2")
    first = session.metadata(case.batch, "decode")
    second = session.metadata(case.batch, "decode")
    assert first.slot is not second.slot, "an earlier step's plan must stay valid"
    del first, second
    for _ in range(5):
        session.metadata(case.batch, "decode")
    assert len(calls(fake, "decode.__init__")) == 2


def test_an_eager_plan_is_kept_while_no_row_gains_a_page(backend, fake):
    spec = make_case(geometry(), "decode", kv_lens=(3, 10), page_size=8, dtype="bf16").spec
    session = backend.open(spec, "fa2")
    for more in range(5):
        case = build(spec.but(kv_lens=(3 + more, 10 + more)))
        result = session.run(case)
        want = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
        torch.testing.assert_close(result.out.double(), want.out, rtol=2e-2, atol=2e-2)
    assert len(calls(fake, "decode.plan")) == 1


def test_last_pages_are_those_of_the_step_where_a_plan_is_kept(backend, fake):
    spec = make_case(geometry(), "decode", kv_lens=(3, 10), page_size=8, dtype="bf16").spec
    session = backend.open(spec, "fa2")
    found = []
    for more in range(3):
        case = build(spec.but(kv_lens=(3 + more, 10 + more)))
        found.append(session.metadata(case.batch, "decode").slot.buffers.last_page.tolist())
    assert found == [[3, 2], [4, 3], [5, 4]]


def test_lengths_of_many_batch_sizes_are_not_kept_forever(backend):
    session = backend.open(make_case(geometry(), "decode", kv_lens=(3,), dtype="bf16"), "fa2")
    for rows in range(1, 80):
        session.metadata(make_case(geometry(), "decode", kv_lens=(3,) * rows, dtype="bf16").batch, "decode")
    assert len(session.bound.backend.steps.recent) <= 64


def test_a_server_may_rewrite_its_host_lengths_in_place(backend):
    case = make_case(geometry(), "decode", kv_lens=(3, 10), page_size=8, dtype="bf16")
    session = backend.open(case, "fa2")
    planned = session.metadata(case.batch, "decode").slot.planned
    before = [x.tolist() for x in (planned.query_offsets, planned.page_offsets, planned.keys)]
    case.batch.query_offsets_cpu.zero_()
    case.batch.kv(1).kv_lens_cpu.zero_()
    assert [x.tolist() for x in (planned.query_offsets, planned.page_offsets, planned.keys)] == before


def test_idle_wrappers_of_old_shapes_are_forgotten(backend):
    session = backend.open(make_case(geometry(), "decode", kv_lens=(3,), dtype="bf16"), "fa2")
    for rows in range(1, 80):
        case = make_case(geometry(), "decode", kv_lens=(3,) * rows, dtype="bf16")
        session.metadata(case.batch, "decode")
    assert len(session.bound.backend.planner.fixed) <= 64


def captured(backend, lens, *, page=8, phase="decode", query_len=1, variant="fa2", **fields):
    rows = len(lens)
    spec = make_case(
        geometry(), phase, query_lens=(query_len,) * rows, kv_lens=lens, page_size=page, dtype="bf16", **fields
    ).spec
    limits = GraphLimits((rows,), rows * query_len, query_len, 64, rows * 64)
    session = backend.open(spec, variant, limits=limits)
    state = session.graph_state(limits, (phase,))
    case = build(spec)
    static = static_case(case, -(-64 // page) + 4, 64)
    static.cache = roomy(case.cache, limits.max_pages + 8)
    load(case, static)
    return session, state, static, spec


def step(session, state, static, spec, lens):
    """The static batch with other lengths: metadata, and a run compared with the oracle."""
    case = build(spec.but(kv_lens=lens))
    load(case, static)
    metadata = session.metadata(static.batch, spec.phase, state)
    session.in_graph(metadata)
    session.store(static)
    result = session.attend(static, metadata, static.out)
    want = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    torch.testing.assert_close(result.out.double(), want.out, rtol=2e-2, atol=2e-2)
    return metadata


def test_a_plan_is_kept_while_no_row_gains_a_page(backend, fake):
    session, state, static, spec = captured(backend, (3, 10))
    first = step(session, state, static, spec, (3, 10))
    for more in range(1, 5):
        assert step(session, state, static, spec, (3 + more, 10 + more)) is first
    assert len(calls(fake, "decode.plan")) == 1
    step(session, state, static, spec, (9, 15))  # the first row's second page
    assert len(calls(fake, "decode.plan")) == 2
    step(session, state, static, spec, (3, 10))  # another request in its place
    assert len(calls(fake, "decode.plan")) == 3


def test_keys_that_share_plan_memory_plan_again_after_each_other(backend, fake):
    session, state, static, spec = captured(backend, (3, 10))
    step(session, state, static, spec, (3, 10))
    other = make_case(geometry(), "decode", kv_lens=(3,), page_size=8, dtype="bf16", form="table").batch
    session.metadata(other, "decode", state)
    step(session, state, static, spec, (3, 10))
    assert len(calls(fake, "decode.plan")) == 3
    assert len(calls(fake, "decode.reset_workspace_buffer")) == 2


def test_state_keeps_its_size(backend):
    session, state, static, spec = captured(backend, (3, 10))
    before = state.nbytes
    step(session, state, static, spec, (3, 10))
    step(session, state, static, spec, (40, 63))
    assert state.nbytes == before


def test_a_tree_filled_after_the_metadata_is_the_one_that_counts(backend):
    parents = ((-1, 0, 0, 1),) * 2
    case = make_case(geometry(), "verify", query_lens=(4, 4), kv_lens=(9, 6), dtype="bf16", parents=parents)
    session = backend.open(case, "fa2")
    right = case.batch.tree.mask_bits.clone()
    case.batch.tree.mask_bits.zero_()
    metadata = session.metadata(case.batch, "verify")
    session.in_graph(metadata)
    case.batch.tree.mask_bits.copy_(right)
    session.store(case)
    result = session.attend(case, metadata, case.out)
    want = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    torch.testing.assert_close(result.out.double(), want.out, rtol=2e-2, atol=2e-2)


# --- where a prefill reads its new tokens ------------------------------------------------------------------------------------

FRESH = {"query_lens": (5, 3), "kv_lens": (5, 3)}
CACHED = {"query_lens": (5, 3), "kv_lens": (12, 3)}


@pytest.mark.parametrize("variant", ["fa2", "fa3"])
@pytest.mark.parametrize(
    ("fields", "read", "expected"),
    [
        (FRESH, "auto", ["ragged.run"]),
        (FRESH, "paged", ["prefill.run"]),
        (CACHED, "auto", ["prefill.run"]),
        (CACHED, "ragged", ["ragged.run", "prefill.run"]),
        ({**FRESH, "give_kv": False, "store": False}, "ragged", ["prefill.run"]),
        ({**FRESH, "kv_dtype": "fp8_e4m3"}, "ragged", ["prefill.run"]),
    ],
)
@pytest.mark.parametrize("lse", [False, True])
def test_new_tokens(backend, fake, variant, fields, read, expected, lse):
    if variant == "fa3" and "kv_dtype" in fields:
        pytest.skip("not declared")
    case = make_case(geometry(), "prefill", dtype="bf16", needs_lse=lse, **fields)
    run(backend, case, variant, options={"prefill_read": read})
    assert calls(fake, "ragged.run", "prefill.run") == expected


def test_a_merge_is_in_one_base(backend):
    case = make_case(geometry(), "prefill", dtype="bf16", needs_lse=True, **CACHED)
    session = backend.open(case, "fa2", options={"prefill_read": "ragged"})
    result = session.run(case)
    want = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    torch.testing.assert_close(result.lse.double(), want.lse, rtol=1e-3, atol=1e-3)


def test_a_layer_without_k_and_v_plans_its_pages_once(backend, fake):
    case = make_case(geometry(), "prefill", dtype="bf16", **FRESH)
    session = backend.open(case, "fa3")
    metadata = session.metadata(case.batch, "prefill")
    session.store(case)
    case.inputs = case.inputs._replace(k=None, v=None, store=False)
    for _ in range(3):
        session.attend(case, metadata, case.out)
    assert calls(fake, "ragged.plan", "prefill.plan") == ["ragged.plan", "prefill.plan"]
    assert calls(fake, "ragged.run", "prefill.run") == ["prefill.run"] * 3


# --- deterministic -----------------------------------------------------------------------------------------------------------


def test_deterministic_prefill_has_one_tile_and_no_split_of_keys(backend, fake):
    case = make_case(geometry(), "prefill", dtype="bf16", **CACHED)
    run(backend, case, batch_invariant=True)
    assert calls(fake, "ragged.run") == []
    slot = backend.open(case, "fa2", batch_invariant=True)
    metadata = slot.metadata(case.batch, "prefill")
    assert metadata.slot.wrapper.most >= 128, "more rows than a tile, whatever the batch"


# --- refusals ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "fields", "words"),
    [
        ("fa2", {"window": 4, "window_right": 2}, "right window"),
        ("fa2", {"chunk": 16}, "chunked-local"),
        ("fa2", {"sinks": True}, "attention sinks"),
        ("fa3", {"sinks": True}, "attention sinks"),
        ("sink", {"sinks": True, "softcap": 5.0}, "soft cap"),
        ("fa2", {"window": 4, "causal": False}, "without a causal mask"),
    ],
)
def test_geometries_that_a_kernel_would_ignore(backend, variant, fields, words):
    case = make_case(geometry(**fields), "prefill", query_lens=(2,), kv_lens=(5,), dtype="bf16")
    with pytest.raises(BindError, match=words):
        backend.open(case, variant)


def test_layers_that_do_not_fit_their_group(backend):
    case = make_case(geometry(), "decode", kv_lens=(5,), dtype="bf16")
    session = backend.open(case, "fa2")
    metadata = session.metadata(case.batch, "decode")
    case.layer.sinks = torch.ones(4)
    with pytest.raises(BindError, match="sinks"):
        session.attend(case, metadata, case.out)
    case.layer.sinks = None
    case.inputs = case.inputs._replace(q=case.inputs.q[:, :2])
    with pytest.raises(BindError, match="planned are 4 heads"):
        session.attend(case, metadata, case.out)


def test_spans_and_parts_are_refused(backend):
    case = make_case(geometry(), "prefill", query_lens=(5,), kv_lens=(5,), dtype="bf16", spans=((0, 1, 3),))
    with pytest.raises(BatchError, match="spans"):
        backend.open(case, "fa2").metadata(case.batch, "prefill")


def test_the_scale_and_the_types_are_the_groups(backend, fake):
    case = make_case(geometry(softcap=7.0, window=3), "decode", kv_lens=(5, 9), dtype="fp16", kv_dtype="fp8_e5m2")
    run(backend, case)
    words = next(kwargs for name, _, kwargs in fake.CALLS if name == "decode.plan")
    assert (words["sm_scale"], words["logits_soft_cap"], words["window_left"]) == (0.2, 7.0, 2)
    assert (words["q_data_type"], words["kv_data_type"]) == (torch.float16, torch.float8_e5m2)


def test_warmup_plans_every_phase(backend, fake):
    case = make_case(geometry(), "decode", kv_lens=(5,), dtype="bf16")
    session = backend.open(case, "fa2")
    session.call("attn_warmup", session.context.group, ("prefill", "decode", "verify"), None)
    assert calls(fake, "prefill.plan", "decode.plan") == ["prefill.plan", "decode.plan", "prefill.plan"]
