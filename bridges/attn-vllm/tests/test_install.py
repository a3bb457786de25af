"""The entry point against stand-ins of the two vLLM modules it touches: idempotent, light, quiet, never raising."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest

import attn_vllm
from attn_core.errors import UsageError
from attn_vllm import _install, parent


class Slots(Enum):
    """vLLM's registry, as far as it is used."""

    CPU_ATTN = "vllm.Cpu"
    FLASH_ATTN = "vllm.Flash"
    CUSTOM = None

    def is_overridden(self):
        return self in OVERRIDES

    def get_path(self):
        return OVERRIDES.get(self, self.value)

    def clear_override(self):
        OVERRIDES.pop(self, None)


OVERRIDES: dict[Slots, str] = {}


class Arguments:
    """vLLM's ``EngineArgs``."""

    def __init__(self, **fields):
        self.fields = fields

    def create_engine_config(self, usage_context=None):
        return SimpleNamespace(
            attention_config=SimpleNamespace(backend=self.fields.get("backend"), backend_per_kind={}),
            additional_config=self.fields.get("additional_config", {}),
            cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=self.fields.get("skip", [])),
        )


@pytest.fixture
def vllm(monkeypatch):
    """The stand-ins in sys.modules; nothing of the environment asks for a backend."""
    OVERRIDES.clear()
    monkeypatch.setattr(Arguments, "create_engine_config", Arguments.create_engine_config)
    for name in ("ATTN_BACKEND", "ATTN_PREFILL_BACKEND", "ATTN_DECODE_BACKEND", "ATTN_OPTIONS", _install.SLOT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    names = "vllm vllm.engine vllm.engine.arg_utils vllm.v1 vllm.v1.attention vllm.v1.attention.backends"
    for name in (*names.split(), "vllm.v1.attention.backends.registry", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = "0.32.0"
    sys.modules["vllm.engine.arg_utils"].EngineArgs = Arguments
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    registry.AttentionBackendEnum = Slots
    registry.register_backend = lambda slot, path: OVERRIDES.__setitem__(slot, path)
    platform = SimpleNamespace(is_cpu=lambda: True, device_name="cpu")
    sys.modules["vllm.platforms"].current_platform = platform
    return platform


@pytest.fixture
def adopted(monkeypatch):
    seen = []
    monkeypatch.setattr(parent, "adopt", seen.append)
    return seen


def test_registering_twice_is_registering_once(vllm, adopted):
    attn_vllm.register()
    once = Arguments.create_engine_config
    attn_vllm.register()
    assert Arguments.create_engine_config is once
    assert OVERRIDES == {Slots.CUSTOM: "attn_vllm.backend.CustomSlot"}


def test_without_a_request_the_configuration_passes_through(vllm, adopted):
    attn_vllm.register()
    config = Arguments().create_engine_config(usage_context="x")
    assert config.attention_config.backend is None
    assert not adopted


@pytest.mark.parametrize(
    ("environ", "fields"),
    [
        ({"ATTN_BACKEND": "triton"}, {}),
        ({"ATTN_OPTIONS": '{"attention_backend": "triton"}'}, {}),
        ({"ATTN_DECODE_BACKEND": "triton"}, {}),
        ({}, {"additional_config": {"attn": "triton"}}),
        ({}, {"backend": Slots.CUSTOM}),
    ],
)
def test_each_way_of_asking(vllm, adopted, monkeypatch, environ, fields):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    attn_vllm.register()
    config = Arguments(**fields).create_engine_config()
    assert adopted == [config]


def test_another_plugins_slot_is_left_alone(vllm, adopted):
    OVERRIDES[Slots.CUSTOM] = "other.Backend"
    attn_vllm.register()
    assert OVERRIDES == {Slots.CUSTOM: "other.Backend"}
    Arguments(backend=Slots.CUSTOM).create_engine_config()
    assert not adopted


def test_workers_override_the_slot_that_the_parent_chose(vllm, monkeypatch):
    monkeypatch.setenv(_install.SLOT_VARIABLE, "CPU_ATTN")
    monkeypatch.setattr("multiprocessing.parent_process", object)
    module = sys.modules.pop("vllm.engine.arg_utils")
    before = Arguments.create_engine_config
    attn_vllm.register()
    assert OVERRIDES[Slots.CPU_ATTN] == "attn_vllm.backend.CpuSlot"
    assert Arguments.create_engine_config is before
    assert "vllm.engine.arg_utils" not in sys.modules
    sys.modules["vllm.engine.arg_utils"] = module


def test_an_engine_made_in_a_users_child_process_is_planned_too(vllm, adopted, monkeypatch):
    monkeypatch.setattr("multiprocessing.parent_process", object)
    monkeypatch.setenv("ATTN_BACKEND", "triton")
    attn_vllm.register()
    Arguments().create_engine_config()
    assert len(adopted) == 1


def test_an_engine_without_a_request_gets_vllms_own_backend_back(vllm, adopted, monkeypatch):
    attn_vllm.register()
    monkeypatch.setenv(_install.SLOT_VARIABLE, "CPU_ATTN")
    _install.register_slot("CPU_ATTN")
    Arguments().create_engine_config()
    assert Slots.CPU_ATTN not in OVERRIDES
    import os

    assert _install.SLOT_VARIABLE not in os.environ


def test_it_never_raises(vllm, caplog, monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm.engine.arg_utils")
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    attn_vllm.register()
    assert "could not be installed" in caplog.text


@pytest.mark.parametrize(
    ("version", "fields", "expected"),
    [
        ("0.31.0", {}, "vLLM 0.31.0 is not supported"),
        ("0.32.0", {"backend": Slots.FLASH_ATTN}, "--attention-backend FLASH_ATTN contradicts"),
        ("0.32.0", {"skip": ["0"]}, "kv_cache_dtype_skip_layers"),
    ],
)
def test_the_parent_refuses(vllm, monkeypatch, version, fields, expected):
    sys.modules["vllm"].__version__ = version
    monkeypatch.setenv("ATTN_BACKEND", "torch_native")
    attn_vllm.register()
    with pytest.raises(UsageError, match=expected):
        Arguments(**fields).create_engine_config()


def test_a_platform_with_a_closed_list_is_refused(vllm, monkeypatch):
    vllm.is_cpu = vllm.is_rocm = vllm.is_cuda = lambda: False
    vllm.device_name = "xpu"
    monkeypatch.setenv("ATTN_BACKEND", "torch_native")
    attn_vllm.register()
    with pytest.raises(UsageError, match="xpu"):
        Arguments().create_engine_config()


def test_a_slot_that_another_plugin_took_is_an_error_when_it_is_needed(vllm):
    OVERRIDES[Slots.CPU_ATTN] = "other.Backend"
    with pytest.raises(UsageError, match="belongs to another plugin"):
        parent._take(SimpleNamespace(attention_config=SimpleNamespace(backend=None)), "CPU_ATTN")


def test_importing_the_package_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import attn_vllm; print(sorted(set(sys.modules) - before))"
    source = attn_vllm.__file__.rpartition("/attn_vllm/")[0]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, logging; sys.path.insert(0, {source!r}); {code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "['__future__', 'attn_vllm']"
