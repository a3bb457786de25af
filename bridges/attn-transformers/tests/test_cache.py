"""The cache as transformers sees it: lengths, cropping, rows, errors that lose nothing."""

from __future__ import annotations

import pytest
import torch
from tiny_models import using

from attn_core.errors import BatchError, CacheError, OutOfPages
from attn_transformers import load

IDS = torch.tensor([[7, 11, 13, 17, 19]])


def logits(model, ids, cache):
    return model(ids, **using(cache)).logits[:, -1]


def test_lengths(llama):
    cache = load(llama).new_cache()
    assert (cache.get_seq_length(), cache.batch_size, len(cache)) == (0, -1, 3)
    llama(IDS, **using(cache))
    assert (cache.get_seq_length(), cache.batch_size) == (5, 1)
    assert cache.get_mask_sizes(2, 0) == (7, 0)
    assert cache.is_sliding == [False] * 3
    assert not cache.is_compileable
    assert "lengths=[5]" in repr(cache)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_crop_takes_tokens_back(llama):
    attn = load(llama, page_size=2)
    cache = attn.new_cache()
    expected = logits(llama, IDS[:, :4], cache)
    llama(IDS[:, 4:], **using(cache))
    llama(IDS[:, :1], **using(cache))
    cache.crop(-3)
    assert cache.get_seq_length() == 3
    torch.testing.assert_close(logits(llama, IDS[:, 3:4], cache), expected)
    with pytest.raises(CacheError, match="cannot be taken back"):
        cache.crop(-9)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(2)


def test_rows_are_selected_and_repeated(llama):
    attn = load(llama, page_size=2)
    rows = torch.tensor([[7, 11, 13], [17, 19, 23], [29, 31, 37]])
    new = torch.tensor([[5], [5], [5], [5]])
    cache = attn.new_cache()
    llama(rows, **using(cache))
    cache.batch_select_indices(torch.tensor([2, 0, 2, 2]))
    expected = llama(torch.cat([rows[[2, 0, 2, 2]], new], 1), **using(attn.new_cache())).logits[:, -1]
    torch.testing.assert_close(logits(llama, new, cache), expected)
    cache.batch_select_indices(torch.tensor([True, True, False, False]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.close()
    assert attn.kv.stats().requests == 0


def test_copies_are_independent(llama):
    attn = load(llama, page_size=4)
    cache = attn.new_cache()
    llama(IDS, **using(cache))
    cache.batch_repeat_interleave(2)
    both = logits(llama, torch.tensor([[3], [9]]), cache)
    for row, token in enumerate((3, 9)):
        whole = torch.cat([IDS, torch.tensor([[token]])], 1)
        torch.testing.assert_close(both[row : row + 1], logits(llama, whole, attn.new_cache()))


def test_copies_that_find_no_pages_give_everything_back(llama):
    attn = load(llama, page_size=4, max_tokens=16)
    cache = attn.new_cache()
    llama(IDS, **using(cache))
    with pytest.raises(OutOfPages):
        cache.batch_repeat_interleave(3)
    assert attn.kv.stats().requests == 0
    assert cache.get_seq_length() == 0


def test_out_of_pages_loses_nothing(llama):
    attn = load(llama, page_size=4, max_tokens=16)
    cache = attn.new_cache()
    llama(IDS[:, :3].repeat(2, 1), **using(cache))
    with pytest.raises(OutOfPages, match="max_tokens"):
        llama(IDS.repeat(2, 3), **using(cache))
    assert cache.get_seq_length() == 3
    expected = logits(llama, IDS[:, :4].repeat(2, 1), attn.new_cache())
    torch.testing.assert_close(logits(llama, IDS[:, 3:4].repeat(2, 1), cache), expected)


def test_a_broken_forward_is_noticed(llama):
    attn = load(llama)
    cache = attn.new_cache()
    broken = llama.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llama(IDS, **using(cache))
    broken.remove()
    with pytest.raises(CacheError, match="did not reach every layer"):
        llama(IDS, **using(cache))
    cache.reset()
    torch.testing.assert_close(logits(llama, IDS, cache), logits(llama, IDS, attn.new_cache()))


def test_another_batch_size_is_refused(llama):
    cache = load(llama).new_cache()
    llama(IDS, **using(cache))
    with pytest.raises(BatchError, match="2 rows"):
        llama(IDS.repeat(2, 1), **using(cache))


def test_a_changed_mask_is_refused(llama):
    cache = load(llama).new_cache()
    llama(IDS, attention_mask=torch.tensor([[0, 1, 1, 1, 1]]), **using(cache))
    with pytest.raises(BatchError, match="disagree"):
        llama(IDS[:, :1], attention_mask=torch.ones(1, 6), **using(cache))
    with pytest.raises(BatchError, match="does not cover"):
        llama(IDS[:, :1], attention_mask=torch.ones(1, 4), **using(cache))


def test_two_caches_take_turns(llama):
    attn = load(llama, page_size=2)
    one, two = attn.new_cache(), attn.new_cache()
    llama(IDS[:, :2], **using(one))
    llama(IDS[:, :4], **using(two))
    torch.testing.assert_close(logits(llama, IDS[:, 2:], one), logits(llama, IDS[:, 4:], two))
