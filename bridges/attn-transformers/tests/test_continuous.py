"""Continuous batching on transformers' own page pool: identical tokens, one batch per forward, everything put back."""

from __future__ import annotations

import pytest
import torch
from tiny_models import PROMPTS, alone, make
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

from attn_core.errors import UsageError
from attn_transformers import continuous_batching
from attn_transformers.pool_step import PoolSource, build_step, must_stage

NEW = 10


def generate_batch(model, prompts=PROMPTS, **changes):
    settings = {"num_blocks": 64, "max_batch_tokens": 256, "use_cuda_graph": False, **changes}
    outputs = model.generate_batch(
        inputs=[list(p) for p in prompts],
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        progress_bar=False,
    )
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_tokens_are_identical(kind):
    model = make(kind)
    expected = alone(model, new=NEW).tolist()
    with continuous_batching(model) as bridge:
        assert generate_batch(model) == expected
    layers = model.config.num_hidden_layers
    calls = [count for phases in bridge.stats().values() for count in phases.values()]
    assert bridge.steps >= NEW
    assert sum(calls) >= bridge.steps * layers  # one call a layer; two where a mixed batch had to be split
    assert generate_batch_restored(model)


def generate_batch_restored(model):
    from transformers.integrations.eager_paged import eager_paged_attention_forward

    modules = [m for m in model.modules() if hasattr(m, "layer_idx")]
    return (
        AttentionInterface._global_mapping["paged|eager"] is eager_paged_attention_forward
        and model.config._attn_implementation != "paged|eager"
        and not any(m._forward_pre_hooks or m._attn_core_bridge for m in modules)
    )


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_chunked_prefill_beside_decode(kind):
    """A small token budget makes transformers cut prompts into pieces and mix them with decoding rows."""
    model = make(kind)
    prompts = [*PROMPTS, list(range(3, 60)), list(range(60, 100))]
    expected = alone(model, prompts, new=NEW).tolist()
    with continuous_batching(model):
        assert generate_batch(model, prompts, max_batch_tokens=16) == expected


def test_small_pages_and_shared_prefixes(llama):
    prompts = [list(range(3, 40)), [*range(3, 40), 50], [*range(3, 40), 51, 52]]
    expected = alone(llama, prompts, new=NEW).tolist()
    with continuous_batching(llama):
        assert generate_batch(llama, prompts, page_size=8, max_batch_tokens=48) == expected


def test_two_pools_one_after_the_other(llama):
    expected = alone(llama, new=NEW).tolist()
    with continuous_batching(llama) as bridge:
        assert generate_batch(llama) == expected
        first = bridge.steps
        assert generate_batch(llama) == expected
        assert bridge.steps > first


@pytest.mark.parametrize(
    ("options", "text"), [({"kv_cache_dtype": "fp8_e4m3"}, "model's dtype"), ({"page_size": 16}, "page size 1")]
)
def test_what_the_pool_cannot_do_is_refused(llama, options, text):
    with pytest.raises(UsageError, match=text), continuous_batching(llama, **options):
        pass
    assert llama.config._attn_implementation == "sdpa"


def test_an_error_in_the_thread_comes_out(llama):
    from attn_core.errors import BindError

    llama.model.layers[0].self_attn.scaling = 0.5
    with pytest.raises(BindError, match="scaling"), continuous_batching(llama):
        generate_batch(llama)
    assert generate_batch_restored(llama)


def test_other_models_keep_their_attention(llama):
    other = make("llama", num_hidden_layers=2)
    other.set_attn_implementation("eager")
    expected = alone(other, new=NEW).tolist()
    with continuous_batching(llama) as bridge:
        assert generate_batch(other) == expected
    assert bridge.steps == 0


def test_the_batch_of_one_forward():
    """Rows are sorted into phase order, padding is dropped, and new keys of a ring take the place of sentinels."""
    kwargs = {
        "cu_seq_lens_q": torch.tensor([0, 3, 4, 4]),
        "cu_seq_lens_k": {
            "full_attention": torch.tensor([0, 3, 8, 8]),
            "sliding_attention": torch.tensor([0, 3, 7, 7]),
        },
        "max_length_q": 3,
        "max_length_k": {"full_attention": 5, "sliding_attention": 4},
        "read_index": [torch.tensor([90, 91, 92, 40, 41, 42, 43, 44]), torch.tensor([1, 1, 1, 60, 61, 62, 1])],
        "write_index": [torch.tensor([90, 91, 92, 44]), torch.tensor([70, 71, 72, 63])],
        "position_ids": torch.tensor([[0, 1, 2, 4]]),
    }
    sources = [PoolSource(0, "full_attention", None, 1), PoolSource(1, "sliding_attention", 4, 1)]
    step = build_step(kwargs, sources)
    batch = step.batch
    assert [(s.phase, s.rows, s.tokens, s.query_len) for s in batch.segments] == [
        ("decode", slice(0, 1), slice(0, 1), 1),
        ("prefill", slice(1, 2), slice(1, 4), 3),
    ]
    assert step.order is not None
    assert step.order.tolist() == [3, 0, 1, 2]
    assert batch.positions.tolist() == [4, 0, 1, 2]
    full, ring = batch.addresses
    assert full.indices.tolist() == [40, 41, 42, 43, 44, 90, 91, 92]
    assert full.new_slots.tolist() == [44, 90, 91, 92]
    assert ring.indices.tolist() == [60, 61, 62, 63, 70, 71, 72]
    assert ring.kv_lens.tolist() == [4, 3]
    assert not step.staged
    states = torch.arange(4.0).view(1, 1, 4, 1)
    assert step.unpack(step.pack(states), 4).flatten().tolist() == [0, 1, 2, 3]


def test_a_ring_that_is_overwritten_is_staged():
    source = PoolSource(0, "sliding_attention", 4, 1)
    longer = {"max_length_q": 2, "max_length_k": {"sliding_attention": 5}}
    assert must_stage(source, longer)
    assert not must_stage(source, {**longer, "max_length_q": 1})
    assert not must_stage(source, {**longer, "max_length_k": {"sliding_attention": 4}})
    assert not must_stage(PoolSource(0, "full_attention", None, 1), longer)
