"""The conformance kit on this backend: all that the manifest declares is right, all else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("attn_example_vendor", reason="run in an environment in which the wheel is installed")

from attn_core.testing.report import run_verification


def test_everything_that_the_manifest_declares(tmp_path: Path) -> None:
    report = run_verification("mha", "example_vendor", device="cpu", quick=True, report_path=tmp_path / "report.json")
    assert report["summary"]["passed"] > 0
    assert not report["failures"], "\n".join(map(str, report["failures"]))
