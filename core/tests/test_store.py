"""The default store and gather: any strides, any format, no slot but the named ones, no wait for the device."""

from __future__ import annotations

import math

import pytest
import torch

from attn_core import store
from attn_core.batch import KvAddress, Part
from attn_core.errors import BatchError, BindError
from attn_core.formats import dequantize, quantize, torch_dtype
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import DsaCache, GdnCache, IndexCache, MhaCache, MhaInputs, MhaLayer, MlaCache, MlaInputs, Scale
from attn_core.paging import PoolRows, build_batch, convert
from attn_core.store import default_gather, default_store

HEADS, QK, V, PAGES = 2, 32, 16, 12
DTYPES = ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp4")


def layer_with(k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None) -> MhaLayer:
    group = LayerGroup("target", "full", "full", (0,), MhaGeometry(4, HEADS, QK, V, 0.1), {"attend": "main"})
    scales = [None if scale is None else Scale(scale) for scale in (k_scale, v_scale)]
    return MhaLayer(0, group, k_scale=scales[0], v_scale=scales[1])


def make_cache(dtype: str, page: int, layout: str = "NHD", device: str = "cpu") -> MhaCache:
    """Filled with a byte pattern, so that every write shows."""

    def tensor(width: int, element: torch.dtype, fill: int = 0x55) -> torch.Tensor:
        size = element.itemsize
        if layout == "HND":
            raw = torch.full((PAGES, HEADS, page, width * size), fill, dtype=torch.uint8, device=device)
            return raw.view(element).permute(0, 2, 1, 3)
        if layout == "padded":
            raw = torch.full((PAGES, page + 1, HEADS, (width + 16) * size), fill, dtype=torch.uint8, device=device)
            return raw.view(element)[:, :page, :, :width]
        return torch.full((PAGES, page, HEADS, width * size), fill, dtype=torch.uint8, device=device).view(element)

    if dtype == "fp4":
        blocks = [tensor(width // 16, torch.float8_e4m3fn) for width in (QK, V)]
        return MhaCache(tensor(QK // 2, torch.uint8), tensor(V // 2, torch.uint8), *blocks, format="fp4_block16")
    return MhaCache(tensor(QK, torch_dtype(dtype)), tensor(V, torch_dtype(dtype)))


def parts_of(cache: MhaCache) -> list[torch.Tensor]:
    return [
        x.contiguous().view(torch.uint8) for x in (cache.k, cache.v, cache.k_blocks, cache.v_blocks) if x is not None
    ]


def new_tokens(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> MhaInputs:
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, HEADS * (QK + V), generator=draw).to(dtype)  # k and v are strided views of one projection
    k, v = wide.split([HEADS * QK, HEADS * V], dim=1)
    return MhaInputs(torch.zeros(count, 4, QK), k.view(count, HEADS, QK), v.view(count, HEADS, V))


def address_at(slots: list[int], page: int) -> KvAddress:
    return KvAddress(page, torch.ones(1, dtype=torch.int32), torch.tensor(slots), 1, table=torch.ones(1, 1).int())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND", "padded"])
@pytest.mark.parametrize("page", [1, 4])
def test_store_writes_the_named_slots_and_no_other_bit(dtype, layout, page):
    cache, before = make_cache(dtype, page, layout), parts_of(make_cache(dtype, page, layout))
    slots = [7, -1, 3, 11, -1]
    inputs, layer = new_tokens(5), layer_with(torch.tensor([0.5]), torch.tensor([0.25, 2.0]))
    default_store(inputs, layer, cache, address_at(slots, page))
    after = parts_of(cache)
    wanted = [
        part
        for x, s in ((inputs.k, torch.tensor([0.5])), (inputs.v, torch.tensor([0.25, 2.0])))
        for part in [quantize(x, dtype, s)]
    ]
    flat = [wanted[0][0], wanted[1][0]] + ([wanted[0][1], wanted[1][1]] if dtype == "fp4" else [])
    for old, new, want in zip(before, after, flat, strict=True):
        expected = old.clone()
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot // page, slot % page] = want[token].contiguous().view(torch.uint8)
        assert torch.equal(new, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_path_of_devices_writes_the_same(dtype):
    """No host sync: -1 is pointed at slot 0 with slot 0's own content, so its bits stay."""
    slots = torch.tensor([7, -1, 3, -1, 11])
    inputs = new_tokens(5)
    inputs.k[1] = math.nan
    host, device = make_cache(dtype, 4), make_cache(dtype, 4)
    store._scatter_host(store._mha_parts(inputs.k, inputs.v, host, None, None), slots, 4)
    store._scatter_device(store._mha_parts(inputs.k, inputs.v, device, None, None), slots, 4)
    for a, b in zip(parts_of(host), parts_of(device), strict=True):
        assert torch.equal(a, b)


def test_k_and_v_may_share_storage():
    raw = torch.zeros(PAGES, 2, 4, HEADS, QK)
    cache = MhaCache(raw[:, 0], raw[:, 1, :, :, :V])
    inputs = new_tokens(3, dtype=torch.float32)
    default_store(inputs, layer_with(), cache, address_at([4, 9, 10], 4))
    assert torch.equal(raw[2, 0, 1], inputs.k[1])
    assert torch.equal(raw[2, 1, 1, :, :V], inputs.v[1])
    assert raw[2, 1, 1, :, V:].eq(0).all()


def test_a_layer_that_shares_a_cache_stores_nothing():
    cache = make_cache("bf16", 4)
    before = parts_of(cache)
    default_store(MhaInputs(torch.zeros(3, 4, QK)), layer_with(), cache, address_at([4, 5, 6], 4))
    assert all(torch.equal(a, b) for a, b in zip(before, parts_of(cache), strict=True))
    half = new_tokens(1)._replace(v=None)
    with pytest.raises(BatchError, match="only one of k and v"):
        default_store(half, layer_with(), cache, address_at([4], 4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND", "padded"])
@pytest.mark.parametrize("form", ["table", "csr", "slots"])
def test_gather_packs_rows_of_any_form(dtype, layout, form):
    batch = build_batch([5, 0, 9, 1], [5, 0, 9, 1], PoolRows(4, [[7, 2], [], [11, 3, 5], [9]]), "prefill", form=form)
    cache, inputs, layer = (
        make_cache(dtype, 4, layout),
        new_tokens(15),
        layer_with(torch.tensor([0.5]), torch.tensor([0.3, 2.0])),
    )
    default_store(inputs, layer, cache, batch.kv(0))
    k, v = default_gather(cache, batch.kv(0), None, layer, torch.float32)
    for got, given, scale in ((k, inputs.k, layer.k_scale), (v, inputs.v, layer.v_scale)):
        data, blocks = quantize(given, dtype, scale)
        assert torch.equal(got, dequantize(data, blocks, dtype, scale))
    plain = default_gather(cache, batch.kv(0))[0]
    assert plain.dtype == (
        torch.bfloat16 if dtype.startswith("fp") and dtype not in ("fp32", "fp16") else torch_dtype(dtype)
    )


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e30])
def test_c70_unused_slots_are_never_read(fill):
    cache = MhaCache(torch.full((PAGES, 4, HEADS, QK), fill), torch.full((PAGES, 4, HEADS, V), fill))
    batch = build_batch([13, 2], [13, 2], PoolRows(4, [[7, 2, 5, 1], [3]]), "prefill")
    inputs = new_tokens(15, dtype=torch.float32)
    default_store(inputs, layer_with(), cache, batch.kv(0))
    k, v = default_gather(cache, batch.view(0, "csr", 2))
    assert torch.equal(k, inputs.k)
    assert torch.equal(v, inputs.v)


def test_c77_chunked_prefill_fills_the_cache_like_one_pass():
    """C77: 700 tokens in uneven chunks over permuted pages give the same keys as one pass."""
    page, chunks = 16, [1, 63, 64, 65, 255, 252]
    pages = (torch.randperm(44, generator=torch.Generator().manual_seed(7)) + 1).tolist()
    cache = MhaCache(torch.full((46, page, HEADS, QK), math.nan), torch.full((46, page, HEADS, V), math.nan))
    inputs = new_tokens(700, dtype=torch.float32)
    end = 0
    for count in chunks:
        end += count
        batch = build_batch([count], [end], PoolRows(page, [pages]), "prefill")
        piece = inputs._replace(k=inputs.k[end - count : end], v=inputs.v[end - count : end])
        default_store(piece, layer_with(), cache, batch.kv(0))
        k, _ = default_gather(cache, batch.kv(0))
        assert torch.equal(k, inputs.k[:end])


def test_c126_parts_of_a_prefix_with_rows_that_have_none():
    """A part names a range a row; ranges may be empty."""
    batch = build_batch([9, 3, 8], [9, 3, 8], PoolRows(4, [[7, 2, 10], [3], [5, 6]]), "prefill")
    cache, inputs = make_cache("fp32", 4), new_tokens(20, dtype=torch.float32)
    default_store(inputs, layer_with(), cache, batch.kv(0))
    offsets = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    part = Part(1, offsets, torch.tensor([4, 0, 5], dtype=torch.int32), 4, True, False)
    k, v = default_gather(cache, batch.kv(0), part)
    want = torch.cat((inputs.k[4:8], inputs.k[12 + 5 : 12 + 8]))
    assert torch.equal(k, want)
    assert v.shape == (7, HEADS, V)


def test_a_trimmed_pool_is_gathered_from_its_origin_on():
    cache, inputs = make_cache("fp32", 4), new_tokens(3, dtype=torch.float32)
    batch = build_batch([3], [11], PoolRows(4, [[6]], origin=[8]), "prefill")
    default_store(inputs, layer_with(), cache, batch.kv(0))
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    part = Part(0, offsets, torch.tensor([9], dtype=torch.int32), 2, False, False)
    assert torch.equal(default_gather(cache, batch.kv(0), part)[0], inputs.k[1:])


def test_c63_fp8_queries_and_keys_need_their_scales():
    """C63: logits = (q_scale * k_scale) * q8 . k8 and out = v_scale * P . v8 are within 5%; without the q scale they are not."""
    draw = torch.Generator().manual_seed(63)
    q = torch.randn(8, 128, generator=draw).clamp(-5, 5) * 8
    q[:, 0] = 100.0
    k, v = torch.randn(300, 2, 128, generator=draw) * 0.1, torch.randn(300, 2, 128, generator=draw) + 1
    k[0, :, 1] = 3.0
    q_scale, k_scale, v_scale = torch.tensor([0.5]), torch.tensor([0.02]), torch.tensor([0.5])
    cache = MhaCache(
        torch.zeros(21, 16, 2, 128).to(torch.float8_e4m3fn), torch.zeros(21, 16, 2, 128).to(torch.float8_e4m3fn)
    )
    batch = build_batch([300], [300], PoolRows(16, [list(range(1, 20))]), "prefill")
    layer = layer_with(k_scale, v_scale)
    default_store(MhaInputs(q, k, v), layer, cache, batch.kv(0))
    q8, _ = quantize(q, "fp8_e4m3", q_scale)
    raw_k, raw_v = default_gather(cache, batch.kv(0), None, None, torch.float32)

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        keys, values = keys.repeat_interleave(4, 1), values.repeat_interleave(4, 1)
        return torch.einsum("ht,thd->hd", torch.einsum("hd,thd->ht", query, keys).mul(128**-0.5).softmax(-1), values)

    want = attend(q, k, v)

    def error(got: torch.Tensor) -> float:
        return float((got - want).norm() / want.norm())

    assert error(v_scale * attend(q8.float() * q_scale * k_scale, raw_k, raw_v)) < 0.05
    assert error(v_scale * attend(q8.float() * k_scale, raw_k, raw_v)) > 0.05
    assert torch.equal(default_gather(cache, batch.kv(0), None, layer, torch.float32)[0], raw_k * k_scale)


@pytest.mark.parametrize("k_scale", [0.1, 1.0, 8.0])
def test_c64_prefix_in_fp8_new_tokens_untouched(k_scale):
    """C64: the prefix comes back with its scale; what is stored is divided by it once, new tokens in bf16 are not changed."""
    scale = torch.tensor([k_scale])
    inputs, cache = new_tokens(80), make_cache("fp8_e4m3", 8)
    given = inputs.k.clone()
    batch = build_batch([80], [80], PoolRows(8, [list(range(1, 11))]), "prefill")
    default_store(inputs, layer_with(scale, scale), cache, batch.kv(0))
    assert torch.equal(inputs.k, given)
    back, _ = default_gather(cache, batch.kv(0), None, layer_with(scale, scale), torch.float32)
    bound = given.float().abs() * 2**-4 + k_scale * 2**-9
    assert ((back - given.float()).abs() <= bound).all()


@pytest.mark.parametrize("name", ["mla_plain", "mla_plain_fp8", "mla_split"])
@pytest.mark.parametrize("sparse", [False, True])
def test_latent_caches(name, sparse):
    latent, rope, page = 32, 8, 4
    element = torch.float8_e4m3fn if name.endswith("fp8") else torch.bfloat16
    data = torch.zeros(PAGES, page, latent + rope).to(element)
    cache = MlaCache(data, data[..., :latent], data[..., latent:], name)
    if name == "mla_split":
        cache = MlaCache(
            data, torch.zeros(PAGES, page, latent).to(element), torch.zeros(PAGES, page, rope).to(element), name
        )
    inputs = MlaInputs(None, None, torch.zeros(6, 2, rope), torch.randn(6, latent), torch.randn(6, rope))
    batch = build_batch([6], [6], PoolRows(page, [[5, 2]]), "prefill")
    target = DsaCache(cache, IndexCache(torch.zeros(0))) if sparse else cache
    group = LayerGroup("target", "mla", "mla", (0,), None)
    from attn_core.layers import DsaLayer, MlaLayer

    mla = MlaLayer(0, group, k_scale=Scale(torch.tensor([0.5])))
    layer = DsaLayer(mla, 1.0) if sparse else mla
    default_store(inputs, layer, target, batch.kv(0))
    c_kv, k_pe = default_gather(target, batch.kv(0), None, layer, torch.float32)
    for got, given in ((c_kv, inputs.c_kv), (k_pe, inputs.k_pe)):
        assert torch.equal(got, quantize(given, "fp8_e4m3" if name.endswith("fp8") else "bf16", 0.5)[0].float() * 0.5)


def test_latent_store_needs_no_views():
    data = torch.zeros(PAGES, 4, 40)
    inputs = MlaInputs(None, None, torch.zeros(1, 2, 8), torch.ones(1, 32), torch.full((1, 1, 8), 2.0))
    default_store(inputs, None, MlaCache(data), address_at([5], 4))
    assert data[1, 1].tolist() == [1.0] * 32 + [2.0] * 8
    with pytest.raises(BindError, match="views c_kv and k_pe"):
        default_gather(MlaCache(data), address_at([5], 4))


def test_refusals():
    cache, inputs = make_cache("bf16", 4), new_tokens(3)
    with pytest.raises(BatchError, match="slots    2"):
        default_store(inputs, layer_with(), cache, address_at([4, 5], 4))
    with pytest.raises(BatchError, match=r"cache    \[12, 4, 2, 32\]"):
        default_store(inputs._replace(k=inputs.k[..., :16]), layer_with(), cache, address_at([4, 5, 6], 4))
    cache.format = "vendor:packed"
    for call in (
        lambda: default_store(inputs, layer_with(), cache, address_at([4, 5, 6], 4)),
        lambda: default_gather(cache, address_at([4], 4)),
    ):
        with pytest.raises(BindError, match="must offer attn_store and attn_gather"):
            call()
    with pytest.raises(BindError, match="GdnCache"):
        default_store(inputs, layer_with(), GdnCache(torch.zeros(1), torch.zeros(1)), address_at([4], 4))
    with pytest.raises(BatchError, match="pages of 8 does not belong"):
        default_gather(make_cache("bf16", 4), address_at([4], 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_waits_for_the_device(dtype):
    """A meta tensor has no values: whatever needs one raises."""
    cache = make_cache(dtype, 4, device="meta")
    batch = build_batch([5, 9], [5, 9], PoolRows(4, [[7, 2], [11, 3, 5]]), "prefill", device="meta")
    inputs = MhaInputs(*(x.to("meta") for x in (new_tokens(14).q, new_tokens(14).k, new_tokens(14).v)))
    default_store(inputs, layer_with(torch.ones(1, device="meta")), cache, batch.kv(0))
    assert default_gather(cache, batch.kv(0))[0].shape == (14, HEADS, QK)
    assert default_gather(cache, batch.view(0, "slots", 1))[1].shape == (14, HEADS, V)
    batch.kv(0).kv_lens_cpu = None
    assert default_gather(cache, batch.kv(0))[0].shape == (18, HEADS, QK), "a bound where lengths are unknown"
    assert convert(batch.kv(0), "csr", 2).indices.shape == (10,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND", "padded"])
def test_a_device_gives_the_bits_of_the_host_without_a_sync(dtype, layout):
    host, device = make_cache(dtype, 4, layout), make_cache(dtype, 4, layout, device="cuda")
    inputs, scale = new_tokens(14), torch.tensor([0.5])
    there = MhaInputs(*(x.cuda() for x in inputs[:3]))
    batches = [
        build_batch([5, 9], [5, 9], PoolRows(4, [[7, 2], [11, 3, 5]]), "prefill", device=where, padded_tokens=14)
        for where in ("cpu", "cuda")
    ]
    for batch in batches:
        batch.kv(0).new_slots[3] = -1
    layers = layer_with(scale), layer_with(scale.cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        default_store(there, layers[1], device, batches[1].kv(0))
        got = default_gather(device, batches[1].view(0, "csr", 2), None, layers[1])
        batches[1].view(0, "table", 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    default_store(inputs, layers[0], host, batches[0].kv(0))
    want = default_gather(host, batches[0].kv(0), None, layers[0])
    for a, b in zip(parts_of(host), parts_of(device), strict=True):
        assert torch.equal(a, b.cpu())
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.cpu().nan_to_num(9.0))
