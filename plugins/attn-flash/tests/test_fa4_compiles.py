"""The adapter's calls of FlashAttention 4, compiled to sm_90a and sm_100a machine code, where the library is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from compile_fa4 import CASES

PROGRAM = Path(__file__).parent / "compile_fa4.py"
_MISSING = [m for m in ("cutlass", "quack", "tvm_ffi", "flash_attn") if importlib.util.find_spec(m) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)} (pip install flash-attn-4)")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_call_compiles(arch: str) -> None:
    made = subprocess.run([sys.executable, str(PROGRAM), arch], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    found = json.loads(made.stdout.splitlines()[-1])
    assert list(found) == list(CASES)
    failures = {name: text for name, text in found.items() if isinstance(text, str)}
    assert not failures
    for name, (out, lse) in found.items():
        assert out[:2] == lse, name  # the LSE comes as [T, H]


def test_the_program_names_what_it_compiles() -> None:
    assert {"tree", "packed", "window, sinks", "prefill, slots"} <= set(CASES)
