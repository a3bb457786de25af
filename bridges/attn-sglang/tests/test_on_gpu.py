"""The same forwards on a CUDA device, eagerly and replayed from CUDA graphs, for every installed backend that can be planned.

Needs no SGLang: :class:`fake_graphs.GraphServer` keeps SGLang's order of calls.
"""

from __future__ import annotations

import pytest
import torch
from fake_graphs import GraphServer
from fake_server import Server, backend_of, worst

from attn_core.errors import GraphError, PlanError
from attn_sglang.facts import Speculation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = ("triton", "flashinfer", "fa3", "trtllm_mha", "torch_native")
SHAPE = {"device": "cuda", "dtype": torch.bfloat16, "heads": 8, "kv_heads": 2, "dim": 128, "context": 512}
CASES = {
    "page 1": {"page": 1},
    "page 64": {"page": 64},
    "window": {"page": 16, "windows": (-1, 127)},
    "swa pool": {"page": 16, "windows": (-1, 127), "swa_pool": True},
    "sinks": {"page": 16, "sinks": True},
    "head-major": {"page": 16, "hnd": True},
    "fp8": {"page": 16, "kv_dtype": torch.float8_e4m3fn, "scales": (0.5, 2.0)},
}
#: Relative errors: of 16-bit queries, and of kernels that also take queries and weights in 8 bits.
MOST, NARROW = 3e-2, 6e-2


def _backend(server, name):
    """The backend and the largest error allowed. The reference rounds queries as the plan says that the kernel does."""
    try:
        backend = backend_of(server, backend=name)
    except PlanError as error:
        pytest.skip(f"not planned: {error.message[:200]}")
    server.narrow_queries = any(served.q_dtype.startswith("fp8") for _, _, served in backend.plan.phase_plans())
    return backend, NARROW if server.narrow_queries else MOST


def _graph(function):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = function()

    def replay():
        graph.replay()
        return outs

    return replay


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_eager(case, name):
    server = Server(**SHAPE, **CASES[case])
    backend, most = _backend(server, name)
    for make in (
        lambda: server.extend({1: 150, 2: 33}),
        lambda: server.extend({2: 40, 3: 129}),
        lambda: server.decode([3, 1, 2]),
        lambda: server.decode([1]),
    ):
        outs, wanted = server.run(backend, make())
        assert worst(outs, wanted) < most
    print(backend.plan.groups[0].phases["decode"].backend, backend.calls())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_decode_graphs(case, name):
    """Buckets of 4, 2 and 1 rows; rows of lengths that change between replays; padded rows; a prefill in between."""
    server = Server(**SHAPE, **CASES[case], graphs=True)
    backend, most = _backend(server, name)
    try:
        graphs = GraphServer(server, backend, (4, 2, 1), record=_graph)
    except GraphError as error:
        pytest.skip(f"no graphs: {error}")
    server.run(backend, server.extend({1: 150, 2: 33, 3: 1}))
    for rows in ([1, 2, 3], [2], [3, 1], [1, 2, 3], [1]):
        outs, wanted = graphs.run(server.decode(rows))
        assert worst(outs, wanted) < most
    server.run(backend, server.extend({4: 300}))
    for rows in ([4, 2, 1, 3], [4]):
        outs, wanted = graphs.run(server.decode(rows))
        assert worst(outs, wanted) < most
    assert backend._graphs.replays == 7


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 1, 2, 0]])
@pytest.mark.parametrize("page", [1, 16])
def test_verify_graphs(page, parents, name):
    speculation = Speculation("NGRAM", 6, tree=parents is not None)
    server = Server(**SHAPE, page=page, graphs=True, speculation=speculation)
    backend, most = _backend(server, name)
    server.run(backend, server.extend({1: 150, 2: 33, 3: 2}))
    outs, wanted = server.run(backend, server.verify([1, 2, 3], 6, parents))
    assert worst(outs, wanted) < most
    try:
        graphs = GraphServer(server, backend, (4, 1), width=6, record=_graph)
    except GraphError as error:
        pytest.skip(f"no graphs: {error}")
    for rows in ([1, 2, 3], [2], [3, 1]):
        outs, wanted = graphs.run(server.verify(rows, 6, parents))
        assert worst(outs, wanted) < most
