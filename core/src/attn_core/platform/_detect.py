"""Detection of the platform: one probe a device, each answering a Platform or None and saying why in its notes.

Nothing here creates a device context or imports torch: NVML (or nvidia-smi), /sys/class/kfd, /dev/davinci*, /sys/class/drm
and /proc/cpuinfo are read instead. A probe that fails leaves a note; it never stops the others.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from attn_core.errors import PlatformError
from attn_core.platform import VENDORS, Platform, _nvml, canonical_arch, make_platform

_COMMAND_SECONDS = 10

#: A probe takes the machine and the index of the wanted device, and answers what it found.
Probe = Callable[["Machine", int], "Platform | None"]


class Machine:
    """The files, environment and commands that probes read; tests give another root. ``notes`` collects what was seen."""

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.environ = os.environ if environ is None else environ
        self.notes: list[str] = []

    def read(self, path: str) -> str:
        """The text of a file below the root, empty if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def glob(self, pattern: str) -> list[Path]:
        """Matching paths below the root, in natural order (node2 before node10)."""
        found = self.root.glob(pattern)
        return sorted(found, key=lambda path: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", str(path))])

    def command(self, *words: str) -> str:
        """Standard output of a command, empty if it is missing or fails."""
        if shutil.which(words[0], path=self.environ.get("PATH")) is None:
            return ""
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            self.notes.append(f"{words[0]}: {error}")
            return ""
        return done.stdout.strip()

    def visible(self, *variables: str) -> list[str] | None:
        """The device list of the first variable that is set (``CUDA_VISIBLE_DEVICES``), or None: all are visible."""
        for variable in variables:
            if variable in self.environ:
                listed = [item.strip() for item in self.environ[variable].split(",") if item.strip()]
                if not listed or listed[0] == "-1":
                    self.notes.append(f"{variable} hides every device")
                    return []
                return listed
        return None


def detect(prefer: str | None = None, machine: Machine | None = None) -> Platform:
    """See :func:`attn_core.platform.detect_platform`."""
    machine = machine or Machine()
    device, index = _preferred(prefer)
    found: dict[str, Platform] = {}
    for name, probe in PROBES.items():
        try:
            platform = probe(machine, index if name == device or (name, device) == ("rocm", "cuda") else 0)
        except Exception as error:  # a broken driver of one device must not hide the others
            machine.notes.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if platform is not None:
            found[name] = platform
    chosen = device or next(name for name in VENDORS if name in found)
    if chosen == "cuda" and "cuda" not in found and "rocm" in found:
        chosen = "rocm"  # torch calls AMD's devices cuda, too
    if chosen not in found:
        raise PlatformError(
            f"this machine has no {chosen} device",
            f"found    {', '.join(str(platform) for platform in found.values())}",
            *(f"note     {note}" for note in machine.notes),
            fix=f"leave the device out, or describe another machine: --platform {chosen}:…",
        )
    others = tuple(name for name in found if name != chosen)
    by = f"asked for {prefer}" if prefer else f"first of {', '.join(VENDORS)}"
    return replace(found[chosen], others=others, notes=tuple(machine.notes), chosen_by=by)


def _preferred(prefer: str | None) -> tuple[str | None, int]:
    if not prefer:
        return None, 0
    device, _, index = prefer.partition(":")
    device = {"hip": "rocm", "gpu": "cuda"}.get(device, device)
    if device not in VENDORS or (index and not index.isdigit()):
        raise PlatformError(
            f"{prefer!r} is not a device of this machine",
            f"found    {prefer!r}",
            f"needed   one of {', '.join(VENDORS)}, with an index if wanted: cuda:1",
            fix="to plan for another machine describe it: --platform cuda:sm90",
        )
    return device, int(index or 0)


# --- one probe a device -------------------------------------------------------------------------------------------------


def _cuda(machine: Machine, index: int) -> Platform | None:
    visible = machine.visible("CUDA_VISIBLE_DEVICES")
    if visible == []:
        return None
    cards = _nvml.query(machine.notes) if machine.root == Path("/") else []
    if not cards:
        cards = _nvml.parse_smi(machine.command("nvidia-smi", _nvml.SMI_QUERY, "--format=csv,noheader,nounits"))
    if not cards:
        if machine.glob("dev/nvidia[0-9]*"):
            machine.notes.append("cuda: /dev/nvidia* exists, but neither NVML nor nvidia-smi answers")
        return None
    card = _pick(cards, visible, index)
    if card is None:
        machine.notes.append(f"cuda: no device {index} among {len(cards)} with CUDA_VISIBLE_DEVICES={visible}")
        return None
    archs = sorted({other.arch for other in cards})
    if len(archs) > 1:
        machine.notes.append(f"cuda: cards of different architectures: {', '.join(archs)}; planned for {card.arch}")
    versions = {"driver": card.driver, **_torch_versions("cuda"), **_library("triton")}
    versions.setdefault("cuda", card.cuda)
    known = {key: value for key, value in versions.items() if value}
    return make_platform("cuda", card.arch, name=card.name, versions=known, memory_bytes=card.memory_bytes)


def _pick(cards: list[_nvml.Card], visible: list[str] | None, index: int) -> _nvml.Card | None:
    """The card that a program calls number `index`: CUDA_VISIBLE_DEVICES lists indices or (prefixes of) UUIDs."""
    if visible is None:
        return cards[index] if index < len(cards) else None
    if index >= len(visible):
        return None
    wanted = visible[index]
    if wanted.isdigit():
        return cards[int(wanted)] if int(wanted) < len(cards) else None
    if wanted.startswith("MIG"):  # a slice has the architecture of its card; which card does not matter for planning
        return cards[0]
    return next((card for card in cards if card.uuid.startswith(wanted)), None)


def _rocm(machine: Machine, index: int) -> Platform | None:
    visible = machine.visible("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    if visible == []:
        return None
    nodes = []
    for path in machine.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
        table = dict(line.split(None, 1) for line in path.read_text().splitlines() if " " in line)
        if int(table.get("gfx_target_version", 0)):
            nodes.append((path.parent, table))
    position = int(visible[index]) if visible and index < len(visible) and visible[index].isdigit() else index
    if position >= len(nodes):
        return None
    folder, table = nodes[position]
    version = int(table["gfx_target_version"])  # 90402 is gfx942, 90010 is gfx90a
    arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    rocm = re.match(r"\d+(\.\d+)*", machine.read("opt/rocm/.info/version"))
    versions = {**({"rocm": rocm[0]} if rocm else {}), **_torch_versions("rocm"), **_library("triton")}
    memory = re.search(
        r"size_in_bytes (\d+)", machine.read(str((folder / "mem_banks/0/properties").relative_to(machine.root)))
    )
    lds = int(table.get("lds_size_in_kb", 0)) * 1024
    details = {"lds_bytes": lds} if lds else {}
    name = next(
        (
            machine.read(str(p.relative_to(machine.root)))
            for p in machine.glob("sys/class/drm/card*/device/product_name")
        ),
        "",
    )
    return make_platform(
        "rocm", arch, name=name, versions=versions, memory_bytes=int(memory[1]) if memory else None, **details
    )


def _npu(machine: Machine, index: int) -> Platform | None:
    if not machine.glob("dev/davinci[0-9]*") or machine.visible("ASCEND_RT_VISIBLE_DEVICES") == []:
        return None
    table = machine.command("npu-smi", "info", "-m")
    match = re.search(r"Ascend\s*(910B\w*|910_93\w*|910C?|310\w*)", table)
    chip = match[1] if match else ""
    arch = "a3" if chip.startswith(("910_93", "910C")) else "a2" if chip.startswith("910B") else ""
    if not arch:
        arch = "npu"
        machine.notes.append(f"npu: chip {chip or 'not named by npu-smi'}: neither a2 (910B) nor a3 (910C)")
    driver = re.search(r"(?m)^Version=(\d+(\.\d+)*)", machine.read("usr/local/Ascend/driver/version.info"))
    return make_platform("npu", arch, name=f"Ascend {chip}".strip(), versions={"driver": driver[1]} if driver else {})


def _xpu(machine: Machine, index: int) -> Platform | None:
    cards = [path for path in machine.glob("sys/class/drm/card*/device/vendor") if path.read_text().strip() == "0x8086"]
    if not cards:
        return None
    if not _torch_versions("xpu"):  # an integrated GPU alone is no reason to leave the CPU
        machine.notes.append("xpu: an Intel GPU is there, but torch is not built for it")
        return None
    return make_platform("xpu", "xpu", name="Intel GPU", versions=_library("triton"))


def _cpu(machine: Machine, index: int) -> Platform | None:
    text = machine.read("proc/cpuinfo")
    flags = set(match[1].split()) if (match := re.search(r"(?m)^flags\s*:\s*(.*)$", text)) else set()
    name = match[1].strip() if (match := re.search(r"(?m)^model name\s*:\s*(.*)$", text)) else ""
    memory = re.search(r"(?m)^MemTotal:\s*(\d+) kB", machine.read("proc/meminfo"))
    arch = "amx" if {"amx_tile", "amx_bf16"} <= flags else "cpu"
    return make_platform("cpu", arch, name=name, memory_bytes=int(memory[1]) * 1024 if memory else None)


#: In the order of preference.
PROBES: Mapping[str, Probe] = {"cuda": _cuda, "rocm": _rocm, "npu": _npu, "xpu": _xpu, "cpu": _cpu}


# --- installed software, read without importing it ----------------------------------------------------------------------


def _library(name: str) -> dict[str, str]:
    import importlib_metadata

    try:
        return {name: importlib_metadata.version(name)}
    except importlib_metadata.PackageNotFoundError:
        return {}


def _torch_versions(device: str) -> dict[str, str]:
    """The toolkit that the installed torch was built with, from ``torch/version.py``; it is what kernels run on."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
        text = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    except (OSError, ValueError, ImportError):
        return {}
    variable = {"cuda": "cuda", "rocm": "hip", "xpu": "xpu"}[device]
    match = re.search(rf"(?m)^{variable}\b[^=]*=\s*['\"](\d+(?:\.\d+)*)", text)
    return {device: match[1]} if match else {}


__all__ = ["Machine", "canonical_arch", "detect"]
