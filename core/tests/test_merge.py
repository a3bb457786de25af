"""LSE merges against one softmax over all keys, in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attn_core import merge
from attn_core.errors import BatchError
from attn_core.merge import apply_sinks, log2_to_ln, mask_empty, merge_many, merge_states, token_major


def attend(q, k, v, scale, keep=None):
    """(out, lse) in float64 for q[T, H, D], k[n, H, D], v[n, H, Dv]; keep bool[T, n]."""
    logits = torch.einsum("thd,nhd->thn", q.double(), k.double()) * scale
    if keep is not None:
        logits = logits.masked_fill(~keep[:, None, :], -math.inf)
    lse = logits.logsumexp(-1) if k.shape[0] else torch.full(q.shape[:2], -math.inf).double()
    weights = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("thn,nhd->thd", weights, v.double()), lse.float()


def draw(seed, tokens, keys, heads=2, dim=8, v_dim=4):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, heads, d, generator=g) for n, d in ((tokens, dim), (keys, dim), (keys, v_dim)))


def test_c68_hand_check_natural_log():
    """C68: logits 0 and 2 with values 0 and 1 merge to 0.880797; base-2 numbers left as they are give 0.8, not that."""
    out_a, out_b = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    lse_a, lse_b = torch.zeros(1, 1), torch.full((1, 1), 2.0)
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert out.item() == pytest.approx(0.8807971, abs=1e-6)
    assert lse.item() == pytest.approx(math.log(1 + math.exp(2.0)), abs=1e-6)
    base2 = lse_b / math.log(2.0)
    wrong, _ = merge_states(out_a, lse_a, out_b, base2)
    assert wrong.item() == pytest.approx(0.947, abs=1e-3)
    assert merge_states(out_a, lse_a, out_b, log2_to_ln(base2))[0].item() == pytest.approx(0.8807971, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(0, 4), st.lists(st.integers(0, 7), min_size=1, max_size=6), st.floats(0.1, 30)
)
def test_any_split_equals_one_pass(seed, tokens, lengths, scale):
    q, k, v = draw(seed, tokens, sum(lengths))
    want, want_lse = attend(q, k, v, scale)
    parts = [attend(q, a, b, scale) for a, b in zip(k.split(lengths), v.split(lengths), strict=True)]
    out, lse = merge_many([(o.float(), s) for o, s in parts])
    torch.testing.assert_close(out, want.float(), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=1e-6)
    folded, folded_lse = parts[0][0].float(), parts[0][1]
    for o, s in parts[1:]:
        folded, folded_lse = merge_states(folded, folded_lse, o.float(), s)
    torch.testing.assert_close(folded, out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(folded_lse, lse, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("junk", [0.0, math.nan, math.inf])
def test_c75_an_empty_part_changes_no_bit(dtype, junk):
    g = torch.Generator().manual_seed(1)
    value = torch.randn(5, 3, 16, generator=g).to(dtype)
    value[0, 0, 0] = -0.0
    lse = torch.randn(5, 3, generator=g) * 50
    nothing, never = torch.full_like(value, junk), torch.full((5, 3), -math.inf)
    for out, merged in (merge_states(value, lse, nothing, never), merge_states(nothing, never, value, lse)):
        assert torch.equal(out.view(torch.uint8), value.view(torch.uint8))
        assert torch.equal(merged, lse)
    out, merged = merge_many([(nothing, never), (value, lse), (nothing, never)])
    assert torch.equal(out.view(torch.uint8), value.view(torch.uint8))
    assert torch.equal(merged, lse)
    out, merged = merge_states(nothing, never, nothing, never)
    assert out.eq(0).all()
    assert merged.eq(-math.inf).all()
    out, merged = merge_many([(nothing, never)])
    assert out.eq(0).all()
    assert torch.equal(merge_many([(value, lse)])[0].view(torch.uint8), value.view(torch.uint8))


def test_large_lse_does_not_overflow_and_nan_stays_visible():
    one, two = torch.ones(1, 1, 2), torch.full((1, 1, 2), 3.0)
    out, lse = merge_states(one, torch.tensor([[1e4]]), two, torch.tensor([[1e4]]))
    assert out.eq(2.0).all()
    assert lse.item() == pytest.approx(1e4 + math.log(2))
    out, lse = merge_states(one, torch.tensor([[-3e38]]), two, torch.tensor([[5.0]]))
    assert torch.equal(out, two)
    out, lse = merge_states(one, torch.tensor([[math.nan]]), two, torch.tensor([[5.0]]))
    assert lse.isnan().all()
    assert out.isnan().all()


class Operations(TorchDispatchMode):
    """Counts the operations that run something; views and allocations do not."""

    free = frozenset({"unbind", "unsqueeze", "view", "alias", "slice", "select", "empty", "detach", "t"})

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.free:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_are_few(count, dtype):
    """A decode step over three ranges of keys costs what it launches: two operations a part and four more, no others."""
    parts = [(torch.randn(3, 2, 8).to(dtype), torch.randn(2, 3).t()) for _ in range(count)]
    with Operations() as seen:
        merge_many(parts, torch.empty(3, 2, 8, dtype=dtype))
    most = 7 if count == 1 else 2 * count + 4
    assert len(seen.names) <= most, seen.names
    with Operations() as seen:
        merge_many(parts)
    assert len(seen.names) <= most + (dtype != torch.float32), seen.names
    assert not {"_local_scalar_dense", "item", "nonzero"} & set(seen.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 2 * 3 * 4 * 16, 10**9])
def test_blocks_of_tokens_change_nothing(monkeypatch, dtype, block):
    """Up to the last bit: torch promises no equal rounding for other sizes (vector units take tails another way)."""
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    g = torch.Generator().manual_seed(7)
    parts = [(torch.randn(7, 4, 16, generator=g).to(dtype), torch.randn(7, 4, generator=g)) for _ in range(3)]
    parts[1][1][2:5] = -math.inf
    want, want_lse = merge_many(parts)
    monkeypatch.setattr(merge, "BLOCK_ELEMENTS", block)
    out, lse = merge_many(parts)
    torch.testing.assert_close(out, want, **close)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)
    target = torch.full((4, 7, 16), math.nan, dtype=dtype).transpose(0, 1)  # strided
    got, lse = merge_many(parts, target)
    assert got is target
    torch.testing.assert_close(target, want, **close)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block", [1, 384, 10**9])
def test_the_same_merge_has_the_same_bits(monkeypatch, block):
    """From run to run, with and without blocks; a part alone passes through bit by bit in every block."""
    monkeypatch.setattr(merge, "BLOCK_ELEMENTS", block)
    g = torch.Generator().manual_seed(7)
    parts = [(torch.randn(7, 4, 16, generator=g), torch.randn(7, 4, generator=g)) for _ in range(3)]
    for _, lse in parts[1:]:
        lse[2:5] = -math.inf
    first, again = merge_many(parts), merge_many([(out.clone(), lse.clone()) for out, lse in parts])
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[0][2:5], parts[0][0][2:5])
    assert torch.equal(first[1][2:5], parts[0][1][2:5])


def test_sums_are_rounded_once_and_kinds_may_differ():
    """bf16 parts into a bf16 result: exactly the rounded fp32 result; an fp32 part among bf16 ones keeps its digits."""
    g = torch.Generator().manual_seed(11)
    values = [torch.randn(6, 2, 8, generator=g).bfloat16() for _ in range(4)]
    lses = [torch.randn(6, 2, generator=g) * 3 for _ in range(4)]
    exact, _ = merge_many([(v.float(), s) for v, s in zip(values, lses, strict=True)])
    parts = list(zip(values, lses, strict=True))
    assert torch.equal(merge_many(parts)[0], exact.bfloat16())
    assert torch.equal(merge_many(parts, torch.empty(6, 2, 8, dtype=torch.bfloat16))[0], exact.bfloat16())
    precise = merge_many(parts, torch.empty(6, 2, 8))[0]
    assert torch.equal(precise, exact)
    fine = values[1].float() + 1e-4
    mixed, _ = merge_many([parts[0], (fine, lses[1])], torch.empty(6, 2, 8))
    want, _ = merge_many([(values[0].float(), lses[0]), (fine, lses[1])])
    assert torch.equal(mixed, want)
    lse16 = [s.bfloat16() for s in lses]
    out, lse = merge_many(list(zip(values, lse16, strict=True)))
    assert lse.dtype == torch.float32
    assert torch.equal(out, merge_many([(v, s.float()) for v, s in zip(values, lse16, strict=True)])[0])


def test_gradients_pass_and_out_takes_none():
    value = torch.randn(2, 1, 4, requires_grad=True)
    lse = torch.zeros(2, 1)
    out, _ = merge_many([(value, lse), (torch.ones(2, 1, 4), lse), (torch.ones(2, 1, 4), lse)])
    out.sum().backward()
    torch.testing.assert_close(value.grad, torch.full((2, 1, 4), 1 / 3))
    target = torch.empty(2, 1, 4)
    merge_many([(value, lse), (torch.ones(2, 1, 4), lse)], target)
    assert not target.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_may_hold_it():
    g = torch.Generator(device="cuda").manual_seed(5)
    parts = [
        (torch.randn(4, 8, 128, generator=g, device="cuda").bfloat16(), torch.randn(4, 8, generator=g, device="cuda"))
        for _ in range(3)
    ]
    target = torch.empty_like(parts[0][0])
    merge_many(parts, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = merge_many(parts, target)
    parts[0][0].normal_()
    parts[2][1].fill_(-math.inf)
    want, want_lse = merge_many(parts)
    graph.replay()
    assert torch.equal(target, want)
    assert torch.equal(lse, want_lse)


def test_the_result_may_overwrite_an_input():
    q, k, v = draw(3, 4, 10)
    (out_a, lse_a), (out_b, lse_b) = (attend(q, k[s], v[s], 1.0) for s in (slice(0, 3), slice(3, 10)))
    target = out_a.float()
    got, _ = merge_states(target, lse_a, out_b.float(), lse_b, out=target)
    assert got is target
    torch.testing.assert_close(target, attend(q, k, v, 1.0)[0].float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_c125_prefix_in_chunks_and_new_part_in_bf16(chunks):
    """C125: unequal chunks of a prefix, a row without prefix, bf16 partial results: within 2e-3 of one pass."""
    prefixes, news, heads = [409, 0, 37], [5, 9, 1], 4
    for prefix, new in zip(prefixes, news, strict=True):
        q, k, v = draw(prefix, new, prefix + new, heads, 24, 16)
        keep = torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix)
        want, _ = attend(q, k, v, 24**-0.5, keep)
        limits = sorted([0, prefix, *(prefix * i * i // chunks**2 for i in range(1, chunks))])
        spans = [slice(a, b) for a, b in pairwise(limits)] + [slice(prefix, prefix + new)]
        parts = [attend(q, k[s], v[s], 24**-0.5, keep[:, s]) for s in spans]
        out, _ = merge_many([(o.bfloat16().float(), s) for o, s in parts])
        largest = max(float(o.abs().max()) for o, _ in parts if o.numel())
        assert (out - want.float()).abs().max() < 2e-3 * (1 + largest)
        exact, _ = merge_many([(o.float(), s) for o, s in parts])
        torch.testing.assert_close(exact, want.float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_are_merged_once(dtype):
    q, k, v = draw(9, 4, 10)
    sinks = torch.tensor([0.5, -3.0])
    logits = torch.einsum("thd,nhd->thn", q.double(), k.double())
    weights = torch.cat((logits, sinks.double().expand(4, 2)[..., None]), -1).softmax(-1)[..., :-1]
    want = torch.einsum("thn,nhd->thd", weights, v.double())
    parts = [attend(q, k[s], v[s], 1.0) for s in (slice(0, 4), slice(4, 10))]
    out, lse = apply_sinks(*merge_many([(o.to(dtype), s) for o, s in parts]), sinks)
    torch.testing.assert_close(out.float(), want.float(), atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-4)
    both = torch.logaddexp(logits.logsumexp(-1), sinks.double().expand(4, 2))
    torch.testing.assert_close(lse, both.float(), atol=1e-5, rtol=1e-5)
    empty = torch.full((4, 2), -math.inf)
    out, lse = apply_sinks(torch.full((4, 2, 3), math.nan), empty, sinks, in_place=True)
    assert out.eq(0).all()
    assert torch.equal(lse, empty)


def test_c126_rows_without_keys_are_masked_before_merging():
    """C126: a kernel that returns something finite for a row without keys is corrected by core."""
    out, lse = torch.randn(8, 2, 3), torch.randn(8, 2)
    offsets, lens = torch.tensor([0, 3, 3, 7], dtype=torch.int32), torch.tensor([5, 2, 0], dtype=torch.int32)
    masked, masked_lse = mask_empty(out, lse, offsets, lens)
    assert torch.equal(masked[:3], out[:3])
    assert torch.equal(masked_lse[:3], lse[:3])
    assert masked[3:].eq(0).all()
    assert masked_lse[3:].eq(-math.inf).all()
    assert mask_empty(out[:0], lse[:0], torch.zeros(1, dtype=torch.int32), lens[:0])[0].shape == (0, 2, 3)


def test_head_major_lse_is_turned():
    lse = torch.arange(6.0).view(2, 3).half()
    assert token_major(lse).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert token_major(lse).dtype == torch.float32
    assert token_major(lse).is_contiguous()


def test_refusals():
    with pytest.raises(BatchError, match="nothing to merge"):
        merge_many([])
    with pytest.raises(BatchError, match=r"lse \[2, 5\]"):
        merge_states(torch.zeros(5, 2, 4), torch.zeros(5, 2), torch.zeros(5, 2, 4), torch.zeros(2, 5))
    with pytest.raises(BatchError, match=r"out \[2, 5, 4\]"):
        merge_many([(torch.zeros(5, 2, 4), torch.zeros(5, 2))], torch.zeros(2, 5, 4))
    with pytest.raises(BatchError, match="one logit a query head"):
        apply_sinks(torch.zeros(5, 2, 4), torch.zeros(5, 2), torch.zeros(3))


def test_nothing_waits_for_the_device():
    out, lse = torch.empty(5, 2, 4, device="meta"), torch.empty(5, 2, device="meta")
    merged = apply_sinks(*merge_states(out, lse, out, lse), torch.empty(2, device="meta"))
    assert merged[0].shape == out.shape
    offsets, lens = torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    assert mask_empty(*merged, offsets, lens)[1].shape == lse.shape
