"""A service between vLLM's metadata and a router: every layer of every step against float64 attention."""

from __future__ import annotations

import pytest
import torch
from vllm_fakes import GEMMA2, GPT_OSS, LLAMA, MISTRAL, FakeServer

from attn_core.errors import BatchError, BindError

#: prompts of several lengths, chunks on a cached prefix, decodes in front, a new prompt beside decodes
STEPS = (
    [(0, 5), (1, 33), (2, 1)],
    [(2, 1), (0, 1), (1, 17)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 1), (3, 40)],
    [(3, 4), (0, 4), (1, 2)],
)


def run(server: FakeServer, steps=STEPS) -> FakeServer:
    for step in steps:
        server.step(step)
    return server


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("model", [LLAMA, MISTRAL], ids=["full", "window"])
def test_layers_are_exact_in_either_memory_order(model, order):
    server = run(FakeServer(model, {"attention_backend": "torch_native", "kv_layout": order}, order=order))
    assert server.worst < 1e-5
    calls = server.service.stats()["torch_native"]
    assert calls["prefill"] > 0
    assert calls["decode"] > 0


@pytest.mark.parametrize(("model", "group"), [(GPT_OSS, "sliding"), (GPT_OSS, "full"), (GEMMA2, "sliding")])
def test_sinks_windows_and_soft_cap_come_from_the_group(model, group):
    server = FakeServer(model, {"attention_backend": "torch_native"}, only=group)
    assert run(server).worst < 1e-5


def test_sinks_follow_a_weight_update():
    """vLLM's loaders write through ``.data``, which no tensor version shows; 16-bit sinks are copies in the layer."""
    server = FakeServer(GPT_OSS, {"attention_backend": "torch_native"}, only="full", dtype=torch.float16)
    run(server, STEPS[:2])
    for module in server.modules.values():
        module.impl.sinks.data.copy_(module.impl.sinks + 3.0)
    assert run(server, STEPS[2:4]).worst < 5e-3


def test_groups_that_share_a_block_table_are_served_together():
    """vLLM without its hybrid cache manager puts windowed and full layers into one group."""
    server = run(FakeServer(GPT_OSS, {"attention_backend": "torch_native"}))
    assert len(server.service.plan.groups) == 2
    assert server.worst < 1e-5


def test_one_byte_caches_are_seen_as_what_was_planned():
    server = run(FakeServer(LLAMA, {"attention_backend": "torch_native"}, cache_dtype="fp8"))
    assert server.plan.pools[0].dtype == "fp8_e4m3"
    assert server.worst < 1e-4


def test_prefill_and_decode_may_be_split():
    asked = {"prefill_attention_backend": "flex_attention:eager", "decode_attention_backend": "torch_native"}
    server = run(FakeServer(LLAMA, asked))
    assert server.worst < 1e-5
    calls = server.service.stats()
    assert set(calls["flex_attention"]) == {"prefill"}
    assert set(calls["torch_native"]) == {"decode"}


def test_chains_of_drafts_are_verified():
    server = FakeServer(LLAMA, {"attention_backend": "torch_native"}, spec=3)
    run(server, ([(0, 9), (1, 20)], [(0, 4), (1, 4)], [(0, 4), (1, 1)], [(1, 1), (0, 4)]))
    assert server.worst < 1e-5
    assert server.service.stats()["torch_native"]["verify"] > 0


def test_tensors_may_be_longer_than_the_batch():
    server = FakeServer(LLAMA, {"attention_backend": "torch_native"})
    server.step([(0, 3)], padded_tokens=8)
    assert server.worst < 1e-5


def test_a_new_cache_is_bound_again_and_counts_go_on():
    server = FakeServer(LLAMA, {"attention_backend": "torch_native"})
    server.step([(0, 3)])
    first = server.service.stats()["torch_native"]["prefill"]
    for module in server.modules.values():
        module.kv_cache = module.kv_cache.clone()
    server.step([(0, 2)])
    assert server.worst < 1e-5
    assert server.service.stats()["torch_native"]["prefill"] == 2 * first


def test_an_idle_step_calls_nobody():
    server = FakeServer(LLAMA, {"attention_backend": "torch_native"})
    common = server.common([(0, 0)])
    served = server.service.begin(common)
    name, (q, k, v) = next(iter(server.inputs(0, 4).items()))
    out = q.new_full(q.shape, 7.0)
    served.attend(name, q, k, v, out)
    assert bool((out == 7.0).all())
    assert server.service.stats() == {}


def test_shared_layers_store_nothing():
    server = FakeServer(LLAMA, {"attention_backend": "torch_native"})
    name, other = server.modules
    server.modules[other].kv_sharing_target_layer_name = name
    server.modules[other].kv_cache = server.modules[name].kv_cache
    common = server.common([(0, 6)])
    served = server.service.begin(common)
    made = server.inputs(6, 6)
    for layer, (q, k, v) in made.items():
        out = q.clone()
        served.attend(layer, q, k if layer == name else None, v if layer == name else None, out)
        server.check(layer, [(0, 6)], q, made[name][1], made[name][2], out)
    assert server.worst < 1e-5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("causal", False),
        ("mm_req_doc_ranges", {0: [(1, 3)]}),
        ("encoder_seq_lens", [3]),
        ("dcp_local_seq_lens", [3]),
        ("rswa_prefix_lens", [3]),
    ],
)
def test_what_a_batch_cannot_say_is_refused(field, value):
    server = FakeServer(LLAMA, {"attention_backend": "torch_native"})
    common = server.common([(0, 3)])
    setattr(common, field, value)
    with pytest.raises(BatchError, match="does not serve"):
        server.service.begin(common)


def test_a_cache_of_another_page_size_is_refused():
    server = FakeServer(LLAMA, {"attention_backend": "torch_native"})
    for module in server.modules.values():
        module.kv_cache = module.kv_cache[:, :, :8]
    with pytest.raises(BindError, match="needed"):
        server.step([(0, 3)])


def test_a_graph_of_mixed_rows_is_refused():
    server = FakeServer(LLAMA, {"attention_backend": "torch_native"})
    with pytest.raises(BatchError, match="graph"):
        server.service.capture(server.common([(0, 1), (1, 3)]))
