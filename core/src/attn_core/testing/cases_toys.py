"""From a case's toys to manifests: a toy does everything except what one of its keys limits, written out as explicit rows.

Where two readings are possible:

- ``pages`` names the pages a kernel reads. 1 means slots, which every pool can be split into; other sizes are fixed.
- a name that ends in ``_mla`` or ``mla``, ``_mha``, ``_gdn`` says its kind; others serve every kind of the model's groups.
- vision towers and encoders take part only where the entry mentions them (a role, a flag, an expectation).
- keys about prefill (``prefill_ratios``, ``kv_prefill``) cover verify and draft extension, too: several queries a row.
- ``NAME:VARIANT`` is one variant of backend NAME.
- ``jit: true`` compiles at first use; ``prebuilt`` (a list of architectures, or true) needs no compiler there, and elsewhere
  it compiles unless ``jit`` is false.
- ``lib`` is the version of the toy's own library, or its name if ``lib_version`` has the version; joint limits may speak
  about it as ``lib`` or by its name.
- ``enabled: false`` is a backend that is installed but switched off, ``enable_with`` how to switch it on: the name of a
  flag of the case (it is on when that flag is set), or text to quote.
- ``self_test`` names a test that passes, unless it is ``{"name": …, "ok": false}``, false, or contains "fail".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from attn_core.availability import Availability
from attn_core.capabilities import FEATURES, PHASES
from attn_core.errors import ManifestError
from attn_core.manifest import Manifest, parse_manifest
from attn_core.reasons import Reason
from attn_core.testing import cases_words as words
from attn_core.testing.cases_limits import LIMITS, Row
from attn_core.testing.cases_words import CaseError

#: Rank of a toy whose ``order`` does not speak about the platform.
_RANK = 5
_ROLES: Mapping[str, list[str]] = {
    "mha": ["attend"],
    "mm": ["attend"],
    "mla": ["absorbed", "ragged"],
    "gdn": ["scan"],
    "dsa": ["sparse"],
}


@dataclass
class World:
    """The toys of a case as manifests, with probe answers, and what was wrong with them."""

    manifests: list[Manifest] = field(default_factory=list)
    availability: dict[str, dict[str, Availability]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)


def build_world(
    toys: Mapping[str, Any], kinds: Iterable[str], flags: Mapping[str, Any], schemas: Mapping[str, Any]
) -> World:
    """All toys as manifests of the kinds at hand. ``schemas`` are the options that backends know."""
    world = World()
    grouped: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, toy in toys.items():
        backend, _, variant = name.partition(":")
        grouped.setdefault(backend, {})[variant or "default"] = check_keys(name, toy or {})
    for backend, variants in grouped.items():
        for kind in _kinds(backend, variants.values(), kinds):
            try:
                manifest = parse_manifest(_manifest(backend, kind, variants, flags, schemas.get(backend)))
            except ManifestError as error:
                world.problems.append(str(error))
                continue
            world.manifests.append(manifest)
            world.kinds.add(kind)
            world.availability[manifest.id] = {
                variant: answer for variant, toy in variants.items() if (answer := _available(backend, toy, flags))
            }
    return world


def check_keys(name: str, toy: Mapping[str, Any]) -> Mapping[str, Any]:
    """The toy, if all its keys are known."""
    unknown = set(toy) - KEYS
    if unknown:
        raise CaseError(f"unknown key(s) {sorted(unknown)} of installed {name!r}")
    return toy


def _kinds(backend: str, variants: Iterable[Mapping[str, Any]], kinds: Iterable[str]) -> list[str]:
    roles = {role for toy in variants for role in toy.get("roles", ())}
    for suffix, kind in (("_gdn", "gdn"), ("_mha", "mha"), ("mla", "mla")):
        if backend.endswith(suffix):
            latent = "dsa" if kind == "mla" and "dsa" in kinds else kind
            return [latent]
    found = [kind for kind in ("mha", "mla", "dsa", "gdn", "mm") if kind in kinds]
    if not roles:
        return found
    text = bool(roles - {"vision", "linear"})
    wanted = {"mm": "vision" in roles, "gdn": "linear" in roles or text}
    return [kind for kind in found if wanted.get(kind, text)]


# --- one manifest -------------------------------------------------------------------------------------------------------


def _manifest(
    backend: str, kind: str, variants: Mapping[str, Mapping[str, Any]], flags: Mapping[str, Any], schema: Any
) -> dict[str, Any]:
    tables: list[dict[str, Any]] = []
    order: list[dict[str, Any]] = []
    for name, toy in variants.items():
        tables += _variants(backend, name, kind, toy, flags)
        order += _order(toy.get("order"))
    table: dict[str, Any] = {
        "api": "1.0", "kind": kind, "name": backend, "package": f"attn-{backend}", "version": _version(variants),
        "variant": tables, "order": order,
    }  # fmt: skip
    return table | ({"options_schema": schema} if schema else {})


def _version(variants: Mapping[str, Mapping[str, Any]]) -> str:
    stated = [str(toy.get("lib_version") or toy.get("lib") or "") for toy in variants.values()]
    return next((text for text in stated if text[:1].isdigit()), "1.0")


def _order(order: Any) -> list[dict[str, Any]]:
    """``{"121": 1}`` ranks by architecture; a number ranks everywhere."""
    rows: list[dict[str, Any]] = []
    if order is not None and not isinstance(order, Mapping):
        return [{"rank": order}]
    for arch, rank in (order or {}).items():
        name = str(arch)
        place = words.archs("gfx" if name.startswith("gfx") else "sm", name) if name not in words.OTHERS else [name]
        rows.append({"rank": rank, "reason": f"ranked {rank} on {place[0]}", "when": {"arch": place}})
    taken = [arch for row in rows for arch in row["when"]["arch"]]
    rest = {"when": {"arch": {"not": taken}}} if taken else {}
    return [*rows, {"rank": _RANK, **rest}]


def _variants(
    backend: str, name: str, kind: str, toy: Mapping[str, Any], flags: Mapping[str, Any]
) -> list[dict[str, Any]]:
    rows = _rows(backend, kind, toy)
    deny = [_deny(_library(backend, toy), row) for row in toy.get("deny", ())] if kind != "mm" else []
    ready = toy.get("prebuilt")
    jit = bool(toy.get("jit", isinstance(ready, list)))
    base = {"name": name, "roles": _ROLES[kind], "deny": deny, "allow": rows, "jit": jit or ready is False}
    found = [base]
    if isinstance(ready, list):  # prebuilt for some architectures; the rest is compiled, where it may be
        built = {**base, "name": name, "jit": False, "allow": _on(rows, words.hardware(ready))}
        rest = [arch for arch in words.ARCHS if arch not in words.hardware(ready)]
        found = [built, *([{**base, "name": f"{name}_jit", "allow": _on(rows, rest)}] if jit else [])]
    elif ready is True:
        found = [{**base, "jit": False}]
    if kind == "dsa":
        index = _rows(backend, kind, {key: toy[key] for key in ("sm", "gfx", "phases") if key in toy})
        for row in index:
            row["when"] = {**row["when"], "dtypes": [{"q": q} for q in words.MODEL_DTYPES]}
            row["when"]["format.name"] = "index_132_planar"
        found.append({**base, "name": f"{name}_index", "roles": ["index"], "deny": [], "allow": index})
    return found


def _on(rows: Iterable[Row], archs: list[str]) -> list[Row]:
    """The rows on these architectures only; a row that keeps none is left out."""
    found = []
    for row in rows:
        present = row["when"].get("arch", list(words.ARCHS))
        kept = [arch for arch in present if arch in archs]
        if kept:
            when = {**row["when"], "arch": kept}
            when.pop("vendor", None)
            found.append({**row, "when": when})
    return found


def _deny(backend: str, row: Mapping[str, Any]) -> dict[str, Any]:
    said = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("reason", "link", "fix", "code"))
    reason = row.get("reason") or f"declared wrong or unsupported together: {said}"
    table = {"code": row.get("code", "joint"), "reason": reason, "when": words.conditions(row, backend)}
    return table | {key: row[key] for key in ("link", "fix") if key in row}


def _library(backend: str, toy: Mapping[str, Any]) -> str:
    """The distribution name of a toy's library."""
    named = str(toy.get("lib", ""))
    return named if "lib_version" in toy and named[:1].isalpha() else backend


