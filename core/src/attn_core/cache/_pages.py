"""Whole pages and the prefixes they hold: who uses a page, which prefix it belongs to, which one is given up next.

Host-side bookkeeping only, no tensors. Public through :mod:`attn_core.cache`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from attn_core.errors import CacheError, OutOfPages


class PageAllocator:
    """The pages of one pool. Page 0 is the dummy and is never handed out. One thread at a time.

    A page is *free*, *used* (one or more requests refer to it), or *cached* (nobody does, but it holds a prefix that a later
    request may match). ``free + used + cached == total`` always holds.
    """

    def __init__(self, num_pages: int, name: str = "main") -> None:
        if num_pages < 2:
            raise CacheError(
                f"pool {name!r}: {num_pages} pages are too few; page 0 is reserved, so at least 2 are needed"
            )
        self.name = name
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._kept: set[int] = set()
        self._cached = 0

    @property
    def total(self) -> int:
        """Pages that can be handed out."""
        return len(self.references) - 1

    @property
    def free(self) -> int:
        """Pages without any content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only hold a prefix: they are evicted when pages are needed."""
        return self._cached

    @property
    def used(self) -> int:
        """Pages that requests refer to."""
        return self.total - self.free - self.cached

    def check(self, needed: int) -> None:
        """Raise :class:`OutOfPages` if `needed` pages cannot be had, evictions included. Changes nothing."""
        if needed > self.free + self.cached:
            raise self._out_of_pages(needed)

    def take(self, count: int) -> list[int]:
        """`count` free pages with one reference each. Raises :class:`OutOfPages`, with nothing changed."""
        if count > self.free:
            raise self._out_of_pages(count)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def _out_of_pages(self, needed: int) -> OutOfPages:
        return OutOfPages(
            f"pool {self.name!r} has too few pages",
            f"needed   {needed} pages",
            f"free     {self.free}",
            f"evict    {self.cached} cached prefix pages that nobody uses",
            f"used     {self.used} of {self.total}",
            fix="free or preempt a request, or give the pool more pages",
        )

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page (used or cached)."""
        for page in pages:
            if not self.references[page]:
                if page not in self._kept:
                    raise CacheError(f"pool {self.name!r}: page {page} is free and cannot be shared")
                self._cached -= 1
            self.references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One reference less to each page; the last one frees it, or leaves it cached. Raises :class:`CacheError`."""
        for page in pages:
            if page < 1 or not self.references[page]:
                raise CacheError(f"pool {self.name!r}: page {page} is freed twice")
            self.references[page] -= 1
            if not self.references[page]:
                if page in self._kept:
                    self._cached += 1
                else:
                    self._free.append(page)

    def keep(self, pages: Iterable[int]) -> None:
        """These used pages hold a prefix from now on: without references they stay cached."""
        self._kept.update(pages)

    def forget(self, pages: Iterable[int]) -> None:
        """These pages hold no prefix any more: without references they become free."""
        for page in pages:
            self._kept.discard(page)
            if not self.references[page]:
                self._cached -= 1
                self._free.append(page)


class Block:
    """A run of tokens that fills whole pages in every pool, below the block of the tokens before it.

    ``users`` counts the requests that hold it; a request holds all blocks from the root to its last one.
    """

    __slots__ = ("children", "pages", "parent", "tokens", "users")

    def __init__(self, tokens: Hashable, pages: tuple[tuple[int, ...], ...], parent: Block | None) -> None:
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[Hashable, Block] = {}
        self.users = 0


class PrefixIndex:
    """Cached prefixes as a tree of blocks, one tree per key (a LoRA adapter, a tenant). One thread at a time.

    Blocks that no request holds are kept in the order in which they were released, deepest first: the oldest one is
    always a leaf or drags only unused blocks along.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._roots: dict[Hashable, Block] = {}
        self._idle: OrderedDict[Block, None] = OrderedDict()

    def match(self, tokens: Sequence[int], key: Hashable) -> list[Block]:
        """The longest chain of blocks that `tokens` begin with, leaving at least one token to compute."""
        chain: list[Block] = []
        node = self._roots.get(key)
        size = self.block_tokens
        for start in range(0, len(tokens) - size, size):
            node = None if node is None else node.children.get(tuple(tokens[start : start + size]))
            if node is None:
                break
            chain.append(node)
        return chain

    def find(self, parent: Block | None, key: Hashable, tokens: Sequence[int]) -> Block | None:
        """The block of `tokens` below `parent` (None: at the root of `key`)."""
        node = self._roots.get(key) if parent is None else parent
        return None if node is None else node.children.get(tuple(tokens))

    def insert(
        self, parent: Block | None, key: Hashable, tokens: Sequence[int], pages: tuple[tuple[int, ...], ...]
    ) -> Block:
        """A new block with one user."""
        if parent is None:
            parent = self._roots.setdefault(key, Block(key, (), None))
        block = Block(tuple(tokens), pages, parent)
        block.users = 1
        parent.children[block.tokens] = block
        return block

    def hold(self, block: Block) -> None:
        """One more user."""
        if not block.users:
            del self._idle[block]
        block.users += 1

    def release(self, block: Block) -> None:
        """One user less; without any, the block may be evicted, after those that were released before it."""
        block.users -= 1
        if not block.users:
            self._idle[block] = None

    def remove(self, block: Block) -> list[Block]:
        """Take a block and all blocks below it out of the tree; they are returned."""
        parent = block.parent
        assert parent is not None
        del parent.children[block.tokens]
        if parent.parent is None and not parent.children:
            del self._roots[parent.tokens]
        removed, pending = [], [block]
        while pending:
            node = pending.pop()
            self._idle.pop(node, None)
            removed.append(node)
            pending += node.children.values()
        return removed

    def oldest(self) -> Block | None:
        """The block to evict next; None if requests hold every block."""
        return next(iter(self._idle), None)

    def blocks(self) -> Iterator[Block]:
        """All blocks, parents first."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending += node.children.values()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the cache. Change it only through the cache's methods.

    ``length`` tokens have a place (the last ``length - computed`` are new: the next step computes them); ``tokens`` are the
    ids known so far, the prompt's first; ``cached_tokens`` came from the prefix cache when the request was made.
    ``pages[pool]`` are its pages in order; ``slot`` is its state slot where the plan has a state pool.
    """

    number: int
    tokens: list[int]
    key: Hashable
    prompt_tokens: int
    pages: list[list[int]]
    length: int = 0
    computed: int = 0
    cached_tokens: int = 0
    slot: int = 0
    blocks: list[Block] = field(default_factory=list, repr=False)

    @property
    def pending(self) -> int:
        """New tokens: placed, not yet computed."""
        return self.length - self.computed


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages of one pool: ``free + used + cached == total`` (page 0 is not counted)."""

    name: str
    total: int
    free: int
    used: int
    cached: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What the cache holds and did: live requests, prompt tokens seen and matched, pages evicted and copied on write."""

    pools: tuple[PoolStats, ...]
    requests: int
    prompt_tokens: int
    matched_tokens: int
    evicted_pages: int
    copied_pages: int
