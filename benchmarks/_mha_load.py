"""Triton kernels of SGLang and vLLM for ``benchmarks/mha.py``, loaded from their wheels without installing them.

A kernel file needs little of its package: what it imports beside other kernel files is replaced by a few stand-ins, in this
process only. Nothing is copied into the tree: wheels are unpacked into a temporary folder, file by file.
"""

from __future__ import annotations

import atexit
import enum
import importlib.util
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

#: Files that a peer's kernels consist of, in the order in which they are loaded.
SGLANG = ("score_mod", "decode_attention", "extend_attention")
SGLANG_FOLDER = "sglang/kernels/ops/attention"
VLLM = ("triton_attention_helpers", "triton_unified_attention")
VLLM_FOLDER = "vllm/v1/attention/ops"


class Missing(Exception):
    """The peer's sources are not there, or do not load: the text says which and why."""


def find_sources(peers: Path | None, package: str, folder: str, names: tuple[str, ...]) -> tuple[Path, str]:
    """(folder with the files, version). `peers` holds wheels, or folders NAME-VERSION with unpacked sources."""
    if peers is None or not peers.is_dir():
        raise Missing(f"no wheel of {package}: give --peers FOLDER (or MHA_PEERS) with {package}-*.whl")
    for unpacked in sorted(peers.glob(f"{package}-*")):
        if all((unpacked / folder / f"{name}.py").exists() for name in names):
            return unpacked / folder, unpacked.name.split("-")[1]
    for wheel in sorted(peers.glob(f"{package}-*.whl")):
        return _unpack(wheel, folder, names), wheel.name.split("-")[1]
    raise Missing(f"no {package}-*.whl with {folder}/{names[-1]}.py in {peers}")


def _unpack(wheel: Path, folder: str, names: tuple[str, ...]) -> Path:
    target = tempfile.TemporaryDirectory(prefix="mha-peer-")
    atexit.register(target.cleanup)
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            try:
                archive.extract(f"{folder}/{name}.py", target.name)
            except KeyError:
                raise Missing(f"{wheel.name} has no {folder}/{name}.py") from None
    return Path(target.name) / folder


def stand_in(name: str, **attributes: Any) -> ModuleType:
    """A module with these attributes in place of a real one, and bare packages above it."""
    parent, _, leaf = name.rpartition(".")
    module = sys.modules.get(name) or ModuleType(name)
    module.__dict__.setdefault("__path__", [])
    vars(module).update(attributes)
    sys.modules[name] = module
    if parent:
        setattr(stand_in(parent), leaf, module)
    return module


def _load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stand_in(name.rpartition(".")[0])
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise Missing(f"{file.name} does not load: {type(error).__name__}: {error}") from error
    return module


class _Unset:
    """Every setting of an environment, unset."""

    def __getattr__(self, name: str) -> Any:
        return self

    def get(self) -> bool:
        return False


@cache
def load_sglang(peers: Path | None) -> tuple[ModuleType, ModuleType, str]:
    """(decode_attention, extend_attention, version). Raises :class:`Missing`."""
    folder, version = find_sources(peers, "sglang", SGLANG_FOLDER, SGLANG)
    stand_in("sglang.srt.environ", envs=_Unset())
    stand_in(
        "sglang.srt.utils",
        is_hip=lambda: False,
        is_cuda=torch.cuda.is_available,
        is_gfx95_supported=lambda: False,
        is_gfx1250_supported=lambda: False,
        get_device_core_count=lambda index=0: torch.cuda.get_device_properties(index).multi_processor_count,
    )
    package = SGLANG_FOLDER.replace("/", ".")
    loaded = [_load(f"{package}.{name}", folder / f"{name}.py") for name in SGLANG]
    return loaded[1], loaded[2], version


@cache
def load_vllm(peers: Path | None) -> tuple[ModuleType, str]:
    """(triton_unified_attention, version). Raises :class:`Missing`."""
    import logging

    import triton
    import triton.language as tl

    class Platform:
        """An NVIDIA GPU of no family that has launch data of its own."""

        @staticmethod
        def fp8_dtype() -> torch.dtype:
            return torch.float8_e4m3fn

        @staticmethod
        def is_device_capability_family(family: int) -> bool:
            return False

    class KVQuantMode(enum.IntEnum):
        NONE = 0
        FP8_PER_TENSOR = 1
        INT8_PER_TOKEN_HEAD = 2
        FP8_PER_TOKEN_HEAD = 3
        INT4_PER_TOKEN_HEAD = 4

    folder, version = find_sources(peers, "vllm", VLLM_FOLDER, VLLM)
    stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False)
    stand_in("vllm.logger", init_logger=logging.getLogger)
    stand_in("vllm.platforms", current_platform=Platform())
    stand_in("vllm.triton_utils", tl=tl, triton=triton)
    stand_in("vllm.v1.kv_cache_interface", KVQuantMode=KVQuantMode)
    package = VLLM_FOLDER.replace("/", ".")
    loaded = [_load(f"{package}.{name}", folder / f"{name}.py") for name in VLLM]
    return loaded[1], version
