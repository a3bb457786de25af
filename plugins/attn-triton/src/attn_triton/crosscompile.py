"""Compile kernels for a GPU that is not there: every launch inside the context becomes a compilation.

    with targeting("sm90") as compiled:
        backend.attn_decode(...)            # CPU tensors; nothing runs
    for kernel in compiled: print(kernel.name, kernel.registers, kernel.shared)

Used by the tests and by ``python -m attn_triton.crosscompile``, which writes the table of resources.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Architectures that every kernel must compile for, with (triton backend, architecture, warp size).
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
#: Shared memory that one block may use, bytes.
SHARED = {"sm80": 166_912, "sm90": 232_448, "sm100": 232_448, "gfx942": 65_536, "gfx950": 163_840}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one compilation used. Registers and spills are a thread's; None where the assembler does not say."""

    name: str
    arch: str
    registers: int | None
    spills: int | None
    shared: int
    warps: int
    stages: int
    narrow_dots: int  #: products whose operands are wider than their sum: see :func:`narrow_dots`


class _Utils:
    def __init__(self, shared: int) -> None:
        self.shared = shared

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}


class _Driver:
    """Just enough of a triton driver to compile."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*TARGETS[arch])
        self.device = 64 + list(TARGETS).index(arch)  # triton caches kernels by device number
        self.utils = _Utils(SHARED[arch])

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


@contextmanager
def targeting(arch: str) -> Iterator[list[Compiled]]:
    """Inside, launches compile for `arch` and run nothing. Gives the list of what was compiled."""
    from triton.runtime.jit import JITFunction

    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(_resources(self.fn.__name__, arch, kernel))
        return kernel

    with _launching(arch, compile_only):
        yield compiled


@contextmanager
def recording(arch: str) -> Iterator[set[tuple[str, str]]]:
    """Inside, launches are noted and neither compiled nor run. Gives (kernel, what it would be compiled for) of each."""
    from triton.runtime.driver import driver

    seen: set[tuple[str, str]] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = self.device_caches[driver.active.get_current_device()][-1]
        _, specialization, options = bind(*args, debug=False, **kwargs)
        names = [parameter.name for parameter in self.params]
        seen.add((self.fn.__name__, str((list(zip(names, specialization, strict=True)), sorted(options.items())))))

    with _launching(arch, note):
        yield seen


@contextmanager
def _launching(arch: str, launch: Any) -> Iterator[None]:
    """Inside, `launch` takes the place of every kernel's launch, and the current device is `arch`."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    previous, run = driver._active, JITFunction.run
    driver.set_active(_Driver(arch))
    JITFunction.run = launch
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active = previous


def _resources(name: str, arch: str, kernel: Any) -> Compiled:
    registers = spills = None
    if "amdgcn" in kernel.asm:
        registers = _find(r"\.vgpr_count:\s+(\d+)", kernel.asm["amdgcn"])
        spills = _find(r"\.vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"])
    elif "cubin" in kernel.asm:
        registers, spills = _read_cubin(kernel.asm["cubin"])
    meta = kernel.metadata
    narrow = narrow_dots(kernel.asm.get("ttgir", ""))
    return Compiled(name, arch, registers, spills, meta.shared, meta.num_warps, meta.num_stages, narrow)


