"""Reasons as data: why a candidate was refused, and what would make it work. Text is a rendering; nothing parses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reason:
    """One fact that speaks against a candidate.

    ``code`` is stable (an axis name, ``feature``, ``library``, ``arch``, ``outranked``, …); ``need`` is what the candidate
    needs, ``have`` what was found, ``asked_by`` the flag or source that asked for it, ``fix`` the next step.
    """

    code: str
    need: str = ""
    have: str = ""
    asked_by: str = ""
    fix: str = ""
    link: str = ""

    def __str__(self) -> str:
        text = f"{self.code}: "
        if self.need and self.have:
            text += f"needs {self.need}; have {self.have}"
        else:
            text += self.need or self.have
        return text + (f" ({self.asked_by})" if self.asked_by else "")

    def to_dict(self) -> dict[str, str]:
        """The JSON form, without empty fields."""
        return {key: value for key, value in asdict(self).items() if value}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Reason:
        """The inverse of :meth:`to_dict`."""
        return cls(**{key: str(value) for key, value in table.items()})
