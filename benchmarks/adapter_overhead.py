"""What the contract and the router cost: each backend through the Router against its library called directly.

    python benchmarks/adapter_overhead.py [--backends fa3,fa4] [--out benchmarks/results/adapter_overhead-h200.json]

Same process, same tensors, rounds in turn: decode of 1, 32 and 128 rows with 8192 keys each and a causal prefill of 8192 tokens
(bf16, 32/8 heads, head dim 128), eager and under CUDA graphs. The two sides of a round follow each other directly and change
places every round; what is judged is the median of the differences within a round, over at least 400 calls a side where the
host sets the pace. Bars: eager within the larger of 3 % and 5 us a call, under a graph within 1 %. For a backend that plans on
the host, its share of ``begin`` is set against the library's own ``plan`` with tensors on the device, idle and behind a queued
step: at most a quarter of it. Exit status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from _common import provenance, write
from _direct import DIRECT, NAIVE_PLAN, Case
from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.context import GraphLimits
from attn_core.discovery import Registry, discover
from attn_core.errors import AttnError
from attn_core.geometry import LayerGroup, MhaGeometry, Model
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.options import Options
from attn_core.planner import plan_for
from attn_core.platform import detect_platform
from attn_core.router import Router, Step

#: (rows, keys a row, new tokens a row)
SHAPES = ((1, 8192, 1), (32, 8192, 1), (128, 8192, 1), (1, 8192, 8192))
Q_HEADS, KV_HEADS, DIM = 32, 8, 128
#: Pages of the pool: 64, or the backend's own.
PAGES = {"fa4": 128}
#: Options with which a backend does what its library does by itself: the pools here are finite everywhere.
OPTIONS: dict[str, dict[str, Any]] = {name: {"finite_pool": True} for name in ("fa3", "fa4", "trtllm_mha")}
LIBRARIES = ("flashinfer-python", "tokenspeed-fa3", "sglang-kernel", "flash-attn-4", "nvidia-cutlass-dsl", "triton")
EAGER_SHARE, EAGER_MICROS, GRAPH_SHARE, PLAN_SHARE = 0.03, 5.0, 0.01, 0.25
ROUNDS, GRAPH_CALLS = 21, 8
#: Rounds and calls a round of eager decode: few rows are host-bound, and a host is noisier than a device.
DECODE_ROUNDS, DECODE_CALLS, PREFILL_CALLS = 41, 20, 4
#: The naive plan of FlashInfer at 32 rows, work of a step before it included, as it was recorded on an H200; layers of that step.
NAIVE_PLAN_MICROS, QUEUED_LAYERS = 760.0, 32

Call = Callable[[], torch.Tensor]


class Routed(NamedTuple):
    """A case through the router: what a layer calls, and what must stay alive."""

    router: Router
    layer: MhaLayer
    batch: AttentionBatch
    step: Step
    call: Call


def build_case(rows: int, kv_len: int, new: int, page: int) -> Case:
    """Random data on permuted pages; page 0 is nobody's."""
    torch.manual_seed(0)
    device, width = torch.device("cuda"), -(-kv_len // page)
    pages = rows * width + 1

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    table = (torch.randperm(rows * width, device=device) + 1).view(rows, width).int()
    lens = torch.full((rows,), kv_len, dtype=torch.int32)
    offsets = torch.arange(0, rows * new + 1, new, dtype=torch.int32)
    q = randn(rows * new, Q_HEADS, DIM)
    k, v = (randn(pages, page, KV_HEADS, DIM) for _ in range(2))
    return Case(
        rows, kv_len, new, page, q, k, v, torch.empty_like(q), table, lens.to(device), offsets.to(device), lens, offsets,
        DIM**-0.5,
    )  # fmt: skip


def make_batch(case: Case, kv_len: int | None = None) -> AttentionBatch:
    """The case as a batch; `kv_len` other than the case's for a step of its own."""
    length = case.kv_len if kv_len is None else kv_len
    lens_cpu = case.kv_lens_cpu if length == case.kv_len else torch.full_like(case.kv_lens_cpu, length)
    tokens = case.rows * case.new
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=case.q.device)
    lens = case.kv_lens if length == case.kv_len else lens_cpu.to(case.q.device)
    address = KvAddress(case.page, lens, slots, case.kv_len, table=case.table, kv_lens_cpu=lens_cpu)
    phase = "decode" if case.new == 1 else "prefill"
    segment = Segment(phase, slice(0, case.rows), slice(0, tokens), case.new)
    return AttentionBatch(
        case.rows, tokens, (segment,), case.query_offsets, case.new, (address,), query_offsets_cpu=case.query_offsets_cpu
    )  # fmt: skip


