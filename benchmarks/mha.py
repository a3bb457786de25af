"""Attention kernels side by side: triton (ours) against what is installed, one run, one table.

    python benchmarks/mha.py [--quick] [--out benchmarks/results/mha-h200.json] [--plot mha.png]

Decode is measured in bytes of keys and values against the measured copy bandwidth, prefill in operations on visible
(query, key) pairs against the measured matrix rate. Decode steps run in one CUDA graph over several caches, so that no cache
stays in L2. ``recorded`` are the figures of peers' Triton kernels from an earlier run on the same kind of machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from _mha_peers import RECORDED_DECODE, RECORDED_PREFILL, peers
from _mha_world import Shape, build_world, make_context, reference, time_graph, triton_calls

DECODE = (
    Shape(32, 8192), Shape(32, 8192, page=64), Shape(1, 131072), Shape(1, 8192), Shape(8, 4096), Shape(128, 2048),
    Shape(256, 1024), Shape(32, 8192, 32, 32), Shape(32, 8192, 64, 8, 64), Shape(16, 8192, 16, 8, 256), Shape(32, 8192, 8, 1),
    Shape(1, 32768), Shape(4, 131072), Shape(64, 512), Shape(16, 16384), Shape(32, 8192, 48, 4, 192),
)  # fmt: skip
NARROW = (
    Shape(32, 8192, kv="fp8_e4m3"), Shape(32, 8192, page=64, kv="fp8_e4m3"), Shape(32, 8192, page=64, kv="fp8_e5m2"),
    Shape(1, 131072, page=64, kv="fp8_e4m3"), Shape(32, 8192, page=64, kv="fp4"),
)  # fmt: skip
PREFILL = (
    Shape(1, 8192, new=8192, page=64), Shape(1, 8192, new=8192, page=16), Shape(1, 8192, new=8192, page=128),
    Shape(1, 33280, new=512, page=64), Shape(1, 8192, new=4096, page=64), Shape(4, 2048, new=2048, page=64),
    Shape(1, 32768, new=32768, page=64, window=1024), Shape(1, 8192, 16, 8, 256, new=8192, page=64),
)  # fmt: skip


def measure_ceilings() -> dict[str, float]:
    """Copy bandwidth in TB/s (read plus written) and the rate of an 8192^3 product of random bf16 matrices in TFLOP/s."""
    x = torch.randn(1 << 30, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    copy = 2 * x.nbytes / statistics.median(times) / 1e9
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"copy_tb_s": round(copy, 3), "matmul_tflop_s": round(2 * 8192**3 / time_graph([lambda: a @ b]) / 1e6, 1)}


def measure(shape: Shape, ceilings: dict[str, float], quick: bool) -> Iterator[dict[str, Any]]:
    """One row for each kernel that takes the shape."""
    world = build_world(shape)
    check = shape.kv_len * shape.new <= 1 << 27
    want = reference(world) if check else None
    programs: dict[str, Callable[[Any], Any]] = {"triton": triton_calls, **({} if quick else peers(shape))}
    for name, make in programs.items():
        row: dict[str, Any] = {"kernel": name, "shape": str(shape), **vars(shape)}
        try:
            world.kept.clear()
            calls = make(world)
            for call in calls:
                call()
            out = world.kept["out"][0]
            if want is not None:
                have = out[: shape.new].float()
                row["relative_error"] = round(float((have - want).norm() / want.norm()), 5)
            micros = time_graph(calls, repeats=10 if quick else 20, budget_ms=40 if quick else 150)
        except Exception as error:
            yield {**row, "failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        row["us"] = round(micros, 1)
        if shape.phase == "decode":
            row["tb_s"] = round(shape.kv_bytes / micros / 1e6, 3)
            row["of_ceiling"] = round(row["tb_s"] / ceilings["copy_tb_s"], 3)
        else:
            row["tflop_s"] = round(shape.flops / micros / 1e6, 1)
            row["of_ceiling"] = round(row["tflop_s"] / ceilings["matmul_tflop_s"], 3)
        yield row


def measure_step(layers: int = 32) -> dict[str, float]:
    """A decode step of `layers` layers: metadata and one graph replay, against the same launches without metadata."""
    world = build_world(Shape(32, 2048))
    from attn_core.context import GraphLimits
    from attn_triton.backend import TritonBackend

    backend = TritonBackend(make_context(world))
    limits = GraphLimits((32,), 32, 1, 2048, 4096)
    state = backend.attn_graph_state(world.group, ("decode",), limits, 0)
    metadata = backend.attn_metadata(world.batch, world.group, "decode", state, True)
    out = torch.empty_like(world.inputs[0].q)
    calls = [
        lambda n=n: backend.attn_decode(
            world.inputs[n % len(world.inputs)], world.layer, world.caches[n % len(world.caches)], metadata, out
        )
        for n in range(layers)
    ]
    bare = time_graph(calls) * layers
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # the host runs ahead, as a server's does
        start.record()
        backend.attn_metadata(world.batch, world.group, "decode", state, False)
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    step = statistics.median(times)
    return {
        "layers": layers,
        "step_us": round(step, 1),
        "kernels_us": round(bare, 1),
        "overhead": round(step / bare - 1, 4),
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to the better recorded peer of each decode shape, and their geometric mean."""
    ours = {row["shape"]: row for row in rows if row["kernel"] == "triton" and "us" in row}
    ratios = {name: round(best / ours[name]["us"], 3) for name, best in RECORDED_DECODE.items() if name in ours}
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else math.nan
    return {
        "decode_ratio_to_recorded_peers": ratios,
        "geometric_mean": round(mean, 3),
        "lowest": min(ratios.values(), default=None),
    }


