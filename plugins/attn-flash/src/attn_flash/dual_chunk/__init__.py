"""Dual chunk attention (Qwen2.5-1M): every query meets its keys in three ranges, each with a rotation of its own.

Positions are cut into chunks of ``chunk_size - local_size``. Keys of the query's own chunk, of the chunk before and of all
earlier ones are three attention calls of any kernel that returns an LSE; core's merge makes one result of them.

::

    chunks.py    the sizes, from options or from a model's configuration, and the logit scale of long rows
    parts.py     which keys each query meets in which range: one varlen call a range, whatever the number of rows
    rotary.py    the three rotations of a query and the one of a key
    backend.py   the backend object; takes the kernel as a function
    fa3.py       that function over FlashAttention 3

Nothing here is imported before the backend is created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_flash.dual_chunk.backend import DualChunk
from attn_flash.dual_chunk.chunks import Chunks, options_from_config
from attn_flash.dual_chunk.rotary import as_versions

if TYPE_CHECKING:
    from attn_core.context import Context
    from attn_core.manifest import Manifest

__all__ = ["Chunks", "DualChunk", "as_versions", "create_dual_chunk", "options_from_config"]


def create_dual_chunk(manifest: Manifest, variant: str, context: Context) -> DualChunk:
    """What ``attn_create`` returns for ``mha/dual_chunk_flash_attn``: the ranges over FlashAttention 3, which is loaded here."""
    from attn_flash.dual_chunk.fa3 import create

    manifest.variant(variant)
    return create(context)
