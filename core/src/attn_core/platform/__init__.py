"""The hardware and toolkit that a plan is made for, detected or described.

::

    detect_platform()                                  what this machine has, without a device context and without torch
    parse_platform("cuda:sm90,cuda=13.0,name=H200")    what another machine has, for what-if plans
    parse_platform({"device": "cuda", "sm": 121})      the same from JSON

A platform is pure data. :meth:`Platform.axes` is what manifest rows are compared with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import PlatformError
from attn_core.reasons import Reason

#: Devices in the order of preference when several are present, with the vendor that manifests name.
VENDORS: Mapping[str, str] = {"cuda": "nvidia", "rocm": "amd", "npu": "ascend", "xpu": "intel", "cpu": "cpu"}

#: Architecture of a device that is described without one; CUDA and ROCm have no sensible default.
_DEFAULT_ARCH: Mapping[str, str] = {"npu": "a2", "xpu": "xpu", "cpu": "cpu"}
_CPU_ARCHS = ("cpu", "amx")

#: Shared memory (LDS) that one block may use, bytes. A set of known architectures, never a bound.
LDS_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("sm70", "sm72"), 98304),
    "sm75": 65536,
    **dict.fromkeys(("sm80", "sm87"), 166912),
    **dict.fromkeys(("sm86", "sm89", "sm120", "sm121"), 101376),
    **dict.fromkeys(("sm90", "sm100", "sm101", "sm103", "sm110"), 232448),
    **dict.fromkeys(("gfx906", "gfx908", "gfx90a", "gfx940", "gfx941", "gfx942"), 65536),
    "gfx950": 163840,
    **dict.fromkeys(("gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201"), 65536),
}

#: Architectures whose hardware has no bfloat16: a rule of the vendor, the same for every backend.
_NO_BF16 = frozenset({"sm50", "sm52", "sm53", "sm60", "sm61", "sm62", "sm70", "sm72", "sm75"})

#: Versions that are axes of their own; every other version is ``library.<name>``.
_TOOLKITS = ("cuda", "rocm", "driver")
_FORM = "'cuda:sm90,cuda=13.0,name=NVIDIA H200', 'rocm:gfx942', 'npu:a2', 'xpu', 'cpu', 'cpu:amx', or JSON"


@dataclass(frozen=True, slots=True)
class Platform:
    """One platform. ``others`` are the devices that are present, too; ``notes`` say what detection saw on the way.

    ``versions`` maps ``cuda``, ``rocm``, ``driver`` and library names (``triton``) to version strings; what is not known
    is left out. ``lds_bytes`` and ``memory_bytes`` are None where not known. ``chosen_by`` says who chose the device.
    """

    device: str
    arch: str
    name: str = ""
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    lds_bytes: int | None = None
    memory_bytes: int | None = None
    others: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    chosen_by: str = "description"

    @property
    def vendor(self) -> str:
        """``nvidia``, ``amd``, ``ascend``, ``intel`` or ``cpu``."""
        return VENDORS[self.device]

    @property
    def amx(self) -> bool:
        """The CPU has AMX tiles."""
        return self.arch == "amx"

    @property
    def id(self) -> str:
        """The short form that :func:`parse_platform` reads: ``cuda:sm90``, ``cpu:amx``, ``xpu``."""
        return self.device if self.arch == self.device else f"{self.device}:{self.arch}"

    def __str__(self) -> str:
        details = [self.name] if self.name else []
        details += [f"{kind.upper()} {self.versions[kind]}" for kind in ("cuda", "rocm") if kind in self.versions]
        return self.id + (f" ({', '.join(details)})" if details else "")

    def axes(self) -> dict[str, Any]:
        """The values of the platform axes and ``library.*``. An axis that is not known is absent."""
        axes: dict[str, Any] = {"vendor": self.vendor, "arch": self.arch}
        if self.lds_bytes is not None:
            axes["lds_bytes"] = self.lds_bytes
        for name, version in self.versions.items():
            axes[name if name in _TOOLKITS else f"library.{name}"] = version
        return axes

    def refuses(self, dtype: str) -> Reason | None:
        """Why no kernel on this hardware can compute in `dtype` (a canonical name), or None."""
        if dtype == "bf16" and self.arch in _NO_BF16:
            return Reason("dtype", need="sm80 or later for bfloat16", have=self.describe(), fix="--dtype float16")
        return None

    def describe(self) -> str:
        """Device name and architecture, as refusals quote them: ``NVIDIA GB10 (sm121)``."""
        return f"{self.name} ({self.arch})" if self.name else self.arch

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; :func:`parse_platform` reads it back."""
        table: dict[str, Any] = {"device": self.device, "arch": self.arch, "vendor": self.vendor, "id": self.id}
        for key in ("name", "lds_bytes", "memory_bytes"):
            if getattr(self, key):
                table[key] = getattr(self, key)
        table["versions"] = dict(self.versions)
        table["others"], table["notes"], table["chosen_by"] = list(self.others), list(self.notes), self.chosen_by
        return table


