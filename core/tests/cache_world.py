"""Small caches for tests, and everything that a refused call must leave as it was."""

from __future__ import annotations

from attn_core.cache import PagedKVCache, Request
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.plan import Pool


def small(num_pages: int = 9, page_size: int = 4, **arguments) -> PagedKVCache:
    return PagedKVCache.plain(
        layers=2, kv_heads=1, head_dims=(2, 1), page_size=page_size, num_pages=num_pages, dtype="fp32", **arguments
    )


def two_pools(num_pages: int = 9, sizes: tuple[int, int] = (4, 2), **arguments) -> PagedKVCache:
    """Full and sliding layers with tables and page sizes of their own."""
    groups, pools = [], []
    for number, (name, size) in enumerate(zip(("full", "sliding"), sizes, strict=True)):
        geometry = MhaGeometry(1, 1, 2, 1, 1.0, window=None if name == "full" else 4)
        groups.append(LayerGroup("target", name, name, (number,), geometry, {"attend": name}))
        pools.append(Pool(name, "target", (number,), "plain", "fp32", "NHD", size, 12 * size))
    pages = {"full": num_pages, "sliding": num_pages * sizes[0] // sizes[1]}
    return PagedKVCache(pools, groups, num_pages=pages, **arguments)


def run(cache: PagedKVCache, prompt: list[int], key=None) -> Request:
    """A request whose prompt has been computed."""
    request = cache.new_request(prompt, key=key)
    cache.extend(request, len(prompt) - request.length)
    cache.commit(request)
    return request


def snapshot(cache: PagedKVCache) -> object:
    """Everything that a refused call must leave as it was."""
    allocators = [(list(p.references), list(p._free), sorted(p._kept), p.cached) for p in cache._pages]
    tree = [(id(b), b.tokens, b.pages, b.users, id(b.parent)) for b in cache._index.blocks()]
    requests = [
        (n, id(r), list(r.tokens), r.key, r.length, r.computed, r.cached_tokens, r.slot, [list(p) for p in r.pages], [id(b) for b in r.blocks])
        for n, r in cache._requests.items()
    ]  # fmt: skip
    tensors = [t.numpy().tobytes() for _, layer in sorted(cache._layers.items()) for t in (layer.k, layer.v)]
    idle = [id(b) for b in cache._index._idle]
    return allocators, tree, idle, requests, dict(cache._counts), cache._next, tensors
