"""Rules of the whole repository that a reviewer should not have to check by eye."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "src" / "attn_core"


def backend_names() -> set[str]:
    """Every name that a shipped manifest gives a backend; kinds are words of the contract, not names."""
    from attn_core.geometry import BACKEND_KINDS
    from attn_core.manifest import load_toml
    from attn_core.platform import VENDORS

    names: set[str] = set()
    for path in ROOT.glob("plugins/*/src/*/attn_manifest.toml"):
        for backend in load_toml(path.read_text(encoding="utf-8"))["backend"]:
            names |= {backend["name"], *backend.get("aliases", ()), *backend.get("deprecated_aliases", ())}
    return names - set(BACKEND_KINDS) - set(VENDORS)  # a device may share its name with a backend


def literals(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def name_comparisons(source: str, names: set[str]) -> list[int]:
    """Lines that compare something with a backend's name, or dispatch on one with `match`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        compared: set[str] = set()
        if isinstance(node, ast.Compare | ast.MatchValue):
            compared = literals(node)
        if compared & names:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda p: str(p.relative_to(CORE)))
def test_core_never_compares_a_backend_name(path: Path) -> None:
    # the kit and the models' data may name examples; decisions are what this is about
    assert name_comparisons(path.read_text(encoding="utf-8"), backend_names()) == []


def test_the_comparison_test_can_fail() -> None:
    planted = "if backend == 'fa3':\n    pass\nif name in ('triton', 'x'):\n    pass\n"
    assert name_comparisons(planted, backend_names()) == [1, 3]


def test_core_imports_no_plugin() -> None:
    packages = {path.name for path in ROOT.glob("plugins/*/src/*") if path.is_dir()}
    for path in CORE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not {name.partition(".")[0] for name in names} & packages, path


def test_packages_have_what_every_package_has() -> None:
    for project in [*ROOT.glob("plugins/*"), *ROOT.glob("bridges/attn-*"), ROOT / "core"]:
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            assert (project / name).is_file(), project / name
        assert list(project.glob("src/*/py.typed")), project


def test_no_file_names_the_place_where_it_was_written() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    pattern = re.compile(r"/(work|farm)/|/root/")
    for name in tracked:
        path = ROOT / name
        if (
            path.suffix in (".py", ".md", ".toml", ".json", ".cfg", ".yml")
            and path.is_file()
            and path != Path(__file__)
        ):
            assert not pattern.search(path.read_text(encoding="utf-8", errors="replace")), name
