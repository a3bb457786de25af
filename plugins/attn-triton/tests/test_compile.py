"""Every kernel compiles for every declared family of GPUs, without one, and fits into its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_triton


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "gfx942", "gfx950"])
def test_kernels_compile(arch, tmp_path):
    file = tmp_path / "resources.json"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "attn_triton.crosscompile", str(file), arch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    table = json.loads(file.read_text())
    names = {row["name"] for row in table["kernels"]}
    assert {"prepare_kernel", "attention_kernel", "merge_kernel", "store_kernel"} <= names
    assert ("hopper_kernel" in names) == (arch == "sm90")
    for row in table["kernels"]:
        assert row["shared"] <= table["shared_limit"][arch], row
