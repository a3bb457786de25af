"""Every address that a kernel reads or writes lies in a tensor it was given, also where pools are larger than 32 bits.

The interpreter shows the address of every live lane. A launch may touch its tensor arguments and what the metadata points to
(page lists, tree masks), nothing else; huge pools are sparse mappings, of which only the touched pages take memory.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

import attn_triton
from attn_core.geometry import MhaGeometry
from attn_core.layers import MhaCache
from attn_core.testing.batches import make_case
from attn_core.testing.compare import compare_out, tolerance
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.oracle_mha import attend

#: Linux: pages of a mapping are counted when they are touched.
NO_RESERVE = 0x4000
pytestmark = [
    pytest.mark.needs_triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="addresses are seen in the interpreter only"),
]


def extent(tensor):
    """(first byte, end) of what a view can reach."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class Addresses:
    """Checks each access of the interpreter against the tensors of the launch and those in `given`."""

    def __init__(self, monkeypatch):
        from triton.runtime import interpreter

        self.given, self.extents, self.accesses = [], [], 0
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

        def launch(executor, args, kwargs):
            found = arguments(executor, args, kwargs)
            tensors = [x for x in (*found[0], *found[1].values()) if isinstance(x, torch.Tensor)]
            self.extents = sorted(extent(x) for x in (*tensors, *self.given))
            return found

        def checked_load(builder, ptrs, mask, *rest):
            self.check("read", ptrs, mask)
            return load(builder, ptrs, mask, *rest)

        def checked_store(builder, ptrs, value, mask, *rest):
            self.check("write", ptrs, mask)
            return store(builder, ptrs, value, mask, *rest)

        monkeypatch.setattr(executor, "_init_args_hst", launch)
        monkeypatch.setattr(executor, "_restore_args_dev", lambda *_: None)  # CPU tensors are not copied
        monkeypatch.setattr(builder, "create_masked_load", checked_load)
        monkeypatch.setattr(builder, "create_masked_store", checked_store)

    def check(self, what, ptrs, mask):
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        live = np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)
        addresses = ptrs.data[live].astype(np.uint64)
        self.accesses += addresses.size
        inside = np.zeros(addresses.shape, bool)
        for first, end in self.extents:
            inside |= (addresses >= first) & (addresses + np.uint64(size) <= end)
        if not inside.all():
            raise AssertionError(f"{what} of {size} bytes at {addresses[~inside][:4]}, tensors {self.extents}")


@pytest.fixture
def addresses(monkeypatch):
    return Addresses(monkeypatch)


def spread(tensor, page_bytes):
    """The same pages, `page_bytes` apart, in a sparse mapping."""
    flat = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    stride = page_bytes // flat.element_size()
    memory = mmap.mmap(-1, page_bytes * flat.shape[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    whole = torch.frombuffer(memory, dtype=flat.dtype)
    inner = torch.empty(flat.shape[1:]).stride()
    return whole.as_strided(flat.shape, (stride, *inner)).copy_(flat).view(tensor.dtype)


def examine(addresses, shape, phase, *, page_bytes=0, invariant=False, **fields):
    """Run one step with its addresses checked; numbers, too, so that a silent skip cannot pass."""
    from attn_triton.crosscompile import _manifests

    case = make_case(shape, phase, dtype="fp16", **fields)
    want = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    if page_bytes:
        tensors = [case.cache.k, case.cache.v, case.cache.k_blocks, case.cache.v_blocks]
        case.cache = MhaCache(*(None if x is None else spread(x, page_bytes) for x in tensors), case.cache.format)
    address, tree = case.batch.kv(case.pool_index), case.batch.tree
    addresses.given = [x for x in (address.table, address.indices) if x is not None]
    addresses.given += [] if tree is None else [tree.mask_bits, tree.depth]
    session = BackendUnderTest.of_module(attn_triton, _manifests()["mha"]).open(case, batch_invariant=invariant)
    result = session.run(case)
    problem = compare_out(result.out, want, tolerance("fp16", case.spec.kv, "fp16").out, case.batch.num_tokens)
    assert problem is None, str(problem)
    assert addresses.accesses > 1000
    return case


def geometry(qk=32, v=16, **fields):
    return MhaGeometry(4, 2, qk, v, 0.3, **fields)


@pytest.mark.parametrize(("page", "storage"), [(1, "separate"), (12, "hnd"), (64, "separate"), (1024, "hnd")])
@pytest.mark.parametrize("kv", ["fp4", "fp8_e4m3", ""])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_accesses_stay_inside(addresses, phase, kv, page, storage):
    shape = geometry(window=40 if page == 12 else None)
    fields = {"kv_dtype": kv, "page_size": page, "storage": storage, "form": "csr" if page == 12 else "table"}
    lens = {"kv_lens": (1, 63, 130)} if phase == "decode" else {"query_lens": (1, 5, 20), "kv_lens": (1, 63, 130)}
    examine(addresses, shape, phase, unused="nan", pad_rows=2, pad_tokens=3, invariant=True, **fields, **lens)


@pytest.mark.parametrize("dims", [(16, 16), (48, 80)])
def test_narrow_rows_stay_inside(addresses, dims):
    examine(addresses, geometry(*dims), "decode", kv_lens=(3, 70), kv_dtype="fp4", page_size=16, storage="separate")


def test_trees_stay_inside(addresses):
    trees = ((-1, 0, 0, 1), (-1, 0, 1, 1))
    examine(addresses, geometry(), "verify", query_lens=(4, 4), kv_lens=(4, 70), parents=trees, pad_rows=1)


@pytest.mark.parametrize("kv", ["fp4", "fp8_e5m2", ""])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_offsets_have_64_bits(addresses, phase, kv):
    lens = {"kv_lens": (5, 40)} if phase == "decode" else {"query_lens": (2, 9), "kv_lens": (5, 40)}
    case = examine(addresses, geometry(), phase, page_bytes=1 << 30, kv_dtype=kv, page_size=16, **lens)
    assert case.cache.k.shape[0] * case.cache.k.stride(0) > 1 << 31


def test_a_wild_address_is_seen(addresses):
    """The check itself: a page number past the end of the pool."""
    from attn_triton.crosscompile import _manifests

    case = make_case(geometry(), "decode", dtype="fp16", kv_lens=(40,), page_size=16)
    address = case.batch.kv(case.pool_index)
    addresses.given = [address.table]
    address.table += 1 << 20
    session = BackendUnderTest.of_module(attn_triton, _manifests()["mha"]).open(case)
    with pytest.raises(Exception, match="read of 2 bytes"):
        session.run(case, store=False)
