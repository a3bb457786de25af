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
    assert {"expand_kernel", "merge_states_kernel"} <= names
    assert ("hopper_kernel" in names) == (arch == "sm90")
    for row in table["kernels"]:
        assert row["shared"] <= table["shared_limit"][arch], row
        assert row["narrow_dots"] == 0, row


def test_narrow_operands_are_seen():
    from attn_triton.crosscompile import narrow_dots

    text = (
        "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0}>\n"
        "%s = tt.dot %a, %b, %c : tensor<16x32xf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 8}>> * "
        "tensor<32x64xf16, #ttg.dot_op<{opIdx = 1, parent = #mma, kWidth = 8}>> -> tensor<16x64xf32, #mma>\n"
    )
    assert narrow_dots(text) == 1
    assert narrow_dots(text.replace("kWidth = 8", "kWidth = 4")) == 0
    assert narrow_dots(text.replace("versionMajor = 2", "versionMajor = 3")) == 0
