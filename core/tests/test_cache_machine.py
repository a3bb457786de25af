"""The reference cache under random calls: the machine knows what every slot must hold and who owns every page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attn_core.cache import Request
from attn_core.errors import CacheError, OutOfPages
from attn_core.store import default_gather
from cache_world import small, snapshot, two_pools

PICK = st.integers(0, 30)
TOKENS = st.one_of(st.integers(0, 9), st.lists(st.integers(0, 1), max_size=5))


class CacheMachine(RuleBasedStateMachine):
    """Every computed slot holds a number that stands for (key, all tokens up to it): any mix-up is seen.

    Few token values and tiny pages make shared prefixes, evictions, copies and full caches frequent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[object, int] = {}
        self.ids: dict[int, list[int]] = {}  # what each request's tokens really are
        self.live: dict[int, Request] = {}
        self.dead: list[Request] = []
        self.unknown = 100

    @initialize(pools=st.sampled_from([(4,), (1,), (4, 2), (2, 4), (4, 6)]))
    def start(self, pools):
        self.cache = small(10, pools[0]) if len(pools) == 1 else two_pools(8, pools)

    def pick(self, number: int) -> Request:
        return list(self.live.values())[number % len(self.live)]

    @rule(prompt=st.lists(st.integers(0, 1), max_size=14), key=st.sampled_from([None, None, "lora"]))
    def new_request(self, prompt, key):
        self.begin(prompt, key)

    def begin(self, prompt, key):
        before = self.cache.stats().pools
        request = self.cache.new_request(prompt, key=key)
        assert request.length % self.cache.block_tokens == 0
        assert request.length < max(1, len(prompt))
        assert [p.free for p in self.cache.stats().pools] == [p.free for p in before]
        self.live[request.number] = request
        self.ids[request.number] = list(prompt)
        return request

    @precondition(lambda self: self.ids)
    @rule(number=PICK, share=st.floats(0.5, 1), rest=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def follow_up(self, number, share, rest):
        """A prompt that begins like that of a former or live request, computed at once if there is room."""
        like = (*self.live.values(), *self.dead)[number % len(self.ids)]
        ids = self.ids[like.number]
        request = self.begin([*ids[: round(len(ids) * share)], *rest], like.key)
        self.grow(request, request.prompt_tokens - request.length)
        self.compute(request)
        self.cache.commit(request)

    @precondition(lambda self: self.live)
    @rule(number=PICK, tokens=TOKENS)
    def extend(self, number, tokens):
        self.grow(self.pick(number), tokens)

    def grow(self, request, tokens):
        self.compute(request)
        if not isinstance(tokens, int) and len(request.tokens) > request.length:
            tokens = len(tokens)
        before, length = snapshot(self.cache), request.length
        try:
            self.cache.extend(request, tokens)
        except OutOfPages:
            assert snapshot(self.cache) == before
            return
        ids = self.ids[request.number]
        ids += tokens if not isinstance(tokens, int) else []
        assert request.length == length + (tokens if isinstance(tokens, int) else len(tokens))
        while len(ids) < request.length:
            self.unknown += 1
            ids.append(self.unknown)

    @precondition(lambda self: self.live)
    @rule(number=PICK, share=st.floats(0.3, 1), tokens=TOKENS)
    def cut_and_go_on(self, number, share, tokens):
        """Rejected drafts, or a conversation that is taken up again from an earlier token."""
        request = self.pick(number)
        self.compute(request)
        self.cache.commit(request)
        length, before = round(request.length * share), request.length
        self.cache.truncate(request, length)
        if length < before:
            del self.ids[request.number][length:]
        assert (request.length, request.pending) == (length, 0)
        self.grow(request, tokens)

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def undo(self, number):
        """The step failed: pending tokens lose their place."""
        request = self.pick(number)
        self.cache.truncate(request, request.computed)
        del self.ids[request.number][max(request.length, request.prompt_tokens) :]

    @precondition(lambda self: self.live)
    @rule(number=PICK, discard=st.booleans())
    def free(self, number, discard):
        request = self.pick(number)
        if not discard:
            self.compute(request)
        self.cache.free(request, discard=discard)
        self.dead.append(self.live.pop(request.number))

    @precondition(lambda self: self.dead)
    @rule(number=PICK)
    def use_after_free(self, number):
        request = self.dead[number % len(self.dead)]
        before = snapshot(self.cache)
        for call in (
            self.cache.free,
            self.cache.commit,
            lambda r: self.cache.extend(r, 1),
            lambda r: self.cache.truncate(r, 0),
        ):
            with pytest.raises(CacheError, match="freed"):
                call(request)
        assert snapshot(self.cache) == before

    def compute(self, request):
        """The forward pass: write the pending tokens' numbers to the new slots of every pool."""
        if not request.pending:
            return
        phase = "decode" if request.pending == 1 else "prefill"
        batch = self.cache.batch([request], phase)
        values = self.numbers(request)[request.computed : request.length]
        for layer, address in self.addresses(batch):
            k = self.cache.layer(layer).k
            k.flatten(0, 1)[address.new_slots] = torch.tensor(values, dtype=torch.float32)[:, None, None]

    def addresses(self, batch):
        return [(0, batch.kv(0)), (1, batch.kv(len(batch.addresses) - 1))]

    def numbers(self, request) -> list[int]:
        ids = self.ids[request.number]
        return [
            self.names.setdefault((request.key, tuple(ids[: at + 1])), len(self.names) + 1)
            for at in range(request.length)
        ]

    @invariant()
    def contents_are_right(self):
        for request in self.live.values():
            if not request.computed:
                continue
            batch = self.cache.batch([(request, 0)], "prefill")
            for layer, address in self.addresses(batch):
                k, _ = default_gather(self.cache.layer(layer), address)
                assert k[: request.computed, 0, 0].tolist() == self.numbers(request)[: request.computed]

    @invariant()
    def pages_add_up(self):
        blocks = list(self.cache._index.blocks())
        for place, number in enumerate(self.cache._paged):
            pages, size = self.cache._pages[number], self.cache.pools[number].page_size
            owners: dict[int, list[tuple[Request, int]]] = {}
            for request in self.live.values():
                assert len(request.pages[number]) * size >= request.length
                for at, page in enumerate(request.pages[number]):
                    owners.setdefault(page, []).append((request, at))
            assert pages.references == [len(owners.get(page, ())) for page in range(pages.total + 1)]
            held = {page for block in blocks for page in block.pages[place]}
            assert 0 not in owners
            assert 0 not in held
            assert pages._kept == held
            assert sum(len(block.pages[place]) for block in blocks) == len(held), "no page belongs to two prefixes"
            assert pages.cached == len(held - set(owners))
            assert pages.cached == sum(len(b.pages[place]) for b in blocks if not b.users), "all of it can be evicted"
            assert len(set(pages._free)) == pages.free
            assert not set(pages._free) & (held | set(owners))
            assert pages.free + pages.used + pages.cached == pages.total
            for page, users in owners.items():
                assert len(users) == 1 or page in held, "only whole published pages are shared"

    @invariant()
    def users_add_up(self):
        idle = set(self.cache._index._idle)
        for block in self.cache._index.blocks():
            users = [r for r in self.live.values() if block in r.blocks]
            assert block.users == len(users)
            assert (block in idle) == (not users)
            assert block.parent.users >= block.users or block.parent.parent is None
        assert len(idle) == sum(not block.users for block in self.cache._index.blocks())


CacheMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase
