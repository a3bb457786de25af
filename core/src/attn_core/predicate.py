"""The one predicate language of manifest rows.

A ``when`` table is a conjunction of conditions, one an axis. A condition is a scalar (equal), a list (any of) or a table
with ``min``, ``max``, ``multiple``, ``exactly``, ``not`` and, for pairs, ``equal``, ``first``, ``second``. Nested tables of ``format``, ``library``,
``explicit`` and ``peer`` are flattened to dotted axis names.

>>> when = compile_when({"arch": ["sm90"], "page_size": {"multiple": 16}})
>>> [c.holds({"arch": "sm90", "page_size": 64}) for c in when]
[True, True]
>>> when[0].need
'sm90'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from attn_core.axes import OPEN_FAMILIES, Axis, find_axis
from attn_core.dtypes import canonical
from attn_core.errors import ManifestError, UsageError

_NESTED = ("format", *OPEN_FAMILIES)
_TABLE_KEYS = frozenset({"min", "max", "multiple", "exactly", "not", "equal", "first", "second"})
_PAIR_KEYS = ("equal", "first", "second")

#: A request: the value of each axis that is known. An absent axis is unknown.
Request = Mapping[str, Any]


class Condition:
    """One axis of a row with the values it accepts, ``raw`` as the manifest writes them."""

    def __init__(self, axis: Axis, name: str, raw: Any, test: Callable[[Any], bool]) -> None:
        self.axis, self.raw, self._form, self._test = name, raw, axis, test

    def __repr__(self) -> str:
        return f"Condition({self.axis}: {self.need})"

    @cached_property
    def value(self) -> Any:
        """The accepted values, as nested tuples."""
        return _freeze(self.raw)

    @cached_property
    def need(self) -> str:
        """The accepted values, as people read them."""
        return _describe(self._form, self.raw)

    def holds(self, request: Request, unknown: bool = True) -> bool:
        """Whether the request satisfies this condition; an axis the request does not know counts as `unknown`."""
        have = request.get(self.axis)
        if have is None:
            return unknown
        return self._test(have)

    def accepts(self, value: Any) -> bool:
        """Whether this one value satisfies the condition."""
        return self._test(value)

    @cached_property
    def exact(self) -> bool:
        """``exactly``: the pool itself must have this value; splitting its pages down to it does not count."""
        return isinstance(self.value, tuple) and any(isinstance(v, tuple) and v[:1] == ("exactly",) for v in self.value)


class When(dict[str, Any]):
    """A ``when`` table that has been compiled: its conditions come with it, so that nobody compiles it twice."""

    def __init__(self, table: Mapping[str, Any], where: str = "when") -> None:
        super().__init__(table)
        self.conditions = compile_when(table, where)

    def __reduce__(self) -> tuple[Any, ...]:
        return When, (dict(self),)


def flatten(when: Mapping[str, Any]) -> dict[str, Any]:
    """`when` with nested families flattened: ``{"format": {"dtype": "fp4"}}`` becomes ``{"format.dtype": "fp4"}``."""
    flat: dict[str, Any] = {}
    for name, value in when.items():
        if name in _NESTED and isinstance(value, Mapping):
            flat.update({f"{name}.{key}": item for key, item in value.items()})
        else:
            flat[name] = value
    return flat


def compile_when(when: Mapping[str, Any], where: str = "when") -> tuple[Condition, ...]:
    """Compile a ``when`` table. Raises :class:`ManifestError` that names the axis, the value and what is possible."""
    return tuple(compile_condition(name, value, where) for name, value in flatten(when).items())


def compile_condition(name: str, value: Any, where: str) -> Condition:
    """Compile the condition on one axis. See :func:`compile_when` for errors."""
    axis = find_axis(name)
    if axis is None:
        raise ManifestError(f"{where}: unknown axis {name!r}", fix="see the list of axes in docs/manifest.md")
    place = f"{where}.{name}"
    _check_words(axis, value, place)
    return Condition(axis, name, value, _build(axis, value, place))


def _check_words(axis: Axis, value: Any, place: str) -> None:
    """Refuse words an axis can never have: a typo would make a row that never holds, without a word."""
    if not axis.words and axis.pattern is None:
        return
    listed = value["not"] if isinstance(value, Mapping) and "not" in value else value
    for item in listed if isinstance(listed, list | tuple) else [listed]:
        if isinstance(item, str) and item not in axis.words and not (axis.pattern and axis.pattern.fullmatch(item)):
            forms = f", or {axis.pattern_means}" if axis.pattern_means else ""
            raise ManifestError(f"{place}: {item!r} is not one of {', '.join(axis.words)}{forms}")


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((key, _freeze(item)) for key, item in value.items()))
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value


def _build(axis: Axis, value: Any, place: str) -> Callable[[Any], bool]:
    if axis.form == "dtypes":
        return _dtypes_test(value, place)
    if axis.form == "set":
        return _set_test(value, place)
    if axis.form == "specifier":
        return _specifier_test(value, place)
    if axis.form == "flag" and not isinstance(value, bool):
        raise ManifestError(f"{place}: {value!r} is not a flag; write true or false")
    if isinstance(value, Mapping):
        return _table_test(axis, value, place)
    items = value if isinstance(value, list | tuple) else [value]
    if axis.form == "pair" and not isinstance(value, list | tuple):
        raise ManifestError(f"{place}: {value!r} is not a list of pairs; write [[128, 128]]")
    if not items:
        raise ManifestError(f"{place}: an empty list accepts nothing; leave the row out instead")
    accepted = frozenset(_value(axis, item, place) for item in items)
    return lambda have: _normal(axis, have) in accepted


def _value(axis: Axis, item: Any, place: str) -> Any:
    """One listed value in comparable form, checked against the axis' form."""
    if axis.form == "pair":
        if not (isinstance(item, list | tuple) and len(item) == 2 and all(isinstance(n, int) for n in item)):
            raise ManifestError(f"{place}: {item!r} is not a pair of numbers; write [[128, 128]]")
        return tuple(item)
    if axis.form == "number":
        if isinstance(item, bool) or not isinstance(item, int):
            raise ManifestError(f"{place}: {item!r} is not a whole number")
        return item
    if axis.form == "version":
        return _version(item, place)
    if axis.form == "name" and not isinstance(item, str):
        raise ManifestError(f"{place}: {item!r} is not a name (a string)")
    return item


