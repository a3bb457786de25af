"""Calling a library function by its arguments' names, whatever its generation: names are read off the signature, once.

A call is a list in the order of the signature. What is the same for all layers of a step is filled in once
(:meth:`Bound.template`), a layer copies the list and sets a few places.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attn_core.errors import BindError


class Bound:
    """A function with the places of its arguments. ``names`` are in order; ``defaults`` fill what a call leaves out."""

    __slots__ = ("defaults", "function", "names", "place", "what")

    def __init__(self, function: Callable[..., Any], names: Iterable[str], defaults: Iterable[Any], what: str) -> None:
        self.function, self.what = function, what
        self.names, self.defaults = tuple(names), list(defaults)
        self.place: Mapping[str, int] = {name: number for number, name in enumerate(self.names)}

    @classmethod
    def of_operator(cls, operator: Any, what: str) -> Bound:
        """A torch operator overload. An argument without a default gets the neutral value of its type."""
        arguments = operator._schema.arguments
        defaults = [a.default_value if a.has_default_value() else _neutral(str(a.type)) for a in arguments]
        return cls(operator, (a.name for a in arguments), defaults, what)

    @classmethod
    def of_function(cls, function: Callable[..., Any], what: str) -> Bound:
        """A Python function without ``*args`` and ``**kwargs``. A required argument is None until it is given."""
        parameters = inspect.signature(function).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return cls(function, (p.name for p in positional), (None if p.default is p.empty else p.default for p in positional), what)  # fmt: skip

    def has(self, *names: str) -> bool:
        """Whether all these arguments exist."""
        return all(name in self.place for name in names)

    def require(self, *names: str, fix: str = "") -> None:
        """Raises :class:`BindError` if an argument that the adapter gives does not exist in this release."""
        missing = [name for name in names if name not in self.place]
        if missing:
            raise BindError(
                f"{self.what} has no argument {', '.join(missing)}",
                f"found    {', '.join(self.names)}",
                fix=fix or "install a release that this adapter was built for",
            )

    def template(self, **given: Any) -> list[Any]:
        """The arguments of a call in order. Raises :class:`BindError` for a name that does not exist."""
        self.require(*given)
        made = list(self.defaults)
        for name, value in given.items():
            made[self.place[name]] = value
        return made


def _neutral(kind: str) -> Any:
    if "Optional" in kind or kind.endswith("?") or "Tensor" in kind:
        return None
    return {"bool": False, "int": 0, "float": 0.0}.get(kind)
