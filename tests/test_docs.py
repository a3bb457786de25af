"""Every code block of README.md and docs/*.md is executed, document by document, in order, in a folder of its own.

========================  ============================================================================================
```` ```python ````       runs; all blocks of a document share one namespace
```` ```LANG title="F" `` is written to the file F of the document's folder
```` ```toml ````         parses, and is a valid manifest where it declares a backend
```` ```console ````      lines after ``$`` run; the lines below one must occur in its output, in order; ``$ echo $?`` compares
                          the exit status, which must otherwise be 0, or not 0 where an error with its code is quoted
========================  ============================================================================================

``attn`` and ``python -m`` run with this environment's interpreter. ``pip install FOLDER`` builds the wheel and unpacks it into the
document's site folder, which all its blocks see: nothing is installed into this environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attn_core import errors
from attn_core.capabilities import FEATURES
from attn_core.manifest import load_toml, parse_manifests

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: Runs blocks that come as JSON lines, in one namespace; answers with the traceback of each, empty if it was fine.
SERVER = """
import contextlib, json, sys, traceback
answers, names = sys.stdout, {"__name__": "__main__"}
for line in sys.stdin:
    where, text, failure = *json.loads(line), ""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            exec(compile(text, where, "exec"), names)
        except BaseException:
            failure = traceback.format_exc()
    print(json.dumps(failure), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Block:
    """One fenced block: language, title, text, and the line of the document on which the text begins."""

    language: str
    title: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = FENCE.finditer(text)
    return [Block(m[1], m[2] or "", m[3], text.count("\n", 0, m.start(3)) + 1) for m in found]


class Runner:
    """Executes the blocks of one document in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder / "work", folder / "site"
        self.folder.mkdir()
        self.site.mkdir()
        for name in ("core", "examples", "plugins"):  # documents name files of the repository by their paths in it
            (self.folder / name).symlink_to(ROOT / name)
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("ATTN_", "PYTEST_"))}
        self.environment = {**keep, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "130"}
        self.server: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self.server is not None:
            self.server.communicate(timeout=60)

    def run(self, block: Block, where: str) -> None:
        if block.title:
            target = self.folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        if block.language == "python" and not block.title:
            self._python(block, where)
        elif block.language == "toml":
            document = load_toml(block.text, where)
            if "api" in document:
                assert parse_manifests(document, where=where)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "console":
            self._console(block, where)

    def _python(self, block: Block, where: str) -> None:
        if self.server is None:
            self.server = subprocess.Popen(
                [sys.executable, "-c", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self.folder,
                env=self.environment,
            )
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps([where, "\n" * (block.line - 1) + block.text]) + "\n")
        self.server.stdin.flush()
        failure = json.loads(self.server.stdout.readline())
        assert not failure, failure

    def _console(self, block: Block, where: str) -> None:
        commands: list[tuple[str, list[str]]] = []
        for line in block.text.splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            elif line.strip() and line.strip() != "…":
                commands[-1][1].append(line)
        status, output, told = 0, "", True
        for command, expected in commands:
            if command == "echo $?":
                assert expected == [str(status)], f"{where}: exit status {status}, documented is {expected}"
                told = True
                continue
            assert told, f"{where}: exit status {status} before `{command}`:\n{output}"
            status, output = self._command(command.partition("  #")[0])
            told, rest = (status != 0) == any("Error [AC-" in line for line in expected), output
            for line in (line.strip() for line in expected if not line.startswith("fingerprint")):
                assert line in rest, f"{where}: `{command}` does not print {line!r}:\n{output}"
                rest = rest.partition(line)[2]
        assert told, f"{where}: exit status {status}:\n{output}"

    def _command(self, text: str) -> tuple[int, str]:
        words = shlex.split(text)
        if words[:2] == ["pip", "install"]:
            return self._install(words[2:])
        tools = {"attn": ["-m", "attn_core"], "python": [], "pytest": ["-m", "pytest", "-p", "no:cacheprovider"]}
        arguments = [*tools[words[0]], *words[1:]]
        if words[:3] == ["python", "-m", "build"]:
            arguments.append("--no-isolation")
        return self._call(arguments)

    def _call(self, arguments: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def _install(self, arguments: list[str]) -> tuple[int, str]:
        folder = self.folder / arguments[-1]
        assert folder.is_dir(), f"only folders can be installed in a test: {folder}"
        out = self.folder.parent / "wheels" / folder.name
        status, output = self._call(["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(folder)])
        if status == 0:
            (wheel,) = out.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(self.site)
        return status, output


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_every_block_of_a_document_runs(path: Path, runner: Runner) -> None:
    for block in blocks(path):
        runner.run(block, f"{path.name}:{block.line}")


def test_documents_have_the_blocks_that_they_promise() -> None:
    """Blocks are found at all, and a backend in 60 lines has at most 60."""
    found = {path.name: [block.language for block in blocks(path)] for path in DOCUMENTS}
    assert "python" in found["README.md"]
    assert found["vendor-guide.md"].count("python") >= 10
    guide = blocks(ROOT / "docs" / "vendor-guide.md")
    backend = [b for b in guide if b.title.startswith("attn-sixty/src") and b.language == "python"]
    assert len(backend) == 2
    assert sum(block.text.count("\n") for block in backend) <= 60


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


# --- error codes --------------------------------------------------------------------------------------------------------


def subclasses(cls: type[errors.AttnError]) -> list[type[errors.AttnError]]:
    return [found for sub in cls.__subclasses__() for found in (sub, *subclasses(sub))]


def test_every_error_has_a_section() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (AC-\S+)\n`(\w+)`", text, re.MULTILINE))
    known = {
        error.code: error.__name__ for error in subclasses(errors.AttnError) if error.__module__ == "attn_core.errors"
    }
    assert sections == known


def reason_codes() -> dict[str, str]:
    """Literal codes of every ``Reason`` that core makes, with the file."""
    import ast

    found = {}
    for path in (ROOT / "core" / "src" / "attn_core").rglob("*.py"):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Reason":
                first = node.args[0] if node.args else next(k.value for k in node.keywords if k.arg == "code")
                found |= {n.value: path.name for n in ast.walk(first) if isinstance(n, ast.Constant)}
    return found


def test_every_reason_code_is_listed() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").partition("## Reason codes")[2]
    listed = {code for row in re.findall(r"^\|([^|]+)\|", text, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)}
    made = reason_codes()
    assert len(made) > 10
    assert {code: file for code, file in made.items() if code not in listed} == {}
    assert not listed & FEATURES.keys()
