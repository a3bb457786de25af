"""Every library call fits the signatures of the real wheels; one that does not is refused before anything runs."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
from trtllm_fake import DATA, functions, install

from attn_core.errors import BindError
from attn_trtllm import library
from attn_trtllm.library import ENTRIES, GEN_DECODE, XQA, Entry, bind, misfits, signature_in_source, signature_of

RELEASES = ("0.6.13", "0.7.4")
ALL = [(variant, entry) for variant, entries in ENTRIES.items() for entry in entries]


def fixture(version: str) -> dict[str, inspect.Signature]:
    tree = ast.parse((DATA / f"flashinfer-{version}.txt").read_text(encoding="utf-8"))
    return {node.name: signature_of(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(("variant", "entry"), ALL, ids=[entry.name for _, entry in ALL])
def test_every_call_fits_every_release(variant, entry, version):
    signature = fixture(version)[entry.name]
    assert misfits(signature, entry) == []
    present = [name for name in entry.optional if name in signature.parameters]
    signature.bind(**dict.fromkeys([*entry.passes, *present]))


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("variant", ENTRIES)
def test_binding_finds_the_functions_and_their_optional_arguments(variant, version, monkeypatch):
    install(monkeypatch, version)
    for entry in ENTRIES[variant]:
        found = bind(entry)
        assert found.call.__name__ == entry.name
        assert ("multi_ctas_kv_counter_buffer" in found.optional) == (version == "0.7.4" and variant == "trtllm-gen")


def test_a_changed_signature_is_refused_with_both_sides(monkeypatch):
    install(monkeypatch)
    module = sys.modules["flashinfer.decode"]
    monkeypatch.setattr(module, XQA.name, lambda query, kv_cache, workspace_buffer, spare, /, positional=None: None)
    with pytest.raises(BindError) as error:
        bind(XQA)
    assert "missing  block_tables" in str(error.value)
    assert "spare by position only" in str(error.value)
    monkeypatch.delattr(module, GEN_DECODE.name)
    with pytest.raises(BindError, match=GEN_DECODE.name):
        bind(GEN_DECODE)


def test_a_library_that_does_not_load_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.delitem(sys.modules, "flashinfer.decode", raising=False)
    with pytest.raises(BindError, match=r"flashinfer\.decode does not load"):
        bind(XQA)


def test_signatures_are_read_from_source_without_running_it():
    text = "raise SystemExit\n\n@deco(x=1)\ndef f(\n    a: int,\n    *,\n    b: Tuple[int, (1, 2)] = 3,\n) -> Tuple[\n    int\n]:\n    pass\n"
    found = signature_in_source(text, "f")
    assert str(found) == "(a, *, b=None)"
    assert signature_in_source(text, "g") is None
    assert misfits(found, Entry("m", "f", ("b",))) == ["demands  a"]


def test_a_function_that_takes_anything_is_trusted():
    def wrapper(**anything: object) -> None: ...

    assert misfits(inspect.signature(wrapper), XQA) == []


def test_installed_sources_are_found_without_import(tmp_path, monkeypatch):
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise SystemExit\n", encoding="utf-8")
    (tmp_path / "flashinfer" / "decode.py").write_text("def f():\n    pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    importlib.invalidate_caches()
    assert library.source_of(XQA) == "def f():\n    pass\n"


@pytest.mark.skipif(not os.environ.get("ATTN_DERIVE_SIGNATURES"), reason="ATTN_DERIVE_SIGNATURES=1 downloads wheels")
@pytest.mark.parametrize("version", RELEASES)
def test_the_fixtures_are_what_the_wheels_say(version, tmp_path):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(tmp_path), f"flashinfer-python=={version}"]  # fmt: skip
    subprocess.run(command, check=True)
    wheel = next(Path(tmp_path).glob("*.whl"))
    assert (
        f"sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}" in (DATA / f"flashinfer-{version}.txt").read_text()
    )
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(f"flashinfer/{name}.py").decode() for name in ("decode", "prefill")}
    for _, entry in ALL:
        found = signature_in_source(texts[entry.module.partition(".")[2]], entry.name)
        assert [str(p) for p in found.parameters.values()] == functions(version)[entry.name]
