"""``attn verify --jobs``: the same report from several processes, and a crash that costs one cell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from attn_core.errors import UsageError
from attn_core.testing.fake import make_distribution, manifest_text
from attn_core.testing.report import load_schema, run_verification
from test_kit_run import backend_of

# One phase of this backend takes the process down, another never returns.
CODE = """
import os, signal, threading, time
from attn_core.hookspecs import hookimpl
from attn_core.testing.reference_backend import ReferenceBackend


class Crashing(ReferenceBackend):
    @hookimpl
    def attn_metadata(self, batch, group, phase, state, capture):
        if phase == os.environ.get("CRASH"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if os.environ.get("QUIT"):  # the answer goes out first
            threading.Timer(0.5, os._exit, (3,)).start()
        if phase == os.environ.get("HANG"):
            time.sleep(60)
        return super().attn_metadata(batch, group, phase, state, capture)


@hookimpl
def attn_create(manifest, variant, context):
    return Crashing(context)
"""

RUN = """
import json, sys
from attn_core.testing import workers
from attn_core.testing.report import run_verification
if __name__ == "__main__":
    workers.run_cells.__kwdefaults__["cell_limit_s"] = float(sys.argv[2])
    report = run_verification("mha", "vendor", quick=True, jobs=int(sys.argv[1]), only=("attend_numbers",))
    print(json.dumps(report))
"""


def run(site: Path, jobs: int, limit: float = 600.0, **variables: str) -> dict:
    script = site / "run_kit.py"
    script.write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [sys.executable, str(script), str(jobs), str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report: dict = json.loads(done.stdout)
    jsonschema.validate(report, load_schema())
    return report


def outcomes(report: dict) -> dict[str, str]:
    return {cell["id"]: cell["outcome"] for cell in report["cells"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    manifest = manifest_text("vendor", phases=("prefill", "decode"), page_sizes=(4,), head_dims=((32, 32),))
    make_distribution(folder, "attn-vendor", module_source=CODE, manifest_toml=manifest)
    return folder


def test_two_processes_report_what_one_does(site: Path) -> None:
    alone, shared = run(site, 1), run(site, 2)
    assert outcomes(shared) == outcomes(alone), shared["failures"]
    assert set(outcomes(alone).values()) == {"passed"}, alone["failures"]
    assert len(shared["cells"]) == sum(shared["summary"].values()) >= 2


@pytest.mark.parametrize(
    ("variables", "limit", "found"),
    [({"CRASH": "decode"}, 600.0, "killed by SIGSEGV"), ({"HANG": "decode"}, 15.0, "no answer in 15 s")],
)
def test_a_lost_process_fails_its_cell_only(site: Path, variables: dict, limit: float, found: str) -> None:
    report = run(site, 2, limit, **variables)
    for cell in report["cells"]:
        assert cell["outcome"] == ("failed" if cell["phase"] == "decode" else "passed"), cell
    assert {cell["phase"] for cell in report["cells"]} == {"prefill", "decode"}
    assert all(found in failure for failure in report["failures"])


def test_processes_that_end_between_two_cells_lose_no_result(site: Path) -> None:
    report = run(site, 2, QUIT="1")
    assert len(report["cells"]) == len(run(site, 1)["cells"])
    assert {cell["outcome"] for cell in report["cells"]} <= {"passed", "failed"}
    assert all("exit status 3" in failure for failure in report["failures"])


def test_only_installed_backends_go_to_processes() -> None:
    with pytest.raises(UsageError, match="cannot be run in worker processes"):
        run_verification("mha", "fake", jobs=2, backend=backend_of())


def test_one_variant_can_be_asked_for() -> None:
    report = run_verification("mha", "fake:default", quick=True, only=("refusal",), backend=backend_of())
    assert report["summary"]["refused"] > 0
    with pytest.raises(UsageError, match="no variant 'other'"):
        run_verification("mha", "fake:other", quick=True, backend=backend_of())
