"""A third party's wheel beside ours, as its users have it: found, chosen, configured, verified, and generating text.

The environment is a venv in which our packages and the vendor's are wheels, not editable. Torch and the other libraries are
too large to download again, so a folder of links to them (their modules and dist-info, found by walking the requirements of
the installed distributions) stands behind the venv's own site-packages. Unlike ``--system-site-packages`` or a ``.pth`` file
that names the whole of another site-packages, this leaks neither our editable packages nor any other plugin.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
VENDOR = ROOT / "examples" / "attn-example-vendor"
PROJECTS = [ROOT / "core", ROOT / "plugins" / "attn-torch", ROOT / "bridges" / "attn-transformers", VENDOR]
#: What the wheels and their tests need; their requirements follow.
LIBRARIES = ["attn-core[testing]", "attn-transformers[demo]", "torch", "pytest", "mypy"]
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ATTN_", "VIRTUAL_ENV", "PYTEST_"))}
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "torch_dtype": "float32",
}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(roots: list[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that `roots` need, by name; ours are followed but not among them."""
    found: dict[str, metadata.Distribution] = {}
    wanted, seen = [Requirement(text) for text in roots], set[tuple[str, tuple[str, ...]]]()
    while wanted:
        item = wanted.pop()
        key = normal(item.name), tuple(sorted(item.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = metadata.distribution(item.name)
        except metadata.PackageNotFoundError:  # optional, or for another system
            continue
        if not key[0].startswith("attn-"):
            found[key[0]] = distribution
        for text in distribution.requires or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *item.extras)):
                wanted.append(need)
    return found


def link_libraries(folder: Path) -> None:
    """Links to the top-level files of every library that the wheels need."""
    folder.mkdir()
    for distribution in requirements(LIBRARIES).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))


@cache
def _environment(folder: Path) -> Path:
    wheels, place = folder / "wheels", folder / "venv"
    for project in PROJECTS:
        call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, project)
    link_libraries(folder / "libraries")
    venv.create(place, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", place / "bin" / "python"]
    call(*pip, "install", "-q", "--no-deps", "--no-index", *sorted(wheels.glob("*.whl")))
    (site,) = place.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{folder / 'libraries'}\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the venv, the wheels and a model's config."""
    return _environment(tmp_path_factory.mktemp("vendor"))


def call(*command: str | Path, cwd: Path | None = None, status: int = 0) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, env=CLEAN, timeout=600, cwd=cwd, check=False)
    assert done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def attn(place: Path, *arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    return call(place / "venv" / "bin" / "attn", *arguments, cwd=place, status=status)


def test_the_environment_holds_wheels_only(place: Path) -> None:
    listed = json.loads(attn(place, "list", "--json").stdout)
    assert {entry["package"] for entry in listed["backends"]} == {"attn-torch", "attn-example-vendor"}
    assert listed["problems"] == []
    assert all(entry["origin"].endswith(".whl") for entry in listed["backends"])
    script = "import attn_core, attn_example_vendor; print(attn_core.__file__, attn_example_vendor.__file__)"
    files = call(place / "venv" / "bin" / "python", "-c", script, cwd=place).stdout.split()
    assert all(file.startswith(str(place / "venv")) for file in files)


def test_the_vendor_imports_only_what_is_published() -> None:
    """No private module of attn-core, no other plugin."""
    for path in VENDOR.rglob("*.py"):
        for module in re.findall(
            r"^\s*(?:from|import)\s+(attn_[\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert module.split(".")[0] in ("attn_core", "attn_example_vendor"), (path, module)
            assert "._" not in module, (path, module)


def test_the_vendor_is_chosen_by_itself_on_its_platform(place: Path) -> None:
    for platform in ("cpu", "cpu:amx"):
        plan = json.loads(attn(place, "plan", "--model", "config.json", "--platform", platform, "--json").stdout)
        phases = plan["groups"][0]["phases"]
        assert {phase["backend"] for phase in phases.values()} == {"example_vendor"}
        assert phases["decode"]["package"] == "attn-example-vendor"
        assert "streams keys on CPUs" in phases["decode"]["reason"]
        losers = {(item["backend"], reason["code"]) for item in plan["rejected"] for reason in item["reasons"]}
        assert ("torch_native", "outranked") in losers
    plan = json.loads(attn(place, "plan", "--model", "config.json", "--platform", "cuda:sm90", "--json").stdout)
    assert plan["groups"][0]["phases"]["decode"]["backend"] == "torch_native"


def test_an_option_of_its_own_is_carried_in_the_plan(place: Path) -> None:
    flags = ["plan", "--model", "config.json", "--platform", "cpu"]
    option = "example_vendor.block_size=64"
    done = attn(place, *flags, "--json", "--backend-option", option, "--output", "plan.json")
    part = json.loads(done.stdout)["groups"][0]["phases"]["decode"]["parts"][0]
    assert part["options"] == {"block_size": 64}
    assert json.loads((place / "plan.json").read_text(encoding="utf-8"))["fingerprint"]
    wrong = {
        "example_vendor.blocksize=64": "example_vendor knows block_size, double_accumulation",
        "example_vendor.block_size=4": "example_vendor.block_size: 4 is less than the minimum of 16",
        "example_vendor.block_size=big": "is not of type 'integer'",
        "torch_native.block_size=64": "torch_native knows no options",
        "example_vendr.block_size=64": "did you mean example_vendor?",
        "block_size=64": "is not NAME.KEY=VALUE",
    }
    for text, said in wrong.items():
        assert said in attn(place, *flags, "--backend-option", text, status=2).stderr


def test_its_own_tests_pass_in_the_environment(place: Path) -> None:
    """Options through plan, worker, router and cache to the backend object."""
    python, file = place / "venv" / "bin" / "python", VENDOR / "tests" / "test_options.py"
    done = call(
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", place, "-c", "/dev/null", file, cwd=place
    )
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_its_code_is_typed(place: Path) -> None:
    python = place / "venv" / "bin" / "python"
    flags = ["--strict", "--cache-dir", place / "mypy"]
    call(python, "-m", "mypy", *flags, "-p", "attn_example_vendor", cwd=place)


@pytest.mark.slow
def test_the_kit_verifies_it(place: Path) -> None:
    attn(place, "verify", "mha/example_vendor", "--quick", "--report", "report.json")
    report = json.loads((place / "report.json").read_text(encoding="utf-8"))
    assert report["backend"] == "mha/example_vendor"
    assert report["summary"]["failed"] == 0
    assert report["summary"]["passed"] > 20
    assert report["summary"]["refused"] > 20


@pytest.mark.slow
def test_the_demo_generates_text_with_it(place: Path) -> None:
    (place / "prompts.txt").write_text("Name three colours.\nCount from one to ten.\n", encoding="utf-8")
    flags = ["--prompts", place / "prompts.txt", "--max-new-tokens", "6", "--json"]
    report = json.loads(attn(place, "demo", *flags).stdout)
    assert report["tokens"] == report["identical"] > 0
    assert set(report["calls"]) == {"example_vendor"}


def test_without_it_the_rest_is_as_before(place: Path) -> None:
    done = subprocess.run(
        [place / "venv" / "bin" / "attn", "plan", "--model", "config.json", "--platform", "cpu", "--json"],
        env={**CLEAN, "ATTN_DISABLE_PLUGINS": "attn-example-vendor"}, capture_output=True, text=True, cwd=place, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["groups"][0]["phases"]["decode"]["backend"] == "torch_native"
