"""The registry: what the keys of a configuration do not say about a family of models.

One entry names the ``model_type`` values it covers and, where needed, how the layers alternate, what "linear" means
there and a function that settles odd spellings. A family whose configuration says everything is just a name in a list
(``_families.py``); adding an architecture is one short entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attn_core.model._view import View

#: Which reader takes a configuration. ``pair``: an encoder and a decoder with a configuration each; ``composite``: a
#: language model with towers, for families that need a word more than that; ``towers``: nothing but towers;
#: ``outside``: refused with the rule's ``reason``.
Stack = Literal["decoder", "encoder", "vision", "audio", "encoder_decoder", "pair", "composite", "towers", "outside"]
#: Gives the kind of every layer when the configuration does not list them.
Layout = Callable[[View, int], list[str]]
#: Settles keys that need arithmetic or have an odd name. Keys with an ``@`` are the readers' own (see ``_readers.py``).
Prepare = Callable[[View], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one family is read.

    ``windows`` says that the family's own code reads ``sliding_window``; elsewhere the key is ignored with a note.
    ``attention`` reads its full layers (``mha`` or ``mla``), ``linear`` says what a linear layer is (``gdn``, ``kda``,
    ``mamba1``, ``mamba2``, …), ``indexed`` what an indexed one is. ``unsupported`` names what API 1 cannot express.
    ``listed`` False: a tower that is planned, but is no part of the published description of its model.
    """

    stack: Stack
    layout: Layout | None = None
    prepare: Prepare | None = None
    attention: Literal["mha", "mla"] = "mha"
    linear: str | None = None
    indexed: str = "dsa"
    windows: bool = False
    unsupported: tuple[str, ...] = ()
    reason: str = ""
    listed: bool = True


RULES: dict[str, Rule] = {}
_BY_CLASS: dict[str, str] = {}
_CLASS_SUFFIX = re.compile(
    r"(For(CausalLM|ConditionalGeneration|Causal|MaskedLM|SequenceClassification|Vision2Seq|ImageTextToText)"
    r"|LMHeadModel|LMModel|Model)$"
)


def register(names: str, rule: Rule) -> None:
    """Let `rule` read every ``model_type`` in `names` (separated by blanks). A name is registered once."""
    for name in names.split():
        if name in RULES:
            raise ValueError(f"model type {name!r} is registered twice")
        RULES[name] = rule
        _BY_CLASS.setdefault(_squash(name), name)


def _squash(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_type(model_type: str, architectures: Iterable[str]) -> str | None:
    """The registered type for a configuration: by its own ``model_type``, else by the name of its model class.

    ``kimi_k2`` with ``DeepseekV3ForCausalLM`` is read as ``deepseek_v3``.
    """
    if model_type in RULES:
        return model_type
    for architecture in architectures:
        known = _BY_CLASS.get(_squash(_CLASS_SUFFIX.sub("", architecture)))
        if known is not None:
            return known
    return None


def fixed(**values: Any) -> Prepare:
    """A `prepare` that settles constants. A leading underscore stands for ``@``: ``fixed(_sinks=True)``."""
    table = {("@" + key[1:] if key.startswith("_") else key): value for key, value in values.items()}
    return lambda view: table


def both(*parts: Prepare) -> Prepare:
    """Several `prepare` functions in order; a later one sees what earlier ones settled."""

    def run(view: View) -> Mapping[str, Any]:
        settled: dict[str, Any] = {}
        for part in parts:
            settled.update(part(view.settle(settled)))
        return settled

    return run


def rename(**names: str) -> Prepare:
    """A `prepare` that copies keys: ``rename(head_dim="attention_head_dim")`` (absent ones stay as they are)."""
    return lambda view: {new: view.get(old) for new, old in names.items() if view.get(old) is not None}


def per_kind(**kinds: Mapping[str, Any]) -> Prepare:
    """A `prepare` that settles values for the layers of one kind: ``per_kind(sliding={"@sinks": True})``."""
    return lambda view: {"@layer": lambda index, kind: kinds.get(kind, {})}


def every(period: int, key: str | None = None, *, first: bool = False, others: str = "sliding") -> Layout:
    """Full attention on the last (or first) layer of every `period`; `others` elsewhere.

    `key` names the configuration key that overrides the period. A period of 0 or less: all layers are full.
    """

    def layout(view: View, count: int) -> list[str]:
        stated = view.integer(key) if key else None
        size = period if stated is None else stated
        if size <= 0:
            return ["full"] * count
        return ["full" if (i if first else i + 1) % size == 0 else others for i in range(count)]

    return layout


def at(test: Callable[[int, int], bool], *, others: str = "sliding") -> Layout:
    """Full attention where ``test(index, count)`` holds; `others` elsewhere."""
    return lambda view, count: ["full" if test(i, count) else others for i in range(count)]


def listed(key: str, *, chosen: str = "full", others: str = "linear", missing: str = "linear") -> Layout:
    """The layers whose indices are in the list `key` are `chosen`, the rest `others`; no list: all are `missing`."""

    def layout(view: View, count: int) -> list[str]:
        indices = view.items(key)
        if indices is None:
            return [missing] * count
        wrong = [i for i in indices if not isinstance(i, int) or not 0 <= i < count]
        if wrong:
            raise view.error(f"{key} names layers {wrong}, the model has layers 0 to {count - 1}")
        return [chosen if i in indices else others for i in range(count)]

    return layout
