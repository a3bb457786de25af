"""Registration, and what is refused: every difference between the call and the plan is an error."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make, using
from transformers import AttentionInterface, AttentionMaskInterface

from attn_core.errors import BatchError, BindError, PlanError, UsageError
from attn_transformers import load, register
from attn_transformers.interface import attn_core_attention, attn_core_mask

IDS = torch.tensor([[7, 11, 13, 17, 19]])


@pytest.fixture
def registry():
    saved = [(table, dict(table._global_mapping)) for table in (AttentionInterface, AttentionMaskInterface)]
    yield
    for table, entries in saved:
        table._global_mapping.clear()
        table._global_mapping.update(entries)


def test_register_adds_attention_and_mask(registry):
    assert register("my_name") == register("my_name") == "my_name"
    assert AttentionInterface._global_mapping["my_name"] is attn_core_attention
    assert AttentionMaskInterface._global_mapping["my_name"] is attn_core_mask


@pytest.mark.parametrize("name", ["my_flash", "owner/name", "paged|mine"])
def test_names_with_a_meaning_are_refused(name):
    with pytest.raises(UsageError, match="cannot be registered"):
        register(name)


def test_names_of_others_are_not_overwritten(registry):
    with pytest.raises(UsageError, match="registered already"):
        register("sdpa")


def test_detach_gives_the_model_back(llama):
    before = llama(IDS).logits
    attn = load(llama)
    assert llama.config._attn_implementation == "attn_core"
    with pytest.raises(UsageError, match="already"):
        load(llama)
    attn.detach()
    assert llama.config._attn_implementation == "sdpa"
    torch.testing.assert_close(llama(IDS).logits, before)
    load(llama).detach()


def test_a_model_that_is_not_bound(llama):
    register()
    llama.set_attn_implementation("attn_core")
    with pytest.raises(BindError, match="not bound"):
        llama(IDS)


def test_a_forward_without_a_cache_is_refused(llama):
    load(llama)
    with pytest.raises(BatchError, match="without an AttnCache"):
        llama(IDS)
    with pytest.raises(BatchError, match="without an AttnCache"):
        llama(IDS, use_cache=False)


def test_the_cache_refuses_another_attention(llama):
    cache = load(llama).new_cache()
    llama.set_attn_implementation("sdpa")
    with pytest.raises(BindError, match="not attn-core"):
        llama(IDS, **using(cache))


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("llama", {"scaling": 0.5}, "scaling"),
        ("gemma2", {"sliding_window": 4}, "sliding_window"),
        ("gemma2", {"attn_logit_softcapping": 7.0}, "softcap"),
        ("gpt_oss", {"sinks": None}, "sinks"),
        ("llama", {"attention_dropout": 0.5, "training": True}, "dropout"),
    ],
)
def test_differences_from_the_plan(kind, change, named):
    model = make(kind)
    cache = load(model).new_cache()
    for name, value in change.items():
        setattr(model.model.layers[0].self_attn, name, value)
    with pytest.raises(BindError, match=named):
        model(IDS, **using(cache))


def test_sinks_that_were_not_planned(llama):
    cache = load(llama).new_cache()
    llama.model.layers[2].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "s_aux": torch.zeros(4)}), with_kwargs=True
    )
    with pytest.raises(BindError, match="sinks"):
        llama(IDS, **using(cache))


def test_gradients_are_refused(llama):
    cache = load(llama).new_cache()
    with torch.enable_grad(), pytest.raises(BatchError, match="no gradient"):
        llama(IDS, **using(cache))


def test_a_mask_with_four_dimensions_is_refused(llama):
    cache = load(llama).new_cache()
    with pytest.raises(BatchError, match="4-D"):
        llama(IDS, attention_mask=torch.zeros(1, 1, 5, 5), **using(cache))


def test_masks_beyond_padding_are_refused():
    with pytest.raises(BatchError, match="more than causal"):
        attn_core_mask(attention_mask=None, use_vmap=True)
    with pytest.raises(BatchError, match="more than causal"):
        attn_core_mask(attention_mask=None, allow_is_causal_skip=False)


def test_a_plan_that_cannot_be_made(llama):
    with pytest.raises(PlanError) as caught:
        load(
            llama,
            attention_backend="torch_native",
            kv_cache_dtype="fp4",
            page_size=16,
            exclude_backends=("torch_native",),
        )
    assert caught.value.rejected or caught.value.facts
    assert llama.config._attn_implementation == "sdpa"


def test_an_encoder_decoder_is_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=50)
    with pytest.raises(PlanError, match="encoder-decoder"):
        load(T5ForConditionalGeneration(config))


def test_a_plan_of_another_model_is_refused(llama):
    attn = load(llama)
    other = make("llama", num_hidden_layers=1)
    with pytest.raises(BindError, match="no such layer"):
        load(other, plan=attn.plan)
    with pytest.raises(BindError, match="dtype"):
        load(make("llama").to(torch.bfloat16), plan=attn.plan)


def test_layers_that_share_keys_are_refused():
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=16,
        vocab_size=50,
        vocab_size_per_layer_input=50,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=1,
        layer_types=["full_attention", "full_attention"],
    )
    with pytest.raises(PlanError, match="shares the keys"):
        load(Gemma4ForCausalLM(config))
