"""Numbers of a step and of a layer's rules do not make kernels be compiled again: a server would wait for the compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from attn_triton.metadata import allocate

#: Runs in a process of its own: the interpreter, which the other tests use, has no specialisation.
SCRIPT = """
import attn_triton
from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import make_case
from attn_core.testing.harness import BackendUnderTest
from attn_triton import backend
from attn_triton.crosscompile import _manifests, recording

backend.device_facts = lambda device: ("sm90", 132)
STEPS = {
    "rows": [("decode", {}, {"kv_lens": (300,) * rows}) for rows in range(1, 12)],
    "lengths": [("decode", {}, {"kv_lens": (n, 3)}) for n in (1, 16, 17, 700, 5000)],
    "windows": [("decode", {"window": n}, {"kv_lens": (300,)}) for n in (1, 16, 40, 128)],
    "right windows": [
        ("prefill", {"window": 9, "window_right": n}, {"query_lens": (90,), "kv_lens": (300,)}) for n in (1, 3, 16)
    ],
    "chunks": [("prefill", {"chunk": n}, {"query_lens": (90,), "kv_lens": (300,)}) for n in (1, 12, 16)],
    "queries": [("prefill", {}, {"query_lens": (n,), "kv_lens": (300,)}) for n in (5, 6, 7, 8)],
    "lse": [("decode", {}, {"kv_lens": (300, 9), "needs_lse": wanted}) for wanted in (False, True)],
    "drafts": [
        ("verify", {}, {"query_lens": (n,), "kv_lens": (300,), "parents": (tuple(range(-1, n - 1)),)}) for n in (9, 13, 16)
    ],
    "spans": [
        ("prefill", {}, {"query_lens": (90,) * rows, "kv_lens": (300,) * rows, "spans": ((0, 220, 240),) * rows}) for rows in (1, 2, 3)
    ],
}
for kind, steps in STEPS.items():
    for phase, rules, fields in steps:
        geometry = MhaGeometry(4, 2, 32, 16, 0.3, **rules)
        case = make_case(geometry, phase, dtype="bf16", page_size=16, **fields)
        session = BackendUnderTest.of_module(attn_triton, _manifests()["mha"]).open(case)
        with recording("sm90") as seen:
            session.run(case)
        for name, signature in sorted(seen):
            print(kind, name, signature, sep="|")
"""


@pytest.fixture(scope="module")
def signatures() -> dict[str, dict[str, set[str]]]:
    """What each kernel would be compiled for, by kind of step."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, set[str]]] = {}
    for line in done.stdout.splitlines():
        kind, name, signature = line.split("|", 2)
        found.setdefault(kind, {}).setdefault(name, set()).add(signature)
    return found


@pytest.mark.needs_triton
@pytest.mark.parametrize(
    "kind", ["rows", "lengths", "windows", "right windows", "chunks", "queries", "lse", "drafts", "spans"]
)
def test_numbers_are_no_constants(signatures, kind):
    found = signatures[kind]
    assert {"prepare_kernel", "attention_kernel"} <= set(found)
    assert {name: len(seen) for name, seen in found.items()} == dict.fromkeys(found, 1)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("width", [8, 10, 128])
def test_every_buffer_is_aligned(rows, width):
    buffers = allocate(rows, rows + 1, spans=rows, parts=rows, width=width, device=torch.device("cpu"))
    addresses = {name: getattr(buffers, name).data_ptr() for name in buffers.__slots__}
    assert {name: address % 16 for name, address in addresses.items()} == dict.fromkeys(addresses, 0)
