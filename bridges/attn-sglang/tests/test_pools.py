"""SGLang's memory as pages, without a copy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_server import Server

from attn_core.errors import BindError, PlanError
from attn_sglang.pools import memory_layout, page_view, sliding_layers


def test_slots_become_pages_in_place():
    slots = torch.arange(2 * 3 * 37).view(37, 3, 2)  # 37 slots: the last page is not whole and is never handed out
    pages = page_view(slots, 8, 8, "NHD")
    assert pages.shape == (4, 8, 3, 2)
    assert pages.data_ptr() == slots.data_ptr()
    assert torch.equal(pages[2, 5], slots[21])
    assert page_view(slots, 1, 8, "NHD").shape == (37, 1, 3, 2)


def test_head_major_pages_keep_their_size():
    memory = torch.arange(5 * 3 * 8 * 2).view(5, 3, 8, 2)
    pages = page_view(memory, 8, 8, "HND")
    assert pages.shape == (5, 8, 3, 2)
    assert pages.data_ptr() == memory.data_ptr()
    assert torch.equal(pages[4, 7, 1], memory[4, 1, 7])
    with pytest.raises(BindError, match="cannot be read in pages of 4"):
        page_view(memory, 4, 8, "HND")


def test_layouts():
    assert memory_layout(Server(page=4).token_to_kv_pool) == "NHD"
    assert memory_layout(Server(page=4, hnd=True).token_to_kv_pool) == "HND"
    pool = Server(windows=(-1, 9), swa_pool=True).token_to_kv_pool
    assert memory_layout(pool) == "NHD"
    assert sliding_layers(pool) == {1}
    assert sliding_layers(Server().token_to_kv_pool) == frozenset()
    with pytest.raises(PlanError, match=r"vectorized_5d(.|\n)*SGLANG_AITER_KV_CACHE_LAYOUT=nhd"):
        memory_layout(SimpleNamespace(kv_cache_layout="vectorized_5d"))
    with pytest.raises(PlanError, match="quantised in blocks"):
        memory_layout(SimpleNamespace(is_quantized_kv_cache=True))
