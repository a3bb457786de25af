"""Models as layer groups: what a configuration says about attention, without loading a framework.

``parse_model`` reads a configuration, ``describe`` gives it back as JSON. Families are data (``_families*.py``): how to
add one is told in ``_rules.py``.
"""

from __future__ import annotations

from attn_core.model._parse import parse_model
from attn_core.model._source import ConfigLike, Source
from attn_core.model.describe import (
    describe,
    kv_bytes_per_token,
    model_kv_bytes_per_token,
    state_bytes,
    state_dtypes,
    state_shapes,
)

__all__ = [
    "ConfigLike",
    "Source",
    "describe",
    "kv_bytes_per_token",
    "model_kv_bytes_per_token",
    "parse_model",
    "state_bytes",
    "state_dtypes",
    "state_shapes",
]
