"""The GDN oracle: recurrent = chunk form, packed = separate, split = whole, roll-back, and a naive independent loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attn_core.batch import AttentionBatch, Checkpoints, Segment, StateAddress
from attn_core.geometry import GdnGeometry, LayerGroup
from attn_core.layers import GdnCache, GdnInputs, GdnLayer
from attn_core.testing import oracle_gdn
from attn_core.testing.trees import build_tree

HK, HV, K, V, W = 2, 4, 6, 5, 4
CONV = 2 * HK * K + HV * V
GEOMETRY = GdnGeometry(HK, HV, K, V, W, CONV)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_layer(seed: int = 1) -> GdnLayer:
    group = LayerGroup("target", "gdn", "linear_gdn", (0,), GEOMETRY)
    return GdnLayer(
        0, group, random(HV, seed=seed), random(HV, seed=seed + 1), random(CONV, W, seed=seed + 2), random(CONV)
    )


def make_inputs(tokens: int) -> GdnInputs:
    return GdnInputs(random(tokens, CONV, seed=7), random(tokens, HV, seed=8), random(tokens, HV, seed=9))


def make_batch(lens: list[int], slots: list[int], fresh: list[bool], phase: str = "prefill", **state) -> AttentionBatch:
    offsets = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    index = torch.tensor(slots, dtype=torch.int32)
    address = StateAddress(index, index.clone(), torch.tensor(fresh), **state)
    segment = Segment(phase, slice(0, len(lens)), slice(0, sum(lens)))
    return AttentionBatch(len(lens), sum(lens), (segment,), offsets, max(lens), (address,))


def make_cache(slots: int = 5) -> GdnCache:
    return GdnCache(random(slots, CONV, W - 1, seed=20), random(slots, HV, V, K, seed=21))


def cut(inputs: GdnInputs, tokens: slice) -> GdnInputs:
    return GdnInputs(inputs.mixed_qkv[tokens], inputs.a[tokens], inputs.b[tokens])


def put(cache: GdnCache, states: dict[int, oracle_gdn.RowState]) -> None:
    for slot, state in states.items():
        cache.conv[slot], cache.state[slot] = state.conv, state.state


def test_recurrent_equals_chunk_form() -> None:
    q, k, v = random(11, HK, K), F.normalize(random(11, HK, K, seed=1), dim=-1), random(11, HV, V, seed=2)
    g, beta = -random(11, HV, seed=3).abs(), torch.sigmoid(random(11, HV, seed=4))
    state = start = random(HV, V, K, seed=5)
    outs = []
    for t in range(11):
        out, state = oracle_gdn.recur(q[t], k[t], v[t], g[t], beta[t], state)
        outs.append(out)
    for chunk in (1, 4, 64):
        got, last = oracle_gdn.recur_in_chunks(q, k, v, g, beta, start, chunk)
        torch.testing.assert_close(got, torch.stack(outs))
        torch.testing.assert_close(last, state)


def test_equals_an_independent_naive_loop() -> None:
    """FLA's naive recurrence, written again in [K, V] order with batched tensors."""
    layer, inputs, cache = make_layer(), make_inputs(6), make_cache()
    got = oracle_gdn.run(make_batch([6], [2], [False]), layer, cache, inputs)
    x = torch.cat([cache.conv[2], inputs.mixed_qkv.T], dim=1)
    mixed = F.silu(F.conv1d(x[None], layer.conv_weight[:, None], layer.conv_bias, groups=CONV))[0].T
    q, k, v = mixed.split([HK * K, HK * K, HV * V], dim=1)
    q, k = (F.normalize(t.view(6, HK, K), dim=-1, eps=0).repeat_interleave(2, 1) for t in (q, k))
    v = v.reshape(6, HV, V)
    decay = torch.exp(-torch.exp(layer.a_log) * F.softplus(inputs.a + layer.dt_bias))
    beta = torch.sigmoid(inputs.b)
    state = cache.state[2].transpose(-1, -2).clone()  # [Hv, K, V]
    outs = []
    for t in range(6):
        state = state * decay[t][:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t] * K**-0.5))
    torch.testing.assert_close(got.out, torch.stack(outs), rtol=1e-4, atol=1e-5)  # eps 1e-6 inside the norm
    torch.testing.assert_close(got.steps[0][-1].state, state.transpose(-1, -2), rtol=1e-4, atol=1e-5)


def test_packed_equals_separate() -> None:
    """Case C87: lengths 3 and 4 with random initial states."""
    layer, inputs, cache = make_layer(), make_inputs(7), make_cache()
    packed = oracle_gdn.run(make_batch([3, 4], [1, 3], [False, False]), layer, cache, inputs)
    for row, tokens, slot in ((0, slice(0, 3), 1), (1, slice(3, 7), 3)):
        alone = oracle_gdn.run(
            make_batch([tokens.stop - tokens.start], [slot], [False]), layer, cache, cut(inputs, tokens)
        )
        torch.testing.assert_close(alone.out, packed.out[tokens])
        torch.testing.assert_close(alone.steps[0][-1].state, packed.steps[row][-1].state)


