"""Core's graph runner over this backend: padded buckets, verify by tree and chain, and few plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attn_flashinfer
from attn_core.cache import PagedKVCache
from attn_core.context import GraphLimits
from attn_core.discovery import Registry
from attn_core.geometry import LayerGroup, MhaGeometry, Model
from attn_core.graphs import GraphRunner, RerunRecorder
from attn_core.layers import MhaInputs, MhaLayer
from attn_core.manifest import parse_manifests
from attn_core.options import Options
from attn_core.paging import PoolRows, build_batch
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.router import Router
from attn_core.testing.trees import build_tree

LIMITS = GraphLimits(rows=(2, 4), max_tokens=16, max_query_len=4, max_kv_len=64, max_pages=16)
PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 64


@pytest.fixture
def runner(fake, shipped):
    manifest = replace(parse_manifests(shipped)[0], package="attn-flashinfer")
    group = LayerGroup("target", "full", "full", (0,), MhaGeometry(HEADS, KV_HEADS, DIM, DIM, 0.2), {"attend": "main"})
    options = Options.of(
        page_size=PAGE, dtype="bfloat16", speculative_algorithm="NGRAM", attention_backend="flashinfer"
    )
    model = Model("toy", "Toy", "toy", "bf16", (group,), 1, max_positions=64)
    plan = solve_plan(model, parse_platform("cuda:sm90,cuda=13.0"), options, [manifest])
    registry = Registry.with_manifests([manifest], modules={manifest.package: attn_flashinfer})
    router = Router(plan, registry, device="cpu")
    cache = PagedKVCache.from_plan(plan, num_pages=16, device="cpu")
    layer = MhaLayer(0, plan.groups[0].group)
    kv = cache.layer(0)
    for plane in (kv.k, kv.v):
        plane.copy_(torch.randn(plane.shape))
    router.bind([layer], [kv])
    shapes = {"q": (HEADS, DIM), "k": (KV_HEADS, DIM), "v": (KV_HEADS, DIM)}
    example = {name: torch.zeros(1, *shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def forward(step, inputs):
        return step.attend(layer, MhaInputs(inputs["q"], inputs["k"], inputs["v"]))

    return GraphRunner(router, forward, LIMITS, example, recorder=RerunRecorder())


def batch(kv_lens, phase="decode", query_len=1):
    pages = [[1 + 3 * row, 2 + 3 * row, 3 + 3 * row] for row in range(len(kv_lens))]
    return build_batch([query_len] * len(kv_lens), kv_lens, PoolRows(PAGE, pages), phase)


def both(runner, one):
    """(replayed, eager) of a step with random inputs."""
    inputs = {name: torch.randn(one.num_tokens, *t.shape[1:]).to(t.dtype) for name, t in runner.example.items()}
    replayed = runner.run(one, inputs).clone()
    return replayed, runner.forward(runner.router.begin(one), inputs)


def test_decode_is_replayed_with_padding_and_planned_when_a_page_is_gained(runner, fake):
    assert runner.capture("decode") == [4, 2]
    fake.CALLS.clear()
    for lens in ([5, 20, 33], [6, 21, 34], [7, 22, 35], [16, 23, 36]):
        replayed, eager = both(runner, batch(lens))
        torch.testing.assert_close(replayed, eager, rtol=1e-2, atol=1e-2)
    planned = [kwargs["seq_lens"].numel() for name, _, kwargs in fake.CALLS if name == "decode.plan"]
    assert planned.count(4) == 1, "the captured bucket of four rows is planned once for all four steps"
    assert runner.replays == 4


def test_verify_is_replayed_as_chain_and_as_tree(runner):
    assert runner.capture("verify", 4) == [4, 2]
    for parents in (None, ((-1, 0, 0, 1), (-1, 0, 1, 1))):
        one = batch([9, 30], "verify", 4)
        if parents is not None:
            one.tree = build_tree(parents)
        replayed, eager = both(runner, one)
        torch.testing.assert_close(replayed, eager, rtol=1e-2, atol=1e-2)
    assert (runner.replays, runner.eager_runs) == (2, 0)
