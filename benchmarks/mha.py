"""Attention kernels side by side: triton (ours) against what is installed, one run, one table.

    python benchmarks/mha.py [--peers FOLDER] [--quick] [--out benchmarks/results/mha-h200.json] [--plot mha.png]

Decode is measured in bytes of keys and values against the measured copy bandwidth, prefill in operations on visible
(query, key) pairs against the measured matrix rate. Decode steps run in one CUDA graph over several caches, so that no cache
stays in L2. Every kernel's numbers are compared with ours before it is timed, and ours with plain torch in fp32. FOLDER holds
the wheels of SGLang and vLLM, whose Triton kernels are loaded from there; ``--warm N`` compiles everything in N processes first.

All shapes are measured with the kernels that compile fast, then all again with the others (``SLOW``), so that a run that is cut
short has lost the least. FA4 keeps what it compiled for other processes with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from _mha_load import Missing
from _mha_peers import RECORDED_DECODE, TRITON_PEERS, Make, Program, peer_versions, peers
from _mha_plot import plot
from _mha_world import Shape, World, build_world, make_context, reference, time_graph, triton_calls

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


#: Largest relative difference between two kernels' results that counts as the same answer.
SAME = 0.01
#: Kernels that take 10 to 20 seconds to compile for a new kind of shape: measured after all others.
SLOW = frozenset({"fa4"})


def ours(world: World) -> list[Program]:
    """Our backend as a program."""
    calls = triton_calls(world)
    return [Program("default", calls, world.kept["out"])]


def measure(
    shape: Shape, ceilings: dict[str, float], options: argparse.Namespace, slow: bool = False
) -> Iterator[dict[str, Any]]:
    """One row for each kernel that takes the shape, ours first; or for each of the SLOW ones, ours run for comparison only."""
    others = {} if options.quick else peers(shape, options.peers)
    programs: dict[str, Make] = {k: v for k, v in others.items() if (k in SLOW) == slow and k not in options.without}
    if slow and not programs:
        return
    late = options.budget and time.monotonic() - START > options.budget
    facts = {"shape": str(shape), **vars(shape)}
    spent = {"unavailable": f"the budget of {options.budget:.0f} s is spent"}
    if slow and late:
        yield from ({"kernel": name, **facts, **spent} for name in programs)
        return
    world = build_world(shape)
    want = reference(world) if shape.kv_len * shape.new <= 1 << 27 and not slow else None
    mine: list[torch.Tensor] = []
    if slow:
        mine += own_results(world)
    else:
        programs = {"triton": ours, **programs}
    for name, make in programs.items():
        row: dict[str, Any] = {"kernel": name, **facts}
        if late and mine:
            yield row | spent
            continue
        try:
            row |= run_kernel(make(world), mine, want, shape, options.quick)
        except Missing as error:
            yield {**row, "unavailable": str(error)[:300]}
            continue
        except Exception as error:
            yield {**row, "unavailable": f"{type(error).__name__}: {error}"[:300]}
            if "illegal memory access" in str(error):
                raise SystemExit(f"{name} broke the device on {shape}: {error}") from error
            continue
        yield row | rate_of(shape, row["us"], ceilings)


def own_results(world: World) -> list[torch.Tensor]:
    """What our kernel gives, one tensor for each copy of the cache."""
    (program,) = ours(world)
    for call in program.calls:
        call()
    return [out.clone() for out in program.outs]


def rate_of(shape: Shape, us: float, ceilings: dict[str, float]) -> dict[str, float]:
    """Bytes (decode) or operations (prefill) in a time, and their share of what the hardware was measured to do."""
    if shape.phase == "decode":
        rate = shape.kv_bytes / us / 1e6
        return {"tb_s": round(rate, 3), "of_ceiling": round(rate / ceilings["copy_tb_s"], 3)}
    rate = shape.flops / us / 1e6
    return {"tflop_s": round(rate, 1), "of_ceiling": round(rate / ceilings["matmul_tflop_s"], 3)}


def run_kernel(
    programs: list[Program], mine: list[torch.Tensor], want: torch.Tensor | None, shape: Shape, quick: bool
) -> dict[str, Any]:
    """Check every program, then time the two that look fastest: the best figures. `mine` is filled by ours, the first."""
    checked: list[tuple[dict[str, Any], Program]] = []
    for program in programs:
        for call in program.calls:
            call()
        found: dict[str, Any] = {"choice": program.choice}
        if want is not None:
            found["relative_error"] = difference(program.outs[0][: shape.new], want)
        if not mine:
            mine += [out.clone() for out in program.outs]
        else:
            worst = max(difference(have, other) for have, other in zip(program.outs, mine, strict=True))
            found["difference"] = worst
            if not worst <= SAME:
                raise Missing(f"wrong: differs from ours by {worst} ({program.choice})")
        checked.append((found, program))
    if len(checked) > 2:
        checked = sorted(checked, key=lambda pair: time_graph(pair[1].calls, 5, 8))[:2]
    for found, program in checked:
        found["us"] = round(time_graph(program.calls, 10 if quick else 20, 40 if quick else 120), 1)
    return min((found for found, _ in checked), key=lambda found: found["us"])


def difference(have: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of `want`; NaN anywhere gives NaN."""
    have, want = have.float(), want.float()
    return round(float((have - want).norm() / want.norm()), 5)


