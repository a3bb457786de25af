"""From a case's toys to manifests: a toy does everything except what one of its keys limits, written out as explicit rows.

Where two readings are possible:

- ``pages`` names the pages a kernel reads. 1 means slots, which every pool can be split into; other sizes are fixed.
- a name that ends in ``_mla`` or ``mla``, ``_mha``, ``_gdn`` says its kind; others serve every kind of the model's groups.
- keys about decoding kernels and caches do not limit a toy's vision part, unless the toy names the role ``vision``.
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

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from attn_core.availability import Availability
from attn_core.capabilities import FEATURES, GRAPH_LEVELS, PHASES
from attn_core.errors import ManifestError
from attn_core.manifest import Manifest, parse_manifest
from attn_core.reasons import Reason
from attn_core.testing import cases_words as words
from attn_core.testing.cases_words import CaseError

#: Rank of a toy whose ``order`` does not speak about the platform.
_RANK = 5
_MLA = ("mla", "dsa")
_ROLES: Mapping[str, list[str]] = {
    "mha": ["attend"],
    "mm": ["attend"],
    "mla": ["absorbed", "ragged"],
    "gdn": ["scan"],
    "dsa": ["sparse"],
}

Row = dict[str, Any]


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
    limits = toy if kind != "mm" or "vision" in toy.get("roles", ()) else _only_hardware(toy)
    rows = _rows(backend, kind, limits)
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


def _only_hardware(toy: Mapping[str, Any]) -> dict[str, Any]:
    return {key: toy[key] for key in ("sm", "gfx") if key in toy}


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
    for key, limit in _LIMITS.items():  # in this order: what splits rows comes after what replaces conditions
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


def _without(row: Row, *features: str) -> Row:
    return {**row, "features": [name for name in row["features"] if name not in features]}


def _flag(*features: str) -> Any:
    """A key that is true, false, or the phases in which it is true."""

    def limit(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
        if isinstance(value, Mapping):
            value = [name for name, on in value.items() if on]
        on = row["when"]["phase"] in words.phases(value) if isinstance(value, list | str) else bool(value)
        return [row if on else _without(row, *features)]

    return limit


def _set(axis: str, make: Any, kinds: tuple[str, ...], only: tuple[str, ...] = PHASES) -> Any:
    """A key that replaces the condition on one axis, in some kinds and phases."""

    def limit(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
        if kind in kinds and row["when"]["phase"] in only and value not in ("any", None):
            row["when"][axis] = make(value)
        return [row]

    return limit


def _arch(key: str) -> Any:
    def limit(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
        row["when"]["arch"] = [*row["when"].get("arch", []), *words.archs(key, value)]
        return [row]

    return limit


def _merge_dims(**more: Any) -> Any:
    def limit(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
        if kind in ("mha", "mla", "mm"):
            present = row["when"]["head_dims"]
            bounds = {name: make(value) for name, make in more.items()}
            row["when"]["head_dims"] = {**present, **bounds} if isinstance(present, dict) else present
        return [row]

    return limit


def _diff_kv(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    if kind == "mha" and not value and isinstance(row["when"]["head_dims"], dict):
        row["when"]["head_dims"] = {**row["when"]["head_dims"], "equal": True}
    return [row]


def _diff_kv_with_sinks(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    present = row["when"].get("head_dims")
    if kind != "mha" or value or not isinstance(present, dict) or present.get("equal"):
        return [row]
    equal = deepcopy(row)
    equal["when"]["head_dims"] = {**present, "equal": True}
    return [equal, _without(row, "sinks")]


def _phases(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    if isinstance(value, Mapping):
        value = [name for name, on in value.items() if on]
    return [row] if row["when"]["phase"] in words.phases(value) else []


def _roles(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    named = words.phases([role for role in words.listed(value) if role not in ("vision", "linear")])
    return [row] if kind in ("mm", "gdn") or row["when"]["phase"] in named else []


def _graph(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    level = value
    if isinstance(value, Mapping):
        level = next((said for name, said in value.items() if row["when"]["phase"] in words.phases(name)), "none")
    level = {True: "full", False: "none", None: "none"}.get(level, level)
    if level not in GRAPH_LEVELS:
        raise CaseError(f"graph: {level!r} is not one of {', '.join(GRAPH_LEVELS)}")
    row["graph"] = {"level": level}
    return [row]


def _kv_rules(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    """``[{"fp8": "sm>=89"}]``: these cache types on this hardware only; other types are not touched."""
    if kind not in ("mha", "mla", "dsa"):
        return [row]
    ruled: dict[str, list[str]] = {}
    for rule in words.listed(value):
        for word, where in rule.items():
            for name in words.dtypes(word):
                ruled[name] = words.hardware(where)
    free = [pair for pair in row["when"]["dtypes"] if pair["kv"] not in ruled]
    rows = [{**deepcopy(row), "when": {**deepcopy(row["when"]), "dtypes": free}}] if free else []
    for name, archs in ruled.items():
        kept = [pair for pair in row["when"]["dtypes"] if pair["kv"] == name]
        present = row["when"].get("arch", archs)
        both = [arch for arch in archs if arch in present]
        if kept and both:
            rows.append({**deepcopy(row), "when": {**deepcopy(row["when"]), "dtypes": kept, "arch": both}})
    return rows


def _combos(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    """The combinations that exist, one row each; nothing else does."""
    rows = []
    for table in words.combos(value):
        when = words.conditions({key: item for key, item in table.items() if key not in ("q", "kv")}, "")
        if row["when"]["phase"] not in when.pop("phase", [row["when"]["phase"]]):
            continue
        pairs = [
            pair
            for pair in row["when"].get("dtypes", [{}])
            if ("q" not in table or pair.get("q") in words.dtypes(table["q"]))
            and ("kv" not in table or table["kv"] == "auto" or pair.get("kv") in words.dtypes(table["kv"]))
        ]
        made = {**deepcopy(row["when"]), **when}
        rows += [{**row, "when": made | ({"dtypes": pairs} if "dtypes" in made else {})}] if pairs else []
    return rows


def _qkv(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    """Element types [q, kv] or [q, k, v] that go together; a third one that differs is the output's. Numbers are head dims."""
    value = [re.split(r"[/+,\s]+", item) if isinstance(item, str) and "/" in item else item for item in value]
    items = value if value and isinstance(value[0], list | dict) else [value]
    if all(isinstance(n, int) for item in items if isinstance(item, list) for n in item):
        if kind in ("mha", "mla", "mm"):
            row["when"]["head_dims"] = [[item[0], item[-1]] for item in items]
        return [row]
    if kind not in ("mha", "mla", "dsa"):
        return [row]
    triples = []
    for item in items:
        table = item if isinstance(item, dict) else _triple(item)
        triples.append({key: words.dtypes(name)[0] for key, name in table.items()})
    row["when"]["dtypes"] = triples
    return [row]


