"""A model as one tensor-parallel rank sees it: properties over head counts and ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core.errors import ModelError
from attn_core.geometry import GdnGeometry, MhaGeometry, MlaGeometry
from attn_core.model import kv_bytes_per_token, parse_model, state_bytes

POWERS = st.sampled_from([1, 2, 4, 8, 16, 32])


def plain(heads: int, kv_heads: int, **keys: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        **keys,
    }


@given(kv_heads=st.integers(1, 32), ratio=st.integers(1, 8), tp=POWERS)
def test_heads_of_a_rank_cover_the_model(kv_heads: int, ratio: int, tp: int) -> None:
    model = parse_model(plain(kv_heads * ratio, kv_heads, num_hidden_layers=2))
    heads = kv_heads * ratio
    splits = kv_heads % tp == 0 if kv_heads >= tp else tp % kv_heads == 0
    if heads % tp or not splits:
        with pytest.raises(ModelError):
            model.shard(tp)
        return
    geometry = model.shard(tp).groups[0].geometry
    assert isinstance(geometry, MhaGeometry)
    assert geometry.q_heads * tp == heads
    assert geometry.kv_heads * tp >= kv_heads
    assert geometry.kv_heads == max(1, kv_heads // tp)
    assert geometry.q_heads % geometry.kv_heads == 0
    assert (geometry.qk_dim, geometry.scale) == (64, 0.125)


@given(heads=st.sampled_from([16, 32, 64, 128]), tp=POWERS)
def test_latent_cache_is_the_same_on_every_rank(heads: int, tp: int) -> None:
    model = parse_model({"model_type": "deepseek_v3", "num_attention_heads": heads, "num_hidden_layers": 2})
    if heads % tp:
        with pytest.raises(ModelError):
            model.shard(tp)
        return
    group = model.shard(tp).groups[0]
    assert isinstance(group.geometry, MlaGeometry)
    assert group.geometry.q_heads * tp == heads
    assert kv_bytes_per_token(group) == kv_bytes_per_token(model.groups[0]) == 1152


@given(k_heads=POWERS, ratio=st.sampled_from([1, 2, 3, 4]), tp=POWERS)
def test_delta_states_are_divided(k_heads: int, ratio: int, tp: int) -> None:
    keys = {"linear_num_key_heads": k_heads, "linear_num_value_heads": k_heads * ratio, "num_hidden_layers": 4}
    model = parse_model({"model_type": "qwen3_next", "num_attention_heads": 32, "num_key_value_heads": 32, **keys})
    if k_heads % tp:
        with pytest.raises(ModelError):
            model.shard(tp)
        return
    whole, rank = model.group("linear"), model.shard(tp).group("linear")
    assert isinstance(rank.geometry, GdnGeometry)
    assert rank.geometry.v_heads * tp == k_heads * ratio
    assert rank.geometry.conv_dim == 2 * rank.geometry.k_heads * 128 + rank.geometry.v_heads * 128
    assert state_bytes(rank) * tp == state_bytes(whole)


def test_a_model_is_sharded_once() -> None:
    model = parse_model(plain(8, 8, num_hidden_layers=1)).shard(2)
    assert model.tp == 2
    assert model.shard(1) is model
    with pytest.raises(ModelError, match="sharded already"):
        model.shard(4)


@given(
    heads=st.integers(1, 16),
    count=st.integers(1, 24),
    period=st.integers(1, 8),
    window=st.integers(1, 5000),
    width=POWERS,
)
def test_layer_kinds_partition_the_layers(heads: int, count: int, period: int, window: int, width: int) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width, "num_hidden_layers": count}
    model = parse_model(
        {"model_type": "gemma3_text", "sliding_window": window, "sliding_window_pattern": period, **sizes}
    )
    layers = sorted(layer for group in model.groups for layer in group.layers)
    assert layers == list(range(count))
    for group in model.groups:
        assert isinstance(group.geometry, MhaGeometry)
        full = {(layer + 1) % period == 0 for layer in group.layers}
        assert full == {group.kind == "full"}
        assert group.geometry.window == (None if group.kind == "full" else window)
