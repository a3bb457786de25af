"""What a plan has to know about the server, as data: no SGLang here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: drafts verified per row, whether they form a tree, whose backend (``prefill`` or ``decode``)
    verifies."""

    algorithm: str
    draft_tokens: int
    tree: bool
    mode: str = "prefill"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One model runner of SGLang. Lengths in tokens; ``max_rows`` is the size of the request pool.

    ``prefill_name`` and ``decode_name`` are the backend names that the user asked for: they differ under SGLang's own
    split, and then this process builds one backend for each. ``refused`` lists (what, what to do).
    """

    model: str
    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    context_length: int
    max_rows: int
    architecture: str = ""
    model_type: str = ""
    attention_chunk: int | None = None
    chunked_prefill_size: int | None = None
    prefix_cache: bool = True
    overlap: bool = False
    deterministic: bool = False
    graphs: bool = False
    speculation: Speculation | None = None
    prefill_name: str = ""
    decode_name: str = ""
    refused: tuple[tuple[str, str], ...] = field(default=())

    @property
    def split(self) -> bool:
        """SGLang runs prefill and decode by two backends of different names."""
        return self.prefill_name != self.decode_name