def make_router(name: str, case: Case, registry: Registry) -> tuple[Router, MhaLayer]:
    """A model of one layer planned with the backend by name."""
    geometry = MhaGeometry(Q_HEADS, KV_HEADS, DIM, DIM, case.scale)
    group = LayerGroup("target", "full", "full", (0,), geometry, {"attend": "main"})
    model = Model("bench", "Bench", "bench", "bf16", (group,), 1, max_positions=case.kv_len)
    flags: dict[str, Any] = {"attention_backend": name, "page_size": case.page, "allow_experimental": True}
    declared = next(m for m in registry.manifests if m.id == f"mha/{name}").options_schema.get("properties", {})
    chosen = {key: value for key, value in OPTIONS.get(name, {}).items() if key in declared}
    if chosen:
        flags["backend_options"] = {name: chosen}
    plan = plan_for(model, detect_platform("cuda"), Options.of(flags), registry)
    router, layer = Router(plan, registry, device="cuda"), MhaLayer(0, plan.groups[0].group)
    router.bind([layer], [MhaCache(case.k, case.v)])
    return router, layer


def routed(name: str, case: Case, registry: Registry) -> Routed:
    """The case through the router, eager."""
    router, layer = make_router(name, case, registry)
    batch = make_batch(case)
    step, inputs = router.begin(batch), MhaInputs(case.q, store=False)
    return Routed(router, layer, batch, step, lambda: step.attend(layer, inputs, case.out))


# --- timing -------------------------------------------------------------------------------------------------------------


def in_turn(sides: dict[str, Any], number: int) -> list[tuple[str, Any]]:
    """The sides, the other one first in every second round: what is measured second finds a warmer device."""
    found = list(sides.items())
    return found if number % 2 else found[::-1]


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection in a measured round: it would fall on one side."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """The median of each side, and as ``extra`` that of the differences within a round."""
    pairs = zip(times["routed"], times["direct"], strict=True)
    found = {side: statistics.median(values) for side, values in times.items()}
    return {**found, "extra": statistics.median(routed - direct for routed, direct in pairs)}


def eager_micros(calls: dict[str, Call], each: int, rounds: int) -> dict[str, float]:
    """Median microseconds of one call, `each` calls a round, the sides in turn; the wait for the device is in it.

    ``host_direct`` and ``host_routed`` are the same without that wait: what a call takes of the thread that makes it.
    """
    times: dict[str, list[float]] = {side: [] for side in calls}
    host: dict[str, list[float]] = {side: [] for side in calls}
    with no_collections():
        for number in range(rounds + 2):
            for side, call in in_turn(calls, number):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(each):
                    call()
                issued = time.perf_counter()
                torch.cuda.synchronize()
                if number >= 2:
                    times[side].append((time.perf_counter() - start) / each * 1e6)
                    host[side].append((issued - start) / each * 1e6)
    return {**medians(times), **{f"host_{side}": statistics.median(found) for side, found in host.items()}}


def record(call: Call, before: Callable[[], None] | None = None) -> torch.cuda.CUDAGraph:
    """A graph of :data:`GRAPH_CALLS` calls; `before` is recorded once, in front of them."""

    def work() -> None:
        if before is not None:
            before()
        for _ in range(GRAPH_CALLS):
            call()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def graph_micros(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median microseconds of one call inside a replayed graph, the sides in turn, timed by events on the device."""
    times: dict[str, list[float]] = {side: [] for side in graphs}
    for number in range(ROUNDS + 2):
        for side, graph in in_turn(graphs, number):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 2:
                times[side].append(start.elapsed_time(end) * 1e3 / GRAPH_CALLS)
    return medians(times)


def captured(made: Routed, case: Case) -> torch.cuda.CUDAGraph:
    """The routed side as a server captures it: static batch, graph state and in-graph metadata. Prefill: its eager step."""
    inputs = MhaInputs(case.q, store=False)
    if case.new > 1:
        return record(made.call)
    limits = GraphLimits((case.rows,), case.rows, 1, case.kv_len, case.k.shape[0])
    batch = make_batch(case)
    batch.static = True
    step = made.router.begin(batch, made.router.graph_state(limits), capture=True)
    return record(
        lambda: step.attend(made.layer, inputs, case.out), lambda: made.router.in_graph(step)
    )  # fmt: skip


# --- one backend ----------------------------------------------------------------------------------------------------------


def measure(name: str, registry: Registry) -> Iterator[dict[str, Any]]:
    """One row for each shape and mode; a row that failed says why."""
    for shape in SHAPES:
        case = build_case(*shape, PAGES.get(name, 64))
        row: dict[str, Any] = {"backend": f"mha/{name}", "case": case.name, "page": case.page}
        try:
            direct, made = DIRECT[f"mha/{name}"](case), routed(name, case, registry)
            want, have = direct().float(), made.call().float()
            row["difference"] = float((want - have).abs().max() / want.abs().max())
        except Exception as error:
            yield {**row, "failed": f"{type(error).__name__}: {error}"[:400]}
            continue
        each, rounds = (PREFILL_CALLS, ROUNDS) if case.new > 1 else (DECODE_CALLS, DECODE_ROUNDS)
        yield judged({**row, "mode": "eager"}, eager_micros({"direct": direct, "routed": made.call}, each, rounds))
        try:
            graphs = {"direct": record(direct), "routed": captured(made, case)}
            yield judged({**row, "mode": "graph"}, graph_micros(graphs))
        except Exception as error:
            yield {**row, "mode": "graph", "failed": f"{type(error).__name__}: {error}"[:400]}
        del direct, made, case
        torch.cuda.empty_cache()