def _normal(axis: Axis, have: Any) -> Any:
    if axis.form == "version":
        return _version(have, axis.name)
    return tuple(have) if axis.form == "pair" else have


def _version(item: Any, place: str) -> tuple[int, ...]:
    try:
        parts = [int(part) for part in str(item).split(".")]
    except ValueError as error:
        raise ManifestError(f"{place}: {item!r} is not a version such as 12.3") from error
    while parts and parts[-1] == 0:  # 13 and 13.0 are one version
        parts.pop()
    return tuple(parts)


def _table_test(axis: Axis, table: Mapping[str, Any], place: str) -> Callable[[Any], bool]:
    unknown = set(table) - _TABLE_KEYS
    if unknown or not table:
        raise ManifestError(
            f"{place}: {sorted(unknown) or 'an empty table'} not understood; a table may hold {sorted(_TABLE_KEYS)}"
        )
    if axis.form == "name" and set(table) - {"not"}:
        raise ManifestError(f"{place}: names have no order; only 'not' is possible in a table")
    if axis.form == "pair":
        return _pair_table_test(table, place)
    tests: list[Callable[[Any], bool]] = []
    if "min" in table:
        low = _value(axis, table["min"], place)
        tests.append(lambda have: have >= low)
    if "max" in table:
        high = _value(axis, table["max"], place)
        tests.append(lambda have: have <= high)
    if "multiple" in table:
        step = _positive(table["multiple"], place)
        tests.append(lambda have: have % step == 0)
    if "exactly" in table:
        named = table["exactly"] if isinstance(table["exactly"], list | tuple) else [table["exactly"]]
        exact = frozenset(_value(axis, item, place) for item in named)
        tests.append(lambda have: have in exact)
    if "not" in table:
        listed = table["not"] if isinstance(table["not"], list | tuple) else [table["not"]]
        excluded = frozenset(_value(axis, item, place) for item in listed)
        tests.append(lambda have: have not in excluded)
    for key in _PAIR_KEYS:
        if key in table:
            raise ManifestError(f"{place}: {key!r} is about the two numbers of a pair")
    return lambda have: all(test(_normal(axis, have)) for test in tests)


