"""Forwards of every mode through the bridge, against a float64 reference: no SGLang needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_server import Mode, Server, backend_of, worst

from attn_core.errors import BatchError, BindError
from attn_sglang.facts import Speculation

CASES = {
    "page 1": {},
    "page 16": {"page": 16},
    "windows": {"page": 16, "windows": (-1, 20, 20)},
    "window at page 1": {"windows": (7, -1)},
    "swa pool, page 1": {"windows": (-1, 9), "swa_pool": True},
    "swa pool, page 8": {"windows": (-1, 9, -1), "swa_pool": True, "page": 8},
    "sinks and soft cap": {"sinks": True, "softcap": 15.0},
    "head-major memory": {"hnd": True, "page": 16},
    "value width": {"dim": 32, "v_dim": 16, "page": 4},
    "fp8 with scales": {"kv_dtype": torch.float8_e4m3fn, "scales": (0.5, 2.0), "page": 16},
    "half": {"dtype": torch.float16},
}


@pytest.mark.parametrize("case", CASES)
def test_extend_prefix_decode_mixed(case):
    """Fresh prefill, a prefix hit and a chunk of another request together, decode, a mixed batch, decode again."""
    server = Server(**CASES[case])
    backend = backend_of(server)
    most = 1e-5 if server.dtype is torch.float32 else 4e-3
    steps = [
        lambda: server.extend({1: 37, 2: 5, 4: 16}),
        lambda: server.extend({2: 30, 3: 17}),
        lambda: server.decode([1, 2, 3, 4]),
        lambda: server.extend({5: 9, 1: 1, 3: 1}, Mode.MIXED),
        lambda: server.decode([5, 1]),
        lambda: server.extend({6: 1}, Mode.SPLIT_PREFILL),
    ]
    for make in steps:
        outs, wanted = server.run(backend, make())
        assert worst(outs, wanted) < most
    layers = len(server.modules)
    assert backend.calls() == {"torch_native": {"prefill": 4 * layers, "decode": 2 * layers}}


@pytest.mark.parametrize("full_mask", [True, False])
@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 1, 2, 0]])
def test_verify_chain_and_tree(parents, full_mask):
    server = Server(speculation=Speculation("NGRAM", 6, tree=True), page=4)
    backend = backend_of(server)
    for make in (
        lambda: server.extend({1: 11, 2: 3}),
        lambda: server.verify([1, 2], 6, parents, full_mask),
        lambda: server.decode([2, 1]),
        lambda: server.verify([2], 6, parents, full_mask),
    ):
        outs, wanted = server.run(backend, make())
        assert worst(outs, wanted) < 1e-5
    assert backend.calls()["torch_native"]["verify"] == 4


def test_verify_a_chain_needs_no_mask():
    server = Server(speculation=Speculation("EAGLE", 4, tree=False))
    backend = backend_of(server)
    server.run(backend, server.extend({1: 11, 2: 3}))
    batch = server.verify([1, 2], 4)
    batch.spec_info.custom_mask = None
    outs, wanted = server.run(backend, batch)
    assert worst(outs, wanted) < 1e-5
    assert backend.verify_mask is None


def test_the_drafter_fills_its_mask_after_the_metadata():
    server = Server(speculation=Speculation("EAGLE", 5, tree=True))
    backend = backend_of(server)
    server.run(backend, server.extend({1: 9, 3: 4}))
    batch = server.verify([1, 3], 5, [-1, 0, 0, 1, 1], full_mask=False)
    right = batch.spec_info.custom_mask
    buffer = torch.zeros(4 * 5 * 5, dtype=torch.bool)  # for up to four rows
    backend._built.maker.own_mask = buffer
    batch.spec_info.custom_mask = buffer
    inputs = [server.inputs(batch, layer) for layer in range(2)]
    backend.init_forward_metadata(batch)
    early = server.attend(backend, batch, inputs)
    buffer[: right.numel()] = right
    backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
    late = server.attend(backend, batch, inputs)
    wanted = server.reference(batch, inputs)
    assert worst(late, wanted) < 1e-5
    assert worst(early, wanted) > 1e-3


def test_sinks_follow_a_weight_update():
    server = Server(sinks=True)
    backend = backend_of(server)
    server.run(backend, server.extend({1: 9}))
    for layer in server.layers:
        layer.sinks.data.copy_(layer.sinks + 3.0)  # as SGLang's loader does: no version changes
    outs, wanted = server.run(backend, server.decode([1]))
    assert worst(outs, wanted) < 1e-5


def test_an_idle_rank_and_padding_of_the_server():
    server = Server()
    backend = backend_of(server)
    batch = server.extend({1: 6})
    inputs = [server.inputs(batch, layer) for layer in range(2)]
    padded = [tuple(torch.cat([x, x[:2]]) for x in layer) for layer in inputs]
    backend.init_forward_metadata(batch)
    outs = server.attend(backend, batch, padded)
    assert all(out.shape[0] == 8 and not out[6:].any() for out in outs)
    assert worst([out[:6] for out in outs], server.reference(batch, inputs)) < 1e-5
    batch.forward_mode = Mode.IDLE
    backend.init_forward_metadata(batch)
    assert server.attend(backend, batch, [tuple(x[:0] for x in layer) for layer in inputs])[0].shape == (0, 4 * 32)


def test_keys_and_values_lie_in_the_servers_own_memory():
    server = Server(page=4)
    backend = backend_of(server)
    batch = server.extend({1: 6, 2: 3})
    inputs = [server.inputs(batch, layer) for layer in range(2)]
    backend.init_forward_metadata(batch)
    server.attend(backend, batch, inputs)
    for layer, (_, k, v) in enumerate(inputs):
        assert torch.equal(server.token_to_kv_pool.get_key_buffer(layer)[batch.out_cache_loc], k)
        assert torch.equal(server.token_to_kv_pool.get_value_buffer(layer)[batch.out_cache_loc], v)


def test_without_saving_the_cache_stays_as_it_is():
    server = Server()
    backend = backend_of(server)
    server.run(backend, server.extend({1: 6}))
    batch = server.decode([1])
    q, k, v = server.inputs(batch, 0)
    backend.init_forward_metadata(batch)
    slot = int(batch.out_cache_loc[0])
    before = server.token_to_kv_pool.get_key_buffer(0)[slot].clone()
    backend.forward(q, k, v, server.modules[0], batch, save_kv_cache=False)
    assert torch.equal(before, server.token_to_kv_pool.get_key_buffer(0)[slot]) or bool(before.isnan().all())
    assert server.token_to_kv_pool.get_key_buffer(0)[slot].isnan().all()


def test_an_lse_is_given_where_it_is_asked_for():
    server = Server()
    backend = backend_of(server)
    batch = server.extend({1: 6})
    q, k, v = server.inputs(batch, 0)
    backend.init_forward_metadata(batch)
    out, lse = backend.forward(q, k, v, server.modules[0], batch, return_lse=True)
    assert out.shape == (6, 128)
    assert lse.shape == (6, 4)
    scores = (q.view(6, 4, 32)[0] * k[0].repeat_interleave(2, 0)).sum(-1) * 32**-0.5
    assert torch.allclose(lse[0], scores, atol=1e-5)  # the first token sees itself only: natural log of one term


def test_modes_and_arguments_that_are_refused():
    server = Server()
    backend = backend_of(server)
    batch = server.extend({1: 6})
    inputs = server.inputs(batch, 0)
    with pytest.raises(BatchError, match="before init_forward_metadata"):
        backend.forward(*inputs, server.modules[0], batch)
    for mode in (Mode.DLLM_EXTEND, Mode.DRAFT_EXTEND_V2, Mode.PREBUILT):
        batch.forward_mode = mode
        with pytest.raises(BatchError, match=mode.name):
            backend.init_forward_metadata(batch)
    batch.forward_mode = Mode.EXTEND
    backend.init_forward_metadata(batch)
    with pytest.raises(BindError, match="passes q_rope, topk_indices to its attention"):
        backend.forward(*inputs, server.modules[0], batch, q_rope=inputs[0], topk_indices=inputs[0])
    with pytest.raises(BindError, match="planned without sinks"):
        backend.forward(*inputs, server.modules[0], batch, sinks=torch.zeros(4))
    with pytest.raises(BindError, match="was not in the model"):
        backend.forward(*inputs, Server().modules[0], batch)
    with pytest.raises(BatchError, match="was given 3 tokens; the step has 6"):
        backend.forward(*(x[:3] for x in inputs), server.modules[0], batch)


def test_a_phase_that_was_not_planned_is_refused():
    server = Server()
    backend = backend_of(server)
    server.run(backend, server.extend({1: 6}))
    with pytest.raises(Exception, match="verify"):
        backend.init_forward_metadata(server.verify([1], 4))


def test_pages_of_the_server_are_split_for_the_backend(monkeypatch):
    """SGLang has pages of 32, the plan pages of 8: slots, tables and memory are read in the plan's size."""
    from attn_sglang import build as building
    from attn_sglang.planning import make_plan

    def smaller(model, facts, *args):
        return make_plan(model, replace(facts, page_size=8), *args)

    monkeypatch.setattr(building, "make_plan", smaller)
    server = Server(page=32, windows=(-1, 20), swa_pool=True)
    backend = backend_of(server)
    assert {source.page_size for source in backend._built.maker.sources} == {8}
    for make in (lambda: server.extend({1: 70, 2: 33}), lambda: server.decode([1, 2])):
        outs, wanted = server.run(backend, make())
        assert worst(outs, wanted) < 1e-5
