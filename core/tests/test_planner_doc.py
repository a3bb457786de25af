"""The commands and the Python of docs/planning.md run, with the exit status that the page says."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_examples", ROOT / "docs" / "run_examples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks() -> list[tuple[str, str]]:
    """(command, output as printed on the page) of every console block."""
    found = []
    for block in writer().BLOCK.finditer(PAGE):
        command, *output = block[2].splitlines()
        found.append((command.removeprefix("$ "), "\n".join(output)))
    return found


@pytest.mark.parametrize(("command", "output"), blocks(), ids=lambda value: value[:60])
def test_commands_of_the_page(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from attn_core.cli import run

    monkeypatch.chdir(ROOT)
    assert output, "run: python docs/run_examples.py"
    status = run(shlex.split(command)[1:])
    assert status == (3 if output.startswith("PlanError") else 0)
    printed = capsys.readouterr()
    lines = (printed.out or printed.err).splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [line.split()[:2] for line in output.splitlines()[:2]]


def test_python_of_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "planning.md", "exec"), {})
    assert "fa3 1" in capsys.readouterr().out


def test_the_examples_are_complete() -> None:
    text = (ROOT / "docs" / "examples-of-plans.md").read_text(encoding="utf-8")
    for title, model, platforms, _ in writer().PLANS:
        assert f"## {title}" in text
        for platform in platforms:
            assert re.search(
                rf"\$ attn plan --model \S*{re.escape(model)}\.json --platform {re.escape(platform)}", text
            )