def narrow_dots(ttgir: str) -> int:
    """Matrix products of NVIDIA's second version that sum over fewer elements than one operand layout holds.

    A layout of kWidth neighbours a thread covers 8 * kWidth elements of K. With a smaller K (8-bit loads give kWidth 4,
    joined ones 8) the compiler repeats elements, and the kernel gives wrong numbers on the GPU, right ones interpreted.
    """
    second = set(re.findall(r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = 2,", ttgir, re.MULTILINE))
    pattern = r"tensor<(\d+)x\d+x\w+, #ttg\.dot_op<\{opIdx = 1, parent = (#\w+), kWidth = (\d+)\}>>"
    dots = re.findall(rf"tt\.dot .*?\* {pattern}", ttgir)
    return sum(parent in second and int(k) < 8 * int(width) for k, parent, width in dots)


def _find(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else None


def _read_cubin(cubin: bytes) -> tuple[int | None, int | None]:
    """(registers, bytes of stack) by the cuobjdump that triton carries; None where there is none."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    return _find(r"REG:(\d+)", text), _find(r"STACK:(\d+)", text)


# --- the table of resources -----------------------------------------------------------------------------------------------


def compile_everything(arch: str) -> list[dict[str, Any]]:
    """One row for each compiled kernel of the cases below, on `arch`. Raises what the compiler raises."""
    import attn_triton
    from attn_core.geometry import MhaGeometry
    from attn_core.testing.batches import make_case
    from attn_core.testing.harness import BackendUnderTest
    from attn_triton import backend as module

    plain, wide = (
        MhaGeometry(32, 8, 128, 128, 0.1),
        MhaGeometry(16, 8, 256, 256, 0.1, window=40, softcap=5.0, sinks=True),
    )
    narrow, odd = MhaGeometry(4, 2, 16, 16, 0.1), MhaGeometry(4, 2, 80, 48, 0.1)  # scales of FP4 are read as bytes
    sinks = tuple(0.1 * n for n in range(16))
    chain = tuple(range(-1, 7))
    cases: dict[str, Any] = {
        "decode bf16": (plain, "decode", {"kv_lens": (300,), "page_size": 16}),
        "decode fp8": (plain, "decode", {"kv_lens": (300,), "page_size": 64, "kv_dtype": "fp8_e4m3", "k_scale": 0.5}),
        "decode fp4": (plain, "decode", {"kv_lens": (300,), "page_size": 64, "kv_dtype": "fp4"}),
        "narrow fp8": (narrow, "decode", {"kv_lens": (300,), "page_size": 64, "kv_dtype": "fp8_e5m2"}),
        "narrow fp4": (narrow, "decode", {"kv_lens": (300,), "page_size": 1024, "kv_dtype": "fp4", "storage": "hnd"}),
        "narrow fp4 prefill": (
            narrow,
            "prefill",
            {"query_lens": (200,), "kv_lens": (300,), "page_size": 1024, "kv_dtype": "fp4"},
        ),
        "odd fp4": (odd, "decode", {"kv_lens": (300,), "page_size": 64, "kv_dtype": "fp4"}),
        "odd fp4 prefill": (
            odd,
            "prefill",
            {"query_lens": (200,), "kv_lens": (300,), "page_size": 64, "kv_dtype": "fp4"},
        ),
        "prefill bf16": (plain, "prefill", {"query_lens": (200,), "kv_lens": (300,), "page_size": 64}),
        "prefill wide": (wide, "prefill", {"query_lens": (200,), "kv_lens": (300,), "page_size": 16, "sinks": sinks}),
        "tree": (plain, "verify", {"query_lens": (8,), "kv_lens": (300,), "page_size": 16, "parents": (chain,)}),
    }
    facts, module.device_facts = module.device_facts, lambda device: (arch, 132)
    rows: list[dict[str, Any]] = []
    try:
        for name, (geometry, phase, fields) in cases.items():
            case = make_case(geometry, phase, dtype="bf16", needs_lse=True, **fields)
            session = BackendUnderTest.of_module(attn_triton, _manifests()["mha"]).open(case)
            with targeting(arch) as compiled:
                session.run(case)
            rows += [{"case": name, **vars_of(kernel)} for kernel in compiled]
        with targeting(arch) as compiled:
            _tools()
        rows += [{"case": "tools", **vars_of(kernel)} for kernel in compiled]
    finally:
        module.device_facts = facts
    return rows


def _tools() -> None:
    """Launch what :mod:`attn_triton.tools` has."""
    import torch

    from attn_core.batch import KvAddress
    from attn_triton.tools import expand_table, merge_states

    lens, table = torch.tensor([40], dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)
    expand_table(KvAddress(16, lens, torch.empty(0, dtype=torch.int64), 128, table=table), 1)
    out, lse = torch.zeros(2, 4, 128, dtype=torch.bfloat16), torch.zeros(2, 4)
    merge_states(out, lse, out, lse)


def vars_of(kernel: Compiled) -> dict[str, Any]:
    """The fields of a record."""
    return {name: getattr(kernel, name) for name in kernel.__slots__}


def _manifests() -> dict[str, Any]:
    """The manifests of this package by kind."""
    from attn_core.manifest import load_toml, parse_manifests

    path = Path(__file__).with_name("attn_manifest.toml")
    parsed = parse_manifests(load_toml(path.read_text("utf-8"), path.name), package="attn-triton", version="0")
    return {manifest.kind: manifest for manifest in parsed}


def main(arguments: list[str]) -> None:
    """``python -m attn_triton.crosscompile FILE [ARCH ...]``: compile for the architectures and write the table."""
    rows = [row for arch in arguments[1:] or TARGETS for row in compile_everything(arch)]
    Path(arguments[0]).write_text(
        json.dumps({"shared_limit": SHARED, "kernels": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
