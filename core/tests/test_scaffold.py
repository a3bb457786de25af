"""``attn new``: what it generates is clean, builds, is found, plans, and passes its own tests and the conformance kit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attn_core import scaffold
from attn_core.cli import run
from attn_core.errors import UsageError

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}


def call(*arguments: str, folder: Path, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A tool of this environment, run inside `folder`; `site` is a folder with installed packages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ATTN_", "PYTEST_"))}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated package, in a folder whose name has a space."""
    folder = tmp_path_factory.mktemp("new package")
    assert run(["new", "Speedy-Kernels", "--folder", str(folder)]) == 0
    return folder / "attn-speedy-kernels"


@pytest.fixture(scope="module")
def installed(package: Path) -> Path:
    """The package's wheel, unpacked: a folder as ``pip install --target`` leaves it."""
    done = call("build", "--wheel", "--no-isolation", "--outdir", "dist", ".", folder=package)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (package / "dist").glob("*.whl")
    site = package.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_files_of_a_package(package: Path) -> None:
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert files >= {
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        ".gitignore",
        ".github/workflows/test.yml",
        "src/attn_speedy_kernels/__init__.py",
        "src/attn_speedy_kernels/backend.py",
        "src/attn_speedy_kernels/attn_manifest.toml",
        "src/attn_speedy_kernels/py.typed",
        "tests/test_conformance.py",
    }
    for path in package.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".toml", ".md", ".yml"):
            text = path.read_text(encoding="utf-8")
            assert "{{" not in text, path
            assert "{%" not in text, path


def test_generated_code_is_clean(package: Path) -> None:
    for arguments in (["ruff", "check", "--no-cache", "."], ["ruff", "format", "--no-cache", "--check", "."]):
        done = call(*arguments, folder=package)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_generated_code_is_typed(package: Path) -> None:
    done = call("mypy", "src", folder=package)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_is_found_and_chosen(package: Path, installed: Path) -> None:
    names = [path.name for path in (installed / "attn_speedy_kernels").iterdir()]
    assert "attn_manifest.toml" in names
    assert "py.typed" in names
    document = json.loads(call("attn_core", "list", "--json", folder=package, site=installed).stdout)
    entry = next(entry for entry in document["backends"] if entry["name"] == "speedy_kernels")
    assert (entry["kind"], entry["status"], entry["package"]) == ("mha", "implemented", "attn-speedy-kernels")
    model = package.parent / "config.json"
    model.write_text(json.dumps(MODEL), encoding="utf-8")
    flags = ["--model", str(model), "--platform", "cpu", "--attention-backend", "speedy_kernels", "--json"]
    done = call("attn_core", "plan", *flags, folder=package, site=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    phases = json.loads(done.stdout)["groups"][0]["phases"]
    assert {phases[name]["backend"] for name in ("prefill", "decode")} == {"speedy_kernels"}


@pytest.mark.slow
def test_its_own_tests_and_the_kit_pass(package: Path, installed: Path) -> None:
    done = call("pytest", "-p", "no:cacheprovider", "tests", folder=package, site=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize(
    ("name", "dist", "package_name"),
    [
        ("fast", "attn-fast", "attn_fast"),
        ("attn-fast", "attn-fast", "attn_fast"),
        ("attn_fast_2", "attn-fast-2", "attn_fast_2"),
        ("Fast-Kernels", "attn-fast-kernels", "attn_fast_kernels"),
    ],
)
def test_names(tmp_path: Path, name: str, dist: str, package_name: str) -> None:
    files = scaffold.create(name, "mha", tmp_path)
    assert files[0] == tmp_path / dist / "pyproject.toml"
    assert (tmp_path / dist / "src" / package_name / "__init__.py") in files


@pytest.mark.parametrize("name", ["", "2fast", "a b", "fast-", "-fast", "fast--er", "fäst", "a/b", "../x", "attn-"])
def test_names_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a backend's name"):
        scaffold.create(name, "mha", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["torch", "torch_native", "triton", "fa3"])
def test_names_that_are_taken(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is the name of a published backend"):
        scaffold.create(name, "mha", tmp_path)


def test_the_name_of_an_installed_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="attn_core is installed already"):
        scaffold.create("core", "mha", tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "attn-fast").mkdir()
    (tmp_path / "attn-fast" / "mine.txt").write_text("mine", encoding="utf-8")
    assert run(["new", "fast", "--folder", str(tmp_path)]) == 2
    assert [path.name for path in (tmp_path / "attn-fast").iterdir()] == ["mine.txt"]
    (tmp_path / "attn-other").write_text("a file", encoding="utf-8")
    assert run(["new", "other", "--folder", str(tmp_path)]) == 2


def test_a_kind_without_a_template_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", "fast", "--kind", "gdn", "--folder", str(tmp_path)]) == 2
    assert "known are mha" in capsys.readouterr().err


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", "fast", "--folder", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["folder"] == str(tmp_path / "attn-fast")
    assert all(Path(path).is_file() for path in document["files"])
