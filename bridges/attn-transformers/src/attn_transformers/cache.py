"""A ``transformers.Cache`` on attn-core's paged cache: ``generate`` and ``forward`` see a cache, the backends see pages."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from attn_core.errors import CacheError
from attn_transformers.sequences import Sequences

if TYPE_CHECKING:
    from attn_transformers.runtime import AttnModel


class AttnCache(Cache):  # type: ignore[misc]
    """The cache of one batch of sequences. Made by :meth:`AttnModel.new_cache`; one batch per cache.

    Keys and values are not stored here but by the attention call, in pages that all caches of a model share. :meth:`close`
    (or the garbage collector) gives the pages back. Beam search, cropping and repeating rows work; nothing is offloaded.
    """

    def __init__(self, owner: AttnModel) -> None:
        self.sequences = Sequences(owner.kv, owner.router, frozenset(owner.layers))
        super().__init__(layers=[AttnCacheLayer(self.sequences, owner, index) for index in owner.layers])
        self._finalizer = weakref.finalize(self, self.sequences.release)

    def __repr__(self) -> str:
        lengths = [request.length for request in self.sequences.requests]
        return f"AttnCache(layers={len(self.layers)}, lengths={lengths})"

    def reset(self) -> None:
        """Forget all sequences and give their pages back."""
        self.sequences.release()

    def close(self) -> None:
        """As :meth:`reset`; the cache can be used again."""
        self.sequences.release()

    def __enter__(self) -> AttnCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: row i continues what row ``beam_idx[i]`` was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers or a mask), in that order."""
        if self.sequences.requests:
            rows = torch.arange(len(self.sequences.requests))
            self.sequences.select(rows[torch.as_tensor(indices).to("cpu")].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        rows = torch.arange(len(self.sequences.requests))
        self.sequences.select(rows.repeat_interleave(repeats).tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` columns; positive numbers are refused, as transformers does."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes a negative number: how many tokens to remove")
        self.sequences.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Nothing to do: all pages of a sequence are kept, those behind a window too."""

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refused: pages do not move."""
        raise CacheError("this cache is not offloaded")

    offload = prefetch

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return len(self.sequences.requests) or -1


class AttnCacheLayer(CacheLayerMixin):  # type: ignore[misc,no-untyped-call]
    """One layer's side of an :class:`AttnCache`. It hands keys and values through to the attention call."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # pages behind the window are kept, so lengths and masks are those of a full layer
    supports_early_init = False

    def __init__(self, sequences: Sequences, owner: AttnModel, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sequences, self._owner, self._index = sequences, owner, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Announce this layer's new keys; the attention call that follows stores them."""
        self._owner.offer(self._sequences, self._index)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self._sequences.length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns a mask covers, first column)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum of its own: pages run out, columns do not."""
        return -1

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages were allocated with the model."""

    def reset(self) -> None:
        """Layers are not reset one by one; see :meth:`AttnCache.reset`."""
        raise CacheError("a single layer cannot be reset", fix="cache.reset()")