def judged(row: dict[str, Any], micros: dict[str, float]) -> dict[str, Any]:
    """The row with its figures and whether it is within its bar."""
    extra = micros["extra"]
    share = GRAPH_SHARE * micros["direct"]
    allowed = share if row["mode"] == "graph" else max(EAGER_SHARE * micros["direct"], EAGER_MICROS)
    figures = {f"{side}_us": round(value, 2) for side, value in micros.items()}
    return {**row, **figures, "allowed_us": round(allowed, 2), "passed": extra <= allowed}


def measure_planning(name: str, registry: Registry) -> Iterator[dict[str, Any]]:
    """``begin`` of a decode step of 32 rows with new lengths each time, against the library's plan with device tensors.

    Once on an idle device, and once behind a queued step of 32 layers, as a server calls it: what copies lengths back waits for
    that step. The bars: a quarter of the naive plan's recorded time on an idle device, a quarter of its time behind a step.
    """
    case = build_case(32, 8192, 1, PAGES.get(name, 64))
    for queued in (0, QUEUED_LAYERS):
        mode = f"plan, {queued} queued" if queued else "plan, idle"
        row: dict[str, Any] = {"backend": f"mha/{name}", "case": case.name, "mode": mode}
        try:
            made, naive = routed(name, case, registry), NAIVE_PLAN[f"mha/{name}"](case)
            times: dict[str, list[float]] = {"direct": [], "routed": []}
            for number in range(ROUNDS + 2):
                begin = partial(made.router.begin, make_batch(case, case.kv_len - 1 - number))
                for side, call in in_turn({"direct": naive, "routed": begin}, number):
                    torch.cuda.synchronize()
                    for _ in range(queued):
                        made.call()
                    start = time.perf_counter()
                    call()
                    times[side].append((time.perf_counter() - start) * 1e6)
        except Exception as error:
            yield {**row, "failed": f"{type(error).__name__}: {error}"[:400]}
            continue
        micros = {side: statistics.median(found[2:]) for side, found in times.items()}
        allowed = PLAN_SHARE * (micros["direct"] if queued else NAIVE_PLAN_MICROS)
        yield {**row, "direct_us": round(micros["direct"], 1), "routed_us": round(micros["routed"], 1), "allowed_us": round(allowed, 1), "passed": micros["routed"] <= allowed}  # fmt: skip


def show(row: dict[str, Any]) -> str:
    """One line: pass or fail, and the figures."""
    head = f"{row['backend']:16} {row['case']:13} {row.get('mode', ''):15}"
    if "failed" in row:
        return f"FAIL {head} {row['failed']}"
    verdict = "pass" if row["passed"] else "FAIL"
    extra = row.get("extra_us", row["routed_us"] - row["direct_us"])
    host = f"  host {row['host_direct_us']:.1f} / {row['host_routed_us']:.1f}" if "host_direct_us" in row else ""
    return f"{verdict} {head} direct {row['direct_us']:8.1f} us  routed {row['routed_us']:8.1f} us  {extra:+7.2f} (allowed {row['allowed_us']:.2f}){host}"


def usable(registry: Registry) -> list[str]:
    """Names of the backends that have a direct counterpart and can run here."""
    names = []
    for manifest in registry.manifests:
        if manifest.id not in DIRECT:
            continue
        answers = registry.probe(manifest, detect_platform("cuda"))
        if any(answer.ok for answer in answers.values()):
            names.append(manifest.name)
        else:
            reasons = {str(reason) for answer in answers.values() for reason in answer.reasons}
            print(f"skip {manifest.id}: {'; '.join(sorted(reasons))}")
    return names


def save(rows: list[dict[str, Any]], out: Path | None) -> None:
    """Write what was measured so far, so that a run that is cut short leaves the backends that it finished."""
    failed = sum(not row.get("passed") for row in rows)
    rounds = {"rounds": ROUNDS, "decode_rounds": DECODE_ROUNDS, "graph_calls": GRAPH_CALLS}
    content = {"schema_version": 1, **provenance(*LIBRARIES), **rounds, "failed": failed, "rows": rows}
    if out is None:
        write("adapter_overhead-h200", content)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", help="names, separated by commas; default: all that can run here")
    parser.add_argument("--out", type=Path, help="default: results/adapter_overhead-h200.json beside this program")
    parser.add_argument("--no-planning", action="store_true", help="leave the planning of host-planned backends out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device")
        return 2
    registry = discover()
    names = options.backends.split(",") if options.backends else usable(registry)
    rows: list[dict[str, Any]] = []
    for name in names:
        found = list(measure(name, registry)) if name else []
        if f"mha/{name}" in NAIVE_PLAN and not options.no_planning:
            found += measure_planning(name, registry)
        for row in found:
            print(show(row), flush=True)
        rows += found
        save(rows, options.out)
    failed = [row for row in rows if not row.get("passed")]
    print(f"{len(rows) - len(failed)} of {len(rows)} within their bars")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AttnError as error:
        sys.exit(str(error))