def versions() -> dict[str, Any]:
    """Hardware and software of this run."""
    import triton

    facts = torch.cuda.get_device_properties(0)
    return {
        "device": facts.name, "processors": facts.multi_processor_count, "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def plot(report: dict[str, Any], path: Path) -> None:
    """Fractions of the ceilings as bars, ours and the best of the others."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["rows"] if "of_ceiling" in row]
    names = list(dict.fromkeys(row["shape"] for row in rows))
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(names) * max(1, len(kernels) / 2) + 1.5))
    height = 0.8 / len(kernels)
    for number, kernel in enumerate(kernels):
        found = {row["shape"]: row["of_ceiling"] for row in rows if row["kernel"] == kernel}
        axes.barh(
            [i + number * height for i in range(len(names))], [found.get(n, 0) for n in names], height, label=kernel
        )
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.5)
    axes.set_xlabel("fraction of the measured ceiling (copy bandwidth for decode, matrix rate for prefill)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def show(row: dict[str, Any]) -> str:
    if "us" not in row:
        return f"{row['shape']:44} {row['kernel']:10} {row['failed'][:60]}"
    rate = f"{row['tb_s']:6.3f} TB/s " if "tb_s" in row else f"{row['tflop_s']:6.1f} TF/s "
    return f"{row['shape']:44} {row['kernel']:10} {row['us']:9.1f} us {rate} {row['of_ceiling']:.3f} {row.get('relative_error', '')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="our kernels only, fewer repeats")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--replot", type=Path, help="draw the plot of an earlier report; needs no GPU")
    options = parser.parse_args()
    if options.replot:
        plot(json.loads(options.replot.read_text()), options.plot or options.replot.with_suffix(".png"))
        return
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()  # a cache inside the segment of a freed copy buffer reads slower
    print(ceilings)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"schema_version": 1, **versions(), "ceilings": ceilings, "rows": rows}
    report |= {"recorded_decode_us": RECORDED_DECODE, "recorded_prefill_tflop_s": RECORDED_PREFILL}
    for shape in (*DECODE, *NARROW, *PREFILL):
        for row in measure(shape, ceilings, options.quick):
            rows.append(row)
            print(show(row), flush=True)
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    report["step"] = measure_step()
    report["summary"] = summarise(rows)
    print(report["step"], report["summary"])
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(report, options.plot)


if __name__ == "__main__":
    main()
