"""The MLA and DSA oracles against each other and against torch: absorbed = ragged, chunked = whole, sparse of all = dense."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.geometry import DsaGeometry, LayerGroup, MlaGeometry
from attn_core.layers import DsaLayer, IndexCache, IndexInputs, MlaCache, MlaInputs, MlaLayer, Scale
from attn_core.testing import oracle_dsa, oracle_mla
from attn_core.testing.compare import compare_lse, compare_out
from attn_core.testing.trees import build_tree

GEOMETRY = MlaGeometry(q_heads=3, latent_dim=16, rope_dim=4, nope_dim=8, v_dim=6, scale=0.37)
PAGE = 4
Q_LENS, KV_LENS = (2, 3, 1), (7, 3, 10)


def world(seed: int = 0, q_lens: tuple[int, ...] = Q_LENS, kv_lens: tuple[int, ...] = KV_LENS):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    pages = torch.randperm(11, generator=generator) + 1
    table = torch.zeros(len(kv_lens), 3, dtype=torch.int32)
    for row, n in enumerate(-(-kv // PAGE) for kv in kv_lens):
        table[row, :n] = pages[3 * row : 3 * row + n]
    address = KvAddress(PAGE, torch.tensor(kv_lens, dtype=torch.int32), torch.zeros(sum(q_lens)), max(kv_lens), table)
    offsets = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    tokens = sum(q_lens)
    segment = Segment("prefill", slice(0, len(q_lens)), slice(0, tokens))
    batch = AttentionBatch(len(q_lens), tokens, (segment,), offsets, max(q_lens), (address,))
    w_uk, w_uv = random(3, 8, 16), random(3, 16, 6)
    group = LayerGroup("target", "mla", "mla", (0,), GEOMETRY)
    layer = MlaLayer(0, group, expand=oracle_mla.project(w_uk, w_uv))
    data = torch.full((12, PAGE, 20), math.nan, dtype=torch.float64)
    for row, kv in enumerate(kv_lens):
        for j in range(kv):
            data[table[row, j // PAGE], j % PAGE] = random(20)
    q, q_pe = random(tokens, 3, 8), random(tokens, 3, 4)
    inputs = MlaInputs(q, torch.einsum("thd,hdl->thl", q, w_uk), q_pe)
    return batch, layer, MlaCache(data), inputs, w_uv


def test_absorbed_equals_ragged() -> None:
    batch, layer, cache, inputs, w_uv = world()
    absorbed = oracle_mla.attend_absorbed(batch, layer, cache, inputs)
    ragged = oracle_mla.attend_ragged(batch, layer, cache, inputs)
    torch.testing.assert_close(torch.einsum("thl,hlv->thv", absorbed.out, w_uv), ragged.out)
    torch.testing.assert_close(absorbed.lse, ragged.lse)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
def test_chunked_prefix_equals_whole(chunk: int) -> None:
    """Case C125: unequal prefixes, one row without any."""
    batch, layer, cache, inputs, _ = world()
    whole = oracle_mla.attend_ragged(batch, layer, cache, inputs)
    parts = oracle_mla.attend_in_chunks(batch, layer, cache, inputs, chunk)
    torch.testing.assert_close(parts.out, whole.out)
    torch.testing.assert_close(parts.lse, whole.lse)


def test_ragged_equals_sdpa() -> None:
    batch, layer, cache, inputs, _ = world()
    got = oracle_mla.attend_ragged(batch, layer, cache, inputs)
    c_kv, k_pe = oracle_mla.read_latent(cache, batch.kv(0), 2, layer)
    k, v = oracle_mla.expand_rows(layer, c_kv, k_pe)
    q = torch.cat([inputs.q[5:], inputs.q_pe[5:]], -1)  # the last row: one query, ten keys
    want = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), scale=GEOMETRY.scale)
    torch.testing.assert_close(got.out[5:], want.transpose(0, 1))


def test_tree_masks_drafts() -> None:
    batch, layer, cache, inputs, _ = world(q_lens=(3,), kv_lens=(8,))
    batch.tree = build_tree([[-1, 0, 0]])
    star = oracle_mla.attend_absorbed(batch, layer, cache, inputs).out
    batch.tree = None
    chain = oracle_mla.attend_absorbed(batch, layer, cache, inputs).out
    torch.testing.assert_close(star[:2], chain[:2])
    assert not torch.allclose(star[2], chain[2])


def test_formats_hold_the_same_rows() -> None:
    batch, layer, _, _, _ = world()
    slots = torch.tensor([5, 9])
    split = MlaCache(torch.zeros(4, PAGE, 20), torch.randn(4, PAGE, 16), torch.randn(4, PAGE, 4), "mla_split")
    joined = MlaCache(torch.cat([split.c_kv, split.k_pe], -1))
    for a, b in zip(
        oracle_mla.read_latent_slots(split, slots, layer),
        oracle_mla.read_latent_slots(joined, slots, layer),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    layer.k_scale = Scale(torch.tensor([0.5]))
    torch.testing.assert_close(
        oracle_mla.read_latent_slots(joined, slots, layer)[0], 0.5 * joined.data[[1, 2], [1, 1], :16].double()
    )


def test_row_of_656_bytes() -> None:
    codes = torch.randn(2, 512).to(torch.float8_e4m3fn)
    scales, rope = torch.tensor([[1.0, 2.0, 0.5, 4.0]] * 2), torch.randn(2, 64).bfloat16()
    rows = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)], dim=1)
    c_kv, k_pe = oracle_mla.unpack_656(rows)
    torch.testing.assert_close(c_kv[:, 128:256], 2.0 * codes[:, 128:256].float().double())
    torch.testing.assert_close(c_kv[:, 384:], 4.0 * codes[:, 384:].float().double())
    torch.testing.assert_close(k_pe, rope.double())


def test_sparse_attention_over_every_key_is_dense() -> None:
    batch, layer, cache, inputs, _ = world()
    dense = oracle_mla.attend_absorbed(batch, layer, cache, inputs)
    indices = torch.full((6, 12), -1, dtype=torch.int32)
    slots = torch.full((6, 12), -1, dtype=torch.int32)
    for token, (row, seen) in enumerate(((0, 6), (0, 7), (1, 1), (1, 2), (1, 3), (2, 10))):
        indices[token, 1 : seen + 1] = torch.arange(seen)
        slots[token, :seen] = torch.tensor(oracle_mla.token_slots(batch.kv(0), row)[:seen])
    for space, chosen in (("token", indices), ("slot", slots)):
        sparse = oracle_dsa.attend_sparse(batch, layer, cache, inputs._replace(indices=chosen), index_space=space)
        assert compare_out(sparse.out, dense, 1e-12, 6) is None
        assert compare_lse(sparse.lse.float(), dense, 1e-6, 6) is None
    nothing = inputs._replace(indices=torch.full((6, 3), -1, dtype=torch.int32))
    empty = oracle_dsa.attend_sparse(batch, layer, cache, nothing)
    assert not empty.out.any()
    assert (empty.lse == -math.inf).all()


def dsa_world():
    batch, mla, _, _, _ = world()
    generator = torch.Generator().manual_seed(3)
    geometry = DsaGeometry(GEOMETRY, index_heads=2, index_dim=128, index_topk=3)
    group = LayerGroup("target", "dsa", "mla_sparse_dsa", (0,), geometry)
    cache = IndexCache(torch.zeros(12, PAGE * oracle_dsa.KEY_BYTES, dtype=torch.uint8))
    keys = {}
    for row in range(3):
        for slot in oracle_mla.token_slots(batch.kv(0), row):
            keys[slot] = torch.randn(128, generator=generator)
            oracle_dsa.write_index_key(cache, slot, keys[slot], PAGE)
    inputs = IndexInputs(
        torch.randn(6, 2, 128, generator=generator),
        torch.zeros(6, 128),
        torch.randn(6, 2, generator=generator),
    )
    return batch, DsaLayer(MlaLayer(0, group, expand=mla.expand), 128**-0.5), cache, inputs, keys


def test_index_keys_are_planar_in_a_page() -> None:
    batch, _, cache, _, keys = dsa_world()
    got = oracle_dsa.read_index_keys(cache, batch.kv(0), 2, PAGE)
    want = torch.stack([keys[slot] for slot in oracle_mla.token_slots(batch.kv(0), 2)])
    assert (got - want.double()).abs().max() < 0.07 * want.abs().max()
    # the scale of the second token of a page lies behind all keys of the page, not behind its own key
    page = oracle_mla.token_slots(batch.kv(0), 2)[1] // PAGE
    scale = cache.data[page, PAGE * 128 + 4 : PAGE * 128 + 8].view(torch.float32)
    assert float(scale) == pytest.approx(float(want[1].abs().max()) / 448.0)


def test_index_logits_by_hand() -> None:
    batch, layer, cache, inputs, _ = dsa_world()
    logits = oracle_dsa.index_logits(batch, layer, cache, inputs, page_size=PAGE)
    keys = oracle_dsa.read_index_keys(cache, batch.kv(0), 0, PAGE)
    products = torch.einsum("hd,jd->hj", inputs.q[0].double(), keys).clamp(min=0)
    want = layer.index_scale * (inputs.weights[0].double()[:, None] * products).sum(0)
    torch.testing.assert_close(logits[0][:6], want[:6])
    assert logits[0][6] == -math.inf  # the first of two new tokens does not see the second


def test_top_k_is_checked() -> None:
    batch, layer, cache, inputs, _ = dsa_world()
    logits = oracle_dsa.index_logits(batch, layer, cache, inputs, page_size=PAGE)
    good = torch.full((6, 3), -1, dtype=torch.int32)
    for token, scores in enumerate(logits):
        chosen = oracle_dsa.select(scores, 3)
        good[token, : len(chosen)] = torch.tensor(chosen)
    assert oracle_dsa.topk_problems(good, logits, 3) == []
    worst = int(torch.where(logits[5] == -math.inf, math.inf, logits[5]).argmin())
    for change, word in (
        ((5, 0, worst), "scores"),
        ((0, 0, 6), "does not see"),
        ((5, 0, int(good[5, 1])), "twice"),
        ((5, 0, -1), "2 keys"),
    ):
        bad = good.clone()
        bad[change[0], change[1]] = change[2]
        assert word in oracle_dsa.topk_problems(bad, logits, 3)[0]
