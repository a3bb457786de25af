"""Manifests: what a backend declares about itself, as pure data.

``attn_manifest.toml`` holds one or more ``[[backend]]`` tables. Parsing is the validation: every error says where the
mistake is, what was found and what is needed. The same rules are published as ``schemas/manifest-1.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from attn_core._table import Table
from attn_core.axes import AXES, SOLVED_AXES
from attn_core.capabilities import FEATURES, GRAPH_LEVELS, HOST_LENGTHS, PADDED_OUT, PHASES, ROLES, STATUSES
from attn_core.errors import ManifestError
from attn_core.geometry import BACKEND_KINDS
from attn_core.predicate import Condition, When, compile_when

#: Bounds of ``rank`` in order rows; lower is preferred, 50 is what a backend without a matching row has.
RANK_BOUNDS = (1, 99)
DEFAULT_RANK = 50

#: What an adapter may pad with zeros up to the next value that a row takes: heads, V to the width of K, or both widths.
PADDED_AXES = ("q_heads", "v_dim", "head_dims")

#: Sizes of scratch memory: fixed, for each row of a step, each token of a step, each (row, query head).
WORKSPACE_SIZES = ("bytes", "per_row", "per_token", "per_row_head")

#: The role a variant plays when it lists none.
DEFAULT_ROLE: Mapping[str, str] = {"mha": "attend", "mm": "attend", "mla": "absorbed", "gdn": "scan", "dsa": "sparse"}


def _solved(condition: Condition) -> bool:
    return condition.axis in SOLVED_AXES or condition.axis.startswith("peer.")


@dataclass(frozen=True, eq=True)
class Row:
    """One row of a variant or backend. ``when`` is the condition; which other fields count depends on the list it is in.

    allow: ``features``, ``graph``, ``piecewise``, ``fuses``, ``pads``, ``host_lengths``, ``padded_out``. deny: ``code``, ``reason``,
    ``fix``, ``link``. order: ``rank``. prefer: ``page_size``, ``format``, ``layout``. companion: ``phase``, ``role``, ``backend``.
    """

    when: Mapping[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    graph: str = "none"
    piecewise: str = "rebuild"
    fuses: frozenset[str] = frozenset()
    pads: frozenset[str] = frozenset()
    host_lengths: str | None = None
    padded_out: str = "garbage"
    code: str = ""
    reason: str = ""
    fix: str = ""
    link: str = ""
    rank: int = DEFAULT_RANK
    page_size: int | None = None
    format: str | None = None
    layout: str | None = None
    phase: str = ""
    role: str = ""
    backend: str = ""

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """The compiled conditions of ``when``."""
        return self.when.conditions if isinstance(self.when, When) else compile_when(self.when)

    @cached_property
    def settled(self) -> tuple[Condition, ...]:
        """The conditions that are known before anything is solved."""
        return tuple(c for c in self.conditions if not _solved(c))

    @cached_property
    def later(self) -> Mapping[str, tuple[Condition, ...]]:
        """The conditions on what solving decides, by axis; those on other phases under ``peer``. Empty for most rows."""
        found: dict[str, list[Condition]] = {}
        for condition in self.conditions:
            if _solved(condition):
                found.setdefault("peer" if condition.axis.startswith("peer.") else condition.axis, []).append(condition)
        return {axis: tuple(conditions) for axis, conditions in found.items()}

    @cached_property
    def pool(self) -> tuple[tuple[Condition, ...], ...]:
        """The conditions on the pool: on page size, format, layout and size, in this order; None where there is none."""
        return tuple(self.later.get(axis, ()) for axis in SOLVED_AXES)


@dataclass(frozen=True)
class Variant:
    """One kernel path of a backend, with capabilities of its own. Nothing is inherited between variants."""

    name: str
    roles: tuple[str, ...] = ()
    allow: tuple[Row, ...] = ()
    deny: tuple[Row, ...] = ()
    prefer: tuple[Row, ...] = ()
    requires: tuple[str, ...] = ()
    toolkit: tuple[str, ...] = ()
    jit: bool = False
    network: str = ""
    host_lengths: str = "bound"
    workspace: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The declaration of one backend. Identity is ``(kind, name)``."""

    api: str
    kind: str
    name: str
    status: str = "implemented"
    summary: str = ""
    aliases: tuple[str, ...] = ()
    deprecated_aliases: tuple[str, ...] = ()
    package: str = ""
    version: str = ""
    variants: tuple[Variant, ...] = ()
    order: tuple[Row, ...] = ()
    companions: tuple[Row, ...] = ()
    options_schema: Mapping[str, Any] = field(default_factory=dict)
    help: str = ""
    deprecated: str = ""

    @property
    def id(self) -> str:
        """``kind/name``."""
        return f"{self.kind}/{self.name}"

    def variant(self, name: str) -> Variant:
        """The variant called `name`. Raises :class:`ManifestError` if there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise ManifestError(f"{self.id} has no variant {name!r}; it has {[v.name for v in self.variants]}")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: the TOML table of this backend, plus ``api``, ``package`` and ``version``."""
        from attn_core._manifest_json import dump_backend

        return dump_backend(self)


