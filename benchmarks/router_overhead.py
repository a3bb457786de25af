"""Cost of one attend call through the router, minus the bare backend function, on a bf16 backend that does nothing.

    python benchmarks/router_overhead.py

Prints microseconds per call (median of many batches of calls) with 1 and with 25 plugins installed: the router binds
functions once, so the number of plugins must not matter. Floor: one Python call of the same function. The backend declares
``strided_q`` and ``writes_out``, as ours do; without them the router checks strides and copies, which costs 1.6 us more.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from _common import provenance, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "core" / "tests"))
from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.context import StepMetadata
from attn_core.discovery import Registry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.options import Options
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.router import Router
from toys import mha_model, toy

CALLS, ROUNDS = 2000, 60


class Nothing:
    """Returns what it is given."""

    @hookimpl
    def attn_metadata(self, batch: Any, group: Any, phase: Any, state: Any, capture: Any) -> StepMetadata:
        return StepMetadata(phase, batch.num_tokens)

    @hookimpl
    def attn_graph_state(self, group: Any, phases: Any, limits: Any, lane: Any) -> None:
        return None

    @hookimpl
    def attn_extend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        return out, None

    @hookimpl
    def attn_decode(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        return out, None


class Plugin:
    @hookimpl
    def attn_create(self, manifest: Any, variant: Any, context: Any) -> Nothing:
        return Nothing()


def build(plugins: int) -> tuple[Router, MhaLayer, AttentionBatch]:
    manifests = [
        toy(f"p{number}", page_size=[16], features=["mixed", "strided_q", "writes_out"]) for number in range(plugins)
    ]
    plan = solve_plan(
        mha_model(layers=1), parse_platform("cuda:sm90"), Options.of(page_size=16), manifests, tie_order={}
    )
    modules = {manifest.package: Plugin() for manifest in manifests}
    router = Router(plan, Registry.with_manifests(manifests, modules=modules))
    group = plan.groups[0].group
    cache = MhaCache(*(torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2)))
    layer = MhaLayer(0, group)
    router.bind([layer], [cache])
    one = torch.ones(1, dtype=torch.int32)
    address = KvAddress(16, one * 20, torch.tensor([19]), 20, table=torch.tensor([[1, 2]], dtype=torch.int32))
    batch = AttentionBatch(
        1, 1, (Segment("decode", slice(0, 1), slice(0, 1), 1),), torch.tensor([0, 1], dtype=torch.int32), 1, (address,)
    )
    return router, layer, batch


def median_us(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    return statistics.median(times)


def measure(plugins: int) -> dict[str, float]:
    router, layer, batch = build(plugins)
    step = router.begin(batch)
    q = torch.randn(1, 32, 128, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    inputs = MhaInputs(q, store=False)
    run = step.runs()[0]
    attend, cache, metadata = run.attend, router._bound[0][1], run.metadata
    bare = median_us(lambda: attend(inputs, layer, cache, metadata, out))
    routed = median_us(lambda: step.attend(layer, inputs, out))
    begin = median_us(lambda: router.begin(batch))
    return {"plugins": plugins, "bare_us": bare, "routed_us": routed, "overhead_us": routed - bare, "begin_us": begin}


def main() -> None:
    rows = [measure(plugins) for plugins in (1, 25)]
    for row in rows:
        print(
            "  ".join(
                f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )
    write("router_overhead", {**provenance(), "calls": CALLS, "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
