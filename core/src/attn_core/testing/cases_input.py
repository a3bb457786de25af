"""What a case asks: its rows, models, platforms and flags.

Where two readings are possible:

- a platform that names a CUDA device without a toolkit has CUDA 13.0, like the default platform.
- a flag whose value is a list, where the option itself takes one value, is one row for each value (``tp: [1, 2, 4]``).
- ``spec_topk`` without ``spec_algorithm`` means EAGLE: a topk needs somebody who drafts.
- overrides of ``text_config`` in a flat config are its own keys, and the other way round.
- ``cuda_graph: true`` is ``auto``, false is ``off``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from attn_core.geometry import Model
from attn_core.options import Options
from attn_core.platform import Platform, parse_platform
from attn_core.testing.cases_words import CaseError, is_dtype

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_PLATFORM: Mapping[str, Any] = {"device": "cuda", "sm": 90, "cuda": "13.0"}
#: Keys of a repro; ``kernel_variant`` belongs to the kit's own tests.
REPRO_KEYS = frozenset(
    {"model", "models", "draft", "platform", "platforms", "flags", "installed", "expect", "variant", "cases", "more",
     "backend", "plan_a", "plan_b", "kernel_variant"}
)  # fmt: skip
_ROW_KEYS = frozenset({"model", "draft", "platform", "flags", "installed", "expect", "ratio"})
_FLAGS: Mapping[str, str] = {
    "tp": "tp_size",
    "dcp": "dcp_size",
    "attention_backend_per_kind": "attention_backend",
    "spec_algorithm": "speculative_algorithm",
    "spec_topk": "speculative_eagle_topk",
    "spec_eagle_topk": "speculative_eagle_topk",
    "spec_draft_tokens": "speculative_num_draft_tokens",
    "spec_num_draft_tokens": "speculative_num_draft_tokens",
    "spec_steps": "speculative_num_steps",
    "spec_num_steps": "speculative_num_steps",
    "spec_attention_mode": "speculative_attention_mode",
}
_LISTS = ("exclude_backends", "prefer_backends", "disable_variants")


@dataclass(frozen=True)
class Row:
    """One thing to plan and check. ``installed`` None is the shipped manifests."""

    label: str
    model: Any = DEFAULT_MODEL
    draft: Any = None
    platform: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_PLATFORM))
    flags: Mapping[str, Any] = field(default_factory=dict)
    installed: Mapping[str, Any] | None = None
    expect: Any = field(default_factory=dict)
    schemas: Mapping[str, Any] = field(default_factory=dict)


def rows_of(repro: Mapping[str, Any]) -> Iterator[Row]:
    """Every row of an entry: its own, those of ``platforms``, ``models``, ``cases`` and ``more``, and the variant's."""
    unknown = set(repro) - REPRO_KEYS
    if unknown:
        raise CaseError(f"unknown key(s) {sorted(unknown)} of repro")
    base = _base(repro, Row(""))
    yield from _spread(repro, base)
    variant = repro.get("variant")
    if variant is not None:
        if set(variant) - REPRO_KEYS:
            raise CaseError(f"unknown key(s) {sorted(set(variant) - REPRO_KEYS)} of variant")
        yield from _spread(variant, _base(variant, replace(base, label="variant"), merge=True))


def _base(table: Mapping[str, Any], row: Row, merge: bool = False) -> Row:
    """`row` with what `table` states. A variant replaces whole values, and merges ``installed`` by backend."""
    if "model" in table:
        row = replace(row, model=table["model"])
    if "draft" in table:
        row = replace(row, draft=table["draft"])
    if "platform" in table:
        row = replace(row, platform=_with_toolkit(table["platform"]))
    if "flags" in table:
        row = replace(row, flags=table["flags"], schemas=row.schemas or _schemas(table["flags"]))
    if "installed" in table:
        toys = table["installed"]
        row = replace(row, installed={**(row.installed or {}), **toys} if merge and toys is not None else toys)
    if "backend" in table:
        toy = dict(table["backend"])
        row = replace(row, installed={toy.pop("name"): toy})
    if "expect" in table:
        row = replace(row, expect=table["expect"])
    return row


def _with_toolkit(platform: Mapping[str, Any]) -> Mapping[str, Any]:
    is_cuda = platform.get("device") == "cuda"
    return {**({"cuda": DEFAULT_PLATFORM["cuda"]} if is_cuda else {}), **platform}


