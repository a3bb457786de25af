"""The graph protocol on a CPU: captured sizes, padded rows, static buffers; a reference backend that declares every level."""

from __future__ import annotations

import pytest
import torch
from vllm_fakes import LLAMA, FakeServer, Graph

from attn_core.discovery import Registry
from attn_core.errors import BatchError, BindError
from attn_core.model import parse_model
from attn_core.options import Options
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.testing import reference_backend
from attn_vllm.worker import graph_support


def server(spec: int | None = None, **flags) -> FakeServer:
    manifest = reference_backend.load_manifest()
    if spec:
        flags |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": spec + 1}
    options = Options.of(page_size=16, dtype="float32", allow_experimental=True, **flags)
    plan = solve_plan(parse_model(LLAMA), parse_platform("cuda:sm90"), options, [manifest], tie_order={})
    registry = Registry.with_manifests([manifest], modules={manifest.package: reference_backend})
    return FakeServer(LLAMA, given=(plan, registry), spec=spec)


def test_decode_is_replayed_with_other_lengths_and_padded_rows():
    fake = server()
    four, two = Graph(fake, 4, 1), Graph(fake, 2, 1)
    fake.step([(0, 5), (1, 33), (2, 18)])
    for _ in range(12):
        four.replay([(0, 1), (1, 1), (2, 1)])
    fake.step([(0, 1), (3, 40)])
    four.replay([(0, 1), (1, 1), (2, 1), (3, 1)])
    two.replay([(3, 1)])
    assert fake.worst < 1e-5
    assert fake.service.stats()["reference"]["decode"] > 0


def test_replays_keep_the_captured_metadata():
    """vLLM runs no Python in a replay: what the graph reads must be rewritten in place by ``begin``."""
    fake = server()
    graph = Graph(fake, 2, 1)
    captured = graph.served.step
    fake.step([(0, 5), (1, 3)])
    served = fake.service.begin(fake.common([(0, 1), (1, 1)], padded_rows=2))
    mine, theirs = served.step.runs(), captured.runs()
    assert [run.metadata for run in mine] == [run.metadata for run in theirs]
    assert served.step.batch is captured.batch
    assert captured.batch.addresses[0].kv_lens.tolist() == [6, 4]


def test_verify_is_replayed():
    fake = server(spec=3)
    graph = Graph(fake, 4, 4)
    fake.step([(0, 5), (1, 33), (2, 18)])
    for _ in range(3):
        graph.replay([(0, 4), (1, 4), (2, 4)])
    assert fake.worst < 1e-5
    assert fake.service.stats()["reference"]["verify"] > 0


def test_rows_of_several_lengths_are_not_captured():
    fake = server()
    with pytest.raises(BatchError, match="captured are rows of one token"):
        fake.service.capture(fake.common([(0, 1), (1, 3)]))


def test_no_workspace_grows_after_the_first_graph():
    fake = server()
    Graph(fake, 4, 1)
    Graph(fake, 2, 1)
    contexts = fake.service._router._contexts
    with pytest.raises(BindError, match="would grow"):
        contexts[0].workspace("new", 1 << 20)


def test_padded_rows_write_nothing():
    fake = server()
    graph = Graph(fake, 4, 1)
    fake.step([(0, 5)])
    before = {name: module.kv_cache.clone() for name, module in fake.modules.items()}
    graph.replay([(0, 1)])
    page = fake.requests[0].pages[0]
    for name, module in fake.modules.items():
        changed = (module.kv_cache != before[name]) & ~(module.kv_cache.isnan() & before[name].isnan())
        assert changed.any()
        assert torch.equal(changed.flatten(1).any(1).nonzero().flatten(), torch.tensor([page]))


@pytest.mark.parametrize(
    ("flags", "spec", "level"),
    [
        ({}, None, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ({}, 3, "UNIFORM_BATCH"),
        ({"cuda_graph": "off"}, None, "NEVER"),
    ],
)
def test_graph_level_in_vllms_words(flags, spec, level):
    fake = server(spec, **flags)
    assert graph_support(fake.plan, spec + 1 if spec else 0) == level
