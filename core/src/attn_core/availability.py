"""Whether a backend can run on this machine: the answer of ``attn_probe``, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.reasons import Reason


@dataclass(frozen=True, slots=True)
class Availability:
    """The answer of a probe for one variant.

    ``versions`` are the installed library versions, ``archs`` the architectures that are compiled into the binary (empty:
    not known or JIT), ``needs`` the command that would install what is missing, ``deny`` extra deny rows found at run time.
    """

    ok: bool
    reasons: tuple[Reason, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    archs: tuple[str, ...] = ()
    needs: str = ""

    @classmethod
    def missing(cls, library: str, needs: str, why: str = "") -> Availability:
        """Not ok because a library is missing or does not load."""
        return cls(False, (Reason("library", need=library, have=why or "not installed", fix=needs),), needs=needs)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "ok": self.ok,
            "reasons": [reason.to_dict() for reason in self.reasons],
            "versions": dict(self.versions),
            "archs": list(self.archs),
            "needs": self.needs,
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Availability:
        """The inverse of :meth:`to_dict`."""
        reasons = tuple(Reason.from_dict(reason) for reason in table.get("reasons", ()))
        return cls(
            bool(table["ok"]),
            reasons,
            dict(table.get("versions", {})),
            tuple(table.get("archs", ())),
            table.get("needs", ""),
        )
