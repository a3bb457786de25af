"""This package's own options: what they change, and that a plan carries them from the user to the backend object."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_core
from attn_core.cache import PagedKVCache
from attn_core.layers import MhaInputs, MhaLayer

backend = pytest.importorskip(
    "attn_example_vendor.backend", reason="run in an environment in which the wheel is installed"
)

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 100,
    "torch_dtype": "float32",
}


def plan_with(**options: Any) -> attn_core.Plan:
    return attn_core.plan(MODEL, platform="cpu", page_size=16, backend_options={"example_vendor": options})


def attend(plan: attn_core.Plan, tokens: int = 100) -> torch.Tensor:
    """A prefill of one request through plan, router and paged cache."""
    router = attn_core.Router(attn_core.load_plan(plan.to_json()))  # as a worker gets it
    cache = PagedKVCache.from_plan(plan, num_pages=32)
    layer = MhaLayer(0, plan.groups[0].group)
    router.bind([layer], [cache.layer(0)])
    request = cache.new_request(list(range(tokens)))
    cache.extend(request, tokens)
    step = router.begin(cache.batch([request], "prefill"))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(tokens, heads, 32, generator=generator) for heads in (4, 2, 2))
    return step.attend(layer, MhaInputs(q, k, v))


def test_it_is_chosen_by_itself_on_a_cpu() -> None:
    phases = plan_with().groups[0].phases
    assert {phase.backend for phase in phases.values()} == {"example_vendor"}


def test_options_are_carried_in_the_plan_and_change_nothing_but_the_way() -> None:
    plans = [plan_with(), plan_with(block_size=16), plan_with(block_size=64, double_accumulation=True)]
    assert dict(plans[1].groups[0].phases["decode"].parts[0].options) == {"block_size": 16}
    assert len({plan.fingerprint for plan in plans}) == 3
    first, *others = map(attend, plans)
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)


def test_options_reach_the_object() -> None:
    made: list[Any] = []
    original = backend.StreamingAttention.__init__

    def remember(self: Any, context: Any) -> None:
        original(self, context)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.StreamingAttention, "__init__", remember)
        attend(plan_with(block_size=32, double_accumulation=True))
    assert {(item.block_size, item.compute) for item in made} == {(32, torch.float64)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"blocksize": 64}, "block_size"),
        ({"block_size": 8}, "example_vendor.block_size"),
        ({"block_size": "many"}, "example_vendor.block_size"),
        ({"double_accumulation": 1}, "example_vendor.double_accumulation"),
    ],
)
def test_options_that_the_schema_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(attn_core.UsageError) as caught:
        plan_with(**options)
    assert said in str(caught.value)
