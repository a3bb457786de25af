"""Page-table expansion and merging of states, against what core computes with torch."""

from __future__ import annotations

import math

import pytest
import torch

from attn_core.batch import KvAddress
from attn_core.errors import BatchError
from attn_core.merge import merge_states as core_merge
from attn_core.paging import convert

pytestmark = pytest.mark.needs_triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def address(form, *, origin=False):
    """Three rows (one empty) with pages of 16; a permuted table behind table_rows, or CSR."""
    lens, width = [40, 0, 129], 9
    pages = (torch.randperm(3 * width) + 1).int()
    fields = {}
    if form == "csr":
        fields["indices"] = pages
        fields["indptr"] = torch.tensor([0, 9, 9, 18], dtype=torch.int32)
    else:
        fields["table"] = pages.view(3, width)
        fields["table_rows"] = torch.tensor([2, 0, 1], dtype=torch.int32)
    if origin:
        fields["origin"] = torch.tensor([16, 0, 32], dtype=torch.int32)
    moved = {name: x.to(DEVICE) for name, x in fields.items()}
    kv_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    return KvAddress(16, kv_lens, torch.empty(0, dtype=torch.int64, device=DEVICE), max(lens), **moved)


@pytest.mark.parametrize("origin", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("form", ["table", "csr"])
def test_expansion_is_what_core_computes(form, page_size, origin):
    from attn_triton.tools import expand_table

    source = address(form, origin=origin)
    have = expand_table(source, page_size).cpu()
    want = convert(source, "table", page_size).table.cpu()
    if page_size == 16 and form == "table":
        want = want[source.table_rows.cpu()]
    keys = source.kv_lens.cpu() - (source.origin.cpu() if origin else 0)
    for row, count in enumerate((-(-keys // page_size)).tolist()):
        assert have[row, :count].tolist() == want[row, :count].tolist()
        assert not have[row, count:].any()
    assert have.shape[1] == -(-129 // page_size)


def test_expansion_writes_into_a_wider_table():
    from attn_triton.tools import expand_table

    out = torch.full((3, 80), -1, dtype=torch.int32, device=DEVICE)
    assert expand_table(address("table"), 4, out) is out
    assert (out[:, 40:] == 0).all()


def test_expansion_refuses():
    from attn_triton.tools import expand_table

    with pytest.raises(BatchError, match="divides"):
        expand_table(address("csr"), 5)
    with pytest.raises(BatchError, match="does not fit"):
        expand_table(address("csr"), 4, torch.zeros(3, 2, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_states_merge_as_in_core(dtype):
    from attn_triton.tools import merge_states

    torch.manual_seed(0)
    a, b = (torch.randn(6, 3, 80, dtype=dtype, device=DEVICE) for _ in range(2))
    lse_a, lse_b = (3 * torch.randn(6, 3, device=DEVICE) for _ in range(2))
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = (-math.inf,) * 4
    a[0], b[1], a[2] = (math.nan,) * 3
    want, want_lse = core_merge(a, lse_a, b, lse_b)
    have, lse = merge_states(a, lse_a, b, lse_b)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(lse, want_lse)
    assert torch.equal(have[0], b[0])
    assert torch.equal(have[1], a[1])
    assert not have[2].any()
    assert torch.equal(lse[2], torch.full_like(lse[2], -math.inf))
    again, _ = merge_states(a, lse_a, b, lse_b, out=b)
    assert again is b
    torch.testing.assert_close(b, want)


def test_states_of_different_shapes_are_refused():
    from attn_triton.tools import merge_states

    a, lse = torch.zeros(2, 3, 8, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(BatchError, match="fit together"):
        merge_states(a, lse, a[:1], lse[:1])
