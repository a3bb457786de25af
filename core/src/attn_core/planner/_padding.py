"""What a candidate would take if heads or widths were padded with zeros, which the router does (``attn_core.router``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attn_core.manifest import Row
from attn_core.planner._request import Request
from attn_core.predicate import Condition

#: Axes that a padded value changes.
_TOUCHED: Mapping[str, frozenset[str]] = {
    "q_heads": frozenset({"q_heads", "gqa_ratio"}),
    "v_dim": frozenset({"head_dims"}),
    "head_dims": frozenset({"head_dims"}),
}
_WIDEST = 1024


def pads_of(row: Row, request: Request) -> frozenset[str]:
    """What the router's adapter can pad: heads and widths of K and V, and the query heads of latent rows in absorbed form."""
    kind = request.group.backend_kind
    if kind in ("mha", "mm"):
        return row.pads
    return row.pads & {"q_heads"} if request.role in ("absorbed", "sparse") else frozenset()


def padded(
    row: Row, axes: Mapping[str, Any], failed: Sequence[Condition], pads: frozenset[str]
) -> dict[str, tuple[Any, Any]] | None:
    """The smallest padding among `pads` that makes the failed conditions of a row hold, or None: zero heads, or zero columns."""
    changed: dict[str, tuple[Any, Any]] = {}
    left = {condition.axis for condition in failed}
    for name in sorted(pads):
        if not left & _TOUCHED[name]:
            continue
        touched = [condition for condition in row.settled if condition.axis in _TOUCHED[name]]
        for before, after, values in _growing(name, axes):
            if all(condition.accepts(values[condition.axis]) for condition in touched if condition.axis in values):
                changed[name] = before, after
                left -= _TOUCHED[name]
                break
    return changed if changed and not left else None


def _growing(name: str, axes: Mapping[str, Any]) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Padded values of an axis, smallest first: (before, after, the axes that they change)."""
    if name == "q_heads":
        heads, groups = int(axes["q_heads"]), int(axes.get("kv_heads") or 1)
        for count in range(heads + groups - heads % groups, _WIDEST + 1, groups):
            yield heads, count, {"q_heads": count, "gqa_ratio": count // groups}
    elif "head_dims" in axes:
        qk, v = axes["head_dims"]
        if name == "v_dim" and v < qk:
            yield v, qk, {"head_dims": (qk, qk)}
        elif name == "head_dims":
            start = max(qk, v)
            for width in range(start + 8 - start % 8, _WIDEST + 1, 8):
                yield (qk, v), (width, width), {"head_dims": (width, width)}
