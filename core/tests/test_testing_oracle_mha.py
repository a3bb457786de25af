"""The MHA and packed oracles against torch's SDPA with explicit masks, and against hand-computed numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from attn_core.geometry import MhaGeometry
from attn_core.testing import oracle_mha, oracle_mm
from attn_core.testing.batches import build, make_case
from attn_core.testing.spec import Case, CaseSpec
from attn_core.testing.trees import TREES, ancestors

PLAIN = MhaGeometry(q_heads=4, kv_heads=2, qk_dim=16, v_dim=8, scale=0.31)


def answer(case: Case) -> oracle_mha.Answer:
    return oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)


def by_sdpa(case: Case, masks: list[torch.Tensor]) -> torch.Tensor:
    """torch's own attention in float64, one row at a time, over keys collected through the page table."""
    parts, address = [], case.batch.kv(case.pool_index)
    offsets = case.batch.query_offsets.tolist()
    for row, mask in enumerate(masks):
        keys, values = oracle_mha.read_row(case.expected, address, row, case.layer)
        q = case.inputs.q[offsets[row] : offsets[row + 1]].double().transpose(0, 1)
        ratio = case.spec.geometry.ratio
        k, v = (t.transpose(0, 1).repeat_interleave(ratio, 0) for t in (keys, values))
        parts.append(F.scaled_dot_product_attention(q, k, v, mask, scale=case.spec.geometry.scale).transpose(0, 1))
    return torch.cat(parts)


def band(query_len: int, kv_len: int, window: int | None = None, right: int | None = 0) -> torch.Tensor:
    p = torch.arange(query_len)[:, None] + kv_len - query_len
    j = torch.arange(kv_len)[None]
    mask = torch.ones(query_len, kv_len, dtype=torch.bool)
    if right is not None:
        mask &= j <= p + right
    if window is not None:
        mask &= j > p - window
    return mask


