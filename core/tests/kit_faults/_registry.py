"""The table of planted faults and how one is tried."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attn_core.context import Context
from attn_core.manifest import Manifest
from attn_core.testing.cells import Cell, CellResult, run_cell
from attn_core.testing.declared import Ask
from attn_core.testing.harness import BackendUnderTest

FAULTS: dict[str, Fault] = {}
_MODULES = ("numbers", "memory", "steps", "states", "latent")


@dataclass(frozen=True)
class Fault:
    """One planted fault: the faulty class, the check that must catch it, and the small cell on which it does."""

    name: str
    kind: str
    backend: Callable[[Context], object]
    check: str
    ask: Ask
    turn: int


def fault(
    name: str, check: str, phase: str = "decode", kind: str = "mha", turn: int = 0, **ask: Any
) -> Callable[[type], type]:
    """Register a faulty backend class. `ask` overrides fields of the small request it is tried on."""

    def register(cls: type) -> type:
        if name in FAULTS:
            raise ValueError(f"two faults are called {name!r}")
        small = {"dtypes": ("fp32", "fp32", "fp32"), "page_size": 4, "head_dims": (32, 16), "heads": (4, 2), **ask}
        FAULTS[name] = Fault(name, kind, cls, check, Ask(phase, **small), turn)
        return cls

    return register


def load_faults() -> list[Fault]:
    """All faults."""
    for module in _MODULES:
        importlib.import_module(f"kit_faults.{module}")
    return list(FAULTS.values())


def caught(fault: Fault, create: Callable[[Context], object], manifest: Manifest) -> CellResult:
    """Run the fault's check on the backend that `create` makes: the faulty one, or the right one for comparison."""

    def make(manifest: Manifest, variant: str, context: Context) -> object:
        return create(context)

    backend = BackendUnderTest(manifest, make)
    variant = manifest.variants[0]
    cell = Cell(fault.check, variant.name, fault.ask, variant.allow[0], fault.turn)
    return run_cell(backend, cell, minimise=False)
