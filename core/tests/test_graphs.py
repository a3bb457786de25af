"""Capture and replay on the reference backend: real graphs on a GPU, and on a CPU a recorder that re-runs (the protocol)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_core.batch import AttentionBatch
from attn_core.cache import PagedKVCache
from attn_core.context import GraphLimits
from attn_core.discovery import Registry
from attn_core.errors import GraphError
from attn_core.graphs import GraphRunner, RerunRecorder, pad_batch
from attn_core.layers import MhaInputs, MhaLayer
from attn_core.options import Options
from attn_core.paging import PoolRows, build_batch
from attn_core.plan import PhasePlan
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.router import Router
from attn_core.testing import reference_backend
from toys import mha_model

LIMITS = GraphLimits(rows=(2, 4), max_tokens=16, max_query_len=4, max_kv_len=64, max_pages=16)
PAGE = 16


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


def setup(device: str = "cpu") -> tuple[Router, MhaLayer, Any]:
    model = mha_model(layers=1, q_heads=4, kv_heads=2, qk_dim=16, v_dim=8, scale=0.25)
    manifest = reference_backend.load_manifest()
    options = Options.of(page_size=PAGE, dtype="float32", allow_experimental=True, speculative_algorithm="NGRAM")
    plan = solve_plan(model, parse_platform("cuda:sm90"), options, [manifest], tie_order={})
    router = Router(
        plan, Registry.with_manifests([manifest], modules={manifest.package: reference_backend}), device=device
    )
    cache = PagedKVCache.from_plan(plan, num_pages=16, device=device)
    layer = MhaLayer(0, plan.groups[0].group)
    kv = cache.layer(0)
    for plane in (kv.k, kv.v):
        plane.copy_(torch.randn_like(plane))
    router.bind([layer], [kv])
    return router, layer, kv


def runner_of(router: Router, layer: MhaLayer) -> GraphRunner:
    def forward(step: Any, inputs: Any) -> torch.Tensor:
        result: torch.Tensor = step.attend(layer, MhaInputs(inputs["q"], inputs["k"], inputs["v"]))
        return result

    geometry = layer.geometry
    heads = {
        "q": (geometry.q_heads, geometry.qk_dim),
        "k": (geometry.kv_heads, geometry.qk_dim),
        "v": (geometry.kv_heads, geometry.v_dim),
    }
    example = {name: torch.zeros(1, *shape, device=router.device) for name, shape in heads.items()}
    recorder = None if router.device.type == "cuda" else RerunRecorder()
    return GraphRunner(router, forward, LIMITS, example, recorder=recorder)


def random_inputs(runner: GraphRunner, tokens: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(tokens, *one.shape[1:], device=one.device) for name, one in runner.example.items()}


def decode(kv_lens: list[int], phase: str = "decode", query_len: int = 1, device: str = "cpu") -> AttentionBatch:
    pages = [[1 + 3 * row, 2 + 3 * row, 3 + 3 * row] for row in range(len(kv_lens))]
    return build_batch([query_len] * len(kv_lens), kv_lens, PoolRows(PAGE, pages), phase, device=device)


def test_replay_equals_eager_when_lengths_change_and_rows_are_padded(device: str) -> None:
    router, layer, _ = setup(device)
    runner = runner_of(router, layer)
    assert runner.capture("decode") == [4, 2]
    for kv_lens in ([5, 17, 33], [48, 1, 16], [2], [20, 30, 40, 7], [15, 16]):
        batch = decode(kv_lens, device=device)
        inputs = random_inputs(runner, len(kv_lens))
        replayed = runner.run(batch, inputs).clone()
        eager = runner.forward(router.begin(decode(kv_lens, device=device)), inputs)
        torch.testing.assert_close(replayed, eager)
    assert (runner.replays, runner.eager_runs) == (5, 0)


def test_verify_is_captured_with_its_own_width(device: str) -> None:
    router, layer, _ = setup(device)
    runner = runner_of(router, layer)
    runner.capture("verify", query_len=4)
    batch = decode([20, 9, 30], "verify", 4, device)
    inputs = random_inputs(runner, 12)
    replayed = runner.run(batch, inputs).clone()
    eager = runner.forward(router.begin(decode([20, 9, 30], "verify", 4, device)), inputs)
    torch.testing.assert_close(replayed, eager)


def test_padded_rows_write_nothing(device: str) -> None:
    router, layer, kv = setup(device)
    runner = runner_of(router, layer)
    runner.capture("decode")
    before = kv.k.clone()
    batch = decode([5], device=device)
    runner.run(batch, random_inputs(runner, 1))
    changed = (kv.k != before).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[1, 4]]


def test_what_has_no_graph_runs_eagerly_and_is_counted() -> None:
    router, layer, _ = setup()
    runner = runner_of(router, layer)
    runner.capture("decode")
    ragged = build_batch([3, 2], [3, 2], PoolRows(PAGE, [[1], [2]]), "prefill")
    assert runner.run(ragged, random_inputs(runner, 5)).shape == (5, 4, 8)
    assert runner.run(decode([3] * 5), random_inputs(runner, 5)).shape == (5, 4, 8)
    assert (runner.replays, runner.eager_runs) == (0, 2)


def test_no_workspace_grows_after_a_capture() -> None:
    router, layer, _ = setup()
    runner_of(router, layer).capture("decode")
    assert all(context.frozen for context in router._contexts)


def test_a_backend_that_is_never_captured_may_still_grow() -> None:
    router, layer, _ = setup()
    eager = replace(router._contexts[0], phases={"prefill": never_captured(router)}, _workspaces={})
    router._contexts.append(eager)
    runner_of(router, layer).capture("decode")
    assert router._contexts[0].frozen
    assert not eager.frozen
    assert eager.workspace("keys", 64).numel() == 64


def never_captured(router: Router) -> PhasePlan:
    planned = router.plan.groups[0].phases["prefill"]
    return replace(planned, graph=replace(planned.graph, level="none"))


def test_without_graphs_on_the_device_the_runner_says_so() -> None:
    router, layer, _ = setup()
    with pytest.raises(GraphError, match="no graphs on cpu"):
        GraphRunner(router, lambda step, inputs: inputs["q"], LIMITS, {})


def test_pad_batch_keeps_real_rows_and_points_the_rest_to_the_dummy() -> None:
    batch, bucket = decode([5, 20]), decode([1, 1, 1, 1])
    padded = pad_batch(batch, bucket, 1)
    assert padded.query_offsets.tolist() == [0, 1, 2, 3, 4]
    address = padded.kv(0)
    assert address.kv_lens.tolist() == [5, 20, 1, 1]
    assert address.new_slots.tolist()[2:] == [-1, -1]
    assert address.table is not None
    assert address.table[2:].unique().tolist() == [0]
    assert (padded.num_rows, padded.padded_rows) == (2, 4)
    assert padded.query_offsets_cpu is not None, "backends that plan on the host need exact lengths of padded rows"
    assert padded.query_offsets_cpu.tolist() == [0, 1, 2, 3, 4]
    assert address.kv_lens_cpu is not None
    assert address.kv_lens_cpu.tolist() == [5, 20, 1, 1]
    assert padded.cpu_exact


def test_a_chain_that_fills_its_bucket_gets_the_tree_that_the_graph_has() -> None:
    runner = runner_of(*setup()[:2])
    runner.capture("verify", 3)
    for lens in ([9, 30], [9, 30, 20]):  # as many rows as the bucket holds, and fewer
        batch = decode(lens, "verify", 3)
        assert batch.tree is None
        inputs = random_inputs(runner, batch.num_tokens)
        replayed = runner.run(batch, inputs).clone()
        eager = runner.forward(runner.router.begin(batch), inputs)
        torch.testing.assert_close(replayed, eager)
    assert runner.replays == 2
