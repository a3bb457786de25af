"""Options of the suite, and the table that it writes at the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser):
    group = parser.getgroup("bridges")
    group.addoption("--vllm-python", default=os.environ.get("ATTN_VLLM_PYTHON"), help="python of the vLLM environment")
    group.addoption(
        "--bridge-report",
        default=os.environ.get("ATTN_BRIDGE_REPORT", "build/bridges"),
        help="folder for vllm.json and vllm.md, models and logs",
    )


@pytest.fixture(scope="session")
def servers(request):
    from harness import Servers

    python = request.config.getoption("--vllm-python")
    if not python:
        pytest.exit("--vllm-python (or ATTN_VLLM_PYTHON) names the python of an environment with vLLM", returncode=2)
    made = Servers(Path(python), Path(request.config.getoption("--bridge-report")).resolve())
    yield made
    made.write_table()
