"""The reference cache, case by case; ``test_cache_machine`` tries random calls."""

from __future__ import annotations

import pytest
import torch

from attn_core.cache import PageAllocator, PagedKVCache
from attn_core.errors import BatchError, CacheError, OutOfPages
from attn_core.geometry import DsaGeometry, GdnGeometry, LayerGroup, MhaGeometry, MlaGeometry
from attn_core.layers import DsaCache, GdnCache, MhaInputs, MhaLayer, MlaCache
from attn_core.plan import GroupPlan, Plan, Pool
from attn_core.store import default_gather, default_store
from cache_world import run, small, snapshot, two_pools

# --- whole pages ----------------------------------------------------------------------------------------------------------


def test_a_prefix_is_matched_in_whole_pages_only():
    """The requirement's examples: 32 tokens with page 64 match nothing; 65 match one page and one token is computed."""
    cache = small(num_pages=20, page_size=64)
    short = list(range(32))
    run(cache, short)
    assert cache.new_request(short).length == 0
    long = list(range(100, 165))
    first = run(cache, long)
    again = cache.new_request(long)
    assert (again.length, again.cached_tokens, again.pending) == (64, 64, 0)
    assert again.pages[0] == first.pages[0][:1]
    assert cache.new_request(long[:64]).length == 0, "one token must be left to compute"
    assert cache.new_request([*long[:64], 1, 2]).length == 64
    stats = cache.stats()
    assert (stats.prompt_tokens, stats.matched_tokens) == (32 + 32 + 65 + 65 + 64 + 66, 64 + 64)


def test_page_size_one_gives_the_most_reuse():
    cache = small(num_pages=40, page_size=1)
    run(cache, list(range(10)))
    assert cache.new_request(list(range(10))).length == 9
    assert cache.new_request([0, 1, 2, 99, 4]).length == 3