def _triple(item: list[str]) -> dict[str, str]:
    table = dict(zip(("q", "kv"), item, strict=False))
    return table | ({"out": item[2]} if len(item) > 2 and item[2] != item[1] else {})


def _adapter(row: Row, value: Any, kind: str, toy: Mapping[str, Any]) -> list[Row]:
    """``pad`` may pad heads, V and head dims; ``pad_v``, ``pad_heads``, ``pad_head_dim`` one of them."""
    text = str(value).lower().replace("-", "_").replace(" ", "_")
    if "pad" not in text:
        raise CaseError(f"unknown adapter {value!r}; known are pad, pad_v, pad_heads, pad_head_dim")
    named = {"pad_v": ["v_dim"], "pad_head_dim": ["head_dims"], "pad_dim": ["head_dims"], "pad_head": ["q_heads"]}
    axes = next((found for name, found in named.items() if text.startswith(name)), ["q_heads", "v_dim", "head_dims"])
    row["pads"] = axes
    return [row]


_PAGED = ("mha", "mla", "dsa")
_LIMITS: Mapping[str, Any] = {
    "sm": _arch("sm"),
    "gfx": _arch("gfx"),
    "phases": _phases,
    "roles": _roles,
    "kv": _set("dtypes", lambda v: words.cache_pairs(words.listed(v)), _PAGED),
    "kv_prefill": _set("dtypes", lambda v: words.cache_pairs(words.listed(v)), _PAGED, words.PREFILL_LIKE),
    "kv_rules": _kv_rules,
    "qkv": _qkv,
    "combos": _combos,
    "head_dims": _set("head_dims", words.pairs, ("mha", "mla", "mm")),
    "head_dim_max": _merge_dims(max=int),
    "head_dim_multiple": _merge_dims(multiple=int),
    "head_k_dim": _set("state_dims", lambda v: {"first": words.listed(v)}, ("gdn",)),
    "state_dtypes": _set("state_dtype", lambda v: [words.dtypes(n)[0] for n in words.listed(v)], ("gdn",)),
    "pages": _set("page_size", words.pages, _PAGED),
    "page_multiple": _set("page_size", lambda v: {"min": v, "multiple": v}, _PAGED),
    "mha_pages": _set("page_size", words.pages, ("mha",)),
    "mla_pages": _set("page_size", words.pages, _MLA),
    "mla_decode_pages": _set("page_size", words.pages, _MLA, ("decode", "verify", "draft", "draft_extend")),
    "mla_heads": _set("q_heads", words.heads, _MLA),
    "mla_heads_rule": _set("q_heads", words.heads, _MLA),
    "mla_geometry": _set("mla_dims", lambda v: [",".join(map(str, item)) for item in v], _MLA),
    "ratios": _set("gqa_ratio", words.listed, ("mha",)),
    "decode_ratios": _set("gqa_ratio", words.listed, ("mha",), words.DECODE_LIKE),
    "prefill_ratios": _set("gqa_ratio", words.listed, ("mha",), words.PREFILL_LIKE),
    "layouts": _set("format.layout", words.listed, _PAGED),
    "max_pool_elements": _set("pool_elements", lambda v: {"max": int(v)}, _PAGED),
    "min_cuda": _set("cuda", lambda v: {"min": str(v)}, (*_PAGED, "gdn", "mm")),
    "needs_lds": _set("lds_bytes", lambda v: {"min": int(v)}, (*_PAGED, "gdn", "mm")),
    "sliding": _flag("sliding_window"),
    "softcap": _flag("softcap"),
    "returns_lse": _flag("lse", "partial", "dcp_decode", "dcp_multi_query", "chunked_prefix"),
    "deterministic": _flag("batch_invariant"),
    "diff_kv": _diff_kv,
    "diff_kv_with_sinks": _diff_kv_with_sinks,
    "graph": _graph,
    "adapter": _adapter,
}
KEYS = frozenset(_LIMITS) | {
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
