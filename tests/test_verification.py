"""The reports under verification/ keep their schema, hide nothing, and are what the pages of docs/ show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from attn_core.discovery import discover
from attn_core.testing.report import load_schema

ROOT = Path(__file__).resolve().parents[1]
REPORTS = sorted((ROOT / "verification").glob("*.json"))


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_is_whole_and_says_what_was_run(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(report, load_schema())
    failed = [cell for cell in report["cells"] if cell["outcome"] == "failed"]
    assert report["summary"]["failed"] == len(report["failures"]) == len(failed) == 0
    assert report["summary"]["passed"] > 0
    assert sum(report["summary"].values()) == len(report["cells"])
    assert report["hardware"]["name"]
    assert report["versions"]["torch"]
    manifest = {manifest.id: manifest for manifest in discover().manifests}[report["backend"]]
    assert manifest.status == "implemented"
    assert {cell["variant"] for cell in report["cells"]} <= {variant.name for variant in manifest.variants}


def test_pages_show_the_reports() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "verified.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
