"""Keys and values that change their place: accepted drafts move behind the prefix, branches of a draft get copies.

Everything is gathered before anything is written, so that sources and targets may overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attn_core.batch import AttentionBatch
from attn_core.cache import PagedKVCache, Request


def slot_of(pages: Sequence[int], page_size: int, position: int) -> int:
    """The slot of a position in a request's pages."""
    return pages[position // page_size] * page_size + position % page_size


def move_slots(caches: Sequence[Any], page_size: int, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the keys and values (and block scales) of slots `source` to slots `target`, i64[n] each, in every cache."""
    for tensor in _planes(caches):
        tensor[target // page_size, target % page_size] = tensor[source // page_size, source % page_size]


def copy_pages(caches: Sequence[Any], source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole pages `source` to pages `target`, i64[n] each, in every cache."""
    for tensor in _planes(caches):
        tensor[target] = tensor[source]


def keep_accepted(
    kv: PagedKVCache, requests: Sequence[Request], prefixes: Sequence[int], paths: Sequence[Sequence[int]]
) -> None:
    """After verify: the keys of each row's accepted nodes become its next positions, all others go.

    Node i of a row lies at position ``prefixes[row] + i``; its key was rotated for prefix + depth, where it is moved to.
    """
    for number, pool in enumerate(kv.pools):
        source: list[int] = []
        target: list[int] = []
        for request, prefix, path in zip(requests, prefixes, paths, strict=True):
            pages = request.pages[number]
            for depth, node in enumerate(path):
                if node != depth:
                    source.append(slot_of(pages, pool.page_size, prefix + node))
                    target.append(slot_of(pages, pool.page_size, prefix + depth))
        if source:
            caches = [kv.layer(index, pool.model) for index in pool.layers]
            places = torch.tensor([source, target]).to(kv.device)
            move_slots(caches, pool.page_size, places[0], places[1])
    for request, prefix, path in zip(requests, prefixes, paths, strict=True):
        kv.truncate(request, prefix + len(path))


def last_tokens(batch: AttentionBatch) -> torch.Tensor:
    """i64[R] on the host: the place of each row's last token on the token axis."""
    assert batch.query_offsets_cpu is not None
    return batch.query_offsets_cpu[1 : batch.num_rows + 1].long() - 1


def _planes(caches: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors ``[pages, P, …]`` of the caches; 8-bit types as bytes, which torch can index everywhere."""
    for cache in caches:
        for name in ("k", "v", "k_blocks", "v_blocks"):
            tensor = getattr(cache, name)
            if tensor is not None:
                yield tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