def detect_platform(prefer: str | None = None) -> Platform:
    """The platform of this machine. Creates no device context and imports no torch.

    `prefer` names the device to use (``cuda``, ``cuda:1``, ``cpu``, …); without it the order is cuda, rocm, npu, xpu, cpu,
    and ``others`` says what else is there. Raises :class:`PlatformError` if the preferred device is not present.
    """
    from attn_core.platform._detect import detect

    return detect(prefer)


def parse_platform(description: str | Mapping[str, Any] | Platform) -> Platform:
    """A platform from its text, JSON or table form. Raises :class:`PlatformError` saying what was found and needed.

    >>> str(parse_platform("cuda:sm90,cuda=13.0,name=NVIDIA H200"))
    'cuda:sm90 (NVIDIA H200, CUDA 13.0)'
    """
    if isinstance(description, Platform):
        return description
    if isinstance(description, Mapping):
        return _from_table(description)
    if not isinstance(description, str) or not description.strip():
        raise _unreadable(description)
    text = description.strip()
    if text.startswith("{"):
        try:
            table = json.loads(text)
        except ValueError as error:
            raise _unreadable(description, f"not valid JSON: {error}") from error
        return _from_table(table)
    return _from_table(_split(text))


def make_platform(device: str, arch: str, **details: Any) -> Platform:
    """A platform of known parts, with the LDS size of the architecture filled in where it is not given."""
    details.setdefault("lds_bytes", LDS_BYTES.get(arch))
    return Platform(device, arch, **details)


# --- reading ------------------------------------------------------------------------------------------------------------


def _unreadable(found: object, why: str = "") -> PlatformError:
    return PlatformError(
        "this platform description cannot be read" + (f": {why}" if why else ""),
        f"found    {found!r}",
        f"needed   {_FORM}",
    )


def _split(text: str) -> dict[str, Any]:
    """``cuda:sm90,cuda=13.0`` as the table form."""
    head, *pairs = [part.strip() for part in text.split(",")]
    device, _, arch = head.partition(":")
    if not arch and device not in VENDORS:  # a bare architecture: its device is known
        device, arch = _device_of(device), device
    table: dict[str, Any] = {"device": device, **({"arch": arch} if arch else {})}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise _unreadable(text, f"{pair!r} is not key=value")
        if key.strip() in table:
            raise _unreadable(text, f"{key.strip()!r} is given twice")
        table[key.strip()] = value.strip()
    return table


def _device_of(arch: str) -> str:
    if re.fullmatch(r"sm_?\d+[af]?", arch):
        return "cuda"
    if arch.startswith("gfx"):
        return "rocm"
    return {"a2": "npu", "a3": "npu", "amx": "cpu"}.get(arch, arch)


def _from_table(content: Any) -> Platform:
    if not isinstance(content, Mapping):
        raise _unreadable(content, "expected a table")
    table = {str(key): value for key, value in content.items()}
    device = table.pop("device", None)
    if device not in VENDORS:
        raise _unreadable(content, f"device {device!r} is not one of {', '.join(VENDORS)}")
    for derived in ("vendor", "id"):  # written by to_dict for readers of the JSON
        table.pop(derived, None)
    arch = _take_arch(table, device, content)
    platform = make_platform(
        device,
        arch,
        name=str(table.pop("name", "") or ""),
        others=_names(table, "others", content),
        notes=_names(table, "notes", content),
        chosen_by=str(table.pop("chosen_by", "description")),
        **_take_sizes(table, content),
        versions=_take_versions(table, content),
    )
    if table:
        raise _unreadable(content, f"unknown key(s) {sorted(table)}")
    return platform


