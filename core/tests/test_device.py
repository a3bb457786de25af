"""Work goes to the router's device, whichever device is current: with fakes of two devices, and on two real GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from attn_core._device import Place
from attn_core.batch import AttentionBatch, DraftSteps
from attn_core.bench import median_seconds
from attn_core.cache import PagedKVCache
from attn_core.context import GraphLimits
from attn_core.discovery import Registry, discover
from attn_core.errors import PlatformError
from attn_core.graphs import CudaRecorder, GraphRunner
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.options import Options
from attn_core.paging import PoolRows, build_batch
from attn_core.plan import Plan
from attn_core.planner import plan_for, solve_plan
from attn_core.platform import detect_platform, parse_platform
from attn_core.router import Router
from attn_core.testing import reference_backend
from recording import RecordingBackend, RecordingPlugin, address_for, cache_for
from toys import mha_model, toy

LIMITS = GraphLimits(rows=(2, 4), max_tokens=16, max_query_len=4, max_kv_len=64, max_pages=16)


@dataclass
class FakeCuda:
    """Two devices, of which device 0 is current; records on which device what happened."""

    current: int = 0
    waited: list[int] = field(default_factory=list)
    captured: list[tuple[int, int]] = field(default_factory=list)  #: (current device, device of the capture stream)
    streams: list[int] = field(default_factory=list)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def new_stream(self, device: Any = None) -> FakeStream:
        self.streams.append(self.current if device is None else torch.device(device).index)
        return FakeStream(self.streams[-1])

    def current_stream(self, device: Any = None) -> FakeStream:
        return FakeStream(self.current if device is None else torch.device(device).index)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        with self.device(stream.index):
            yield

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, stream: FakeStream | None = None) -> Iterator[None]:
        self.captured.append((self.current, -1 if stream is None else stream.index))
        with self.device(self.captured[-1][1]):
            yield

    def synchronize(self, device: Any = None) -> None:
        self.waited.append(self.current if device is None else device)


@dataclass
class FakeStream:
    index: int

    def wait_stream(self, other: FakeStream) -> None:
        assert other.index == self.index, "streams of two devices wait for each other"


class FakeGraph:
    def replay(self) -> None:
        """Nothing was recorded."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: fake.current,
        "device": fake.device,
        "Stream": fake.new_stream,
        "current_stream": fake.current_stream,
        "stream": fake.stream,
        "graph": fake.graph,
        "CUDAGraph": FakeGraph,
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": fake.synchronize,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


class WatchedBackend(RecordingBackend):
    """Notes the current device at every hook."""

    def __init__(self, *arguments: Any, cuda: FakeCuda) -> None:
        super().__init__(*arguments)
        self.seen: list[tuple[str, int]] = []
        backend, cuda_now = self, cuda

        class Calls(type(self.calls)):  # type: ignore[misc]
            def __setitem__(self, hook: str, count: int) -> None:
                backend.seen.append((hook, cuda_now.current))
                super().__setitem__(hook, count)

        self.calls = Calls()


class WatchedPlugin(RecordingPlugin):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.created_on: list[int] = []

    @hookimpl
    def attn_create(self, manifest: Any, variant: Any, context: Any) -> RecordingBackend:
        self.created_on.append(self.cuda.current)
        self.made.append(WatchedBackend(context, cuda=self.cuda))
        return self.made[-1]


def watched(cuda: FakeCuda, device: str) -> tuple[WatchedPlugin, Router, MhaLayer]:
    manifest, plugin = toy("alpha"), WatchedPlugin(cuda)
    options = Options.of(dtype="float32", page_size=16, speculative_algorithm="EAGLE")
    plan = solve_plan(mha_model(layers=1), parse_platform("cuda:sm90"), options, [manifest], tie_order={})
    router = Router(plan, Registry.with_manifests([manifest], modules={"attn-alpha": plugin}), device=device)
    layers = [MhaLayer(0, plan.groups[0].group)]
    router.bind(layers, [cache_for(layers[0].geometry)])
    return plugin, router, layers[0]


