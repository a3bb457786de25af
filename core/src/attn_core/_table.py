"""A table of TOML or JSON that is read with checks: what is wrong, and where, is said in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attn_core.errors import ManifestError


class Table:
    """A TOML table that knows its place, hands out checked values, and refuses keys nobody asked for."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, Mapping):
            raise ManifestError(f"{where}: expected a table, found {type(content).__name__}")
        self.content, self.where, self.known = content, where, set[str]()

    def take(self, key: str, default: Any = None) -> Any:
        self.known.add(key)
        return self.content.get(key, default)

    def text(self, key: str, *, choices: Iterable[str] | None = None, required: bool = False, default: str = "") -> str:
        value = self.take(key)
        if value is None:
            if required:
                raise ManifestError(
                    f"{self.where}: {key!r} is missing" + (f"; it is one of {sorted(choices)}" if choices else "")
                )
            return default
        if not isinstance(value, str):
            raise ManifestError(f"{self.where}.{key}: {value!r} is not a string")
        if choices is not None and value not in choices:
            raise ManifestError(f"{self.where}.{key}: {value!r} is not one of {sorted(choices)}")
        return value

    def names(self, key: str, *, choices: Iterable[str] | None = None) -> tuple[str, ...]:
        value = self.take(key, ())
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ManifestError(f"{self.where}.{key}: {value!r} is not a list of strings")
        for item in value:
            if choices is not None and item not in choices:
                raise ManifestError(f"{self.where}.{key}: {item!r} is not one of {sorted(choices)}")
        return tuple(value)

    def flag(self, key: str) -> bool:
        value = self.take(key, False)
        if not isinstance(value, bool):
            raise ManifestError(f"{self.where}.{key}: {value!r} is not true or false")
        return value

    def number(self, key: str, low: int, high: int | None = None, *, required: bool = False) -> int | None:
        value = self.take(key)
        if value is None and not required:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ManifestError(
                f"{self.where}.{key}: {value!r} is not a whole number from {low}" + (f" to {high}" if high else "")
            )
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise ManifestError(f"{self.where}.{key}: expected a table, found {type(value).__name__}")
        return dict(value)

    def tables(self, key: str, *, required: bool = False) -> list[Table]:
        value = self.take(key, [])
        if not isinstance(value, list | tuple) or (required and not value):
            raise ManifestError(f"{self.where}: needs at least one [[{key}]] table")
        return [Table(item, f"{self.where}.{key}[{index}]") for index, item in enumerate(value)]

    def finish(self) -> None:
        unknown = set(self.content) - self.known
        if unknown:
            raise ManifestError(f"{self.where}: unknown key(s) {sorted(unknown)}; known here are {sorted(self.known)}")