def _available(backend: str, toy: Mapping[str, Any], flags: Mapping[str, Any]) -> Availability | None:
    versions: dict[str, str] = {}
    for key in ("lib", "lib_version"):
        value = toy.get(key)
        if key == "lib" and _library(backend, toy) != backend:
            continue
        if isinstance(value, Mapping):
            versions |= {str(name): str(version) for name, version in value.items()}
        elif value is not None:
            name, _, version = str(value).replace("==", " ").rpartition(" ")
            versions[name.strip() or _library(backend, toy)] = version
    reasons: list[Reason] = []
    test = toy.get("self_test")
    if test is False or (isinstance(test, str) and "fail" in test) or _failed_test(test):
        name = test.get("name", "self-test") if isinstance(test, Mapping) else str(test)
        reasons.append(Reason("self_test", f"self-test failed ({name})"))
    how = toy.get("enable_with")
    on = toy.get("enabled", how is None)
    if how is not None and str(how) in flags:
        on = bool(flags[str(how)])
    if not on:
        need = f"installed but not enabled: enable with {how}" if how else "installed but not enabled"
        fix = f"enable {backend} with {how}" if how else f"enable {backend}"
        reasons.append(Reason("not_enabled", need, fix=fix))
    if reasons:
        return Availability(False, tuple(reasons), versions)
    return Availability(True, (), versions) if versions or test else None