def decode(rows: int = 2) -> AttentionBatch:
    pages = [[1 + row] for row in range(rows)]
    return build_batch([1] * rows, [5] * rows, PoolRows(16, pages), "decode")


def verify_step(rows: int = 2) -> AttentionBatch:
    pages = [[1 + row] for row in range(rows)]
    return build_batch([4] * rows, [8] * rows, PoolRows(16, pages), "verify")


def inputs_for(layer: MhaLayer, tokens: int) -> MhaInputs:
    geometry = layer.geometry
    return MhaInputs(
        torch.zeros(tokens, geometry.q_heads, geometry.qk_dim),
        torch.zeros(tokens, geometry.kv_heads, geometry.qk_dim),
        torch.zeros(tokens, geometry.kv_heads, geometry.v_dim),
    )


def devices_of(plugin: WatchedPlugin) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for backend in plugin.made:
        for hook, device in backend.seen:  # type: ignore[attr-defined]
            found.setdefault(hook, set()).add(device)
    return found


# --- the place ------------------------------------------------------------------------------------------------------------


def test_a_device_without_an_index_is_the_one_that_is_current_now(cuda: FakeCuda) -> None:
    cuda.current = 1
    place = Place("cuda")
    cuda.current = 0
    assert place.device == torch.device("cuda", 1)
    assert not place.is_current
    with place.use():
        assert place.is_current
    assert cuda.current == 0
    place.wait()
    assert cuda.waited == [1]


def test_a_device_that_is_not_there_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(PlatformError, match="no device cuda:2"):
        Place("cuda:2")


def test_a_cpu_has_one_place() -> None:
    place = Place("cpu")
    assert place.is_current
    with place.use():
        place.wait()


# --- router -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", {1}), ("cuda:0", {0}), ("cuda", {0})])
def test_every_hook_of_a_router_runs_on_its_device(cuda: FakeCuda, device: str, expected: set[int]) -> None:
    plugin, router, layer = watched(cuda, device)
    assert set(plugin.created_on) == expected
    assert all(backend.context is not None and {backend.context.device.index} == expected for backend in plugin.made)
    router.warmup(LIMITS)
    state = router.graph_state(LIMITS)
    router.begin(decode(), state, capture=True)
    step = router.begin(decode())
    step.attend(layer, inputs_for(layer, 2))
    step.attend_lse(layer, inputs_for(layer, 2))
    step.ragged(layer, *inputs_for(layer, 2)[:3])  # type: ignore[misc]
    step.gather(layer)
    router.commit(router.begin(verify_step()), torch.zeros(2, dtype=torch.int32))
    seen = devices_of(plugin)
    hooks = {
        "attn_metadata", "attn_metadata_in_graph", "attn_graph_state", "attn_decode", "attn_ragged", "attn_store",
        "attn_gather", "attn_commit", "attn_warmup",
    }  # fmt: skip
    assert hooks <= set(seen)
    assert set().union(*seen.values()) == expected, seen
    assert cuda.current == 0


def test_draft_steps_run_on_the_routers_device(cuda: FakeCuda) -> None:
    plugin, router, _ = watched(cuda, "cuda:1")
    batch = decode()
    batch.addresses = (*batch.addresses, address_for([5, 5], 2))
    batch.segments[0].phase = "draft"
    router.begin_draft(batch, DraftSteps(3, 1, torch.zeros(2, 1, 3, dtype=torch.int64)))
    assert devices_of(plugin)["attn_draft_metadata"] == {1}


def test_on_the_current_device_a_hook_is_called_directly(cuda: FakeCuda) -> None:
    plugin, router, _ = watched(cuda, "cuda:1")
    with cuda.device(1):
        (run,) = router.begin(decode()).runs()
    assert run.attend in {backend.attn_decode for backend in plugin.made}


