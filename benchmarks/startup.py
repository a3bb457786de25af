"""Process time of ``attn list`` and of ``import attn_core``, beside ``import torch`` and whatever servers are installed.

    python benchmarks/startup.py

Runs are interleaved, so that a busy machine slows all of them alike; the figures are medians of whole processes.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from pathlib import Path

from _common import provenance, write

ROUNDS = 9


def commands() -> dict[str, list[str]]:
    attn = str(Path(sys.executable).parent / "attn")
    found = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import attn_core": [sys.executable, "-c", "import attn_core"],
        "attn list": [attn, "list"],
        "attn list --json": [attn, "list", "--json"],
    }
    for name in ("torch", "transformers", "vllm", "sglang"):
        if importlib.util.find_spec(name) is not None:
            found[f"import {name}"] = [sys.executable, "-c", f"import {name}"]
    return found


def modules_after_import() -> int:
    """How many modules ``import attn_core`` brings, of our own making."""
    code = "import sys, attn_core; print(sum(name.startswith('attn_core') for name in sys.modules))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in commands()}
    for _ in range(ROUNDS):
        for name, command in commands().items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times[name].append(time.perf_counter() - started)
    rows = {name: {"median_s": statistics.median(values), "min_s": min(values)} for name, values in times.items()}
    for name, row in rows.items():
        print(f"{name:<20} {row['median_s'] * 1e3:8.1f} ms   (min {row['min_s'] * 1e3:.1f})")
    count = modules_after_import()
    print(f"modules of attn_core after import attn_core: {count}")
    write("startup", {**provenance(), "rounds": ROUNDS, "rows": rows, "own_modules": count})


if __name__ == "__main__":
    main()
