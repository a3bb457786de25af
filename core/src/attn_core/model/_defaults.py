"""What Hugging Face's configuration classes fill in for keys that a stored ``config.json`` leaves out.

A saved configuration holds only what differs from its class, so the text part of a LLaVA checkpoint may say no more
than its vocabulary size. ``defaults.json`` keeps the class defaults that readers look up, and the types of nested
configurations (``"@clip_vision_model"``). ``build_defaults.py`` writes it from an installed transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Mapping[str, Any]]:
    text = files("attn_core.model").joinpath("defaults.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["types"])


def version() -> str:
    """The transformers version that the defaults come from."""
    text = files("attn_core.model").joinpath("defaults.json").read_text(encoding="utf-8")
    return str(json.loads(text)["transformers"])


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """Plain defaults of `model_type`; empty for a type that transformers does not have."""
    return {key: value for key, value in _table().get(model_type, {}).items() if not _is_type(value)}


def in_transformers(model_type: str) -> bool:
    """Whether transformers has a class for `model_type`."""
    return model_type in _table()


def nested_type(model_type: str, key: str) -> str | None:
    """The type of the nested configuration `key` when it does not name one itself."""
    value = _table().get(model_type, {}).get(key)
    return str(value)[1:] if _is_type(value) else None


def _is_type(value: object) -> bool:
    return isinstance(value, str) and value.startswith("@")