def _schemas(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options a toy knows: those that the entry's own flags set."""
    types = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {
        name: {"properties": {key: {"type": types.get(type(value), "object")} for key, value in options.items()}}
        for name, options in flags.get("backend_options", {}).items()
    }


def _spread(table: Mapping[str, Any], base: Row) -> Iterator[Row]:
    rows = [base]
    for key, make in (("platforms", _platform_row), ("models", _model_row), ("cases", _case_row)):
        if key in table:
            items = table[key].items() if isinstance(table[key], Mapping) else table[key]
            rows = [make(row, item) for row in rows for item in items]
    rows += [_table_row(base, item) for item in table.get("more", ())]
    for row in rows:
        yield from _by_flags(row)


def _platform_row(row: Row, platform: Mapping[str, Any]) -> Row:
    told = " ".join(f"{key}={value}" for key, value in platform.items())
    return replace(row, label=f"{row.label} {told}".strip(), platform=_with_toolkit(platform))


def _model_row(row: Row, item: Any) -> Row:
    """A slug, a slug with its facts (``{slug: {…}}``), or an inherited model."""
    if isinstance(item, tuple):
        slug, facts = item
        expect = {row.expect: facts} if isinstance(row.expect, str) else {"facts": facts}
        return replace(row, label=f"{row.label} {slug}".strip(), model=slug, expect=expect)
    name = item["inherit"] if isinstance(item, Mapping) else item
    expect = row.expect.get(name, row.expect) if isinstance(row.expect, Mapping) else row.expect
    own = isinstance(row.expect, Mapping) and name in row.expect
    return replace(row, label=f"{row.label} {name}".strip(), model=item, expect={"facts": expect} if own else expect)


def _case_row(row: Row, item: Any) -> Row:
    if isinstance(item, Mapping):
        return _table_row(row, item)
    flags, expect, told = dict(row.flags), dict(row.expect), []
    names: list[str] = []
    for value in item:  # read by what it is: a platform, an element type of the cache, then prefill and decode
        if isinstance(value, Mapping):
            row = replace(row, platform=_with_toolkit(value))
            told += [str(n) for n in value.values()]
        elif is_dtype(value) and not names:
            flags["kv_cache_dtype"] = value
            told.append(value)
        elif isinstance(value, str):
            names.append(value)
        else:
            raise CaseError(f"unknown member {value!r} of a row of cases")
    if len(names) > 2:
        raise CaseError(f"a row of cases names prefill and decode, not {names}")
    expect |= dict(zip(("prefill", "decode"), [*names, *names[-1:]][:2], strict=False))
    return replace(row, label=" ".join([row.label, *told]).strip(), flags=flags, expect=expect)


def _table_row(row: Row, item: Mapping[str, Any]) -> Row:
    unknown = set(item) - _ROW_KEYS
    if unknown:
        raise CaseError(f"unknown key(s) {sorted(unknown)} of a row")
    made = _base(item, row)
    told = item.get("model") if isinstance(item.get("model"), str) else json.dumps(item, sort_keys=True)[:60]
    expect = {**made.expect, "ratio": item["ratio"]} if "ratio" in item else made.expect
    return replace(made, label=f"{row.label} {told}".strip(), expect=expect)


def _by_flags(row: Row) -> Iterator[Row]:
    lists = {name: value for name, value in row.flags.items() if isinstance(value, list) and name not in _LISTS}
    for values in product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        told = " ".join(f"{name}={value}" for name, value in chosen.items())
        yield replace(row, label=f"{row.label} {told}".strip(), flags={**row.flags, **chosen})


# --- options, platforms, models -----------------------------------------------------------------------------------------


def options_of(flags: Mapping[str, Any]) -> Options:
    """Options of a case's flags. Raises :class:`UsageError` for one that nobody knows."""
    values: dict[str, Any] = {"allow_planned": True}
    for name, value in flags.items():
        target = _FLAGS.get(name) or (f"speculative_{name[5:]}" if name.startswith("spec_") else name)
        if target == "cuda_graph" and isinstance(value, bool):
            value = "auto" if value else "off"
        values[target] = value
    if values.get("speculative_eagle_topk") and "speculative_algorithm" not in values:
        values["speculative_algorithm"] = "EAGLE"
    return Options.of(values)


def platform_of(table: Mapping[str, Any]) -> Platform:
    """The platform of a case."""
    return parse_platform(dict(table))


@dataclass(frozen=True)
class Library:
    """Where the models of a case file are: beside it, else those of core's own tests."""

    folders: tuple[Path, ...]

    @classmethod
    def beside(cls, file: Path) -> Library:
        """``../models`` next to the folder of `file`, then the copies that core's tests bring."""
        own = Path(__file__).parents[3] / "tests" / "data" / "models"
        return cls((file.resolve().parent.parent / "models", file.resolve().parent / "models", own))

    def config(self, slug: str) -> dict[str, Any]:
        """The config of one model file. The reader uses nothing else of it."""
        for folder in self.folders:
            path = folder / f"{slug}.json"
            if path.exists():
                content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["config"]
                return content
        raise CaseError(f"no model {slug!r} in {', '.join(str(folder) for folder in self.folders)}")

    def model(self, spec: Any) -> Model:
        """A model from a slug or ``{"inherit": slug, "config": {…}}``."""
        from attn_core.model import parse_model

        if isinstance(spec, str):
            return replace(parse_model(self.config(spec)), name=spec)
        unknown = set(spec) - {"inherit", "config"}
        if unknown:
            raise CaseError(f"unknown key(s) {sorted(unknown)} of model")
        config = _override(self.config(spec["inherit"]), spec.get("config", {}))
        return replace(parse_model(config), name=spec["inherit"])


def _override(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` merged in, where the config keeps such keys."""
    text = base.get("text_config")
    for key, value in changes.items():
        if key == "text_config" and text is None:
            base = _override(base, value)
        elif isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            base = {**base, key: _override(dict(base[key]), value)}
        elif isinstance(text, Mapping) and key not in base and key in text:
            base = {**base, "text_config": {**base["text_config"], key: value}}
        else:
            base = {**base, key: value}
    return base
