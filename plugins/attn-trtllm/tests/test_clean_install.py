"""attn-core and attn-trtllm from wheels in a clean environment: without FlashInfer, and with a stand-in for it.

Builds wheels and makes a venv, so it runs only with ``ATTN_SLOW=1``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from trtllm_fake import DATA

ROOT = Path(__file__).resolve().parents[3]
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ATTN_", "VIRTUAL_ENV", "CUDA_"))}

pytestmark = pytest.mark.skipif(not os.environ.get("ATTN_SLOW"), reason="ATTN_SLOW=1 builds wheels and installs them")


def run(*command: str | Path) -> str:
    texts = [str(part) for part in command]
    done = subprocess.run(texts, capture_output=True, text=True, env=CLEAN, timeout=600, check=False)
    assert done.returncode == 0, f"{texts}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with attn-core and attn-trtllm from wheels; the kernel library is left out."""
    folder = tmp_path_factory.mktemp("clean")
    for project in (ROOT / "core", ROOT / "plugins" / "attn-trtllm"):
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "wheels", project)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    core, plugin = (next((folder / "wheels").glob(f"attn_{name}-*.whl")) for name in ("core", "trtllm"))
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", core)
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", plugin)
    return folder / "venv"


def attn(folder: Path, *arguments: str) -> Any:
    return json.loads(run(folder / "bin" / "attn", *arguments, "--json"))


def doctor(folder: Path) -> dict[str, Any]:
    """The doctor's answer for each variant of trtllm_mha."""
    found = [backend for backend in attn(folder, "doctor")["backends"] if backend["name"] == "trtllm_mha"]
    assert len(found) == 1
    return dict(found[0]["variants"])


def test_without_the_library_the_doctor_says_what_to_install(clean):
    listed = attn(clean, "list")
    assert listed["problems"] == []
    names = {backend["name"]: backend["status"] for backend in listed["backends"]}
    assert names == {"trtllm_mha": "implemented", "trtllm_mla": "planned"}
    for variant, answer in doctor(clean).items():
        text = json.dumps(answer)
        assert "flashinfer-python" in text, variant
        assert "pip install" in text, variant
        assert "GPU" in text, variant


def test_with_the_library_only_the_machine_is_missing(clean, tmp_path):
    """A stand-in distribution with the real release's number and signatures; nothing of it is ever imported."""
    site = Path(run(clean / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    text = (DATA / "flashinfer-0.7.4.txt").read_text(encoding="utf-8").replace("): ...", "):\n    pass\n")
    (site / "flashinfer").mkdir()
    (site / "flashinfer" / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    for module in ("decode", "prefill"):
        (site / "flashinfer" / f"{module}.py").write_text(text, encoding="utf-8")
    info = site / "flashinfer_python-0.7.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.4\n", encoding="utf-8")
    assert attn(clean, "list")["problems"] == []
    for variant, answer in doctor(clean).items():
        codes = {reason["code"] for reason in answer["reasons"]}
        assert "library" not in codes, variant
        assert "device" in codes, variant