# --- capture and replay -----------------------------------------------------------------------------------------------------


def test_a_recorder_captures_on_its_device_with_one_stream(cuda: FakeCuda) -> None:
    recorder, seen = CudaRecorder(device="cuda:1"), []
    for _ in range(2):
        recorder.record(lambda: seen.append(cuda.current))  # type: ignore[arg-type, func-returns-value]
    assert set(seen) == {1}
    assert cuda.captured == [(1, 1), (1, 1)]
    assert cuda.streams == [1], "blocks of a graph's pool are re-used on their own stream only"
    assert cuda.current == 0


def test_a_recorder_without_a_device_stays_on_the_first_one(cuda: FakeCuda) -> None:
    recorder = CudaRecorder()
    with cuda.device(1):
        recorder.record(lambda: torch.zeros(1))
    recorder.record(lambda: torch.zeros(1))
    assert cuda.captured == [(1, 1), (1, 1)]


def test_a_runner_captures_and_replays_on_the_routers_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, router, layer = watched(cuda, "cuda:1")
    router.device = torch.device("cpu")  # tensors of this test; the place is what is tested
    seen: list[int] = []

    def forward(step: Any, inputs: Any) -> torch.Tensor:
        seen.append(cuda.current)
        result: torch.Tensor = step.attend(layer, MhaInputs(inputs["q"], inputs["k"], inputs["v"]))
        return result

    example = dict(zip("qkv", inputs_for(layer, 1)[:3], strict=True))
    runner = GraphRunner(router, forward, LIMITS, example, recorder=CudaRecorder(device="cuda:1"))  # type: ignore[arg-type]
    runner.capture("decode")
    monkeypatch.setattr(FakeGraph, "replay", lambda self: seen.append(cuda.current))
    batch, inputs = decode(), dict(zip("qkv", inputs_for(layer, 2)[:3], strict=True))
    batch.addresses = batch.addresses * len(runner._captured["decode", 2, 1].batch.addresses)
    runner.run(batch, inputs)  # type: ignore[arg-type]
    runner.run(decode(5), dict(zip("qkv", inputs_for(layer, 5)[:3], strict=True)))  # type: ignore[arg-type]
    assert (runner.replays, runner.eager_runs) == (1, 1)
    assert set(seen) == {1}
    assert set().union(*devices_of(plugin).values()) == {1}
    assert cuda.current == 0


def test_a_runner_gives_its_recorder_the_routers_device(cuda: FakeCuda) -> None:
    _, router, layer = watched(cuda, "cuda:1")
    runner = GraphRunner(router, lambda step, inputs: inputs["q"], LIMITS, {})
    assert isinstance(runner.recorder, CudaRecorder)
    assert runner.recorder.device == torch.device("cuda:1")


# --- commands ---------------------------------------------------------------------------------------------------------------


def test_times_are_taken_on_the_device_that_was_named(cuda: FakeCuda) -> None:
    seen: list[int] = []
    median_seconds(lambda: seen.append(cuda.current), "cuda:1", 2)
    assert set(seen) == set(cuda.waited) == {1}


def test_verify_makes_its_device_current(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from attn_core.cli.verify import command

    seen: list[int] = []

    def run_verification(*arguments: Any, **options: Any) -> dict[str, Any]:
        seen.append(cuda.current)
        summary = {"passed": 1, "failed": 0, "refused": 0, "skipped": 0}
        return {"failures": [], "summary": summary, "backend": "", "package": "", "version": "", "seconds": 0.0}

    monkeypatch.setattr("attn_core.platform.detect_platform", lambda device: parse_platform("cuda:sm90"))
    monkeypatch.setattr("attn_core.testing.report.run_verification", run_verification)
    result = CliRunner().invoke(command, ["mha/alpha", "--device", "cuda:1"])
    assert result.exit_code == 0, result.output
    assert seen == [1]


@pytest.mark.parametrize("name", ["bench", "warmup"])
def test_the_platform_of_a_command_is_that_of_the_device_it_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from click.testing import CliRunner

    asked: list[str | None] = []

    def detect(device: str | None) -> None:
        asked.append(device)
        raise PlatformError("no such device")

    monkeypatch.setattr("attn_core.platform.detect_platform", detect)
    monkeypatch.setattr("attn_core.cli.plan.read_plan", lambda file: None)
    command = importlib.import_module(f"attn_core.cli.{name}").command
    CliRunner().invoke(command, [*(["plan.json"] if name == "warmup" else []), "--device", "cuda:1"])
    assert asked == ["cuda:1"], "a machine may hold cards of different architectures"


# --- two real devices -------------------------------------------------------------------------------------------------------

two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, one of which is not current"),
]


