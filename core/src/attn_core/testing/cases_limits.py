"""The keys of a toy: each limits the allow rows, in some kinds and phases. A row may be split, or vanish."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from attn_core.capabilities import GRAPH_LEVELS, PHASES
from attn_core.testing import cases_words as words
from attn_core.testing.cases_words import CaseError

Row = dict[str, Any]
_MLA = ("mla", "dsa")


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
LIMITS: Mapping[str, Any] = {
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
