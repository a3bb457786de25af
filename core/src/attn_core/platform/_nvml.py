"""NVIDIA cards through NVML with ctypes, or from the output of nvidia-smi. No CUDA context is created."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

SMI_QUERY = "--query-gpu=name,compute_cap,driver_version,memory.total,uuid"


@dataclass(frozen=True, slots=True)
class Card:
    """One card: name, architecture, versions, memory. ``cuda`` is the newest CUDA that the driver serves."""

    name: str
    arch: str
    driver: str = ""
    cuda: str = ""
    memory_bytes: int | None = None
    uuid: str = ""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def query(notes: list[str]) -> list[Card]:
    """All cards that NVML reports, empty if there is no NVML. What went wrong is added to `notes`."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []  # no NVIDIA driver: nothing to report
    status = library.nvmlInit_v2()
    if status != 0:
        notes.append(f"cuda: NVML does not start (status {status})")
        return []
    try:
        return _cards(library)
    finally:
        library.nvmlShutdown()


def _cards(library: Any) -> list[Card]:
    driver = _text(library.nvmlSystemGetDriverVersion)
    version = ctypes.c_int(0)
    library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value else ""
    count = ctypes.c_uint(0)
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    cards = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
            continue  # lost or not permitted in this container
        cards.append(_card(library, handle, driver, cuda))
    return cards


def _card(library: Any, handle: ctypes.c_void_p, driver: str, cuda: str) -> Card:
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    memory = _Memory()
    known = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0  # not on machines with unified memory
    return Card(
        name=_text(library.nvmlDeviceGetName, handle),
        arch=f"sm{major.value}{minor.value}",
        driver=driver,
        cuda=cuda,
        memory_bytes=memory.total if known else None,
        uuid=_text(library.nvmlDeviceGetUUID, handle),
    )


def _text(function: Any, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(96)
    return buffer.value.decode(errors="replace") if function(*arguments, buffer, ctypes.c_uint(96)) == 0 else ""


def parse_smi(output: str) -> list[Card]:
    """The cards of ``nvidia-smi --query-gpu=… --format=csv,noheader,nounits``.

    >>> parse_smi("NVIDIA H200, 9.0, 580.95.05, 143771, GPU-1234")[0].arch
    'sm90'
    """
    cards = []
    for line in output.splitlines():
        fields = [item.strip() for item in line.split(",")]
        if len(fields) != 5 or not fields[1].replace(".", "").isdigit():
            continue
        name, capability, driver, memory, uuid = fields
        size = int(memory) << 20 if memory.isdigit() else None
        cards.append(Card(name, "sm" + capability.replace(".", ""), driver, "", size, uuid))
    return cards
