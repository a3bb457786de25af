"""The packages as a user gets them: wheels, built and installed into a clean venv, not editable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = [ROOT / "core", *sorted(ROOT.glob("plugins/*")), *sorted(ROOT.glob("bridges/attn-*"))]
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ATTN_", "VIRTUAL_ENV"))}


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=CLEAN, timeout=600, **more
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, project)
    return folder


@pytest.fixture(scope="session")
def clean(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with attn-core's wheel and its light dependencies, and every plugin's wheel without its kernel libraries."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    core = next(wheels.glob("attn_core-*.whl"))
    plugins = [path for path in sorted(wheels.glob("*.whl")) if path != core]
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", core)
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", *plugins)
    return folder


def attn(clean: Path, *arguments: str, status: int = 0) -> Any:
    done = subprocess.run(
        [clean / "bin" / "attn", *arguments], capture_output=True, text=True, env=CLEAN, timeout=120, cwd=clean
    )
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_every_wheel_has_its_types_its_data_and_its_licence(wheels: Path) -> None:
    assert len(list(wheels.glob("*.whl"))) == len(PROJECTS)
    for path in wheels.glob("*.whl"):
        names = zipfile.ZipFile(path).namelist()
        assert any(name.endswith("py.typed") for name in names), path
        if not path.name.startswith(("attn_core", "attn_transformers", "attn_vllm", "attn_sglang")):
            assert any(name.endswith("attn_manifest.toml") for name in names), path
        metadata = next(name for name in names if name.endswith("METADATA"))
        assert "Apache-2.0" in zipfile.ZipFile(path).read(metadata).decode(), path
    core = zipfile.ZipFile(next(wheels.glob("attn_core-*.whl"))).namelist()
    for needed in (
        "directory.toml",
        "schemas/manifest-1.json",
        "templates/explain.html.j2",
        "templates/plugin/pyproject.toml.j2",
    ):
        assert f"attn_core/{needed}" in core


def test_backends_are_listed_from_wheels_without_torch(clean: Path) -> None:
    listed = attn(clean, "list", "--json")
    assert listed["problems"] == []
    text = json.dumps(listed)
    assert "torch_native" in text
    assert "editable" not in text
    run(clean / "bin" / "python", "-c", "import importlib.util as u; assert u.find_spec('torch') is None", cwd=clean)


def test_plans_are_made_from_wheels_without_torch(clean: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
    }
    config |= {
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    path = clean / "config.json"
    path.write_text(json.dumps(config))
    plan = attn(clean, "plan", "--model", str(path), "--platform", "cuda:sm90,cuda=13.0", "--allow-planned", "--json")
    assert plan["ok"]
    assert {phase["package"] for group in plan["groups"] for phase in group["phases"].values()} <= set(
        plan_packages(clean)
    )
    refused = attn(clean, "plan", "--model", str(path), "--json", status=3)  # this machine: probed, not described
    assert refused["ok"] is False
    assert "torch" in json.dumps(refused["error"])


def plan_packages(clean: Path) -> list[str]:
    listed = attn(clean, "list", "--json")
    return [backend["package"] for backend in listed["backends"]]


def test_the_doctor_verifies_files_of_wheels(clean: Path) -> None:
    report = attn(clean, "doctor", "--verify", "--json")
    assert "attn-torch" in json.dumps(report)
    victim = next((clean / "lib").glob("python*/site-packages/attn_triton/attn_manifest.toml"))
    original = victim.read_text()
    try:
        victim.write_text(original + "\n# changed\n")
        changed = subprocess.run(
            [clean / "bin" / "attn", "doctor", "--verify", "--json"],
            capture_output=True,
            text=True,
            env=CLEAN,
            timeout=120,
        )
        assert "attn_manifest.toml" in changed.stdout
    finally:
        victim.write_text(original)
