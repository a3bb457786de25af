"""Addresses against plain Python lists: every form, page size, origin and shared table gives the same slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core.batch import AttentionBatch, Checkpoints, KvAddress, Segment, StateAddress, Tree
from attn_core.errors import BatchError
from attn_core.paging import (
    PoolRows,
    build_batch,
    convert,
    copy_batch,
    lookup_slots,
    packed_rows,
    refresh_views,
    slice_batch,
)


def slots_of(address: KvAddress, row: int) -> list[int]:
    """The slot of every key of a row, the slow way."""
    first = int(address.origin[row]) if address.origin is not None else 0
    size, length = address.page_size, int(address.kv_lens[row])
    if address.table is not None:
        pages = address.table[row if address.table_rows is None else int(address.table_rows[row])].tolist()
    else:
        pages = address.indices[int(address.indptr[row]) : int(address.indptr[row + 1])].tolist()
    return [pages[(at - first) // size] * size + at % size for at in range(first, length)]


def random_address(seed: int, rows: int, page: int, *, form="table", shared=False, origin=False) -> KvAddress:
    """Random lengths around page limits, permuted pages, junk after each row's end."""
    draw = torch.Generator().manual_seed(seed)
    choices = torch.tensor([0, 1, max(0, page - 1), page, page + 1, 3 * page + 5])
    lens = choices[torch.randint(len(choices), (rows,), generator=draw)]
    width = int(-(-(3 * page + 5) // page)) + 2
    pages = (torch.randperm(width * (rows + 3), generator=draw) + 1).view(rows + 3, width)
    first = torch.zeros(rows, dtype=torch.int64)
    if origin:
        first = torch.minimum(lens // page, torch.randint(0, 3, (rows,), generator=draw)) * page
    address = KvAddress(
        page_size=page,
        kv_lens=lens.int(),
        new_slots=torch.full((rows,), -1),
        max_kv_len=int(lens.max()) if rows else 0,
        table=pages[:rows].int(),
        origin=first.int() if origin else None,
    )
    if shared:
        address.table_rows = torch.randperm(rows + 3, generator=draw)[:rows].int()
        address.table = pages.int()
    if form == "csr":
        counts = -(-(lens - first) // page)
        tables = [address.table[r, : counts[r] + r % 2] for r in range(rows)]  # some rows own a page more than needed
        address.indices = torch.cat(tables) if rows else torch.zeros(0, dtype=torch.int32)
        starts = [0]
        for part in tables:
            starts.append(starts[-1] + len(part))
        address.indptr = torch.tensor(starts, dtype=torch.int32)
        address.table = address.table_rows = None
    return address


FORMS = ("table", "csr")


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_c37_every_page_size_splits_into_every_divisor(page, source, target):
    address = random_address(page, 6, page, form=source)
    for size in (s for s in (1, 4, 16, 32, 64, 128, 256) if page % s == 0):
        view = convert(address, target, size)
        assert view.page_size == size
        assert (view.table is not None) == (target == "table")
        for row in range(6):
            assert slots_of(view, row) == slots_of(address, row)
        for tensor in (view.table, view.indices, view.indptr):
            assert tensor is None or tensor.dtype == torch.int32


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(0, 5), st.sampled_from([1, 4, 6, 12]), st.sampled_from(FORMS), st.sampled_from(FORMS),
    st.booleans(), st.booleans(), st.booleans(), st.data(),
)  # fmt: skip
def test_conversion_keeps_every_slot(seed, rows, page, source, target, shared, origin, static, data):
    address = random_address(seed, rows, page, form=source, shared=shared and source == "table", origin=origin)
    address.max_kv_len += data.draw(st.sampled_from([0, 3]))
    if data.draw(st.booleans()):
        address.kv_lens_cpu = address.kv_lens.clone()
    size = data.draw(st.sampled_from([s for s in range(1, page + 1) if page % s == 0]))
    view = convert(address, target, size, static=static)
    for row in range(rows):
        assert slots_of(view, row) == slots_of(address, row)
    assert view.new_slots is address.new_slots
    assert view.kv_lens is address.kv_lens
    assert view.origin is address.origin
    if view.indptr is not None and view is not address and (page != size or source == "table"):
        first = address.origin if address.origin is not None else torch.zeros(rows, dtype=torch.int32)
        exact = [-(-(int(n) - int(o)) // size) for n, o in zip(address.kv_lens, first, strict=True)]
        assert view.indptr.diff().tolist() == exact, "last_page_len arithmetic needs exact page counts"
        if static:
            assert view.indices.numel() == rows * -(-address.max_kv_len // size)
        assert view.indices[int(view.indptr[-1]) :].eq(0).all()


def test_the_asked_form_is_returned_as_it_is():
    address = random_address(1, 3, 4, shared=True)
    assert convert(address, "table", 4) is address
    slots = convert(address, "slots", 1)
    assert slots.form == "slots"
    assert convert(slots, "csr", 1) is slots
    assert convert(slots, "slots", 1) is slots
    assert slots_of(convert(slots, "table", 1), 2) == slots_of(address, 2)


def test_products_are_made_in_64_bits():
    address = KvAddress(
        page_size=256,
        kv_lens=torch.tensor([257], dtype=torch.int32),
        new_slots=torch.tensor([-1]),
        max_kv_len=257,
        table=torch.tensor([[9_000_000, 2]], dtype=torch.int32),
    )
    rows, positions = torch.zeros(2, dtype=torch.int64), torch.tensor([5, 256])
    assert lookup_slots(address, rows, positions).tolist() == [9_000_000 * 256 + 5, 512]
    assert convert(address, "csr", 128).indices.tolist() == [18_000_000, 18_000_001, 4]


def test_refusals():
    address = random_address(0, 2, 16)
    with pytest.raises(BatchError, match="pages of 3"):
        convert(address, "table", 3)
    with pytest.raises(BatchError, match="pages of 32"):
        convert(address, "csr", 32)
    with pytest.raises(BatchError, match="slots has page size 1"):
        convert(address, "slots", 16)
    with pytest.raises(BatchError, match="never joined"):
        convert(convert(address, "slots", 1), "table", 16)
    with pytest.raises(BatchError, match="no form"):
        convert(address, "dense", 16)
    address.kv_lens = torch.tensor([1, 16 * 99], dtype=torch.int32)
    address.max_kv_len = 16 * 99
    with pytest.raises(BatchError, match="row 1 has more keys than its pages hold"):
        convert(address, "slots", 1)
    address.kv_lens = torch.tensor([1, 20], dtype=torch.int32)
    address.max_kv_len = 19
    with pytest.raises(BatchError, match="no upper bound"):
        convert(address, "csr", 4)


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("host", [True, False])
def test_nothing_waits_for_the_device(source, target, host):
    """A meta tensor has no values: whatever needs one raises."""
    real = random_address(3, 4, 16, form=source, shared=source == "table", origin=True)
    meta = {n: getattr(real, n) for n in ("kv_lens", "new_slots", "table", "table_rows", "indices", "indptr", "origin")}
    address = KvAddress(
        page_size=16, max_kv_len=real.max_kv_len, kv_lens_cpu=real.kv_lens if host else None,
        **{name: None if x is None else x.to("meta") for name, x in meta.items()},
    )  # fmt: skip
    view = convert(address, target, 4)
    if target == "csr":
        bound = sum(-(-int(n) // 4) for n in real.kv_lens) if host else 4 * -(-real.max_kv_len // 4)
        assert view.indices.shape == (bound,)
    else:
        assert view.table.shape == (4, -(-real.max_kv_len // 16) * 4) if source == "table" else True


def test_packed_rows_on_host_and_with_a_bound_agree():
    from attn_core.paging import _bounded_rows

    offsets = torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32)
    row, place, valid = packed_rows(offsets, 99)
    assert row.tolist() == [1, 1, 1, 3, 3]
    assert place.tolist() == [0, 1, 2, 0, 1]
    assert valid is None
    bounded = _bounded_rows(offsets.long(), 8)
    assert bounded[2].tolist() == [True] * 5 + [False] * 3
    assert bounded[0][:5].tolist() == row.tolist()
    assert bounded[1].tolist() == [*place.tolist(), 0, 0, 0]
    assert packed_rows(torch.zeros(1, dtype=torch.int32), 0)[0].numel() == 0


def test_static_views_are_rewritten_in_place():
    first = random_address(5, 4, 8)
    first.max_kv_len = 29
    for form in FORMS:
        static = convert(first, form, 4, static=True)
        where = (static.table if form == "table" else static.indices).data_ptr()
        later = random_address(6, 4, 8)
        later.max_kv_len = 29
        assert convert(later, form, 4, out=static) is static
        assert (static.table if form == "table" else static.indices).data_ptr() == where
        for row in range(4):
            assert slots_of(static, row) == slots_of(later, row)
        later.max_kv_len = 60
        with pytest.raises(BatchError, match="does not fit the static tensor"):
            convert(later, form, 4, out=static)


# --- build_batch ----------------------------------------------------------------------------------------------------------


def test_build_batch_computes_slots_positions_and_segments():
    batch = build_batch(
        [1, 1, 3, 5],
        [9, 4, 7, 5],
        [
            PoolRows(4, [[5, 6, 7], [8], [9, 2], [3, 4]]),
            PoolRows(2, [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12, 13, 14]]),
        ],
        ["decode", "decode", "verify", "prefill"],
    )
    assert (batch.num_rows, batch.num_tokens, batch.padded_rows, batch.padded_tokens) == (4, 10, 4, 10)
    assert [(s.phase, s.rows, s.tokens, s.query_len) for s in batch.segments] == [
        ("decode", slice(0, 2), slice(0, 2), 1),
        ("verify", slice(2, 3), slice(2, 5), 3),
        ("prefill", slice(3, 4), slice(5, 10), 5),
    ]
    assert batch.query_offsets.tolist() == [0, 1, 2, 5, 10]
    assert batch.positions.tolist() == [8, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    assert batch.max_query_len == 5
    main, small = batch.addresses
    assert main.new_slots.tolist() == [28, 35, 8, 9, 10, 12, 13, 14, 15, 16]
    assert small.new_slots.tolist() == [10, 15, 20, 21, 22, 24, 25, 26, 27, 28]
    assert main.max_kv_len == 9
    assert main.table.shape == (4, 3)
    assert main.table.dtype == main.kv_lens.dtype == torch.int32
    assert main.new_slots.dtype == batch.positions.dtype == torch.int64


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_new_slots_are_the_last_slots_of_each_row(data):
    rows = data.draw(st.integers(1, 5))
    page = data.draw(st.sampled_from([1, 2, 4, 16]))
    kv = [data.draw(st.integers(1, 40)) for _ in range(rows)]
    queries = [data.draw(st.integers(0, n)) for n in kv]
    numbers = iter(torch.randperm(400, generator=torch.Generator().manual_seed(rows)).add(1).tolist())
    origin = [data.draw(st.integers(0, (n - q) // page)) * page for n, q in zip(kv, queries, strict=True)]
    pages = [[next(numbers) for _ in range(-(-(n - o) // page))] for n, o in zip(kv, origin, strict=True)]
    form = data.draw(st.sampled_from(["table", "csr", "slots"]))
    batch = build_batch(queries, kv, PoolRows(page, pages, origin=origin), "prefill", form=form)
    address = batch.kv(0)
    assert address.form == ("slots" if page == 1 and form == "csr" else form)
    want = [s for r in range(rows) for s in (slots_of(address, r)[-queries[r] :] if queries[r] else [])]
    assert address.new_slots.tolist() == want
    assert batch.positions.tolist() == [at for q, n in zip(queries, kv, strict=True) for at in range(n - q, n)]


def test_padding_of_a_decode_bucket_and_of_a_ragged_batch():
    batch = build_batch([1, 1], [3, 2], PoolRows(4, [[1], [2]]), "decode", padded_rows=4, pad_kv_len=1, max_kv_len=40)
    assert batch.query_offsets.tolist() == [0, 1, 2, 3, 4]
    assert (batch.num_rows, batch.num_tokens, batch.padded_rows, batch.padded_tokens) == (2, 2, 4, 4)
    assert batch.segments == (Segment("decode", slice(0, 2), slice(0, 2), 1),), "segments cover the real rows"
    address = batch.kv(0)
    assert address.kv_lens.tolist() == [3, 2, 1, 1]
    assert address.new_slots.tolist() == [6, 9, -1, -1]
    assert address.table.shape == (4, 10)
    assert address.table[2:].eq(0).all()
    ragged = build_batch([2, 3], [2, 3], PoolRows(4, [[1], [2]]), "prefill", padded_rows=3, padded_tokens=8)
    assert ragged.query_offsets.tolist() == [0, 2, 5, 5]
    assert ragged.segments == (Segment("prefill", slice(0, 2), slice(0, 5), None),)
    assert ragged.kv(0).new_slots.tolist()[5:] == [-1, -1, -1]
    assert ragged.kv(0).kv_lens.tolist() == [2, 3, 0]


def test_c75_c76_zero_lengths_and_empty_batches():
    batch = build_batch([0, 3, 1], [5, 0, 4], PoolRows(4, [[1, 2], [], [3]], write=False), "prefill")
    assert batch.query_offsets.tolist() == [0, 0, 3, 4]
    assert batch.kv(0).new_slots.tolist() == [-1] * 4
    assert convert(batch.kv(0), "slots", 1).indptr.tolist() == [0, 5, 5, 9]
    idle = build_batch([], [], PoolRows(4, []), "decode")
    assert idle.idle
    assert idle.segments == ()
    assert idle.query_offsets.tolist() == [0]
    assert convert(idle.kv(0), "csr", 2).indptr.tolist() == [0]
    assert convert(idle.kv(0), "table", 2).table.shape[0] == 0
    padded = build_batch([], [], PoolRows(4, []), "decode", padded_rows=2, padded_tokens=2)
    assert (padded.num_rows, padded.idle) == (0, False)
    assert padded.segments == (Segment("decode", slice(0, 0), slice(0, 0), 1),)
    assert padded.query_offsets.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([1], [1, 2], PoolRows(4, [[1]]), "decode"), "query_lens has 1 rows, kv_lens 2"),
        (([-1], [1], PoolRows(4, [[1]]), "prefill"), "negative length"),
        (([1], [5], PoolRows(4, [[1]]), "decode"), "needs 2 pages"),
        (([1], [4], PoolRows(4, [[0]]), "decode"), "page 0 is the dummy"),
        (([4], [3], PoolRows(4, [[1]]), "prefill"), "kv_lens count the new tokens too"),
        (([1, 1], [3, 3], PoolRows(4, [[1], [1]]), "decode"), "two new tokens would be written to slot 6"),
        (([1, 2], [3, 3], PoolRows(4, [[1], [2]]), ["prefill", "decode"]), "not grouped in the contract's order"),
        (([1, 1, 1], [1, 1, 1], PoolRows(4, [[1], [2], [3]]), ["decode", "prefill", "decode"]), "not grouped"),
        (([2], [3], PoolRows(4, [[1]]), "decode"), "a decode row has one new token"),
        (([1], [1], PoolRows(4, [[1]]), "train"), "unknown phase 'train'"),
        (([1], [1], PoolRows(4, [[1], [2]]), "decode"), "pages has 2 rows, the batch has 1"),
        (([1], [9], PoolRows(4, [[1, 2, 3]], origin=[3]), "decode"), "not multiples of the page size"),
        (([1], [1], PoolRows(0, [[1]]), "decode"), "page size 0"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(args, message):
    with pytest.raises(BatchError, match=message):
        build_batch(*args)


def test_limits_are_checked():
    with pytest.raises(BatchError, match="the limit max_kv_len is 8"):
        build_batch([1], [9], PoolRows(4, [[1, 2, 3]]), "decode", max_kv_len=8)
    with pytest.raises(BatchError, match="padded counts"):
        build_batch([1, 1], [1, 1], PoolRows(4, [[1], [2]]), "decode", padded_rows=1)


# --- slices and static batches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["table", "csr", "slots"])
def test_slices_are_views_with_rebased_offsets(form):
    batch = build_batch(
        [1, 1, 4, 2],
        [9, 4, 6, 2],
        PoolRows(4, [[5, 6, 7], [8], [9, 2], [3]]),
        ["decode", "decode", "prefill", "prefill"],
        form=form,
    )
    part = batch.part(1)
    assert part is batch.part(1)
    assert (part.num_rows, part.num_tokens, part.max_query_len) == (2, 6, 4)
    assert part.query_offsets.tolist() == part.query_offsets_cpu.tolist() == [0, 4, 6]
    assert part.positions.tolist() == [2, 3, 4, 5, 0, 1]
    assert part.segments == (Segment("prefill", slice(0, 2), slice(0, 6), None),)
    assert part.kv(0).max_kv_len == 6
    assert part.kv(0).new_slots.data_ptr() == batch.kv(0).new_slots[2:].data_ptr()
    for row in range(2):
        assert slots_of(part.kv(0), row) == slots_of(batch.kv(0), row + 2)
        for target in ("table", "csr"):
            assert slots_of(part.view(0, target, 1), row) == slots_of(batch.kv(0), row + 2)
    decode = batch.part(0)
    assert (decode.max_query_len, decode.segments[0].query_len, decode.kv(0).max_kv_len) == (1, 1, 9)


def test_slices_of_padding_trees_spans_and_states():
    batch = build_batch(
        [1, 2, 2], [3, 3, 2], PoolRows(4, [[1], [2], [3]]), ["decode", "verify", "verify"], padded_rows=5
    )
    rows = torch.arange(5, dtype=torch.int32)
    batch.tree = Tree(rows[:, None], rows[:, None], rows[:, None, None])
    batch.spans = torch.tensor([[0, 1, 2], [2, 0, 2]], dtype=torch.int32)
    checkpoints = Checkpoints(
        rows[:3], torch.full((3,), 64, dtype=torch.int32), torch.tensor([7, 8, 9], dtype=torch.int32)
    )
    state = StateAddress(rows + 10, rows + 20, rows > 2, checkpoints=checkpoints)
    batch.addresses = (*batch.addresses, state)
    assert slice_batch(batch, batch.segments[1]).padded_rows == 2
    part = slice_batch(batch, Segment("verify", slice(1, 5), slice(1, 5)))
    assert (part.num_rows, part.padded_rows, part.num_tokens) == (2, 4, 4)
    assert part.query_offsets.tolist() == [0, 2, 4, 4, 4]
    assert part.tree.parents.flatten().tolist() == [1, 2, 3, 4]
    assert part.spans.tolist() == [[0, 0, 0], [1, 0, 2]]
    cut = part.state(1)
    assert cut.read_slots.tolist() == [11, 12, 13, 14]
    assert cut.checkpoints.row.tolist() == [0, 0, 1]
    assert cut.checkpoints.slot.tolist() == [-1, 8, 9]
    assert slice_batch(batch, batch.segments[0]).tree is None


def _bucket(kv_lens: list[int], pages: list[list[int]], form: str) -> AttentionBatch:
    return build_batch(
        [1] * len(kv_lens), kv_lens, PoolRows(4, pages), "decode", form=form, padded_rows=4, max_kv_len=32
    )


def test_a_static_batch_is_refilled_in_place():
    static = _bucket([3, 30], [[9], [1, 2, 3, 4, 5, 6, 7, 8]], "table")
    views = {key: convert(static.kv(0), *key[1:], static=True) for key in ((0, "csr", 2), (0, "table", 1))}
    static._views.update(views)
    pointers = [static.query_offsets.data_ptr(), static.kv(0).table.data_ptr(), views[0, "csr", 2].indices.data_ptr()]
    fresh = _bucket([5, 6, 2], [[1, 2], [3, 4], [5]], "table")
    assert copy_batch(fresh, static) is static
    assert (static.num_rows, static.num_tokens) == (3, 3)
    assert static.view(0, "csr", 2) is views[0, "csr", 2]
    for row in range(3):
        for address in (static.kv(0), *views.values()):
            assert slots_of(address, row) == slots_of(fresh.kv(0), row)
    assert pointers == [
        static.query_offsets.data_ptr(), static.kv(0).table.data_ptr(), static.view(0, "csr", 2).indices.data_ptr()
    ]  # fmt: skip
    assert static.kv(0).new_slots.tolist() == fresh.kv(0).new_slots.tolist()
    refresh_views(static)
    with pytest.raises(BatchError, match="does not fit the static one"):
        copy_batch(build_batch([1], [1], PoolRows(4, [[1]]), "decode"), static)
