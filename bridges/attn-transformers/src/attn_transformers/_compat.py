"""Everything that depends on the version of transformers, in one place. Private names are looked up here and nowhere else."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attn_core.errors import UsageError


class PoolLayer(NamedTuple):
    """One layer's rows of transformers' page pool: k and v ``[rows, Hk, D]``, and which allocator they belong to."""

    k: torch.Tensor
    v: torch.Tensor
    allocator: int
    layer_type: str
    window: int | None
    sentinel: int


@lru_cache(maxsize=1)
def cache_argument() -> str:
    """The keyword under which models take a cache: ``cache`` since transformers 5.24, ``past_key_values`` before."""
    from transformers import GenerationMixin

    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def serving_modules() -> tuple[Any, Any]:
    """transformers' command line application and the module of its server's model manager. Raises :class:`UsageError`."""
    import transformers

    try:
        from transformers.cli.serving import model_manager
        from transformers.cli.transformers import app
        from transformers.utils.import_utils import is_serve_available
    except ImportError as cause:
        raise UsageError(
            f"transformers {transformers.__version__} has no server that this bridge knows",
            f"cause    {cause}",
            fix="pip install 'transformers[serving]>=5.19'",
        ) from cause
    if not is_serve_available():
        raise UsageError(
            "the server of transformers needs packages that are missing",
            "needed   fastapi, uvicorn, openai, pydantic",
            fix="pip install 'attn-transformers[serve]'",
        )
    return app, model_manager


def pool_layer(pool: Any, layer_index: int) -> PoolLayer:
    """The rows of one layer in a ``PagedAttentionCache``. Raises :class:`UsageError` for a layout that is not known."""
    try:
        allocator = pool.layer_to_allocator[layer_index]
        k, v = allocator._kv_token_views[layer_index]
        rows = min(k.shape[0], v.shape[0])
        window = getattr(allocator, "sliding_window", None)
        return PoolLayer(k[:rows], v[:rows], allocator.index, allocator.layer_type, window, allocator.sentinel_index)
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        import transformers

        raise UsageError(
            f"the page pool of transformers {transformers.__version__} has a layout this bridge does not know",
            f"cause    {type(cause).__name__}: {cause}",
            fix="continuous batching needs transformers 5.19 or later; generate() with load(model) works with older ones",
        ) from cause
