"""On a GPU: device-planned kernels from vLLM's metadata, and decode and verify replayed from CUDA graphs as vLLM does it."""

from __future__ import annotations

import pytest
import torch
from vllm_fakes import GPT_OSS, LLAMA, MISTRAL, FakeServer, Graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 6e-3}
STEPS = (
    [(0, 5), (1, 33), (2, 1)],
    [(2, 1), (0, 1), (1, 17)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 1), (3, 40)],
)


@pytest.mark.parametrize("model", [LLAMA, GPT_OSS], ids=["full", "sinks"])
def test_decode_from_graphs(model):
    """Graphs of four and two rows; eager prefills in between; lengths grow; padded rows write nothing."""
    server = FakeServer(model, {"attention_backend": "triton"}, device="cuda", dtype=torch.bfloat16)
    four, two = Graph(server, 4, 1), Graph(server, 2, 1)
    server.step([(0, 5), (1, 33), (2, 18)])
    for _ in range(20):
        four.replay([(0, 1), (1, 1), (2, 1)])
    server.step([(0, 1), (3, 40)])
    four.replay([(0, 1), (1, 1), (2, 1), (3, 1)])
    two.replay([(3, 1)])
    server.step([(0, 1), (3, 1)])
    assert server.worst < LIMIT[torch.bfloat16]
    assert server.service.stats()["triton"]["prefill"] > 0


def test_verify_from_graphs():
    """Chains of three drafts, the last row padded; accepted drafts move the lengths by less than was written."""
    server = FakeServer(LLAMA, {"attention_backend": "triton"}, device="cuda", dtype=torch.bfloat16, spec=3)
    graph = Graph(server, 4, 4)
    server.step([(0, 5), (1, 33), (2, 18)])
    for _ in range(5):
        graph.replay([(0, 4), (1, 4), (2, 4)])
    assert server.worst < LIMIT[torch.bfloat16]


@pytest.mark.parametrize(
    ("model", "order", "dtype"),
    [
        pytest.param(LLAMA, "NHD", torch.bfloat16, id="full"),
        pytest.param(MISTRAL, "HND", torch.bfloat16, id="window, heads first"),
        pytest.param(GPT_OSS, "NHD", torch.bfloat16, id="sinks"),
        pytest.param(LLAMA, "NHD", torch.float32, id="fp32"),
    ],
)
def test_eager_steps(model, order, dtype):
    asked = {"attention_backend": "triton", "kv_layout": order}
    server = FakeServer(model, asked, device="cuda", order=order, dtype=dtype)
    for step in STEPS:
        server.step(step)
    assert server.worst < LIMIT[dtype]


def test_eager_steps_of_a_host_planned_backend():
    server = FakeServer(LLAMA, {"attention_backend": "torch_native"}, device="cuda", dtype=torch.bfloat16)
    for step in STEPS:
        server.step(step)
    assert server.worst < LIMIT[torch.bfloat16]


def test_fp8_cache():
    server = FakeServer(LLAMA, {"attention_backend": "triton"}, device="cuda", dtype=torch.bfloat16, cache_dtype="fp8")
    for step in STEPS:
        server.step(step)
    assert server.plan.pools[0].dtype == "fp8_e4m3"
    assert server.worst < 6e-2
