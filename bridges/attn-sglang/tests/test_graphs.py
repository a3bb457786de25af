"""CUDA-graph hooks in SGLang's order of calls, on a CPU: the recorded function is run again at every replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_graphs import GraphServer
from fake_server import Server, backend_of, worst

from attn_core.discovery import Registry
from attn_core.errors import GraphError
from attn_core.testing import reference_backend
from attn_sglang.facts import Speculation


@pytest.fixture
def registry():
    """The conformance kit's reference backend, which declares every graph level."""
    manifest = replace(reference_backend.load_manifest(), status="implemented")
    return Registry.with_manifests([manifest], modules={manifest.package: reference_backend})


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"page": 8},
        {"page": 16, "windows": (-1, 20), "swa_pool": True},
        {"page": 16, "sinks": True, "softcap": 20.0},
    ],
)
def test_decode_replays(case, registry):
    server = Server(**case, graphs=True)
    backend = backend_of(server, backend="reference", registry=registry)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1  # asked before any graph state exists, too
    graphs = GraphServer(server, backend, (4, 2, 1))
    assert graphs.fill == backend._graphs.pad_kv_len
    server.run(backend, server.extend({1: 40, 2: 33, 3: 1}))
    for rows in ([1, 2, 3], [2], [3, 1], [1, 2, 3], [1]):
        outs, wanted = graphs.run(server.decode(rows))
        assert worst(outs, wanted) < 1e-4
    outs, wanted = server.run(backend, server.extend({4: 90}))  # eager steps in between
    assert worst(outs, wanted) < 1e-4
    outs, wanted = server.run(backend, server.decode([4, 1]))
    assert worst(outs, wanted) < 1e-4
    outs, wanted = graphs.run(server.decode([4, 2, 1, 3]))
    assert worst(outs, wanted) < 1e-4
    last = backend.forward_metadata.batch  # a host-planned backend finds exact lengths, padded rows included
    assert last.cpu_exact
    assert all(torch.equal(address.kv_lens_cpu, address.kv_lens) for address in last.addresses)
    assert backend._graphs.replays == 6
    assert set(backend._graphs._batches) == {("decode", 4, 4), ("decode", 2, 2), ("decode", 1, 1)}


def test_views_of_a_static_batch_are_rewritten(registry):
    """A kernel that reads slots got them while capturing; they must follow the requests of every replay."""
    server = Server(page=8, graphs=True)
    backend = backend_of(server, backend="reference", registry=registry)
    graphs = GraphServer(server, backend, (2,))
    static = backend._graphs._batches["decode", 2, 2]
    view = static.view(0, "slots", 1)
    server.run(backend, server.extend({1: 20, 2: 7, 3: 30}))
    for rows in ([1, 2], [3, 1]):
        graphs.run(server.decode(rows))
        assert static.view(0, "slots", 1) is view
        wanted = [server.req_to_token_pool.req_to_token[r, : server.lengths[r]] for r in rows]
        assert torch.equal(view.indices[: int(view.indptr[-1])], torch.cat(wanted))


@pytest.mark.parametrize("parents", [None, [-1, 0, 0, 1]])
def test_verify_replays(parents, registry):
    server = Server(page=4, graphs=True, speculation=Speculation("NGRAM", 4, tree=parents is not None))
    backend = backend_of(server, backend="reference", registry=registry)
    graphs = GraphServer(server, backend, (3, 1), width=4)
    server.run(backend, server.extend({1: 30, 2: 3}))
    for rows in ([1, 2], [2]):
        outs, wanted = graphs.run(server.verify(rows, 4, parents))
        assert worst(outs, wanted) < 1e-4


def test_the_mask_of_a_captured_verify_step_is_filled_late(registry):
    server = Server(graphs=True, speculation=Speculation("EAGLE", 4, tree=True))
    backend = backend_of(server, backend="reference", registry=registry)
    graphs = GraphServer(server, backend, (2,), width=4)
    server.run(backend, server.extend({1: 12, 2: 5}))
    batch = server.verify([1, 2], 4, [-1, 0, 0, 1])
    right, batch.spec_info.custom_mask = batch.spec_info.custom_mask, None  # a chain until the drafter is done
    late = graphs.graphs[2]

    def after_the_drafter():
        batch.spec_info.custom_mask = right
        batch.spec_info.positions = batch.positions
        backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, 2)
        return late()

    graphs.graphs[2] = after_the_drafter
    outs, wanted = graphs.run(batch)
    assert worst(outs, wanted) < 1e-4


def test_what_may_not_be_captured_is_refused_with_the_flag():
    server = Server(graphs=False)
    backend = backend_of(server, backend="torch_native")
    with pytest.raises(GraphError, match="cuda-graph-backend-decode disabled"):
        backend.init_cuda_graph_state(4, 4)
    with pytest.raises(GraphError, match="before it has called init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(server.extend({1: 3}), in_capture=True)


def test_prefill_is_rebuilt_between_the_pieces_and_never_captured(registry):
    server = Server(graphs=True)
    backend = backend_of(server, backend="reference", registry=registry)
    GraphServer(server, backend, (1,))
    batch = server.extend({1: 9})
    with pytest.raises(GraphError, match="prefill is captured with its metadata"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    inputs = [server.inputs(batch, layer) for layer in range(2)]
    backend.init_forward_metadata_out_graph(batch)  # what SGLang calls around a breakable graph
    backend.init_forward_metadata_in_graph(batch)
    assert worst(server.attend(backend, batch, inputs), server.reference(batch, inputs)) < 1e-4
    for call in (
        lambda: backend.init_forward_metadata_for_breakable_cuda_graph_capture(batch),
        lambda: backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(None, batch),
        lambda: backend.prepare_full_cuda_graph_chunked_prefix(batch, in_capture=True),
    ):
        with pytest.raises(GraphError):
            call()