# --- parsing ------------------------------------------------------------------------------------------------------------


def load_toml(text: str, where: str = "attn_manifest.toml") -> dict[str, Any]:
    """Parse TOML text. Raises :class:`ManifestError` with the line of the mistake."""
    try:
        import tomli as toml  # compiled: a third of tomllib's time, and listing reads one file a plugin
    except ImportError:
        import tomllib as toml  # type: ignore[no-redef]
    try:
        document: dict[str, Any] = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ManifestError(f"{where}: not valid TOML: {error}") from error
    return document


def parse_manifests(
    document: Mapping[str, Any], *, package: str = "", version: str = "", where: str = "attn_manifest.toml"
) -> tuple[Manifest, ...]:
    """The manifests of one document (parsed TOML or JSON). Raises :class:`ManifestError` at the first mistake."""
    table = Table(document, where)
    api = table.text("api", required=True)
    backends = table.tables("backend", required=True)
    table.finish()
    manifests = tuple(_parse_backend(backend, api, package, version) for backend in backends)
    seen: set[str] = set()
    for manifest in manifests:
        if manifest.id in seen:
            raise ManifestError(f"{where}: {manifest.id} is declared twice")
        seen.add(manifest.id)
    return manifests


def parse_manifest(table: Mapping[str, Any]) -> Manifest:
    """One manifest from its :meth:`Manifest.to_dict` form (what ``attn_capabilities`` may return, too)."""
    content = dict(table)
    api = str(content.pop("api", ""))
    package, version = str(content.pop("package", "")), str(content.pop("version", ""))
    return _parse_backend(Table(content, f"{content.get('kind')}/{content.get('name')}"), api, package, version)


def _parse_backend(table: Table, api: str, package: str, version: str) -> Manifest:
    kind = table.text("kind", choices=BACKEND_KINDS, required=True)
    name = table.text("name", required=True)
    if not name or not all(char.isalnum() or char in "_-" for char in name):
        raise ManifestError(f"{table.where}.name: {name!r} may only have letters, digits, '_' and '-'")
    table.where = f"{kind}/{name}"
    variants = tuple(_parse_variant(item, kind) for item in table.tables("variant", required=True))
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise ManifestError(f"{table.where}: two variants have one name: {names}")
    manifest = Manifest(
        api=api,
        kind=kind,
        name=name,
        status=table.text("status", choices=STATUSES, default="implemented"),
        summary=table.text("summary"),
        aliases=table.names("aliases"),
        deprecated_aliases=table.names("deprecated_aliases"),
        package=package,
        version=version,
        variants=variants,
        order=tuple(_parse_order(item) for item in table.tables("order")),
        companions=tuple(_parse_companion(item) for item in table.tables("companion")),
        options_schema=table.table("options_schema"),
        help=table.text("help"),
        deprecated=table.text("deprecated"),
    )
    table.finish()
    return manifest