@pytest.mark.parametrize("splits", [[37, 60, 1, 1, 1], [1, 1, 98]])
def test_split_equals_whole(splits: list[int]) -> None:
    """Case C88: a prompt of 100 in pieces; the slot holds old states and the first piece starts fresh."""
    layer, inputs, cache = make_layer(), make_inputs(100), make_cache()
    whole = oracle_gdn.run(make_batch([100], [1], [True]), layer, cache, inputs)
    start, outs = 0, []
    for number, size in enumerate(splits):
        batch = make_batch([size], [1], [number == 0], "prefill" if size > 1 else "decode")
        part = oracle_gdn.run(batch, layer, cache, cut(inputs, slice(start, start + size)))
        put(cache, oracle_gdn.written(batch, part, "prefill"))
        outs.append(part.out)
        start += size
    torch.testing.assert_close(torch.cat(outs), whole.out)
    torch.testing.assert_close(cache.state[1], whole.steps[0][-1].state)
    torch.testing.assert_close(cache.conv[1], inputs.mixed_qkv[-3:].T)


def test_fresh_ignores_what_the_slot_held() -> None:
    layer, inputs, cache = make_layer(), make_inputs(3), make_cache()
    fresh = oracle_gdn.run(make_batch([3], [1], [True]), layer, cache, inputs)
    zero = GdnCache(torch.zeros_like(cache.conv), torch.zeros_like(cache.state))
    torch.testing.assert_close(fresh.out, oracle_gdn.run(make_batch([3], [1], [False]), layer, zero, inputs).out)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_commit_keeps_accepted_drafts_only(accepted: int) -> None:
    layer, inputs, cache = make_layer(), make_inputs(4), make_cache()
    before = cache.state[1].clone()
    batch = make_batch([4], [1], [False], "verify")
    answer = oracle_gdn.run(batch, layer, cache, inputs)
    assert oracle_gdn.written(batch, answer, "verify") == {}
    put(cache, oracle_gdn.committed(batch, answer, [accepted]))
    if accepted:
        alone = oracle_gdn.run(
            make_batch([accepted], [1], [False]), layer, make_cache(), cut(inputs, slice(0, accepted))
        )
        torch.testing.assert_close(cache.state[1], alone.steps[0][-1].state)
    else:
        torch.testing.assert_close(cache.state[1], before, rtol=0, atol=0)


def test_a_draft_of_a_tree_starts_from_its_parent() -> None:
    layer, inputs, cache = make_layer(), make_inputs(4), make_cache()
    batch = make_batch([4], [1], [False], "verify")
    batch.tree = build_tree([[-1, 0, 0, 2]])
    answer = oracle_gdn.run(batch, layer, cache, inputs)
    path = torch.tensor([0, 2, 3])
    line = GdnInputs(inputs.mixed_qkv[path], inputs.a[path], inputs.b[path])
    alone = oracle_gdn.run(make_batch([3], [1], [False]), layer, cache, line)
    torch.testing.assert_close(answer.out[path], alone.out)
    torch.testing.assert_close(oracle_gdn.committed(batch, answer, [4])[1].state, alone.steps[0][-1].state)


def test_verify_by_slots_resumes_after_the_accepted_draft() -> None:
    layer, inputs, cache = make_layer(), make_inputs(2), make_cache()
    table = torch.tensor([[1, 3, 4]], dtype=torch.int32)
    batch = make_batch([2], [1], [False], "verify", step_slots=table, accepted=torch.tensor([2], dtype=torch.int32))
    answer = oracle_gdn.run(batch, layer, cache, inputs)
    from_slot_4 = oracle_gdn.run(make_batch([2], [4], [False]), layer, cache, inputs)
    torch.testing.assert_close(answer.out, from_slot_4.out)
    assert sorted(oracle_gdn.written(batch, answer, "verify")) == [3, 4]


def test_checkpoints_are_states_on_the_way() -> None:
    layer, inputs, cache = make_layer(), make_inputs(5), make_cache()
    marks = Checkpoints(*(torch.tensor([n], dtype=torch.int32) for n in (0, 2, 4)))
    batch = make_batch([5], [1], [True], checkpoints=marks)
    answer = oracle_gdn.run(batch, layer, cache, inputs)
    found = oracle_gdn.written(batch, answer, "prefill")
    assert sorted(found) == [1, 4]
    torch.testing.assert_close(found[4].state, answer.steps[0][1].state)
