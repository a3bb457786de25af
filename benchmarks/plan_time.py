"""Time of one plan: ``plan()`` in a loop with 25 toy plugins, and the whole ``attn plan`` process beside ``python -c pass``.

Usage: python benchmarks/plan_time.py [--rounds N] [--no-processes]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "core" / "tests"))

from _common import provenance, write
from attn_core.manifest import Manifest
from attn_core.options import Options
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from toys import hybrid_model, mha_model, mixed_model, mla_model, toy

MODELS = Path(__file__).resolve().parents[1] / "core" / "tests" / "data" / "models"
ATTN = ("-c", "import sys; from attn_core.cli import main; sys.exit(main())")
#: What a warm plan and a whole process may take, in milliseconds.
AIMS = {"plan": 5.0, "process": 200.0}


def toys(count: int = 25) -> list[Manifest]:
    """Toy backends of the kinds at hand, with pages and ranks of their own."""
    pages = ([1], [16, 32, 64], [64], [16, 64], [32, 64, 128])
    kinds = ["mha"] * (count - 6) + ["mla"] * 3 + ["gdn"] * 3
    return [
        toy(f"t{i}", kind=kind, order=[{"rank": 10 + i}], **({} if kind == "gdn" else {"page_size": pages[i % 5]}))
        for i, kind in enumerate(kinds)
    ]


def loops(rounds: int) -> dict[str, float]:
    """Median CPU milliseconds of ``solve_plan``, warm: one thread, so waiting for a busy machine does not count."""
    manifests, platform = toys(), parse_platform("cuda:sm90,cuda=13.0")
    speculative = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}
    cases = {
        "one group": (mha_model(), {}),
        "two groups, two pools": (mixed_model(), {}),
        "latent": (mla_model(), {}),
        "hybrid": (hybrid_model(), {}),
        "one group, tree speculation and a draft": (mha_model(), speculative),
    }
    found = {}
    for name, (model, options) in cases.items():
        chosen = Options.of(options)
        solve_plan(model, platform, chosen, manifests)
        times = []
        for _ in range(rounds):
            started = time.process_time()
            solve_plan(model, platform, chosen, manifests)
            times.append(1e3 * (time.process_time() - started))
        found[name] = round(statistics.median(times), 3)
    return found


def environment() -> dict[str, str]:
    """The environment of a measured process: modules are compiled once, as pip does when it installs them."""
    mine = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**mine, "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "attn-plan-time")}


def process(rounds: int, *command: str) -> dict[str, float]:
    """A whole process: median wall time, best wall time, and median CPU time, in milliseconds."""
    walls, busy = [], []
    for _ in range(rounds + 1):
        before, started = os.times(), time.perf_counter()
        subprocess.run([sys.executable, *command], capture_output=True, check=True, env=environment())
        walls.append(1e3 * (time.perf_counter() - started))
        after = os.times()
        busy.append(1e3 * (after.children_user + after.children_system - before.children_user - before.children_system))
    middle = statistics.median
    del walls[0], busy[0]  # the first run compiles
    return {"wall": round(middle(walls), 1), "best": round(min(walls), 1), "cpu": round(middle(busy), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--no-processes", action="store_true")
    options = parser.parse_args()
    content: dict[str, Any] = {
        **provenance(),
        "load": round(os.getloadavg()[0], 1),
        "aims_ms": AIMS,
        "plan_ms": loops(options.rounds),
    }
    if not options.no_processes:
        model = str(MODELS / "llama-3.1-8b.json")
        flags = ("--model", model, "--platform", "cuda:sm90,cuda=13.0", "--allow-planned")
        content["process_ms"] = {
            "python -c pass": process(20, "-c", "pass"),
            "attn plan": process(20, *ATTN, "plan", *flags),
            "attn plan --json": process(20, *ATTN, "plan", *flags, "--json"),
        }
    for name, value in content["plan_ms"].items():
        print(f"{value:8.2f} ms  plan(): {name}")
    for name, figures in content.get("process_ms", {}).items():
        print("  ".join(f"{key} {value:6.1f} ms" for key, value in figures.items()) + f"  {name}")
    write("plan_time", content)


if __name__ == "__main__":
    main()