@dataclass(frozen=True)
class WarmJob:
    """What one process compiles at a time: kernels of one shape."""

    shape: Shape
    kernels: frozenset[str]
    wheels: Path | None


def warm_jobs(shapes: Sequence[Shape], options: argparse.Namespace) -> list[WarmJob]:
    """Every kernel of every shape once; the slow ones first, and only for shapes that they are compiled anew for."""
    jobs: dict[tuple[Any, ...], WarmJob] = {}
    names = {shape: {"triton", *peers(shape, options.peers)}.difference(options.without) for shape in shapes}
    for shape in shapes:
        kind = (shape.dim, shape.q_heads // shape.kv_heads, shape.page, shape.kv, shape.window, shape.phase)
        for name in names[shape] & SLOW:
            jobs.setdefault((name, *kind), WarmJob(shape, frozenset({name}), options.peers))
    return [*jobs.values(), *(WarmJob(shape, frozenset(names[shape] - SLOW), options.peers) for shape in shapes)]


def warm(job: WarmJob) -> list[str]:
    """Compile the kernels of a job: what failed."""
    problems = []
    try:
        world = build_world(job.shape, spread=1)
    except Exception as error:
        return [f"{job.shape}: {type(error).__name__}: {error}"[:200]]
    for name, make in {"triton": ours, **peers(job.shape, job.wheels)}.items():
        if name not in job.kernels:
            continue
        try:
            for program in make(world):
                for call in program.calls:
                    call()
            torch.cuda.synchronize()
        except Exception as error:
            problems.append(f"{job.shape} {name}: {type(error).__name__}: {error}"[:200])
    return problems


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
    """Ratios to the better of the two Triton peers on each decode shape of this run (or recorded), and their mean."""
    times = {(row["kernel"], row["shape"]): row["us"] for row in rows if "us" in row}
    ratios, source = {}, {}
    for shape in map(str, DECODE):
        if ("triton", shape) not in times or shape == str(Shape(32, 8192, page=64)):
            continue
        seen = [times[name, shape] for name in TRITON_PEERS if (name, shape) in times]
        best = min(seen) if seen else RECORDED_DECODE.get(shape)
        if best is not None:
            ratios[shape] = round(best / times["triton", shape], 3)
            source[shape] = "this run" if seen else "recorded"
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else math.nan
    return {
        "decode_ratio_to_better_triton_peer": ratios,
        "peer_figures_from": source,
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


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "us" not in row:
        return f"{row['shape']:44} {row['kernel']:10} unavailable: {row['unavailable'][:90]}"
    rate = f"{row['tb_s']:6.3f} TB/s " if "tb_s" in row else f"{row['tflop_s']:6.1f} TF/s "
    return f"{row['shape']:44} {row['kernel']:10} {row['us']:9.1f} us {rate} {row['of_ceiling']:.3f} {row.get('relative_error', '')} {row.get('choice', '')}"


START = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="our kernels only, fewer repeats")
    parser.add_argument(
        "--peers", type=Path, default=os.environ.get("MHA_PEERS"), help="folder with wheels of SGLang, vLLM"
    )
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="compile everything in N processes first")
    parser.add_argument("--budget", type=float, default=0, metavar="SECONDS", help="then only our kernels; 0: none")
    parser.add_argument("--without", action="append", default=[], metavar="KERNEL", help="leave one out (repeatable)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--replot", type=Path, help="draw the plot of an earlier report; needs no GPU")
    options = parser.parse_args()
    options.peers = None if options.peers is None else Path(options.peers)
    if options.replot:
        plot(json.loads(options.replot.read_text()), options.plot or options.replot.with_suffix(".png"))
        return
    shapes = (*DECODE, *NARROW, *PREFILL)
    if options.warm:
        with multiprocessing.get_context("spawn").Pool(options.warm) as pool:
            for problems in pool.imap_unordered(warm, warm_jobs(shapes, options)):
                print(*problems, sep="\n", end="\n" if problems else "")
        print(f"compiled after {time.monotonic() - START:.0f} s", flush=True)
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()  # a cache inside the segment of a freed copy buffer reads slower
    print(ceilings)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"schema_version": 2, **versions(), "peers": peer_versions(options.peers)}
    report |= {"ceilings": ceilings, "rows": rows}
    order = [str(shape) for shape in shapes]
    for slow in (False, True):
        for shape in shapes:
            for row in measure(shape, ceilings, options, slow):
                rows.append(row)
                print(show(row), flush=True)
            torch.cuda.empty_cache()
            save(report, options.out)
        if not slow:
            report["step"] = measure_step()
            report["summary"] = summarise(rows)
            print(report["step"], report["summary"], f"{time.monotonic() - START:.0f} s", sep="\n", flush=True)
    rows.sort(key=lambda row: order.index(row["shape"]))
    save(report, options.out)
    print(f"{time.monotonic() - START:.0f} s")
    if options.plot:
        plot(report, options.plot)


def save(report: dict[str, Any], path: Path | None) -> None:
    """Write the report as it is by now."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