def _parse_variant(table: Table, kind: str) -> Variant:
    name = table.text("name", required=True)
    table.where = f"{table.where.rpartition('.')[0]}:{name}"
    variant = Variant(
        name=name,
        roles=table.names("roles", choices=ROLES) or (DEFAULT_ROLE[kind],),
        allow=tuple(_parse_allow(item, kind) for item in table.tables("allow", required=True)),
        deny=tuple(_parse_deny(item) for item in table.tables("deny")),
        prefer=tuple(_parse_prefer(item) for item in table.tables("prefer")),
        requires=_requirements(table),
        toolkit=table.names("toolkit"),
        jit=table.flag("jit"),
        network=table.text("network"),
        host_lengths=table.text("host_lengths", choices=HOST_LENGTHS, default="bound"),
        workspace=_workspace(table),
    )
    table.finish()
    return variant


def _requirements(table: Table) -> tuple[str, ...]:
    requires = table.names("requires")
    for text in requires:
        if not text[:1].isalnum():  # the full PEP 508 check is made where requirements are used
            raise ManifestError(f"{table.where}.requires: {text!r} is not a requirement such as 'flash-attn-4>=4.0'")
    return requires


def _workspace(table: Table) -> dict[str, Any]:
    """``{ bytes, per_row, per_token, per_row_head, zeroed, shareable, rows = [{ when, bytes, … }] }``, checked here."""
    content = table.table("workspace")
    outer = Table(content, f"{table.where}.workspace")
    for item in (outer, *outer.tables("rows")):
        for key in WORKSPACE_SIZES:
            item.number(key, 0)
        if item is outer:
            item.flag("zeroed"), item.flag("shareable")
        else:
            _when(item)
        item.finish()
    return content


def _when(table: Table) -> dict[str, Any]:
    when = When(table.table("when"), f"{table.where}.when")
    for axis, listed in (("phase", PHASES), ("role", ROLES)):
        value = when.get(axis, ())
        value = value.get("not", ()) if isinstance(value, Mapping) else value
        for item in [value] if isinstance(value, str) else value:
            if item not in listed:
                raise ManifestError(f"{table.where}.when.{axis}: {item!r} is not one of {list(listed)}")
    return when


def _parse_allow(table: Table, kind: str) -> Row:
    when = _when(table)
    for axis in AXES.values():
        if kind in axis.required_for and axis.name not in when:
            raise ManifestError(
                f"{table.where}.when: {axis.name!r} is missing ({axis.meaning})",
                fix="an allow row must say what it claims; a row without it would claim every value",
            )
    if "arch" not in when and "vendor" not in when:
        raise ManifestError(f"{table.where}.when: say which hardware: 'arch' (a set such as ['sm90']) or 'vendor'")
    graph = Table(table.table("graph"), f"{table.where}.graph")
    row = Row(
        when=when,
        features=frozenset(table.names("features", choices=FEATURES)),
        graph=graph.text("level", choices=GRAPH_LEVELS, default="none"),
        piecewise=graph.text("piecewise", choices=("rebuild", "stable_address"), default="rebuild"),
        fuses=frozenset(table.names("fuses")),
        pads=frozenset(table.names("pads", choices=PADDED_AXES)),
        host_lengths=table.text("host_lengths", choices=HOST_LENGTHS) or None,
        padded_out=table.text("padded_out", choices=PADDED_OUT, default="garbage"),
    )
    graph.finish()
    table.finish()
    return row


def _parse_deny(table: Table) -> Row:
    row = Row(
        when=_when(table),
        code=table.text("code", default="denied"),
        reason=table.text("reason", required=True),
        fix=table.text("fix"),
        link=table.text("link"),
    )
    table.finish()
    return row


def _parse_order(table: Table) -> Row:
    low, high = RANK_BOUNDS
    rank = table.number("rank", low, high, required=True)
    row = Row(when=_when(table), rank=rank or DEFAULT_RANK, reason=table.text("reason"))
    table.finish()
    return row


def _parse_prefer(table: Table) -> Row:
    row = Row(
        when=_when(table),
        page_size=table.number("page_size", 1),
        format=table.text("format") or None,
        layout=table.text("layout") or None,
        reason=table.text("reason"),
    )
    table.finish()
    return row


def _parse_companion(table: Table) -> Row:
    row = Row(
        when=_when(table),
        phase=table.text("phase", choices=PHASES, required=True),
        role=table.text("role", choices=ROLES),
        backend=table.text("backend", required=True),
        reason=table.text("reason"),
    )
    table.finish()
    return row
