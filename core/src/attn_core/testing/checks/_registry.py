"""The table of checks and the decorator that fills it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from attn_core.capabilities import PHASES
from attn_core.testing.bench import Bench

#: Spreads, widest first: every combination, every (phase, types), every phase, once a variant.
SPREADS = ("all", "types", "phase", "once")


@dataclass(frozen=True)
class Check:
    """One check: its name, the sentence it proves, and where it applies."""

    name: str
    proves: str
    function: Callable[[Bench], None]
    kinds: tuple[str, ...]
    features: frozenset[str]
    phases: tuple[str, ...]
    spread: str
    device: str = ""
    role: str = ""


CHECKS: dict[str, Check] = {}
_MODULES = (
    "numbers", "masks", "memory", "steps", "graphs", "packed", "router", "device", "states", "latent", "dual_chunk",
)  # fmt: skip


def check(
    *features: str,
    phases: tuple[str, ...] = PHASES,
    spread: str = "types",
    kinds: tuple[str, ...] = ("mha",),
    device: str = "",
    role: str = "",
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Register a function as a check; the first sentence of its docstring is what it proves."""

    def register(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        title = function.__name__
        proves = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        CHECKS[title] = Check(title, proves, function, kinds, frozenset(features), phases, spread, device, role)
        return function

    return register


def checks_of(kind: str) -> list[Check]:
    """All checks of a kind, in the order of their modules."""
    for module in _MODULES:
        importlib.import_module(f"attn_core.testing.checks.{module}")
    ordered = sorted(CHECKS.values(), key=_place)
    return [item for item in ordered if kind in item.kinds]


def _place(item: Check) -> tuple[int, int]:
    """Module and line of a check: its place does not depend on which module was imported first."""
    module = item.function.__module__.rpartition(".")[2]
    return _MODULES.index(module) if module in _MODULES else len(_MODULES), item.function.__code__.co_firstlineno
