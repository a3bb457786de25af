"""The entry point against a stand-in for SGLang's registry: what is registered, and what a user is told when it failed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from attn_core.errors import AttnError

REGISTRY = "sglang.srt.layers.attention.attention_registry"
CHOICES = "sglang.srt.arg_groups.choices"


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's registry and choices, with two backends of its own; ``version`` may be changed before registering."""
    table, choices = {"triton": "own", "torch_native": "own"}, ["triton", "torch_native", "flashinfer"]

    def register_attention_backend(name):
        def put(factory):
            table[name] = factory
            return factory

        return put

    content = {
        "sglang": {},
        "sglang.version": {"__version__": "0.5.23"},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        CHOICES: {"ATTENTION_BACKEND_CHOICES": choices, "add_attention_backend_choices": choices.extend},
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        REGISTRY: {"ATTENTION_BACKENDS": table, "register_attention_backend": register_attention_backend},
    }
    for name, members in content.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "attn_sglang.plugin", raising=False)
    return SimpleNamespace(
        table=table, choices=choices, version=sys.modules["sglang.version"],
        plugin=importlib.import_module("attn_sglang.plugin"),
    )  # fmt: skip


def test_backends_are_registered_once(sglang):
    sglang.plugin.register()
    assert sglang.plugin.failure is None
    assert {"attn_core", "attn-torch_native", "attn-flex_attention"} <= set(sglang.table)
    assert sglang.table["torch_native"] == "own"
    assert "flashinfer" not in sglang.table  # offered by SGLang's command line: its name, whoever has the factory
    assert {"attn_core", "attn-torch_native"} <= set(sglang.choices)
    first = dict(sglang.table)
    sglang.plugin.register()
    assert first == sglang.table
    assert len(sglang.choices) == len(set(sglang.choices))


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "0.5.23.dev7"])
def test_another_version_is_refused_when_it_is_asked_for(sglang, version):
    sglang.version.__version__ = version
    sglang.plugin.register()
    for name in ("attn_core", "attn-torch_native"):
        with pytest.raises(RuntimeError) as caught:
            sglang.table[name](SimpleNamespace())
        text = str(caught.value)
        assert f"SGLang {version} is not supported" in text
        assert "needed   sglang 0.5.23" in text
        assert isinstance(caught.value.__cause__, AttnError)
    assert sglang.table["torch_native"] == "own"


def test_nothing_is_raised_whatever_happens(sglang, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "sglang.version")
    monkeypatch.setitem(sys.modules, REGISTRY, None)  # importing it fails: nowhere to leave a message but the log
    sglang.plugin.register()
    assert isinstance(sglang.plugin.failure, ImportError)
    assert "registry could not be reached" in caplog.text


def test_importing_the_package_and_the_entry_point_is_light():
    code = (
        "import sys, attn_sglang.plugin, attn_sglang.names, attn_sglang.planning\n"
        "from attn_sglang import *\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'sglang', 'numpy', 'attn_torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
