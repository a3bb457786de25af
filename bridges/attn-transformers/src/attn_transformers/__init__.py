"""attn-transformers: any installed attention backend inside Hugging Face transformers.

``load(model)`` plans, binds and switches a model to the plan's backends; ``AttnModel.generate`` then runs on attn-core's
paged cache. ``continuous_batching(model)`` does the same for ``generate_batch``, on transformers' own page pool.
Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_transformers.cache import AttnCache
    from attn_transformers.interface import register
    from attn_transformers.paged import continuous_batching
    from attn_transformers.runtime import AttnModel, load

__version__ = "0.1.0"
__all__ = ["AttnCache", "AttnModel", "continuous_batching", "load", "register"]

_HOME = {
    "AttnCache": "cache",
    "AttnModel": "runtime",
    "continuous_batching": "paged",
    "load": "runtime",
    "register": "interface",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
