"""Parts of the adapters by themselves: views of caches, pages that are read whole, sinks, trees, graph states, warm-up."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from flashfakes import fa3_library, fa4_library

import attn_flash
from attn_core.context import Context, GraphLimits
from attn_core.errors import BindError, GraphError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import MhaCache, MhaLayer, Scale
from attn_core.manifest import Manifest
from attn_core.plan import PartPlan, PhasePlan, Pool
from attn_core.testing.batches import build
from attn_core.testing.spec import CaseSpec
from attn_flash.caches import Views, paged_view
from attn_flash.fa3 import ANY_QUERY_LEN
from attn_flash.layers import LayerFacts, quantise_query
from attn_flash.rules import OFF, Rules, largest_part

GEOMETRY = MhaGeometry(4, 2, 32, 32, 0.2)


def context(
    geometry: MhaGeometry = GEOMETRY,
    page: int = 16,
    kernel_page: int = 16,
    layers: int = 1,
    features: tuple[str, ...] = (),
    **fields: Any,
) -> Context:
    group = LayerGroup("target", "full", "full", tuple(range(layers)), geometry, {"attend": "main"})
    pool = Pool(
        "main",
        "target",
        group.layers,
        "plain",
        fields.pop("kv", "bf16"),
        "NHD",
        page,
        1,
    )
    part = PartPlan("attend", "fa3", "tokenspeed", "attn-flash", "0", features=features)
    plan = PhasePlan("fa3", "tokenspeed", "attn-flash", "0", (part,), kernel_page_size=kernel_page)
    phases = dict.fromkeys(("prefill", "decode", "verify"), plan)
    return Context(
        torch.device("cpu"), fields.pop("dtype", torch.bfloat16), group, {"attend": pool}, {"attend": 0}, phases, **fields
    )  # fmt: skip


def fa3(made: Context, manifests: dict[str, Manifest]):
    return attn_flash.attn_create(manifests["mha/fa3"], "tokenspeed", made)


def case(geometry: MhaGeometry = GEOMETRY, phase: str = "decode", **fields: Any):
    return build(CaseSpec(geometry, phase, dtype="bf16", decoy_pool=False, **fields))


# --- caches ---------------------------------------------------------------------------------------------------------------


def test_a_page_is_cut_without_a_copy() -> None:
    pool = torch.arange(3 * 8 * 2 * 4).view(3, 8, 2, 4)
    view = paged_view(pool, 2)
    assert view.shape == (12, 2, 2, 4)
    assert view.data_ptr() == pool.data_ptr()
    assert bool((view[5] == pool[1, 2:4]).all())


def test_strides_of_single_entries_are_made_usual() -> None:
    pool = torch.zeros(3, 8, 1, 4).as_strided((3, 8, 1, 4), (32, 4, 99, 1))
    assert paged_view(pool, 8).stride() == (32, 4, 4, 1)
    slots = torch.zeros(6, 1, 2, 4).as_strided((6, 1, 2, 4), (8, 77, 4, 1))
    assert paged_view(slots, 1).stride() == (8, 8, 4, 1)


def test_interleaved_caches_keep_their_strides() -> None:
    both = torch.randn(3, 8, 2, 8)
    k = both[..., :4]
    assert bool((paged_view(k, 4)[3] == k[1, 4:]).all())


def test_pages_that_do_not_follow_each_other_are_refused() -> None:
    stacked = torch.zeros(3, 2, 8, 2, 4)
    assert paged_view(stacked[:, 0], 8).shape == (3, 8, 2, 4)
    with pytest.raises(BindError, match="read in parts of 4"):
        paged_view(stacked[:, 0], 4)
    with pytest.raises(BindError, match="element stride"):
        paged_view(torch.zeros(3, 8, 4, 2).transpose(2, 3), 8)


def test_views_are_made_once_and_again_for_new_tensors() -> None:
    views, cache = Views(), MhaCache(torch.zeros(2, 8, 2, 4), torch.zeros(2, 8, 2, 4))
    assert views.of(cache, 4)[0] is views.of(cache, 4)[0]
    before = views.of(cache, 4)[1]
    cache.v = torch.ones(2, 8, 2, 4)
    assert views.of(cache, 4)[1] is not before
    assert float(views.of(cache, 4)[1].sum()) == cache.v.numel()


# --- rules ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("geometry", "want"),
    [
        ({}, (True, OFF, OFF)),
        ({"window": 1}, (True, 0, 0)),
        ({"window": 128}, (True, 127, 0)),
        ({"causal": False}, (False, OFF, OFF)),
        ({"causal": False, "window": 4, "window_right": 3}, (False, 3, 3)),
    ],
)
def test_a_window_counts_the_querys_own_position(geometry: dict, want: tuple) -> None:
    rules = Rules.of(replace(GEOMETRY, **geometry))
    assert (rules.causal, rules.left, rules.right) == want


def test_largest_part() -> None:
    assert [largest_part(p, 63) for p in (128, 64, 96, 256, 48)] == [32, 32, 48, 32, 48]


# --- pages that would be loaded whole -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "queries", "dim", "want"),
    [
        (16, 99, 128, 16),
        (64, 99, 128, 64),
        (64, 99, 256, 32),
        (128, 99, 128, 32),
        (128, 1, 128, 128),
        (256, 40, 64, 32),
    ],
)
def test_fa3_reads_parts_where_unused_slots_would_be_loaded(
    page: int, queries: int, dim: int, want: int, manifests: dict[str, Manifest]
) -> None:
    geometry = MhaGeometry(8, 2, dim, dim, 0.1)
    made = case(phase="prefill", query_lens=(1,), kv_lens=(1,), page_size=page)
    with fa3_library("tokenspeed"):
        backend = fa3(context(geometry, page, page), manifests)
        assert backend.page_to_read(made.batch.kv(0), page, queries, False) == want
        finite = fa3(context(geometry, page, page, options={"finite_pool": True}), manifests)
        assert finite.page_to_read(made.batch.kv(0), page, queries, False) == page


def test_fa4_reads_the_pools_own_pages(manifests: dict[str, Manifest]) -> None:
    made = case(phase="prefill", query_lens=(1,), kv_lens=(1,), page_size=16)
    with fa4_library():
        backend = attn_flash.attn_create(manifests["mha/fa4"], "hopper", context(page=16, kernel_page=1))
        assert backend.page_to_read(made.batch.kv(0), 1, 5, False) == 16
        assert backend.page_to_read(made.batch.kv(0), 1, 5, True) == 1  # trees are lists of slots
        assert backend.page_to_read(made.batch.kv(0), 128, 5, False) == 64
        finite = attn_flash.attn_create(
            manifests["mha/fa4"], "hopper", context(page=128, kernel_page=128, options={"finite_pool": True})
        )
        assert finite.page_to_read(made.batch.kv(0), 128, 5, False) == 128


# --- refusals -------------------------------------------------------------------------------------------------------------


def test_a_soft_cap_is_refused_by_the_build_without_one(manifests: dict[str, Manifest]) -> None:
    geometry = replace(GEOMETRY, softcap=30.0)
    with fa3_library("tokenspeed"), pytest.raises(BindError, match="without soft caps"):
        fa3(context(geometry), manifests)
    with fa3_library("sgl-kernel"):
        attn_flash.attn_create(manifests["mha/fa3"], "sgl-kernel", context(geometry))


def test_a_replay_with_other_tensors_is_refused(manifests: dict[str, Manifest]) -> None:
    first = case(query_lens=(1, 1), kv_lens=(3, 20), page_size=16)
    limits = GraphLimits((2,), 2, 1, 64, 16)
    with fa3_library("tokenspeed"):
        backend = fa3(context(), manifests)
        group = backend.context.group
        state = backend.attn_graph_state(group, ("decode",), limits, 0)
        metadata = backend.attn_metadata(first.batch, group, "decode", state, True)
        assert backend.attn_metadata(first.batch, group, "decode", state, False) is metadata
        other = replace(first.batch, query_offsets=first.batch.query_offsets.clone(), _views={})
        with pytest.raises(GraphError, match="query_offsets"):
            backend.attn_metadata(other, group, "decode", state, False)


# --- what is given to the operator ------------------------------------------------------------------------------------------


def _step(backend: Any, made: Any, out: bool = True):
    metadata = backend.attn_metadata(made.batch, backend.context.group, made.phase, None, False)
    backend.attn_metadata_in_graph(metadata)
    return metadata, backend.attn_extend(made.inputs, made.layer, made.expected, metadata, made.out if out else None)


def test_decode_reads_the_servers_table_by_row_numbers(manifests: dict[str, Manifest]) -> None:
    made = case(query_lens=(1, 1), kv_lens=(3, 20), page_size=16)
    address = made.batch.kv(0)
    assert address.table_rows is not None
    with fa3_library("tokenspeed") as (forward, _):
        _, (out, lse) = _step(fa3(context(), manifests), made)
    call = forward.calls[-1]
    assert (
        call["kv_batch_idx"] is address.table_rows or call["kv_batch_idx"].data_ptr() == address.table_rows.data_ptr()
    )
    assert call["page_table"].data_ptr() == address.table.data_ptr()  # type: ignore[union-attr]
    assert out is made.out or out.data_ptr() == made.out.data_ptr()
    assert lse is None


def test_batch_invariance_fixes_splits_and_bounds(manifests: dict[str, Manifest]) -> None:
    geometry = replace(GEOMETRY, window=40)
    made = case(geometry, "prefill", query_lens=(2, 1), kv_lens=(3, 20), page_size=16)
    with fa3_library("tokenspeed") as (forward, _):
        _step(fa3(context(geometry, batch_invariant=True), manifests), made)
    call = forward.calls[-1]
    assert (call["num_splits"], call["max_seqlen_q"]) == (1, ANY_QUERY_LEN)
    assert call["page_table"].shape[1] * 16 > 40  # a narrower table makes the library drop the window


@pytest.mark.parametrize(("dim", "causal", "vectors"), [(64, True, 3), (128, True, 4), (128, False, 3), (192, True, 3)])
def test_splits_are_planned_once_for_several_layers(
    dim: int, causal: bool, vectors: int, manifests: dict[str, Manifest]
) -> None:
    geometry = replace(GEOMETRY, qk_dim=dim, v_dim=dim, causal=causal)
    made = case(geometry, query_lens=(1, 1), kv_lens=(3, 20), page_size=16)
    with fa3_library("tokenspeed") as (forward, planner):
        backend = fa3(context(geometry, layers=4), manifests)
        metadata, _ = _step(backend, made)
        backend.attn_extend(made.inputs, made.layer, made.expected, metadata, made.out)
    assert len(planner.calls) == 1
    plan, call = planner.calls[0], forward.calls[-1]
    assert (plan["batch_size"], plan["page_size"], plan["num_heads"]) == (2, 16, 4)
    assert plan["max_seqlen_k"] == call["page_table"].shape[1] * 16  # what the operator derives from the table
    assert call["scheduler_metadata"].shape == (4 * vectors + 1,)
    assert call["scheduler_metadata"].data_ptr() == metadata.splits.data_ptr()
    with fa3_library("tokenspeed") as (forward, planner):
        _step(fa3(context(geometry, layers=4, options={"plan_splits": False}), manifests), made)
    assert not planner.calls
    assert forward.calls[-1]["scheduler_metadata"] is None


def test_a_captured_step_plans_its_splits_inside_the_graph(manifests: dict[str, Manifest]) -> None:
    step = case(query_lens=(1, 1), kv_lens=(3, 20), page_size=16)
    limits = GraphLimits((2, 8), 8, 1, 64, 32)
    with fa3_library("tokenspeed") as (forward, planner):
        backend = fa3(context(layers=2), manifests)
        group = backend.context.group
        state = backend.attn_graph_state(group, ("decode",), limits, 0)
        metadata = backend.attn_metadata(step.batch, group, "decode", state, True)
        assert not planner.calls
        for _ in range(2):
            backend.attn_metadata_in_graph(metadata)
            backend.attn_extend(step.inputs, step.layer, step.expected, metadata, step.out)
    assert forward.calls[-1]["scheduler_metadata"].data_ptr() == state.buffers.splits.data_ptr()


def test_sinks_follow_the_layers_tensor() -> None:
    facts, layer = LayerFacts(2), MhaLayer(0, context().group, sinks=torch.zeros(4))
    first = facts.sinks_bf16(layer)
    assert facts.sinks_bf16(layer) is first
    layer.sinks.fill_(1.0)  # type: ignore[union-attr]
    assert float(facts.sinks_bf16(layer).sum()) == 4.0


def test_descales_are_expanded_without_a_copy_and_follow_new_scales() -> None:
    layer = MhaLayer(0, context().group, k_scale=Scale(torch.tensor([0.5])), v_scale=Scale(torch.tensor([1.0, 2.0])))
    facts = LayerFacts(2)
    found = facts.descales(layer, 3)
    assert found.q is None
    assert found.k.stride() == (0, 0)  # type: ignore[union-attr]
    assert found.v.tolist() == [[1.0, 2.0]] * 3  # type: ignore[union-attr]
    layer.k_scale = Scale(torch.tensor([4.0]))
    assert facts.descales(layer, 3).k.tolist() == [[4.0, 4.0]] * 3  # type: ignore[union-attr]


def test_queries_saturate_and_scales_may_be_per_head() -> None:
    q = torch.tensor([1000.0, 3.0]).view(1, 2, 1).bfloat16()
    assert quantise_query(q, None, 2).float().flatten().tolist() == [448.0, 3.0]
    scaled = quantise_query(q, Scale(torch.tensor([10.0, 3.0])), 2).float().flatten().tolist()
    assert scaled == [96.0, 1.0]  # 100 lies between two e4m3 values and goes to the even one


# --- warm-up ----------------------------------------------------------------------------------------------------------------


def test_warm_up_runs_every_phase_and_says_so(manifests: dict[str, Manifest], caplog: pytest.LogCaptureFixture) -> None:
    limits = GraphLimits((4,), 16, 4, 64, 16)
    made = context(
        replace(GEOMETRY, sinks=True), features=("spec_tree",), page=1, kernel_page=1, log=logging.getLogger("warm")
    )
    with fa4_library() as fake, caplog.at_level(logging.INFO, logger="warm"):
        backend = attn_flash.attn_create(manifests["mha/fa4"], "hopper", made)
        backend.attn_warmup(made.group, ("prefill", "decode", "verify"), limits)
    assert len(fake.calls) == 3
    assert any("compiles a kernel" in record.message for record in caplog.records)
    assert sum("warm up" in record.message for record in caplog.records) == 3
    assert all(call["learnable_sink"] is not None for call in fake.calls)


def test_a_kernel_is_announced_once(manifests: dict[str, Manifest], caplog: pytest.LogCaptureFixture) -> None:
    step = case(query_lens=(1, 1), kv_lens=(3, 20), page_size=16)
    made = context(page=16, kernel_page=16, log=logging.getLogger("once"))
    with fa4_library(), caplog.at_level(logging.INFO, logger="once"):
        backend = attn_flash.attn_create(manifests["mha/fa4"], "hopper", made)
        for _ in range(3):
            _step(backend, step)
    assert sum("compiles a kernel" in record.message for record in caplog.records) == 1


def test_the_compile_cache_is_switched_on_unless_the_user_decided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import os

    from attn_flash import cutedsl

    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(cutedsl.CACHE_SWITCH, raising=False)
    monkeypatch.delenv(cutedsl.CACHE_PLACE, raising=False)
    cutedsl.use_cache(logging.getLogger("cache"))
    assert os.environ[cutedsl.CACHE_SWITCH] == "1"
    assert os.environ[cutedsl.CACHE_PLACE] == str(tmp_path / "flash-attn-4")
    monkeypatch.setenv(cutedsl.CACHE_SWITCH, "0")
    cutedsl.use_cache(logging.getLogger("cache"))
    assert os.environ[cutedsl.CACHE_SWITCH] == "0"


# --- towers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_a_tower_has_no_pool(name: str, manifests: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_core.batch import AttentionBatch, Segment
    from attn_flash import builds

    monkeypatch.setattr(builds, "any_build", lambda: builds.TOKENSPEED)
    geometry = MhaGeometry(2, 2, 16, 16, 0.25, causal=False)
    group = LayerGroup("vision", "vit", "vit_full", (0,), geometry)
    made = Context(torch.device("cpu"), torch.bfloat16, group)
    with fa3_library("tokenspeed"), fa4_library():
        backend = attn_flash.attn_create(manifests[f"mm/{name}"], "default", made)
        offsets = torch.tensor([0, 3, 4], dtype=torch.int32)
        batch = AttentionBatch(
            2, 4, (Segment("prefill", slice(0, 2), slice(0, 4)),), offsets, 3, key_offsets=offsets, max_key_len=3
        )
        metadata = backend.attn_metadata(batch, group, "prefill", None, False)
        q = torch.randn(4, 2, 16).bfloat16()
        out, lse = backend.attn_ragged(q, q, q, MhaLayer(0, group), metadata, None)
    assert lse is None
    torch.testing.assert_close(out[3], q[3])  # a sequence of one token attends to itself


# --- what a step asks for -----------------------------------------------------------------------------------------------------


def test_a_captured_step_with_an_lse_is_another_key(manifests: dict[str, Manifest]) -> None:
    step = case(query_lens=(1, 1), kv_lens=(3, 20), page_size=16)
    limits = GraphLimits((2,), 2, 1, 64, 16)
    with fa3_library("tokenspeed"):
        backend = fa3(context(), manifests)
        group = backend.context.group
        state = backend.attn_graph_state(group, ("decode",), limits, 0)
        plain = backend.attn_metadata(step.batch, group, "decode", state, True)
        wanted = replace(step.batch, needs_lse=True, partial=True)
        made = backend.attn_metadata(wanted, group, "decode", state, True)
    assert made is not plain
    assert (made.needs_lse, made.partial) == (True, True)
    assert (plain.needs_lse, plain.partial) == (False, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_parts_of_a_prefix_leave_sinks_to_the_merge(
    name: str, dtype: torch.dtype, manifests: dict[str, Manifest]
) -> None:
    from attn_core.batch import AttentionBatch, Part, Segment

    geometry = replace(GEOMETRY, sinks=True)
    made = context(geometry, dtype=dtype)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    batch = AttentionBatch(
        1,
        3,
        (Segment("prefill", slice(0, 1), slice(0, 3)),),
        offsets,
        3,
        key_offsets=offsets,
        max_key_len=3,
        needs_lse=True,
    )
    part = Part(0, offsets, torch.zeros(1, dtype=torch.int32), 3, False, True)
    layer = MhaLayer(0, made.group, sinks=torch.full((4,), 3.0))
    q, k = torch.randn(3, 4, 32).to(dtype), torch.randn(3, 2, 32).to(dtype)
    with fa3_library("tokenspeed"), fa4_library():
        backend = attn_flash.attn_create(manifests[f"mha/{name}"], manifests[f"mha/{name}"].variants[0].name, made)
        metadata = backend.attn_metadata(batch, made.group, "prefill", None, False)
        whole, with_sink = backend.attn_ragged(q, k, k, layer, metadata, None)
        chunk, without = backend.attn_ragged(q, k, k, layer, metadata, part)
    added = torch.logaddexp(without, torch.tensor(3.0))
    torch.testing.assert_close(with_sink, added, atol=2e-3, rtol=1e-3)
    share = torch.exp(without - added)[..., None]
    torch.testing.assert_close(whole.float(), chunk.float() * share, atol=2e-2, rtol=2e-2)
