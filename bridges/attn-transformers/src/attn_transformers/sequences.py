"""The requests behind one ``transformers.Cache``: pages, seen columns, and the step that the layers of a forward share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_core.cache import PagedKVCache, Request
from attn_core.errors import BatchError, CacheError, OutOfPages
from attn_core.layers import MhaInputs, MhaLayer
from attn_core.router import Router, Step
from attn_transformers.rows import NewTokens, new_tokens


class Sequences:
    """One request per row of the batch. ``columns`` counts what transformers believes is cached, padding included.

    Not thread-safe, and one forward at a time.
    """

    def __init__(self, kv: PagedKVCache, router: Router, layers: frozenset[int]) -> None:
        self.kv, self.router, self.layers = kv, router, layers
        self.requests: list[Request] = []
        self.columns = 0
        self.offered: int | None = None  #: the layer whose keys were handed over and not attended yet
        self._step: Step | None = None
        self._tokens: NewTokens | None = None
        self._done: set[int] = set()

    # --- what transformers asks ---------------------------------------------------------------------------------------------

    def length(self, layer: int) -> int:
        """Columns that `layer` has seen: within a forward, layers that are done count the new ones."""
        if self._tokens is None or self.finished or layer in self._done:
            return self.columns
        return self.columns - self._tokens.width

    @property
    def finished(self) -> bool:
        """No forward is under way."""
        return self._step is None or self._done == self.layers

    def waits_for(self, layer: int) -> bool:
        """A forward is under way and `layer` has not attended in it yet."""
        return self._step is not None and layer not in self._done

    # --- a forward ------------------------------------------------------------------------------------------------------------

    def begin(self, mask: torch.Tensor | None, rows: int, width: int) -> None:
        """Give the new tokens pages and start a step. Raises :class:`OutOfPages` with nothing changed."""
        if torch.is_grad_enabled():
            raise BatchError(
                "attention over a paged cache has no gradient",
                fix="with torch.inference_mode(): … (or torch.no_grad())",
            )
        if not self.finished:
            missing = sorted(self.layers - self._done)
            raise CacheError(
                "the previous forward did not reach every layer, so the cache lacks some of its keys",
                f"missing  layers {missing[:8]} of {len(self.layers)}",
                fix="cache.reset()",
            )
        requests = self.requests or [self.kv.new_request() for _ in range(rows)]
        try:
            if rows != len(requests):
                raise BatchError(f"the batch has {rows} rows, the cache {len(requests)}", fix="one cache per batch")
            tokens = new_tokens(mask, rows, width, self.columns, [request.length for request in requests])
            self._grow(requests, tokens.counts)
        except Exception:
            if not self.requests:
                self._free(requests)
            raise
        self.requests = requests
        live = [(request, count) for request, count in zip(requests, tokens.counts, strict=True) if count]
        decode = tokens.width == 1 and all(request.length > 1 for request, _ in live)
        batch = self.kv.batch(live, "decode" if decode else "prefill")
        self._tokens, self._done = tokens, set()
        self.columns += width
        self._step = self.router.begin(batch)

    def attend(self, layer: MhaLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One layer: query ``[B, Hq, S, D]`` to ``[B, S, Hq, Dv]``."""
        step, tokens = self._step, self._tokens
        assert step is not None
        assert tokens is not None
        out = step.attend(layer, MhaInputs(tokens.pack(query), tokens.pack(key), tokens.pack(value)))
        self._done.add(layer.index)
        return tokens.unpack(out)

    def _grow(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        before = [request.length for request in requests]
        for place, (request, count) in enumerate(zip(requests, counts, strict=True)):
            try:
                self.kv.extend(request, count)
            except OutOfPages as error:
                for grown, length in zip(requests[:place], before, strict=False):
                    self.kv.truncate(grown, length)
                raise OutOfPages(
                    error.message,
                    *error.facts,
                    f"cached   {sum(before)} tokens in {len(requests)} sequences; {sum(counts)} more were needed",
                    fix="attn_transformers.load(model, max_tokens=…)",
                ) from error

    # --- changes of the batch ---------------------------------------------------------------------------------------------

    def select(self, indices: Sequence[int]) -> None:
        """Row i becomes what row ``indices[i]`` was: a row used once moves, further uses are copies, others are freed.

        Rows that go make room for copies; if that is not enough, all pages are given back and :class:`OutOfPages` is raised.
        """
        self._need_finished("rows can be selected")
        self._free([r for place, r in enumerate(self.requests) if place not in set(indices)])
        former, rows, copies = self.requests, list[Request](), list[Request]()
        moved: set[int] = set()
        try:
            for place in indices:
                if place in moved:
                    copies.append(self._copy(former[place]))
                rows.append(copies[-1] if place in moved else former[place])
                moved.add(place)
        except OutOfPages:
            self.requests = [former[place] for place in set(indices)] + copies
            self.release()
            raise
        self.requests = rows

    def crop(self, count: int) -> None:
        """Forget the last `count` columns. Raises :class:`CacheError` where they hold padding or are not there."""
        self._need_finished("the cache can be cropped")
        shortest = min((request.length for request in self.requests), default=0)
        if count > shortest:
            raise CacheError(
                f"{count} columns cannot be taken back", f"shortest {shortest} tokens in one of the sequences"
            )
        for request in self.requests:
            self.kv.truncate(request, request.length - count)
        self.columns -= count

    def release(self) -> None:
        """Give all pages back and start anew."""
        self._free(self.requests)
        self.requests, self.columns, self.offered = [], 0, None
        self._step, self._tokens, self._done = None, None, set()

    def _copy(self, source: Request) -> Request:
        """A new request with its own copy of the pages of `source`."""
        copy = self.kv.new_request()
        try:
            self.kv.extend(copy, source.length)
        except OutOfPages:
            self.kv.free(copy)
            raise
        self.kv.commit(copy)
        for number, pool in enumerate(self.kv.pools):
            old, new = (torch.tensor(r.pages[number], device=self.kv.device) for r in (source, copy))
            for index in pool.layers:
                cache = self.kv.layer(index, pool.model)
                for name in ("k", "v", "k_blocks", "v_blocks"):
                    tensor = getattr(cache, name)
                    if tensor is not None:
                        stored = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                        stored[new] = stored[old]
        return copy

    def _free(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.kv.free(request, discard=True)

    def _need_finished(self, what: str) -> None:
        if not self.finished:
            raise CacheError(f"a forward is under way; {what} between forwards only", fix="cache.reset()")