@pytest.mark.parametrize(
    ("geometry", "right"),
    [
        (PLAIN, 0),
        (replace(PLAIN, window=3), 0),
        (replace(PLAIN, causal=False), None),
        (replace(PLAIN, causal=False, window=4, window_right=2), 2),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_oracle_equals_sdpa(geometry: MhaGeometry, right: int | None, phase: str) -> None:
    query_lens = (1, 1, 1) if phase == "decode" else (5, 1, 7)
    case = make_case(geometry, phase, query_lens=query_lens, kv_lens=(9, 1, 7), seed=3)
    masks = [band(q, kv, geometry.window, right) for q, kv in zip(query_lens, case.spec.kv_lens, strict=True)]
    torch.testing.assert_close(answer(case).out, by_sdpa(case, masks), rtol=1e-12, atol=1e-12)


def test_lse_is_torch_logsumexp() -> None:
    case = make_case(PLAIN, "decode", kv_lens=(7, 3))
    got = answer(case).lse
    for row in range(2):
        keys, _ = oracle_mha.read_row(case.expected, case.batch.kv(case.pool_index), row, case.layer)
        logits = PLAIN.scale * torch.einsum("hd,jhd->hj", case.inputs.q[row].double(), keys.repeat_interleave(2, 1))
        torch.testing.assert_close(got[row], torch.logsumexp(logits, -1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("sink", "out"), [(0.0, 0.5), (-math.inf, 1.0), (1.0986123, 0.25)])
def test_sink_is_in_the_denominator_only(sink: float, out: float) -> None:
    """Case C18: one key with logit 0 and value 1."""
    geometry = MhaGeometry(1, 1, 64, 64, 0.125, sinks=True)
    case = make_case(geometry, "decode", kv_lens=(1,), sinks=(sink,))
    case.inputs.q.zero_()
    case.expected.v.fill_(1.0)
    got = answer(case)
    torch.testing.assert_close(got.out, torch.full((1, 1, 64), out, dtype=torch.float64), rtol=1e-7, atol=1e-7)
    partial = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index, partial=True)
    assert partial.out[0, 0, 0] == 1.0
    assert partial.lse[0, 0] == 0.0


def test_soft_cap_comes_after_the_scale_and_before_the_mask() -> None:
    geometry = replace(PLAIN, softcap=0.7)
    case = make_case(geometry, "prefill", query_lens=(4,), kv_lens=(6,))
    keys, values = oracle_mha.read_row(case.expected, case.batch.kv(case.pool_index), 0, case.layer)
    logits = torch.einsum("thd,jhd->htj", case.inputs.q.double(), keys.repeat_interleave(2, 1)) * geometry.scale
    logits = 0.7 * torch.tanh(logits / 0.7)
    logits = logits.masked_fill(~band(4, 6), -math.inf)
    want = torch.einsum("htj,jhd->thd", logits.softmax(-1), values.repeat_interleave(2, 1))
    torch.testing.assert_close(answer(case).out, want, rtol=1e-12, atol=1e-12)


def test_chunked_local_sees_its_own_chunk_only() -> None:
    geometry = replace(PLAIN, chunk=4)
    case = make_case(geometry, "prefill", query_lens=(6,), kv_lens=(10,))
    p, j = torch.arange(4, 10)[:, None], torch.arange(10)[None]
    torch.testing.assert_close(answer(case).out, by_sdpa(case, [(j <= p) & (j // 4 == p // 4)]))


def test_spans_see_both_ways_inside_the_window() -> None:
    geometry = replace(PLAIN, window=3)
    case = make_case(geometry, "prefill", query_lens=(8,), kv_lens=(10,), spans=((0, 3, 8),))
    p, j = torch.arange(2, 10)[:, None], torch.arange(10)[None]
    inside = (p >= 3) & (p < 8) & (j >= 3) & (j < 8) & ((p - j).abs() < 3)
    torch.testing.assert_close(answer(case).out, by_sdpa(case, [band(8, 10, 3) | inside]))


@pytest.mark.parametrize("shape", sorted(TREES))
def test_tree_sees_prefix_and_ancestors(shape: str) -> None:
    parents = tuple(TREES[shape](6))
    case = make_case(PLAIN, "verify", query_lens=(6, 6), kv_lens=(11, 6), parents=(parents, tuple(TREES["star"](6))))
    masks = []
    for line, prefix in ((parents, 5), (TREES["star"](6), 0)):
        mask = torch.zeros(6, prefix + 6, dtype=torch.bool)
        mask[:, :prefix] = True
        for draft in range(6):
            mask[draft, [prefix + a for a in ancestors(line, draft)]] = True
        masks.append(mask)
    torch.testing.assert_close(answer(case).out, by_sdpa(case, masks))


def test_tree_and_window_count_tree_positions() -> None:
    """Case C43: prefix 10, window 4, tree [root, a, b, a1]; b does not see a, a1 sees positions 9 to 12."""
    geometry = replace(PLAIN, window=4)
    case = make_case(geometry, "verify", query_lens=(4,), kv_lens=(14,), parents=((-1, 0, 0, 1),))
    seen = [oracle_mha.visible_keys(case.batch, geometry, 0, i, 4, 14) for i in range(4)]
    assert seen == [[7, 8, 9, 10], [8, 9, 10, 11], [8, 9, 10, 12], [9, 10, 11, 13]]
    assert case.batch.positions is not None
    assert case.batch.positions.tolist() == [10, 11, 11, 12]


def test_window_of_a_long_context_starts_at_the_right_key() -> None:
    """Case C80: 5000 tokens, window 4096, first visible key 904."""
    geometry = replace(PLAIN, window=4096)
    case = make_case(geometry, "decode", kv_lens=(2,))
    assert oracle_mha.visible_keys(case.batch, geometry, 0, 0, 1, 5000)[0] == 904


def test_rows_without_keys_are_zero_and_minus_infinity() -> None:
    geometry = replace(PLAIN, causal=False)
    case = make_case(geometry, "prefill", query_lens=(2, 0, 1), kv_lens=(0, 3, 4), store=False)
    got = answer(case)
    assert not got.out[:2].any()
    assert (got.lse[:2] == -math.inf).all()
    assert got.lse[2].isfinite().all()


@pytest.mark.parametrize("form", ["table", "csr"])
@pytest.mark.parametrize("storage", ["separate", "joint", "hnd"])
def test_address_forms_and_storages_are_one_case(form: str, storage: str) -> None:
    def one(**changes: object) -> torch.Tensor:
        return answer(make_case(PLAIN, "decode", kv_lens=(9, 4, 1), seed=5, **changes)).out

    torch.testing.assert_close(one(form=form, storage=storage), one(), rtol=0, atol=0)


def test_quantised_caches_are_read_through_their_scales() -> None:
    geometry = replace(PLAIN, qk_dim=32, v_dim=16)
    for kv_dtype in ("fp8_e4m3", "fp8_e5m2", "fp4"):
        spec = CaseSpec(geometry, "decode", (1,), (6,), "bf16", kv_dtype, k_scale=0.75, v_scale=(2.0, 0.5))
        case = build(spec)
        keys, values = oracle_mha.read_row(case.expected, case.batch.kv(1), 0, case.layer)
        plain = replace_scales(case)
        raw_keys, raw_values = oracle_mha.read_row(case.expected, case.batch.kv(1), 0, plain)
        torch.testing.assert_close(keys, raw_keys * 0.75)
        torch.testing.assert_close(values, raw_values * torch.tensor([2.0, 0.5])[:, None].double())
        assert case.inputs.k is not None
        torch.testing.assert_close(case.inputs.k[0].double(), keys[-1], rtol=0, atol=0)


def replace_scales(case: Case):
    from attn_core.layers import MhaLayer

    return MhaLayer(0, case.group)


def test_packed_oracle_equals_the_paged_one() -> None:
    case = make_case(PLAIN, "prefill", query_lens=(5, 3), kv_lens=(5, 3))
    assert case.inputs.k is not None
    assert case.inputs.v is not None
    got = oracle_mm.attend_packed(case.inputs.q, case.inputs.k, case.inputs.v, PLAIN, [0, 5, 8], [0, 5, 8])
    torch.testing.assert_close(got.out, answer(case).out)
    torch.testing.assert_close(got.lse, answer(case).lse)


def test_merge_by_hand() -> None:
    """Case C68: logits 0 and 2 with values 0 and 1 give 0.8807971; numbers in base 2 would give 0.947."""

    def part(lse: float, value: float) -> oracle_mha.Answer:
        return oracle_mha.Answer(
            torch.full((1, 1, 1), value, dtype=torch.float64), torch.full((1, 1), lse, dtype=torch.float64)
        )

    merged = oracle_mm.merge([part(0.0, 0.0), part(2.0, 1.0)])
    assert float(merged.out) == pytest.approx(0.8807971, abs=1e-7)
    empty = oracle_mm.merge([part(-math.inf, 0.0), part(-math.inf, 0.0)])
    assert float(empty.out) == 0.0
    assert float(empty.lse) == -math.inf
    assert float(oracle_mm.merge([part(-math.inf, 0.0), part(2.0, 1.0)]).out) == 1.0


def test_parts_of_a_prefix_merge_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((6, 4), (20, 2), (20, 2)))
    geometry = replace(PLAIN, v_dim=16)
    whole = oracle_mm.attend_packed(q, k, v, geometry, [0, 6], [0, 20], causal=False)
    cuts = [0, 7, 7, 20]
    parts = [
        oracle_mm.attend_packed(q, k[a:b], v[a:b], geometry, [0, 6], [0, b - a], causal=False)
        for a, b in itertools.pairwise(cuts)
    ]
    merged = oracle_mm.merge(parts)
    torch.testing.assert_close(merged.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse)
