"""What a manifest does not declare: one cell for each feature, phase, types, page size and deny row that must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attn_core.capabilities import FEATURES, PHASES
from attn_core.dtypes import BITS
from attn_core.manifest import Manifest, Row, Variant
from attn_core.testing.declared import (
    Ask,
    Hardware,
    accepted,
    asks,
    dtype_triples,
    phases,
    refusal,
)

#: Features that no request to a backend of this kind can need.
_FOREIGN = {
    "mla": {"external_conv", "checkpoints", "cross", "bidirectional", "shared_kv", "mm_spans", "window_right"},
    "mha": {"external_conv", "checkpoints"},
    "mm": {"external_conv", "checkpoints", "store", "gather"},
    "gdn": {"store", "gather"},
}
_TYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Undeclared:
    """One request that must be refused: what it is about, and the request."""

    what: str
    ask: Ask


def undeclared(manifest: Manifest, variant: Variant, hardware: Hardware) -> Iterator[Undeclared]:
    """Requests next to a declared one that differ in one thing which no row of the variant declares."""
    declared = [ask for row in variant.allow for ask in asks(manifest, variant, row, hardware)]
    if not declared:
        return
    base = declared[0]
    yield from _features(manifest, variant, declared)
    yield from _phases(variant, base)
    if manifest.kind != "gdn":
        yield from _types(variant, base)
    if manifest.kind not in ("mm", "gdn"):
        yield from _pages(variant, base)
    yield from _denied(variant, declared)


def _features(manifest: Manifest, variant: Variant, declared: list[Ask]) -> Iterator[Undeclared]:
    """A feature must be refused in every phase in which no row declares it."""
    for name, capability in FEATURES.items():
        if name in _FOREIGN.get(manifest.kind, ()):
            continue
        for phase in dict.fromkeys(ask.phase for ask in declared):
            if capability.phases and phase not in capability.phases:
                continue
            if any(name in row.features and phase in phases(row) for row in variant.allow):
                continue
            ask = next(item for item in declared if item.phase == phase)
            yield Undeclared(f"feature {name}", replace(ask, features=(name,)))


def _phases(variant: Variant, base: Ask) -> Iterator[Undeclared]:
    served = {phase for row in variant.allow for phase in phases(row)}
    for phase in PHASES:
        if phase not in served:
            features = () if phase in ("prefill", "decode") else ("spec_topk1",)
            yield Undeclared(f"phase {phase}", replace(base, phase=phase, features=features))


def _types(variant: Variant, base: Ask) -> Iterator[Undeclared]:
    known = {triple[:2] for row in variant.allow for triple in dtype_triples(row)}
    for q in _TYPES:
        for kv in BITS:
            if (q, kv) not in known:
                yield Undeclared(f"q {q} with kv {kv}", replace(base, dtypes=(q, kv, q)))


def _pages(variant: Variant, base: Ask) -> Iterator[Undeclared]:
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if not any(accepted(row, "page_size", [size]) for row in variant.allow):
            yield Undeclared(f"page_size {size}", replace(base, page_size=size))


def _denied(variant: Variant, declared: list[Ask]) -> Iterator[Undeclared]:
    """For each deny row a declared request moved into it, where its conditions are about what the kit can ask."""
    for row in variant.deny:
        moved = _move_into(row, declared)
        if moved is not None:
            yield Undeclared(f"deny {row.code}: {row.reason}", moved)


def _move_into(row: Row, declared: list[Ask]) -> Ask | None:
    ask = declared[0]
    extra: dict[str, Any] = {}
    for condition in row.conditions:
        if condition.axis == "dtypes":
            ask = replace(ask, dtypes=_triple(condition.value, ask.dtypes))
            continue
        values = [item[1] if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) else item for item in (condition.value if isinstance(condition.value, tuple) else (condition.value,))]  # fmt: skip
        value = next((v for v in values if _accepts(condition, v)), None)
        if value is None:
            return None
        if condition.axis == "phase":
            ask = replace(ask, phase=value)
        elif condition.axis == "page_size":
            ask = replace(ask, page_size=value)
        elif condition.axis == "head_dims":
            ask = replace(ask, head_dims=tuple(value))
        elif condition.axis == "format.dtype":
            ask = replace(ask, dtypes=(ask.dtypes[0], value, ask.dtypes[2]))
        elif condition.axis in ("arch", "vendor") or condition.axis.partition(".")[0] in ("peer", "library", "format"):
            return None  # another platform's or another plan's rule
        else:
            extra[condition.axis] = frozenset([value]) if condition.axis == "traits" else value
    return replace(ask, extra=tuple(extra.items()))


def _triple(value: Any, usual: tuple[str, str, str]) -> tuple[str, str, str]:
    """(q, kv, out) of the first triple of a condition; what it leaves open is as usual, the result as the query."""
    first: dict[str, str] = dict(value[0])
    q = first.get("q", usual[0])
    return q, first.get("kv", usual[1]), first.get("out", q if "q" in first else usual[2])


def _accepts(condition: Any, value: Any) -> bool:
    try:
        return bool(condition.accepts(frozenset([value]) if condition.axis == "traits" else value))
    except (TypeError, ValueError):
        return False


def reasons_for(manifest: Manifest, variant: Variant, ask: Ask, hardware: Hardware) -> str:
    """The planner's reasons against a request as one line; empty if it would be accepted."""
    return "; ".join(map(str, refusal(manifest, variant, ask, hardware)))
