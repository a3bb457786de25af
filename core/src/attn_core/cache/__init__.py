"""A reference paged cache: page tables, prefix sharing by whole pages, eviction. For demos, tests and bridges.

    cache = PagedKVCache.from_plan(plan, num_pages=512)
    router.bind(layers, cache.caches(layers))
    request = cache.new_request(prompt)                  # matched prefix: request.length tokens are there already
    cache.extend(request, len(prompt) - request.length)  # pages for the rest; OutOfPages changes nothing
    step = router.begin(cache.batch([request], "prefill"))
    ...                                                  # run the layers, sample a token
    cache.extend(request, [token])                       # the former tokens count as computed from here on
    step = router.begin(cache.batch([request], "decode"))
    cache.free(request)                                  # full pages stay matchable until they are evicted

A server has its own allocator; this one is meant to be right and easy to read. Sliding-window pools keep all pages of a
request. Not safe for several threads.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import lcm
from typing import Any

import torch

from attn_core.batch import AttentionBatch, KvAddress, StateAddress
from attn_core.cache._pages import Block, CacheStats, PageAllocator, PoolStats, PrefixIndex, Request
from attn_core.cache._storage import allocate_layers, copy_page, page_count
from attn_core.dtypes import canonical, default_format, row_bytes
from attn_core.errors import CacheError, OutOfPages
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import Cache, Layer
from attn_core.paging import PoolRows, build_batch, copy_batch
from attn_core.plan import Plan, Pool

__all__ = ["CacheStats", "OutOfPages", "PageAllocator", "PagedKVCache", "PoolStats", "Request"]


class PagedKVCache:
    """Tensors, page tables and cached prefixes of all pools of a model.

    Prefixes are matched and shared in whole pages (of all pools at once: in runs of the least common multiple of their
    page sizes), chained from the first token on, and only within one `key`. At least one token is always left to compute.
    A page that another request uses, or that a later one may match, is never written: a request that was cut back into
    such a page gets a copy before it grows again. With a state pool (GDN) no prefix is matched, because the recurrent
    state at its end is not known.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        groups: Iterable[LayerGroup],
        *,
        num_pages: int | Mapping[str, int],
        device: torch.device | str = "cpu",
        max_requests: int = 64,
        max_tokens: int | None = None,
        prefix_sharing: bool = True,
    ) -> None:
        """Allocate everything at once; nothing grows later.

        `num_pages` counts page 0, for every pool or by pool name; state pools have `max_requests` slots and the dummy.
        `max_tokens` limits one request. Raises :class:`CacheError` for pools that this cache cannot serve.
        """
        self.pools = tuple(pools)
        self.device = torch.device(device)
        self.max_tokens = max_tokens
        sizes = [page_count(pool, num_pages, max_requests) for pool in self.pools]
        groups = tuple(groups)
        self._roles = {(g.model, name): role for g in groups for role, name in g.pools.items()}
        self._layers = allocate_layers(self.pools, groups, sizes, self.device)
        self._pages = [PageAllocator(count, pool.name) for pool, count in zip(self.pools, sizes, strict=True)]
        self._paged = [number for number, pool in enumerate(self.pools) if pool.kind != "state"]
        self._states = [number for number, pool in enumerate(self.pools) if pool.kind == "state"]
        self.block_tokens = lcm(*(self.pools[number].page_size for number in self._paged)) if self._paged else 1
        self.prefix_sharing = prefix_sharing and not self._states
        self._index = PrefixIndex(self.block_tokens)
        self._requests: dict[int, Request] = {}
        self._next = 0
        self._counts = {"prompt": 0, "matched": 0, "evicted": 0, "copied": 0}

    @classmethod
    def from_plan(cls, plan: Plan, *, num_pages: int | Mapping[str, int], **arguments: Any) -> PagedKVCache:
        """The cache that `plan` asks for: its pools in its order, so that batches fit ``Router.begin``."""
        return cls(plan.pools, [group.stored for group in plan.groups], num_pages=num_pages, **arguments)

    @classmethod
    def plain(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dims: tuple[int, int],
        page_size: int,
        num_pages: int,
        dtype: str = "bf16",
        layout: str = "NHD",
        zero_init: bool = False,
        **arguments: Any,
    ) -> PagedKVCache:
        """One pool for `layers` equal MHA layers, without a plan. `head_dims` are the widths of k and v."""
        dtype = canonical(dtype)
        geometry = MhaGeometry(kv_heads, kv_heads, *head_dims, scale=head_dims[0] ** -0.5)
        group = LayerGroup("target", "full", "full", tuple(range(layers)), geometry, {"attend": "main"})
        token = layers * kv_heads * sum(row_bytes(width, dtype) for width in head_dims)
        fmt = default_format(dtype)
        pool = Pool(
            "main", "target", group.layers, fmt, dtype, layout, page_size, token * page_size, zero_init=zero_init
        )
        return cls([pool], [group], num_pages=num_pages, **arguments)

    # --- layers -------------------------------------------------------------------------------------------------------------

    def layer(self, index: int, model: str = "target") -> Cache:
        """The cache of one layer. Raises :class:`CacheError` if no pool holds it."""
        if (model, index) not in self._layers:
            known = sorted(number for name, number in self._layers if name == model)
            raise CacheError(f"no pool holds layer {index} of the {model} model", f"layers   {known}")
        return self._layers[model, index]

    def caches(self, layers: Iterable[Layer]) -> list[Cache | None]:
        """The cache of each layer, in order, for ``Router.bind``; None for a layer that keeps nothing (vision)."""
        return [self._layers.get((layer.group.model, layer.index)) for layer in layers]

    # --- requests -----------------------------------------------------------------------------------------------------------

    def new_request(self, tokens: Sequence[int] | None = None, *, key: Hashable = None) -> Request:
        """A request for the prompt `tokens`; the longest cached prefix is its own already (``length``, ``cached_tokens``).

        `key` separates prefixes that must not be mixed (a LoRA adapter). Without `tokens` nothing is matched or shared.
        Takes no new page. Raises :class:`OutOfPages` if there is a state pool without a free slot.
        """
        prompt = list(tokens or ())
        for number in self._states:
            self._pages[number].check(1)
        chain = self._index.match(prompt, key) if self.prefix_sharing else []
        request = Request(self._next, prompt, key, len(prompt), [[] for _ in self.pools])
        for block in chain:
            self._adopt(request, block)
        request.length = request.computed = request.cached_tokens = len(chain) * self.block_tokens
        for number in self._states:
            request.slot = self._pages[number].take(1)[0]
            request.pages[number] = [request.slot]
        self._requests[self._next] = request
        self._next += 1
        self._counts["prompt"] += len(prompt)
        self._counts["matched"] += request.length
        return request

    def extend(self, request: Request, tokens: int | Sequence[int]) -> None:
        """Give the next tokens a place: a number of them (the prompt's next, or unknown ids), or their ids.

        Tokens of earlier calls count as computed from here on, and their full pages can be matched.
        Raises :class:`OutOfPages` with nothing changed, and :class:`CacheError` past ``max_tokens``.
        """
        self._known(request)
        count, ids = self._new_tokens(request, tokens)
        length = request.length + count
        if self.max_tokens is not None and length > self.max_tokens:
            raise CacheError(
                f"request {request.number} would be longer than the limit",
                f"length   {request.length} + {count}",
                f"limit    {self.max_tokens} tokens",
            )
        detach = count > 0 and request.length < len(request.blocks) * self.block_tokens
        needed = self._pages_needed(request, length, detach)
        for number, pages in needed.items():
            self._pages[number].check(pages)
        self.commit(request)
        if detach:
            self._detach(request)
        for number in needed:
            missing = -(-length // self.pools[number].page_size) - len(request.pages[number])
            request.pages[number] += self._take(number, max(0, missing))
        request.tokens += ids
        request.length = length

    def commit(self, request: Request) -> None:
        """All placed tokens have been computed: full pages of known tokens can be matched from now on.

        Where the same prefix is cached already, the request takes over those pages and frees its own.
        """
        self._known(request)
        request.computed = request.length
        size = self.block_tokens
        if not self.prefix_sharing:
            return
        for start in range(len(request.blocks) * size, request.length - size + 1, size):
            tokens = request.tokens[start : start + size]
            if len(tokens) < size:
                return
            parent = request.blocks[-1] if request.blocks else None
            block = self._index.find(parent, request.key, tokens)
            pages = self._range(request, start, start + size)
            if block is not None:
                self._adopt(request, block)
                self._drop(pages)
                continue
            block = self._index.insert(parent, request.key, tokens, pages)
            request.blocks.append(block)
            for number, held in zip(self._paged, pages, strict=True):
                self._pages[number].keep(held)

    def truncate(self, request: Request, length: int) -> None:
        """Cut a request back to `length` tokens (rejected drafts); those count as computed, the pages behind them go.

        Prompt ids that were not computed yet stay known (a failed chunk is tried again); a cut into computed tokens forgets
        all ids behind it, and the request may go on with others.
        Raises :class:`CacheError` if `length` is negative or more than the request has.
        """
        self._known(request)
        if not 0 <= length <= request.length:
            raise CacheError(f"request {request.number} cannot be cut to {length} tokens", f"length   {request.length}")
        size = self.block_tokens
        blocks = request.blocks[-(-length // size) :]
        del request.blocks[-(-length // size) :]
        held = len(request.blocks) * size
        for number in self._paged:
            first = -(-max(length, held) // self.pools[number].page_size)
            self._pages[number].drop(request.pages[number][first:])
            del request.pages[number][first:]
        for block in reversed(blocks):
            self._index.release(block)
        if length < request.computed:
            request.prompt_tokens = min(length, request.prompt_tokens)
        del request.tokens[max(length, request.prompt_tokens) :]
        request.length = request.computed = length

    def free(self, request: Request, *, discard: bool = False) -> None:
        """Give everything back. Full pages of known tokens stay cached until they are evicted.

        `discard` says that the pending tokens were never computed (the step failed): their pages are not kept.
        Raises :class:`CacheError` for a request that was freed before.
        """
        self._known(request)
        if discard:
            self.truncate(request, request.computed)
        self.commit(request)
        del self._requests[request.number]
        for number, pages in enumerate(request.pages):
            self._pages[number].drop(pages)
            pages.clear()
        for block in reversed(request.blocks):
            self._index.release(block)
        request.blocks.clear()

    # --- batches ------------------------------------------------------------------------------------------------------------

    def batch(
        self,
        requests: Sequence[Request | tuple[Request, int]],
        phases: str | Sequence[str],
        *,
        into: AttentionBatch | None = None,
        **arguments: Any,
    ) -> AttentionBatch:
        """The next step of `requests`, with one address per pool. A row's new tokens are the pending ones, or (request, n).

        `phases` and further arguments (form, padded_rows, max_kv_len, …) are those of :func:`attn_core.paging.build_batch`.
        `into` is a static batch of the same bucket whose tensors are overwritten and which is returned.
        Raises :class:`CacheError` for an unknown request, one that comes twice, or new tokens in a shared page.
        """
        rows = [(row, row.pending) if isinstance(row, Request) else row for row in requests]
        self._check_rows(rows)
        pools = [
            PoolRows(self.pools[number].page_size, [request.pages[number] for request, _ in rows])
            for number in self._paged
        ]
        lengths = [new for _, new in rows], [request.length for request, _ in rows]
        batch = build_batch(*lengths, pools, phases, device=self.device, **arguments)
        if self._states:
            batch.addresses = self._with_states(batch, [request for request, _ in rows])
        return batch if into is None else copy_batch(batch, into)

    def stats(self) -> CacheStats:
        """Pages by pool, live requests, and what happened since the cache was made."""
        pools = tuple(PoolStats(p.name, p.total, p.free, p.used, p.cached) for p in self._pages)
        counts = self._counts
        return CacheStats(
            pools, len(self._requests), counts["prompt"], counts["matched"], counts["evicted"], counts["copied"]
        )

    # --- the parts ----------------------------------------------------------------------------------------------------------

    def _known(self, request: Request) -> None:
        if self._requests.get(request.number) is not request:
            raise CacheError(
                f"request {request.number} is unknown to this cache: it was freed, or belongs to another one",
                f"live     {len(self._requests)} requests",
            )

    def _new_tokens(self, request: Request, tokens: int | Sequence[int]) -> tuple[int, list[int]]:
        """(how many tokens, ids to append to the known ones)."""
        if isinstance(tokens, int):
            if tokens < 0:
                raise CacheError(f"request {request.number} cannot grow by {tokens} tokens", fix="use truncate")
            return tokens, []
        if len(request.tokens) > request.length:
            raise CacheError(
                f"request {request.number} still has prompt tokens without a place; their ids are known",
                f"prompt   {request.prompt_tokens} tokens, {request.length} placed",
                fix="extend by a number of tokens until the prompt is placed",
            )
        known = len(request.tokens) == request.length
        return len(tokens), list(tokens) if known else []

    def _pages_needed(self, request: Request, length: int, detach: bool) -> dict[int, int]:
        """New pages per paged pool for `length` tokens, copies of a shared last block included."""
        copy = detach and request.blocks[-1].users > 1
        kept = (len(request.blocks) - 1) * self.block_tokens
        needed = {}
        for number in self._paged:
            size = self.pools[number].page_size
            have = kept // size if copy else len(request.pages[number])
            needed[number] = max(0, -(-length // size) - have)
        return needed

    def _detach(self, request: Request) -> None:
        """Make the last block, which the request only partly uses, its own: out of the index, or a copy of its pages."""
        block = request.blocks.pop()
        if block.users == 1:
            for removed in self._index.remove(block):
                self._forget(removed)
            return
        start = len(request.blocks) * self.block_tokens
        for number in self._paged:
            size = self.pools[number].page_size
            pages = request.pages[number]
            first, last = start // size, -(-request.length // size)
            shared = pages[first:]
            pages[first:] = self._take(number, last - first)
            for source, target in zip(shared, pages[first:], strict=False):
                self._copy(number, source, target)
            self._pages[number].drop(shared)
        self._index.release(block)

    def _take(self, number: int, count: int) -> list[int]:
        """`count` pages, after evicting as many prefixes as that takes, the least recently used first."""
        while self._pages[number].free < count:
            oldest = self._index.oldest()
            if oldest is None:
                break
            for block in self._index.remove(oldest):
                self._counts["evicted"] += self._forget(block)
        return self._pages[number].take(count)

    def _forget(self, block: Block) -> int:
        for number, pages in zip(self._paged, block.pages, strict=True):
            self._pages[number].forget(pages)
        return sum(map(len, block.pages))

    def _copy(self, number: int, source: int, target: int) -> None:
        pool = self.pools[number]
        role = self._roles[pool.model, pool.name]
        for layer in pool.layers:
            copy_page(self._layers[pool.model, layer], role, source, target)
        self._counts["copied"] += 1

    def _adopt(self, request: Request, block: Block) -> None:
        """Hold a cached block as the request's next one; its pages replace what the request has there."""
        start = len(request.blocks) * self.block_tokens
        self._index.hold(block)
        request.blocks.append(block)
        for number, pages in zip(self._paged, block.pages, strict=True):
            self._pages[number].share(pages)
            first = start // self.pools[number].page_size
            request.pages[number][first : first + len(pages)] = pages

    def _range(self, request: Request, start: int, end: int) -> tuple[tuple[int, ...], ...]:
        """The request's pages of tokens start..end, per paged pool."""
        sizes = [(number, self.pools[number].page_size) for number in self._paged]
        return tuple(tuple(request.pages[number][start // size : end // size]) for number, size in sizes)

    def _drop(self, pages: tuple[tuple[int, ...], ...]) -> None:
        for number, held in zip(self._paged, pages, strict=True):
            self._pages[number].drop(held)

    def _check_rows(self, rows: Sequence[tuple[Request, int]]) -> None:
        seen: set[int] = set()
        for request, new in rows:
            self._known(request)
            if request.number in seen:
                raise CacheError(f"request {request.number} is in the batch twice")
            seen.add(request.number)
            shared = len(request.blocks) * self.block_tokens
            if new and request.length - new < shared:
                raise CacheError(
                    f"request {request.number}: new tokens would be written into shared pages",
                    f"new      {new} of {request.length} tokens",
                    f"shared   the first {shared} tokens",
                    fix="extend the request by the tokens that the step computes",
                )

    def _with_states(self, batch: AttentionBatch, requests: Sequence[Request]) -> tuple[KvAddress | StateAddress, ...]:
        """The batch's addresses with those of state pools in their places; a request's state starts from zero once."""
        padding = [-1] * (batch.padded_rows - len(requests))
        slots = torch.tensor([*(r.slot for r in requests), *padding], dtype=torch.int32, device=self.device)
        fresh = torch.tensor([*(not r.computed for r in requests), *map(bool, padding)], device=self.device)
        state = StateAddress(slots, slots, fresh)
        paged = iter(batch.addresses)
        return tuple(state if number in self._states else next(paged) for number in range(len(self.pools)))