def _names(table: dict[str, Any], key: str, content: Any) -> tuple[str, ...]:
    value = table.pop(key, ())
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _unreadable(content, f"{key}={value!r} is not a list of names")
    return tuple(str(item) for item in value)


def _take_arch(table: dict[str, Any], device: str, content: Any) -> str:
    """The architecture from ``arch``, ``sm``, ``gfx`` or ``amx``, in canonical spelling."""
    given = [key for key in ("arch", "sm", "gfx") if table.get(key) is not None]
    if len(given) > 1:
        raise _unreadable(content, f"{' and '.join(given)} both name the architecture")
    value = str(table[given[0]]) if given else ""
    for key in ("arch", "sm", "gfx"):
        table.pop(key, None)
    amx = table.pop("amx", None)
    if amx is not None:
        if device != "cpu":
            raise _unreadable(content, f"amx is a property of CPUs, not of {device}")
        value = value or ("amx" if _flag(amx, content) else "cpu")
    arch = canonical_arch(device, value)
    if arch is None:
        need = "an architecture such as" if not value else "which is not an architecture such as"
        example = {"cuda": "sm90", "rocm": "gfx942", "npu": "a2", "xpu": "xpu", "cpu": "amx"}[device]
        raise _unreadable(content, f"{device} needs {need} {example}" if not value else f"{value!r}, {need} {example}")
    return arch


def canonical_arch(device: str, value: str) -> str | None:
    """``9.0``, ``90``, ``sm_90a`` become ``sm90``; None if `value` is no architecture of `device`."""
    text = value.strip().lower()
    if not text:
        return _DEFAULT_ARCH.get(device)
    if device == "cuda":
        match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)[af]?", text)
        return f"sm{match[1]}{match[2]}" if match else None
    if device == "rocm":
        match = re.fullmatch(r"(?:gfx)?([0-9a-f]{3,4})(?::.*)?", text)  # gfx942:sramecc+:xnack- has feature suffixes
        return f"gfx{match[1]}" if match else None
    if device == "cpu":
        return text if text in _CPU_ARCHS else None
    return text if re.fullmatch(r"[a-z0-9_]+", text) else None


def _flag(value: Any, content: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in known:
        raise _unreadable(content, f"{value!r} is not true or false")
    return known[str(value).lower()]


_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 1000, "mb": 10**6, "gb": 10**9}


def _take_sizes(table: dict[str, Any], content: Any) -> dict[str, int]:
    sizes: dict[str, int] = {}
    aliases = {"lds": "lds_bytes", "smem_per_block": "lds_bytes", "lds_bytes": "lds_bytes"}
    aliases |= {"memory": "memory_bytes", "memory_bytes": "memory_bytes"}
    for key, target in aliases.items():
        value = table.pop(key, None)
        if value is None:
            continue
        match = re.fullmatch(r"(\d+)\s*([a-z]*)", str(value).lower())
        if match is None or match[2] not in _UNITS:
            raise _unreadable(content, f"{key}={value!r} is not a number of bytes such as 101376 or 99KiB")
        sizes[target] = int(match[1]) * _UNITS[match[2]]
    return sizes


def _take_versions(table: dict[str, Any], content: Any) -> dict[str, str]:
    given = table.pop("versions", {})
    if not isinstance(given, Mapping):
        raise _unreadable(content, f"versions={given!r} is not a table")
    versions = {str(key): str(value) for key, value in given.items()}
    for key in [*_TOOLKITS, "triton", *(key for key in table if key.startswith("library."))]:
        if table.get(key) is not None:
            versions[key.removeprefix("library.")] = str(table[key])
        table.pop(key, None)
    for key in _TOOLKITS:
        if key in versions and not re.fullmatch(r"\d+(\.\d+)*", versions[key]):
            raise _unreadable(content, f"{key}={versions[key]!r} is not a version such as 13.0")
    return versions
