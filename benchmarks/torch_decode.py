"""Decode of mha/torch_native on a CPU against a floor: dense attention over gathered keys, plus one copy of the pages.

    python benchmarks/torch_decode.py [--quick] [--json FILE]

The floor has two parts, both measured here: the fastest dense form of the same work (keys and values already gathered, query
heads packed by KV head, no ``enable_gqa``), and a copy of the pages into a buffer that was allocated before. All three are
timed in turn, round by round, on random data; the figures are medians. ``metadata`` is what a step costs once for all layers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.context import Context
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_torch.native import TorchNative

PAGE, Q_HEADS, KV_HEADS, DIM, KEYS = 16, 32, 8, 128, 2048
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def dense_forms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """q[B, Hk, G, D] packed by KV head over k, v[B, S, Hk, D]: the ways to compute it, by name."""
    scale = 1 / math.sqrt(DIM)
    strided = k.transpose(1, 2), v.transpose(1, 2)
    k_major, v_major = (x.transpose(1, 2).contiguous() for x in (k, v))
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k_major, v_major))

    def matmul() -> torch.Tensor:
        weights = torch.softmax(torch.bmm(flat_q, flat_k.transpose(1, 2)).float() * scale, -1).to(q.dtype)
        return torch.bmm(weights, flat_v)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "flash, token-major": lambda: _flash(q, *strided, scale=scale),
        "flash, head-major": lambda: _flash(q, k_major, v_major, scale=scale),
        "sdpa, head-major": lambda: sdpa(q, k_major, v_major, scale=scale),
        "bmm, head-major": matmul,
    }


def medians(work: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of each piece of work: the median over rounds in which all take turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 2):
        for name, function in work.items():
            start = time.perf_counter()
            function()
            if number >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(dtype_name: str, rows: int, lengths: list[int], rounds: int) -> dict[str, Any]:
    """One case: random pages in a random order, one new token a row."""
    torch.manual_seed(rows)
    dtype, pages = DTYPES[dtype_name], -(-max(lengths) // PAGE)
    count = 1 + rows * pages
    cache = MhaCache(*(torch.randn(count, PAGE, KV_HEADS, DIM, dtype=dtype) for _ in range(2)))
    table = (torch.randperm(count - 1)[: rows * pages] + 1).view(rows, pages).to(torch.int32)
    q = torch.randn(rows, Q_HEADS, DIM, dtype=dtype)
    backend, group = _backend(dtype)
    batch, layer = _batch(rows, lengths, table), MhaLayer(0, group)
    metadata = backend.attn_metadata(batch, group, "decode", None, False)
    out = torch.empty(rows, Q_HEADS, DIM, dtype=dtype)
    buffers = [torch.empty(rows * pages, PAGE, KV_HEADS, DIM, dtype=dtype) for _ in range(2)]
    index = table.flatten()

    def copy() -> None:
        torch.index_select(cache.k, 0, index, out=buffers[0])
        torch.index_select(cache.v, 0, index, out=buffers[1])

    copy()
    forms = dense_forms(q.view(rows, KV_HEADS, -1, DIM), *(b.view(rows, -1, KV_HEADS, DIM) for b in buffers))
    work = {
        **forms,
        "copy": copy,
        "backend": lambda: backend.attn_decode(MhaInputs(q), layer, cache, metadata, out),
        "metadata": lambda: backend.attn_metadata(batch, group, "decode", None, False),
    }
    found = medians(work, rounds)
    best = min(forms, key=lambda name: found[name])
    floor = found[best] + found["copy"]
    if set(lengths) == {KEYS}:
        expected = forms["flash, head-major"]()[0].reshape(rows, Q_HEADS, DIM)
        error = float((out.float() - expected.float()).abs().max() / expected.float().abs().max())
        assert error < (1e-5 if dtype == torch.float32 else 2e-2), f"wrong result: relative error {error}"
    return {
        "dtype": dtype_name, "rows": rows, "keys": [min(lengths), max(lengths)], "dense_ms": found[best],
        "dense_form": best, "copy_ms": found["copy"], "floor_ms": floor, "backend_ms": found["backend"],
        "ratio": found["backend"] / floor, "metadata_ms": found["metadata"],
    }  # fmt: skip


def _backend(dtype: torch.dtype) -> tuple[TorchNative, LayerGroup]:
    geometry = MhaGeometry(Q_HEADS, KV_HEADS, DIM, DIM, 1 / math.sqrt(DIM))
    group = LayerGroup("target", "full", "full", (0,), geometry, {"attend": "main"})
    return TorchNative(Context(torch.device("cpu"), dtype, group, pool_index={"attend": 0})), group


def _batch(rows: int, lengths: list[int], table: torch.Tensor) -> AttentionBatch:
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    return AttentionBatch(
        rows, rows, (Segment("decode", slice(0, rows), slice(0, rows), 1),),
        torch.arange(rows + 1, dtype=torch.int32), 1,
        addresses=(KvAddress(PAGE, kv_lens, torch.full((rows,), -1), max(lengths), table=table),),
    )  # fmt: skip


def hardware() -> dict[str, Any]:
    name = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), name
        )
    return {
        "cpu": name, "threads": torch.get_num_threads(), "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__, "python": platform.python_version(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, no batch of 32")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "torch_decode.json")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"hardware": hardware(), "cases": []}
    shape = {"page": PAGE, "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    report["shape"] = shape
    print(f"{report['hardware']}\n{shape}, milliseconds a layer, medians")
    print(f"{'case':24}{'dense':>9}{'copy':>9}{'sum':>9}{'backend':>9}{'ratio':>7}{'metadata':>10}  fastest dense form")
    ragged = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for rows in (1, 8) if arguments.quick else (1, 8, 32):
            mixed = torch.randint(KEYS // 2, KEYS + 1, (rows,), generator=ragged).tolist()
            for lengths in ([KEYS] * rows,) if rows == 1 or arguments.quick else ([KEYS] * rows, mixed):
                case = measure(dtype, rows, lengths, 5 if arguments.quick else 60 // rows + 15)
                report["cases"].append(case)
                low, high = case["keys"]
                name = f"{dtype} B={rows} {low if low == high else f'{low}..{high}'}"
                print(
                    f"{name:24}{case['dense_ms']:9.3f}{case['copy_ms']:9.3f}{case['floor_ms']:9.3f}"
                    f"{case['backend_ms']:9.3f}{case['ratio']:7.2f}{case['metadata_ms']:10.3f}  {case['dense_form']}",
                    flush=True,
                )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