def _positive(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ManifestError(f"{place}: {value!r} is not a positive whole number")
    return value


def _pair_table_test(table: Mapping[str, Any], place: str) -> Callable[[Any], bool]:
    low, high = table.get("min", 0), table.get("max", 1 << 62)
    step = _positive(table.get("multiple", 1), place)
    equal = table.get("equal")
    if "exactly" in table:
        raise ManifestError(f"{place}: list the exact pair instead: [[128, 128]]")
    excluded = frozenset(tuple(pair) for pair in table.get("not", ()))
    number = Axis("", "number", "")
    first, second = (_build(number, table[key], place) if key in table else None for key in ("first", "second"))

    def test(have: Any) -> bool:
        a, b = have
        inside = low <= a <= high and low <= b <= high and a % step == 0 and b % step == 0
        each = (first is None or first(a)) and (second is None or second(b))
        return inside and each and (equal is None or (a == b) is equal) and (a, b) not in excluded

    return test


def _dtypes_test(value: Any, place: str) -> Callable[[Any], bool]:
    triples = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(item, Mapping) or not item or set(item) - {"q", "kv", "out"}:
            raise ManifestError(f'{place}: {item!r} is not a dtype triple; write {{ q = "bf16", kv = "bf16" }}')
        names = {key: _dtype(name, place) for key, name in item.items()}
        triples.append((names.get("q"), names.get("kv"), names.get("out")))

    def fits(triple: tuple[str | None, str | None, str | None], have: Any) -> bool:
        q, kv, out = triple
        # without `out` a kernel returns what it is given, or the model's dtype where q was quantised for it
        out_fits = have[2] == out if out else (q is None or have[2] == q or q.startswith("fp8"))
        return (q is None or q == have[0]) and (kv is None or kv == have[1]) and out_fits

    def test(have: Any) -> bool:
        return any(fits(triple, have) for triple in triples)

    return test


def _dtype(name: Any, place: str) -> str:
    try:
        return canonical(name)
    except UsageError as error:
        raise ManifestError(f"{place}: {error.message}") from error


def _set_test(value: Any, place: str) -> Callable[[Any], bool]:
    if isinstance(value, Mapping):
        if set(value) != {"not"}:
            raise ManifestError(f"{place}: a table may only hold 'not'")
        listed = value["not"]
        excluded = frozenset([listed] if isinstance(listed, str) else listed)
        return lambda have: not (excluded & frozenset(have))
    wanted = frozenset([value] if isinstance(value, str) else value)
    return lambda have: wanted <= frozenset(have)


def _specifier_test(value: Any, place: str) -> Callable[[Any], bool]:
    if not isinstance(value, str):
        raise ManifestError(f"{place}: {value!r} is not a version specifier such as '>=3.5,<3.7'")
    compiled: list[Any] = []

    def test(have: Any) -> bool:
        if not compiled:  # packaging is imported only where a version is really compared
            from packaging.specifiers import InvalidSpecifier, SpecifierSet

            try:
                compiled.append(SpecifierSet(value, prereleases=True))
            except InvalidSpecifier as error:
                raise ManifestError(f"{place}: {value!r} is not a version specifier such as '>=3.5,<3.7'") from error
        return bool(compiled[0].contains(str(have)))

    return test


def _describe(axis: Axis, value: Any) -> str:
    if axis.form == "dtypes":
        items = value if isinstance(value, list | tuple) else [value]
        return " or ".join(
            "/".join(f"{key} {item[key]}" for key in ("q", "kv", "out") if key in item)
            for item in items
            if isinstance(item, Mapping)
        )
    if isinstance(value, Mapping):
        words = {
            "min": ">= {}",
            "max": "<= {}",
            "multiple": "a multiple of {}",
            "exactly": "exactly {}",
            "not": "not {}",
        }
        parts = [words[key].format(_join(item)) for key, item in value.items() if key in words]
        if "equal" in value:
            parts.append("qk and v equal" if value["equal"] else "qk and v different")
        number = Axis("", "number", "")
        parts += [f"{key} {_describe(number, value[key])}" for key in ("first", "second") if key in value]
        return " and ".join(parts)
    return _join(value)


def _join(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(
            _join(item) if not isinstance(item, list | tuple) else "/".join(map(str, item)) for item in value
        )
    return str(value).lower() if isinstance(value, bool) else str(value)
