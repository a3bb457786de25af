"""Small real distributions for the tests of discovery: dist-info, entry points, a module and a manifest in a folder."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import importlib_metadata
import pytest
from packaging.requirements import Requirement

import attn_core
from attn_core import discovery
from attn_core.discovery import _problems

#: A plugin that works; its backend answers what an MHA backend must.
GOOD_CODE = """
import attn_core

@attn_core.hookimpl
def attn_create(manifest, variant, context):
    return Backend(manifest, variant)

class Backend:
    def __init__(self, manifest, variant):
        self.made_for = (manifest.name, variant)

    @attn_core.hookimpl
    def attn_metadata(self, batch, group, phase, state, capture):
        return None

    @attn_core.hookimpl
    def attn_extend(self, inputs, layer, cache, metadata, out):
        return inputs, None

    @attn_core.hookimpl
    def attn_decode(self, inputs, layer, cache, metadata, out):
        return inputs, None
"""


@cache
def _dependencies() -> dict[str, Path]:
    """Top-level modules of what attn-core needs, by name: an interpreter without site-packages gets links to them."""
    found: dict[str, Path] = {}
    wanted, seen = ["click", "importlib-metadata", "packaging", "pluggy", "tomli"], set()
    while wanted:
        name = wanted.pop()
        try:
            distribution = importlib_metadata.distribution(name)
        except importlib_metadata.PackageNotFoundError:  # tomli is for Python 3.10 only
            continue
        seen.add(name)
        for file in distribution.files or ():
            top = file.parts[0]
            if file.suffix == ".py" and not top.endswith(".dist-info") and top != "..":
                found[top] = Path(str(distribution.locate_file(top)))
        needs = [Requirement(text) for text in distribution.requires or ()]
        wanted += [
            n.name for n in needs if n.name not in seen and (n.marker is None or n.marker.evaluate({"extra": ""}))
        ]
    return found


def manifest_text(
    *names: str, api: str = "1.0", kind: str = "mha", variant: str = "", extra: str = "", status: str = ""
) -> str:
    """A manifest with one plain backend a name. `variant` and `extra` are added to the variant and backend tables."""
    text = f'api = "{api}"\n'
    for name in names:
        text += f"""
[[backend]]
kind = "{kind}"
name = "{name}"
{f'status = "{status}"' if status else ""}
{extra}
[[backend.variant]]
name = "default"
{variant}
[[backend.variant.allow]]
[backend.variant.allow.when]
vendor = ["nvidia", "cpu"]
phase = ["prefill", "decode"]
dtypes = [{{ q = "bf16", kv = "bf16" }}]
page_size = [16]
head_dims = [[128, 128]]
"""
    return text


class Site:
    """A site directory of its own. ``run`` starts an interpreter that sees it, attn-core, its dependencies and no more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "site"
        self.folder.mkdir()
        self._dependencies = folder / "dependencies"
        self._dependencies.mkdir()
        for name, source in _dependencies().items():
            (self._dependencies / name).symlink_to(source)
        self.path = [str(self.folder)]

    def add(
        self,
        name: str,
        manifest: str | bytes | None = None,
        code: str | None = GOOD_CODE,
        *,
        version: str = "1.0",
        value: str | None = None,
        entry_points: str | None = None,
        direct_url: str | None = None,
        zipped: bool = False,
    ) -> Path:
        """Install a distribution whose package has its name; `manifest` None installs none. Returns the package folder."""
        package = name.replace("-", "_")
        files: dict[str, bytes] = {}
        if code is not None:
            files[f"{package}/__init__.py"] = code.encode()
        if manifest is not None:
            files[f"{package}/attn_manifest.toml"] = manifest if isinstance(manifest, bytes) else manifest.encode()
        info = f"{package}-{version}.dist-info"
        files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        entries = f"[attn.backends]\n{package.removeprefix('attn_')} = {value or package}\n"
        files[f"{info}/entry_points.txt"] = (entries if entry_points is None else entry_points).encode()
        if direct_url is not None:
            files[f"{info}/direct_url.json"] = direct_url.encode()
        record = "".join(f"{path},{_hash(content)},{len(content)}\n" for path, content in files.items())
        files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
        return self._zip(package, files) if zipped else self._write(package, files)

    def _write(self, package: str, files: dict[str, bytes]) -> Path:
        for path, content in files.items():
            target = self.folder / path
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(content)
        return self.folder / package

    def _zip(self, package: str, files: dict[str, bytes]) -> Path:
        target = self.folder / f"{package}.zip"
        with zipfile.ZipFile(target, "w") as archive:
            for path, content in files.items():
                archive.writestr(path, content)
        self.path.append(str(target))
        return target

    def environment(self, **variables: str) -> dict[str, str]:
        """Environment of a process that sees this site only."""
        core = str(Path(attn_core.__file__).parent.parent)
        keep = {name: value for name, value in os.environ.items() if not name.startswith("ATTN_")}
        path = os.pathsep.join([*self.path, core, str(self._dependencies)])
        return {**keep, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **variables}

    def run(
        self, script: str, *arguments: str, timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code (-S: no other site-packages) and return what it did."""
        command = [sys.executable, "-S", "-c", script, *arguments]
        environment = self.environment(**variables)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)

    def check(self, script: str, **variables: str) -> str:
        """As :meth:`run`, for code that must end well; returns its output."""
        done = self.run(script, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def attn(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the ``attn`` command."""
        return self.run("from attn_core.cli import main; import sys; main(sys.argv[1:])", *arguments, **variables)


def _hash(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site for this process and for those it starts: nothing else is discovered, and its modules are forgotten."""
    made = Site(tmp_path)
    original = importlib_metadata.distributions
    for name in [name for name in os.environ if name.startswith("ATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(made.folder))
    monkeypatch.setattr(importlib_metadata, "distributions", lambda: original(path=made.path))
    monkeypatch.setattr(discovery, "_current", None)
    monkeypatch.setattr(_problems, "_logged", set())
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if origin.startswith(str(tmp_path)):
            del sys.modules[name]