def real_plan(backend: str) -> tuple[Plan, Registry]:
    model = mha_model(layers=1, q_heads=8, kv_heads=2, qk_dim=64, v_dim=64, scale=0.125)
    flags: dict[str, Any] = {"page_size": 16, "dtype": "bfloat16", "allow_experimental": True}
    if backend == "reference":
        manifest = reference_backend.load_manifest()
        registry = Registry.with_manifests([manifest], modules={manifest.package: reference_backend})
        flags["dtype"] = "float32"
        return solve_plan(model, parse_platform("cuda:sm90"), Options.of(flags), [manifest], tie_order={}), registry
    registry = discover()
    return plan_for(model, detect_platform("cuda:1"), Options.of(flags, attention_backend=backend), registry), registry


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=two_gpus) for name in ("reference", "torch_native", "triton")]
)
def test_capture_and_replay_on_a_device_that_is_not_current(backend: str) -> None:
    plan, registry = real_plan(backend)
    router = Router(plan, registry, device="cuda:1")
    cache = PagedKVCache.from_plan(plan, num_pages=16, device="cuda:1")
    layer, kv = MhaLayer(0, plan.groups[0].group), cache.layer(0)
    assert isinstance(kv, MhaCache)
    generator = torch.Generator("cuda:1").manual_seed(1)
    for plane in (kv.k, kv.v):
        plane.copy_(torch.randn(plane.shape, generator=generator, device="cuda:1"))
    router.bind([layer], [kv])

    def forward(step: Any, inputs: Any) -> torch.Tensor:
        result: torch.Tensor = step.attend(layer, MhaInputs(inputs["q"], inputs["k"], inputs["v"]))
        return result

    def random(tokens: int) -> dict[str, torch.Tensor]:
        heads = {"q": layer.geometry.q_heads, "k": layer.geometry.kv_heads, "v": layer.geometry.kv_heads}
        return {
            name: torch.randn(tokens, count, 64, device="cuda:1", generator=generator).to(router.dtype)
            for name, count in heads.items()
        }

    def batch(kv_lens: list[int]) -> AttentionBatch:
        pages = [[1 + 3 * row, 2 + 3 * row, 3 + 3 * row] for row in range(len(kv_lens))]
        return build_batch([1] * len(kv_lens), kv_lens, PoolRows(16, pages), "decode", device="cuda:1")

    torch.cuda.set_device(0)
    level = plan.groups[0].phases["decode"].graph.level
    if level == "none":
        assert torch.isfinite(forward(router.begin(batch([5, 17])), random(2))).all()
        pytest.skip(f"{backend} declares no graph level here; its eager step was run")
    runner = GraphRunner(router, forward, LIMITS, random(1))
    assert runner.capture("decode") == [4, 2]
    for kv_lens in ([5, 17, 33], [48, 1], [2]):
        inputs = random(len(kv_lens))
        replayed = runner.run(batch(kv_lens), inputs).clone()
        eager = forward(router.begin(batch(kv_lens)), inputs)
        torch.cuda.synchronize(1)
        torch.testing.assert_close(replayed, eager)
    assert (runner.replays, runner.eager_runs) == (3, 0)
    assert torch.cuda.current_device() == 0