def _failed_test(test: Any) -> bool:
    return isinstance(test, Mapping) and not test.get(
        "ok", test.get("pass", test.get("passes", test.get("result") != "failed"))
    )


# --- rows ---------------------------------------------------------------------------------------------------------------


def _rows(backend: str, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    """The allow rows of a toy: one row per phase at first, then cut down and split by its keys; equal rows are joined."""
    rows = [_everything(kind, phase) for phase in (PHASES if kind != "mm" else ("prefill",))]
    for key, limit in LIMITS.items():  # in this order: what splits rows comes after what replaces conditions
        if key in toy:
            rows = [made for row in rows for made in limit(deepcopy(row), toy[key], kind, toy)]
    joined: dict[str, Row] = {}
    for row in rows:
        phase = row["when"].pop("phase")
        same = joined.setdefault(repr(sorted(row.items(), key=lambda item: item[0])), {**row, "phases": []})
        same["phases"] += [phase] if isinstance(phase, str) else phase
    return [_finished(row) for row in joined.values()]


def _finished(row: Row) -> Row:
    when = {"phase": row["phases"], **row["when"]}
    if "arch" not in when:
        when["vendor"] = words.VENDORS
    return {**{key: value for key, value in row.items() if key not in ("when", "phases")}, "when": when}


def _everything(kind: str, phase: str) -> Row:
    when: dict[str, Any] = {"phase": phase}
    if kind in ("mha", "mla", "mm", "dsa"):
        when["dtypes"] = words.every_pair()
    if kind in ("mha", "mla", "mm"):
        when["head_dims"] = {"min": 1}
    if kind in ("mha", "mla", "dsa"):
        when |= {"page_size": {"min": 1}, "format.layout": ["NHD", "HND"]}
    if kind == "gdn":
        when |= {"state_dtype": list(words.MODEL_DTYPES), "state_dims": {"min": 1}}
    return {"features": sorted(FEATURES), "graph": {"level": "full"}, "when": when}


KEYS = frozenset(LIMITS) | {
    "order",
    "deny",
    "jit",
    "prebuilt",
    "lib",
    "lib_version",
    "self_test",
    "enabled",
    "enable_with",
}
