"""``generate`` on the paged cache: the same tokens as transformers' own attention, whatever the batch, page or backend."""

from __future__ import annotations

import pytest
import torch
from tiny_models import PROMPTS, alone, make, padded, together, using

from attn_core.errors import UsageError
from attn_transformers import load


@pytest.mark.parametrize("kind", ["llama", "llama4", "mistral", "qwen2", "gemma2", "gpt_oss"])
def test_left_padded_batch_is_identical(kind):
    model = make(kind)
    expected = alone(model)
    attn = load(model, page_size=16)
    assert together(attn).tolist() == expected.tolist()
    calls = attn.router.stats()
    layers = model.config.num_hidden_layers
    assert sum(phases.get("prefill", 0) for phases in calls.values()) == layers
    assert sum(phases.get("decode", 0) for phases in calls.values()) == layers * 11


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_page_sizes(kind, page_size):
    model = make(kind)
    expected = alone(model)
    assert together(load(model, page_size=page_size)).tolist() == expected.tolist()


@pytest.mark.parametrize("chunk", [1, 3, 5, 16])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_chunked_prefill(kind, chunk):
    model = make(kind)
    expected = alone(model)
    attn = load(model, page_size=4)
    assert together(attn, prefill_chunk_size=chunk).tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"), [("flex_attention", "torch_native"), ("torch_native", "flex_attention")]
)
def test_phase_split(prefill, decode):
    model = make("llama")
    expected = alone(model)
    attn = load(model, prefill_attention_backend=prefill, decode_attention_backend=decode)
    assert together(attn).tolist() == expected.tolist()
    calls = attn.router.stats()
    assert set(calls[prefill]) == {"prefill"}
    assert set(calls[decode]) == {"decode"}


def test_logits_of_a_padded_batch_are_those_of_each_prompt_alone(llama):
    references = [llama(torch.tensor([list(p)])).logits[0, -1] for p in PROMPTS]
    attn = load(llama)
    inputs = padded()
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = llama(**inputs, position_ids=positions, **using(attn.new_cache())).logits[:, -1]
    torch.testing.assert_close(logits, torch.stack(references), atol=1e-5, rtol=1e-5)


def test_right_padded_prompts_are_refused(llama):
    from attn_core.errors import BatchError

    attn = load(llama)
    ids = torch.tensor([[7, 11, 0], [13, 17, 19]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    with pytest.raises(BatchError, match="padding after a token"):
        llama(input_ids=ids, attention_mask=mask, **using(attn.new_cache()))


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp8_e4m3", 0.25), ("fp8_e5m2", 0.5)])
def test_quantised_cache_is_close(llama, dtype, tolerance):
    ids = torch.tensor([list(PROMPTS[2])])
    reference = llama(ids).logits
    attn = load(llama, kv_cache_dtype=dtype)
    logits = llama(ids, **using(attn.new_cache())).logits
    error = (logits - reference).abs().max() / reference.abs().max()
    assert 0 < error < tolerance
    assert together(attn).shape == (len(PROMPTS), 12)


def test_scales_of_a_quantised_cache(llama):
    ids = torch.tensor([list(PROMPTS[2])])
    reference = llama(ids).logits
    errors = []
    for scale in (0.01, 1000.0):  # too small saturates, too large loses everything to rounding
        attn = load(llama, kv_cache_dtype="fp8_e4m3", kv_scales=dict.fromkeys(range(3), (scale, scale)))
        errors.append(float((llama(ids, **using(attn.new_cache())).logits - reference).abs().max()))
        attn.detach()
    assert errors[0] < errors[1]


def test_fp4_cache_generates():
    model = make("llama", head_dim=32)
    attn = load(model, kv_cache_dtype="fp4", page_size=16)
    assert attn.plan.pools[0].format == "fp4_block16"
    assert together(attn).shape == (len(PROMPTS), 12)


def test_beam_search(llama):
    inputs = padded()
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    expected = llama.generate(**inputs, **options)
    assert load(llama, page_size=4).generate(**inputs, **options).tolist() == expected.tolist()


def test_prompt_lookup_takes_rejected_tokens_back(llama):
    prompt = [7, 11, 13, 7, 11, 13, 7, 11]
    expected = alone(llama, [prompt])
    attn = load(llama, page_size=4)
    ids = torch.tensor([prompt])
    output = attn.generate(input_ids=ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    assert output[:, len(prompt) :].tolist() == expected.tolist()


def test_a_second_turn_continues_the_cache(llama):
    first, second = [7, 11, 13], [17, 19, 23, 29]
    whole = alone(llama, [first + alone(llama, [first], new=5)[0].tolist() + second], new=6)
    attn = load(llama, page_size=4)
    cache = attn.new_cache()
    ids = torch.tensor([first])
    ids = llama.generate(input_ids=ids, **using(cache), max_new_tokens=5, do_sample=False)
    ids = torch.cat([ids, torch.tensor([second])], 1)
    output = llama.generate(input_ids=ids, **using(cache), max_new_tokens=6, do_sample=False)
    assert output[0, ids.shape[1] :].tolist() == whole[0].tolist()


def test_bfloat16_model_generates():
    model = make("llama").to(torch.bfloat16)
    attn = load(model)
    assert attn.plan.dtype == "bf16"
    assert together(attn).shape == (len(PROMPTS), 12)


def test_pages_come_back(llama):
    attn = load(llama, page_size=4, max_tokens=256)
    for _ in range(3):
        together(attn)
        assert all(pool.used == 0 for pool in attn.kv.stats().pools)
    cache = attn.new_cache()
    llama(torch.tensor([[5, 6, 7]]), **using(cache))
    assert attn.kv.stats().requests == 1
    del cache
    assert attn.kv.stats().requests == 0


@pytest.mark.parametrize("how", ["argument", "config", "static"])
def test_generation_that_would_not_use_the_paged_cache_is_refused(llama, how):
    attn = load(llama)
    options = {"max_new_tokens": 2, "do_sample": False}
    if how == "config":
        llama.generation_config.use_cache = False
    else:
        options |= {"use_cache": False} if how == "argument" else {"cache_implementation": "static"}
    with pytest.raises(UsageError, match="static" if how == "static" else "use_cache=False"):
        attn.generate(**padded(), **options)
