"""The kit as users run it: cells of a manifest, reports, failures with the smallest batch, the pytest command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from attn_core.errors import UsageError
from attn_core.geometry import MhaGeometry
from attn_core.manifest import Row
from attn_core.testing.bench import Bench
from attn_core.testing.cells import FAILED, PASSED, REFUSED, SKIPPED, count, describe, list_cells, run_cell
from attn_core.testing.checks import checks_of
from attn_core.testing.declared import Ask, Hardware, dtype_triples, head_dims, page_sizes, phases
from attn_core.testing.fake import make_manifest
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.reference_backend import ReferenceBackend, load_manifest
from attn_core.testing.report import in_turns, load_schema, run_verification, split_name
from attn_core.testing.shrink import shrink
from attn_core.testing.spec import CaseSpec
from kit_faults.numbers import WindowWide

GEOMETRY = MhaGeometry(4, 2, 32, 16, 0.3)


def small_manifest(**fields: object):
    chosen = {"page_sizes": (4,), "head_dims": ((32, 32),), "dtypes": (("fp32", "fp32"),), **fields}
    return make_manifest(**chosen)


def backend_of(cls: type = ReferenceBackend, **fields: object) -> BackendUnderTest:
    return BackendUnderTest(small_manifest(**fields), lambda manifest, variant, context: cls(context))


def run_all(backend: BackendUnderTest, quick: bool = True):
    return [run_cell(backend, cell) for cell in list_cells(backend, "cpu", quick)]


# --- cells --------------------------------------------------------------------------------------------------------------


def test_cells_are_exactly_what_is_declared() -> None:
    backend = backend_of(features=("sinks",), phases=("decode",))
    cells = list_cells(backend, "cpu")
    declared = [cell for cell in cells if not cell.undeclared]
    assert {cell.ask.phase for cell in declared if cell.ask} == {"decode"}
    assert {cell.ask.page_size for cell in declared if cell.ask} == {4}
    names = {cell.check for cell in declared}
    assert {"attend_numbers", "sinks", "sink_by_hand"} <= names
    assert not {"softcap", "window", "verify_tree", "graph_replay_never"} & names
    undeclared = {cell.undeclared for cell in cells if cell.undeclared}
    assert {
        "feature softcap",
        "feature sliding_window",
        "phase prefill",
        "page_size 64",
        "q bf16 with kv bf16",
    } <= undeclared
    assert "feature sinks" not in undeclared


def test_right_backend_passes_and_the_rest_is_refused() -> None:
    results = run_all(backend_of(features=("sinks", "lse", "writes_out", "strided_q", "zero_rows")))
    assert count(results)[FAILED] == 0, [r.problems for r in results if r.outcome == FAILED]
    totals = count(results)
    assert totals[PASSED] > 20
    assert totals[REFUSED] > 20
    refused = {r.cell.undeclared: r.reason for r in results if r.outcome == REFUSED}
    assert "softcap is not declared" in refused["feature softcap"]


@pytest.mark.parametrize("kind", ["gdn", "mla"])
def test_references_of_other_kinds_pass(kind: str) -> None:
    backend = BackendUnderTest.installed(kind, "reference")
    report = run_verification(kind, "reference", quick=True, backend=backend)
    assert report["summary"]["failed"] == 0, report["failures"]
    assert report["summary"]["passed"] > 10
    ran = {cell["check"] for cell in report["cells"] if cell["outcome"] == "passed"}
    assert ran == {check.name for check in checks_of(kind) if not check.device}


def test_a_page_size_that_is_only_emulated_counts_as_undeclared() -> None:
    results = run_all(backend_of())
    pages = {r.cell.undeclared: r.outcome for r in results if r.cell.undeclared.startswith("page_size")}
    assert pages["page_size 64"] == REFUSED  # 64 splits into pages of 4, but the kernel does not read 64
    assert "page_size 4" not in pages


def test_planned_variant_is_skipped_with_the_probe_s_reason() -> None:
    from attn_core.availability import Availability

    backend = backend_of()
    backend.probe = lambda manifest, platform: {"default": Availability.missing("vendor-kernels", "pip install it")}
    results = run_all(backend)
    assert [r.outcome for r in results] == [SKIPPED]
    assert "vendor-kernels" in results[0].reason


def test_bf16_is_not_run_under_the_triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(dtypes=(("bf16", "bf16"), ("fp16", "fp16")))
    variant = replace(backend.manifest.variants[0], requires=("triton>=3",))
    backend.manifest = replace(backend.manifest, variants=(variant,))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cells = [cell for cell in list_cells(backend, "cpu") if cell.check == "attend_numbers"]
    assert {cell.ask.dtypes[0]: bool(cell.skip) for cell in cells if cell.ask} == {"bf16": True, "fp16": False}
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not any(cell.skip for cell in list_cells(backend, "cpu"))


def test_candidates_come_from_the_row() -> None:
    row = load_manifest().variants[0].allow[0]
    assert page_sizes(row) == [1, 4, 12, 16, 64, 256]  # a range: its bounds and some between
    assert ("bf16", "fp4", "bf16") in dtype_triples(row)
    assert ("fp8_e4m3", "fp8_e4m3", "bf16") in dtype_triples(row)
    assert ("fp8_e4m3", "fp8_e4m3", "fp16") not in dtype_triples(row)
    assert any(a != b for a, b in head_dims(row))
    plain = make_manifest(page_sizes=(48,), head_dims=((200, 104),), phases=("decode", "verify")).variants[0].allow[0]
    assert page_sizes(plain) == [48]
    assert head_dims(plain) == [(200, 104)]
    assert phases(plain) == ["decode"]  # verify without a form of speculation cannot be asked for


def test_every_check_of_a_capability_exists() -> None:
    from attn_core.capabilities import FEATURES

    known = {check.name for kind in ("mha", "mm", "gdn", "mla") for check in checks_of(kind)}
    without = {"dcp"}  # needs an address form for a rank's own share of the pages
    for name, capability in FEATURES.items():
        assert set(capability.tests) <= known | without, name
    assert all(check.proves for kind in ("mha", "mm", "gdn", "mla") for check in checks_of(kind))


# --- failures -------------------------------------------------------------------------------------------------------------


def test_failure_says_which_declaration_is_false_with_the_smallest_batch() -> None:
    backend = backend_of(WindowWide, features=("sliding_window",), phases=("decode",))
    cell = next(cell for cell in list_cells(backend, "cpu") if cell.check == "window")
    result = run_cell(backend, cell)
    assert result.outcome == FAILED
    text = describe(backend, result)
    assert "mha/fake:default declares what is not so: window[default-decode-fp32/fp32-p4" in text
    assert "A window counts the query's own position" in text
    assert "declared   sliding_window for phase decode" in text
    assert "smallest   make_case(" in text
    # one row with one key more than the window is the smallest batch that shows a key too many
    window = int(re.search(r"window=(\d+)", result.smallest)[1])
    assert f"query_lens=(1,), kv_lens=({window + 1},)" in result.smallest


def test_shrink_keeps_the_failure() -> None:
    spec = CaseSpec(GEOMETRY, "prefill", (3, 1, 5), (9, 30, 12), strides="fused", pad_rows=2, form="csr", shared=1)

    def judge(candidate: CaseSpec) -> list[str]:
        pairs = zip(candidate.query_lens, candidate.kv_lens, strict=True)
        return ["long prefix"] if any(kv - q >= 7 for q, kv in pairs) else []

    small = shrink(spec, judge, budget=200)
    assert judge(small)
    assert small.query_lens == (1,)
    assert small.kv_lens == (8,)
    assert (small.strides, small.form, small.pad_rows, small.shared) == ("contiguous", "table", 0, 0)


def test_an_exception_of_the_backend_is_a_failure() -> None:
    class Broken(ReferenceBackend):
        def attend(self, *arguments: object):
            raise RuntimeError("kernel not built")

    backend = backend_of(Broken)
    result = run_cell(backend, list_cells(backend, "cpu")[0])
    assert result.outcome == FAILED
    assert "kernel not built" in result.problems[0]


def test_a_missing_hook_is_a_failure_that_names_it() -> None:
    class OnlyMetadata:
        attn_metadata = ReferenceBackend.attn_metadata

    backend = BackendUnderTest(small_manifest(), lambda manifest, variant, context: OnlyMetadata())
    result = run_cell(backend, list_cells(backend, "cpu")[0])
    assert result.outcome == FAILED
    assert "attn_extend" in result.problems[0]


def test_bench_lengths_stand_around_page_boundaries() -> None:
    row = load_manifest().variants[0].allow[0]
    bench = Bench(backend_of(), "default", row, Ask("decode", ("fp32", "fp32", "fp32"), 16, (32, 16), (4, 2)))
    assert bench.spec().kv_lens == (1, 15, 16, 17, 53)
    assert bench.spec(phase="verify").kv_lens == (3, 17, 18, 19, 55)


# --- reports and commands -----------------------------------------------------------------------------------------------


def test_report_matches_its_schema_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.json"
    seen: list[int] = []
    report = run_verification(
        "mha",
        "fake",
        quick=True,
        report_path=path,
        backend=backend_of(),
        progress=lambda done, total, result: seen.append(done),
    )
    assert json.loads(path.read_text()) == report
    jsonschema.validate(report, load_schema())
    assert report["backend"] == "mha/fake"
    assert report["summary"]["failed"] == 0
    assert sum(report["summary"].values()) == len(report["cells"]) == seen[-1]
    assert report["hardware"]["cores"] >= 1
    assert {"python", "torch", "attn-core"} <= set(report["versions"])


def test_report_of_a_false_declaration_has_the_failure(tmp_path: Path) -> None:
    backend = backend_of(WindowWide, features=("sliding_window",), phases=("decode",))
    report = run_verification("mha", "fake", quick=True, only=("window",), backend=backend)
    assert report["summary"] == {"passed": 0, "failed": 1, "refused": 0, "skipped": 0}
    assert "declares what is not so" in report["failures"][0]
    jsonschema.validate(report, load_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**report, "schema_version": 2}, load_schema())


def test_what_the_time_budget_leaves_out_is_skipped_and_says_so() -> None:
    report = run_verification("mha", "fake", quick=True, backend=backend_of(), budget_s=0.0)
    assert report["summary"]["passed"] == 0
    assert report["summary"]["refused"] > 0
    assert {cell["reason"] for cell in report["cells"] if cell["outcome"] == "skipped"} == {
        "the time budget of 0 s is spent"
    }
    cells = list_cells(backend_of(), "cpu")
    order = [cells[number].check for number in in_turns(cells, range(len(cells)))]
    first = order[: len(set(order))]
    assert len(set(first)) == len(first)  # every check has its turn before any has a second one


def test_a_run_in_which_nothing_ran_is_no_success() -> None:
    command = [sys.executable, "-m", "attn_core", "verify", "mha/trtllm_mha", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nothing was run" in done.stderr


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="names no backend"):
        split_name("triton")
    with pytest.raises(UsageError, match="declares mha/no_such"):
        run_verification("mha", "no_such")
    with pytest.raises(UsageError, match="no check 'windw'"):
        run_verification("mha", "fake", only=("windw",), backend=backend_of())


def pytest_kit(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--pyargs", "attn_core.testing.conformance", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_pytest_command_runs_the_kit_and_writes_the_report(tmp_path: Path) -> None:
    done = pytest_kit(
        "--attn-backend", "mha/reference", "--device", "cpu", "--quick", "--attn-only", "lse", "--attn-report", "r.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["summary"]["passed"] == len(report["cells"]) > 0
    assert {cell["check"] for cell in report["cells"]} == {"lse"}


def test_pytest_command_without_a_backend_says_what_is_needed(tmp_path: Path) -> None:
    done = pytest_kit(cwd=tmp_path)
    assert done.returncode != 0
    assert "needs --attn-backend KIND/NAME" in done.stdout + done.stderr


def test_plugin_is_light_and_leaves_other_projects_options_alone(tmp_path: Path) -> None:
    code = (
        "import sys, attn_core.testing.plugin; print([m for m in ('torch', 'hypothesis', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--device')\n    parser.addoption('--quick')\n"
    )
    (tmp_path / "test_one.py").write_text(
        "def test_one(request):\n    assert request.config.getoption('--device') == 'x'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--device", "x", "."]
    other = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert other.returncode == 0, other.stdout + other.stderr


def test_hardware_axes_hold_platform_and_libraries() -> None:
    from attn_core.availability import Availability
    from attn_core.platform import parse_platform

    hardware = Hardware(parse_platform("cuda:sm90,cuda=13.0"), Availability(True, versions={"triton": "3.6"}))
    axes = hardware.axes()
    assert (axes["arch"], axes["vendor"], axes["library.triton"]) == ("sm90", "nvidia", "3.6")


def test_a_deny_row_on_element_types_is_asked_for_and_refused() -> None:
    manifest = small_manifest()
    row = Row({"dtypes": [{"q": "bf16"}]}, code="dtype", reason="bfloat16 is not computed", fix="--dtype float32")
    denied = replace(manifest, variants=(replace(manifest.variants[0], deny=(row,)),))
    backend = BackendUnderTest(denied, lambda found, variant, context: ReferenceBackend(context))
    cells = [cell for cell in list_cells(backend, "cpu", quick=True) if cell.undeclared.startswith("deny dtype")]
    assert [cell.ask.dtypes for cell in cells if cell.ask] == [("bf16", "fp32", "bf16")]
    assert [run_cell(backend, cell).outcome for cell in cells] == [REFUSED]