def test_a_chain_is_matched_from_the_first_token_and_by_key():
    cache = small()
    run(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.new_request([5, 6, 7, 8, 9, 9]).length == 0, (
        "the same page content after another prefix is another page"
    )
    assert cache.new_request([1, 2, 3, 4, 0, 0, 0, 0, 0]).length == 4
    assert cache.new_request([1, 2, 3, 4, 5, 6, 7, 8, 9], key="adapter").length == 0
    run(cache, [1, 2, 3, 4, 5], key="adapter")
    assert cache.new_request([1, 2, 3, 4, 5, 6, 7, 8, 9], key="adapter").length == 4


def test_pages_are_matchable_only_once_they_are_computed():
    cache = small()
    request = cache.new_request([1, 2, 3, 4, 5])
    cache.extend(request, 5)
    assert cache.new_request([1, 2, 3, 4, 5]).length == 0
    cache.free(request, discard=True)
    assert cache.new_request([1, 2, 3, 4, 5]).length == 0, "the step failed"
    assert cache.stats().pools[0].cached == 0
    cache.free(run(cache, [1, 2, 3, 4, 5]))
    assert cache.new_request([1, 2, 3, 4, 5]).length == 4


def test_generated_tokens_are_shared_too_but_unknown_ids_are_not():
    cache = small()
    request = run(cache, [1, 2, 3])
    for token in (4, 5):
        cache.extend(request, [token])
    cache.free(request)
    again = cache.new_request([1, 2, 3, 4, 5])
    assert again.length == 4
    cache.free(again)
    blind = cache.new_request()
    cache.extend(blind, 4)
    cache.extend(blind, [7])
    cache.free(blind)
    assert cache.stats().pools[0].cached == 1


def test_the_same_prompt_computed_twice_ends_in_one_copy():
    cache = small()
    prompt = [1, 2, 3, 4, 5]
    first, second = cache.new_request(prompt), cache.new_request(prompt)
    for request in (first, second):
        cache.extend(request, 5)
    assert first.pages[0][0] != second.pages[0][0]
    cache.commit(first)
    cache.commit(second)
    assert first.pages[0][0] == second.pages[0][0]
    assert cache.stats().pools[0].used == 3


# --- eviction and OutOfPages ----------------------------------------------------------------------------------------------


def test_the_least_recently_used_prefix_is_evicted_first_and_leaves_before_their_parents():
    cache = small(num_pages=7)
    cache.free(run(cache, [1, 2, 3, 4, 5, 6, 7, 8, 0]))
    cache.free(run(cache, [9, 9, 9, 9, 0]))
    assert (cache.stats().pools[0].cached, cache.stats().pools[0].free) == (3, 3)
    cache.free(cache.new_request([1, 2, 3, 4, 0]))  # touch the first page of the older prefix
    grown = cache.new_request()
    cache.extend(grown, 16)
    assert cache.new_request([1, 2, 3, 4, 5, 6, 7, 8, 0]).length == 4, "its second page was the oldest"
    cache.extend(grown, 4)
    assert cache.new_request([9, 9, 9, 9, 0]).length == 0
    assert cache.stats().evicted_pages == 2


def test_out_of_pages_says_what_is_missing_and_changes_nothing():
    cache = small(num_pages=6)
    cache.free(run(cache, [1, 2, 3, 4, 0]))
    request = run(cache, [5, 6, 7, 8, 0])
    before = snapshot(cache)
    with pytest.raises(OutOfPages) as error:
        cache.extend(request, 16)
    text = str(error.value)
    assert "needed   4 pages" in text
    assert "free     2" in text
    assert "evict    1 cached" in text
    assert "used     2 of 5" in text
    assert "AC-CAC-002" in text
    assert snapshot(cache) == before
    cache.extend(request, 15)
    assert cache.stats().pools[0].free == cache.stats().pools[0].cached == 0


def test_either_pool_may_be_the_one_that_is_full():
    cache = two_pools(num_pages=5)
    assert cache.block_tokens == 4
    request = cache.new_request([1] * 9)
    cache._pages[1].take(7)
    before = snapshot(cache)
    with pytest.raises(OutOfPages, match="pool 'sliding'"):
        cache.extend(request, 9)
    assert snapshot(cache) == before


# --- rejected drafts and copy on write ------------------------------------------------------------------------------------


def test_truncate_gives_back_pages_of_rejected_drafts():
    cache = small()
    request = run(cache, [1, 2, 3])
    cache.extend(request, [4, 5, 6, 7, 8, 9])
    assert len(request.pages[0]) == 3
    cache.truncate(request, 5)
    assert (request.length, request.pending, request.tokens) == (5, 0, [1, 2, 3, 4, 5])
    assert len(request.pages[0]) == 2
    cache.extend(request, [7, 7, 7])
    cache.free(request)
    assert cache.new_request([1, 2, 3, 4, 5, 7, 7, 7, 0]).length == 8


def test_a_shared_page_is_copied_before_it_is_written():
    cache = small()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first, second = run(cache, prompt), None
    for number, page in enumerate(first.pages[0]):
        for layer in range(2):
            cache.layer(layer).k[page] = 10.0 * layer + number
    second = cache.new_request(prompt)
    page = second.pages[0][1]
    cache.truncate(second, 6)
    assert second.pages[0] == first.pages[0][:2], "nothing is copied until it is needed"
    cache.extend(second, [0])
    assert first.pages[0][1] == page != second.pages[0][1]
    assert cache.stats().copied_pages == 1
    for layer in range(2):
        assert cache.layer(layer).k[second.pages[0][1]].eq(10.0 * layer + 1).all()
    assert cache.new_request(prompt).length == 8, "the published page is as it was"


def test_a_page_that_only_its_owner_uses_is_taken_out_of_the_index_instead():
    cache = small()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    cache.free(run(cache, [*prompt[:8], 0, 0, 0, 0, 0]))  # a cached child below the page that will be rewritten
    request = run(cache, prompt)
    page = request.pages[0][1]
    cache.truncate(request, 6)
    cache.extend(request, [0])
    assert request.pages[0][1] == page
    assert cache.stats().copied_pages == 0
    assert cache.new_request(prompt).length == 4
    assert cache.stats().pools[0].cached == 0, "what hung below it is free again"


def test_a_block_that_is_partly_used_keeps_its_pages_in_every_pool():
    cache = two_pools()
    request = run(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.truncate(request, 5)
    assert [len(pages) for pages in request.pages] == [2, 4]
    assert [pool.cached for pool in cache.stats().pools] == [0, 0], "cached means that it can be evicted"
    cache.extend(request, [0])
    assert [len(pages) for pages in request.pages] == [2, 4]
    assert cache.new_request([1, 2, 3, 4, 5, 6, 7, 8, 9]).length == 4


def test_new_tokens_never_land_in_shared_pages():
    cache = small()
    request = run(cache, [1, 2, 3, 4, 5])
    with pytest.raises(CacheError, match="would be written into shared pages"):
        cache.batch([(request, 2)], "prefill")
    assert cache.batch([(request, 1)], "prefill").num_tokens == 1


# --- misuse ---------------------------------------------------------------------------------------------------------------


def test_misuse_is_refused_with_facts():
    cache, other = small(max_tokens=6), small()
    request = run(cache, [1, 2, 3])
    before = snapshot(cache)
    with pytest.raises(CacheError, match="limit    6 tokens"):
        cache.extend(request, 4)
    with pytest.raises(CacheError, match="cannot grow by -1"):
        cache.extend(request, -1)
    with pytest.raises(CacheError, match="cannot be cut to 4"):
        cache.truncate(request, 4)
    with pytest.raises(CacheError, match="in the batch twice"):
        cache.batch([(request, 0), (request, 0)], "prefill")
    with pytest.raises(CacheError, match="unknown to this cache"):
        other.extend(request, 1)
    fresh = cache.new_request([7, 8])
    with pytest.raises(CacheError, match="extend by a number"):
        cache.extend(fresh, [9])
    cache.free(fresh)
    assert snapshot(cache)[:4] == before[:4]
    cache.free(request)
    for call in (cache.free, cache.commit, lambda r: cache.extend(r, 1), lambda r: cache.batch([r], "decode")):
        with pytest.raises(CacheError, match="was freed"):
            call(request)
    with pytest.raises(CacheError, match="no pool holds layer 7"):
        cache.layer(7)


def test_the_allocator_alone():
    pages = PageAllocator(4)
    taken = pages.take(3)
    assert sorted(taken) == [1, 2, 3]
    with pytest.raises(OutOfPages):
        pages.take(1)
    pages.share([1])
    pages.drop([1, 1])
    assert pages.free == 1
    with pytest.raises(CacheError, match="page 1 is freed twice"):
        pages.drop([1])
    with pytest.raises(CacheError, match="page 0 is freed twice"):
        pages.drop([0])
    with pytest.raises(CacheError, match="is free and cannot be shared"):
        pages.share([1])
    pages.keep([2])
    pages.drop([2])
    assert (pages.free, pages.cached, pages.used) == (1, 1, 1)
    pages.forget([2])
    assert (pages.free, pages.cached) == (2, 0)
    with pytest.raises(CacheError, match="at least 2"):
        PageAllocator(1)


# --- tensors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "fp4"])
def test_layers_are_logical_views_of_any_layout(layout, dtype):
    cache = PagedKVCache.plain(
        layers=3, kv_heads=2, head_dims=(64, 32), page_size=16, num_pages=5, dtype=dtype, layout=layout, zero_init=True
    )
    layer = cache.layer(2)
    packed = 2 if dtype == "fp4" else 1
    assert layer.k.shape == (5, 16, 2, 64 // packed)
    assert layer.v.shape == (5, 16, 2, 32 // packed)
    assert layer.k.is_contiguous() == (layout == "NHD")
    assert layer.format == ("fp4_block16" if dtype == "fp4" else "plain")
    parts = [layer.k, layer.v, *([layer.k_blocks, layer.v_blocks] if dtype == "fp4" else [])]
    assert all(part.contiguous().view(torch.uint8).eq(0).all() for part in parts)
    assert sum(part[0].numel() * part.element_size() for part in parts) * 3 == cache.pools[0].bytes_per_page


def test_page_zero_is_zero_even_if_the_rest_is_not():
    cache = small(num_pages=50)
    for layer in range(2):
        assert cache.layer(layer).k[0].eq(0).all()
        assert cache.layer(layer).v[0].eq(0).all()


def test_c77_chunks_and_shared_prefixes_read_back_what_was_stored():
    """C77: 70 tokens in uneven chunks, a second request on the same prefix, pages in any order."""
    cache = small(num_pages=30)
    group = cache_group(cache)
    layer = MhaLayer(0, group)
    held = [run(cache, [200 + n]) for n in range(6)]
    for request in held[::2]:
        cache.free(request)
    prompt = list(range(70))
    k, v = torch.randn(75, 1, 2), torch.randn(75, 1, 1)
    first = cache.new_request(prompt)
    for count in (1, 6, 13, 20, 30):
        cache.extend(first, count)
        batch = cache.batch([first], "prefill")
        span = slice(first.length - count, first.length)
        default_store(MhaInputs(k[span], k[span], v[span]), layer, cache.layer(0), batch.kv(0))
        assert torch.equal(default_gather(cache.layer(0), batch.kv(0))[0], k[: first.length])
    cache.commit(first)
    second = cache.new_request([*prompt[:68], 7, 7, 7, 7, 7])
    assert second.length == 68
    cache.extend(second, 5)
    cache.extend(first, [500])
    batch = cache.batch([first, second], ["decode", "prefill"], padded_rows=4)
    new = torch.cat((k[70:71], k[70:75]))
    default_store(MhaInputs(new, new, torch.zeros(6, 1, 1)), layer, cache.layer(0), batch.kv(0))
    got, _ = default_gather(cache.layer(0), batch.view(0, "csr", 2))
    assert torch.equal(got, torch.cat((k[:71], k[:68], k[70:75])))


def cache_group(cache: PagedKVCache) -> LayerGroup:
    return LayerGroup("target", "full", "full", (0, 1), MhaGeometry(1, 1, 2, 1, 1.0), {"attend": "main"})


def test_from_plan_serves_every_pool_in_the_plans_order():
    full = LayerGroup("target", "full", "full", (0, 2), MhaGeometry(4, 2, 8, 4, 1.0), {"attend": "main"}, {2: 0})
    slide = LayerGroup("target", "sliding", "sliding", (1,), MhaGeometry(4, 1, 4, 4, 1.0, window=8), {"attend": "swa"})
    vision = LayerGroup("vision", "tower", "vit_full", (0,), MhaGeometry(4, 4, 8, 8, 1.0))
    pools = (
        Pool("main", "target", (0,), "plain", "bf16", "NHD", 4, 1),
        Pool("swa", "target", (1,), "plain", "fp8_e5m2", "HND", 2, 1),
    )
    groups = tuple(GroupPlan(group, {}) for group in (full, slide, vision))
    plan = Plan("m", "cpu", 4, "bf16", "NHD", "bf16", groups, pools)
    cache = PagedKVCache.from_plan(plan, num_pages=8)
    assert cache.layer(2) is cache.layer(0), "layer 2 shares the cache of layer 0"
    assert cache.layer(1).k.shape == (8, 2, 1, 4)
    layers = [MhaLayer(0, full), MhaLayer(1, slide), MhaLayer(2, full, kv_from=0), MhaLayer(0, vision)]
    assert cache.caches(layers) == [cache.layer(0), cache.layer(1), cache.layer(0), None]
    request = run(cache, [1, 2, 3, 4, 5])
    batch = cache.batch([(request, 1)], "decode")
    assert [address.page_size for address in batch.addresses] == [4, 2]
    assert [address.kv_lens.tolist() for address in batch.addresses] == [[5], [5]]


def test_latent_sparse_and_state_pools():
    mla = MlaGeometry(2, 32, 8, 16, 16, 1.0)
    dsa = LayerGroup(
        "target", "sparse", "mla_sparse_dsa", (0,), DsaGeometry(mla, 2, 128, 64), {"attend": "latent", "index": "index"}
    )
    gdn = LayerGroup("target", "gdn", "linear_gdn", (1,), GdnGeometry(1, 2, 4, 4, 4, 12), {"state": "state"})
    pools = (
        Pool("latent", "target", (0,), "mla_plain", "bf16", "NHD", 4, 1, kind="latent"),
        Pool("state", "target", (1,), "state_vk", "fp32", "VK", 1, 1, kind="state"),
        Pool("index", "target", (0,), "index_132_planar", "fp8_e4m3", "NHD", 4, 1, kind="index"),
    )
    cache = PagedKVCache(pools, [dsa, gdn], num_pages=6, max_requests=2)
    sparse, state = cache.layer(0), cache.layer(1)
    assert isinstance(sparse, DsaCache)
    assert sparse.latent.data.shape == (6, 4, 40)
    assert sparse.latent.k_pe.shape == (6, 4, 8)
    assert sparse.index.data.shape == (6, 4 * 132)
    assert isinstance(state, GdnCache)
    assert state.state.shape == (3, 2, 4, 4)
    assert state.conv.shape == (3, 12, 3)
    first, second = cache.new_request([1] * 5), cache.new_request([1] * 5)
    cache.extend(first, 5)
    batch = cache.batch([first], "prefill", padded_rows=2)
    assert batch.state(1).read_slots.tolist() == [first.slot, -1]
    assert batch.state(1).fresh.tolist() == [True, True]
    assert batch.kv(2).table.tolist()[0] == first.pages[2]
    cache.extend(first, [3])
    assert cache.batch([first], "decode").state(1).fresh.tolist() == [False]
    before = cache.stats()
    with pytest.raises(OutOfPages, match="pool 'state'"):
        cache.new_request([1])
    assert cache.stats() == before
    cache.free(first)
    assert cache.new_request([1] * 5).length == 0, "no prefix without its state"
    cache.free(second)
    split = Pool("latent", "target", (0,), "mla_split", "bf16", "NHD", 4, 1, kind="latent")
    only = LayerGroup("target", "mla", "mla", (0,), mla, {"attend": "latent"})
    latent = PagedKVCache([split], [only], num_pages=3).layer(0)
    assert isinstance(latent, MlaCache)
    assert (latent.c_kv.shape[-1], latent.k_pe.shape[-1]) == (32, 8)


def test_pools_that_cannot_be_served_are_refused():
    group = LayerGroup("target", "full", "full", (0,), MhaGeometry(1, 1, 2, 1, 1.0), {"attend": "main"})
    good = Pool("main", "target", (0,), "plain", "fp32", "NHD", 4, 48)
    cross = LayerGroup("target", "cross", "cross", (0,), MhaGeometry(1, 1, 2, 1, 1.0), {"cross": "main"})
    with pytest.raises(CacheError, match="does not exist"):
        PagedKVCache([], [group], num_pages=4)
    with pytest.raises(CacheError, match="cross attention"):
        PagedKVCache([good], [cross], num_pages=4)
    with pytest.raises(CacheError, match="32-bit index"):
        PagedKVCache([good], [group], num_pages=2**29)
    with pytest.raises(CacheError, match="names no pool 'main'"):
        PagedKVCache([good], [group], num_pages={"other": 4})
    private = Pool("main", "target", (0,), "vendor:packed", "fp32", "NHD", 4, 48)
    with pytest.raises(CacheError, match="'vendor:packed'"):
        PagedKVCache([private], [group], num_pages=4)
    with pytest.raises(CacheError, match="multiples of 16"):
        PagedKVCache.plain(layers=1, kv_heads=1, head_dims=(24, 16), page_size=4, num_pages=4, dtype="fp4")


def test_a_static_batch_is_filled_in_place():
    cache = small(num_pages=20)
    first, second = run(cache, [1, 2, 3]), run(cache, [4, 5, 6, 7, 8])
    bucket = {"padded_rows": 4, "max_kv_len": 40}
    for request in (first, second):
        cache.extend(request, [9])
    static = cache.batch([first, second], "decode", **bucket)
    where = static.kv(0).table.data_ptr()
    cache.free(first)
    cache.extend(second, [9])
    assert cache.batch([second], "decode", into=static, **bucket) is static
    assert static.kv(0).table.data_ptr() == where
    assert static.kv(0).kv_lens.tolist() == [7, 0, 0, 0]
    assert static.kv(0).table[0, :2].tolist() == second.pages[0]
    with pytest.raises(BatchError, match="padded_rows"):
        cache.batch([second], "decode", into=static)
