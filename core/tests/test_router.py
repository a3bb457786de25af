"""The router against recording backends: dispatch, completeness, mixed and empty batches, graphs, drafts, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_core.batch import AttentionBatch, DraftSteps, Segment
from attn_core.context import GraphLimits
from attn_core.discovery import Registry
from attn_core.errors import BatchError, BindError, GraphError, UsageError, WorkerMismatch
from attn_core.geometry import DsaGeometry, LayerGroup, MhaGeometry, MlaGeometry, Model
from attn_core.hookspecs import BACKEND_HOOKS, hookimpl
from attn_core.layers import (
    DsaCache,
    DsaLayer,
    IndexCache,
    IndexInputs,
    MhaInputs,
    MhaLayer,
    MlaCache,
    MlaLayer,
    MmInputs,
    Scale,
)
from attn_core.manifest import Manifest
from attn_core.options import Options
from attn_core.plan import GroupPlan, PartPlan, PhasePlan, Plan, Pool
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.router import Router
from recording import RecordingPlugin, address_for, cache_for
from toys import mha_model, mixed_model, toy

LIMITS = GraphLimits(rows=(2, 4), max_tokens=16, max_query_len=4, max_kv_len=64, max_pages=8)


def make(model: Model, plugins: dict[str, RecordingPlugin], manifests: list[Manifest], **options: Any) -> Router:
    options.setdefault("dtype", "float32")
    plan = solve_plan(model, parse_platform("cuda:sm90"), Options.of(options), manifests, tie_order={})
    modules = {f"attn-{name}": plugin for name, plugin in plugins.items()}
    return Router(plan, Registry.with_manifests(manifests, modules=modules), device="cpu")


def bind_all(router: Router, model: str = "target") -> list[MhaLayer]:
    layers, caches = [], []
    for group in router.plan.groups:
        if group.group.model == model:
            for index in group.group.layers:
                layers.append(MhaLayer(index, group.group))
                caches.append(cache_for(group.group.geometry, router.plan.page_size))
    router.bind(layers, caches)
    return layers


def batch_of(phases: list[tuple[str, list[int]]], pools: int = 1, page_size: int = 16) -> AttentionBatch:
    """Rows by phase; each list holds query lengths. Every row has 20 keys before its own tokens."""
    segments, offsets, row = [], [0], 0
    for phase, lengths in phases:
        start = offsets[-1]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        same = lengths[0] if len(set(lengths)) == 1 else None
        segments.append(Segment(phase, slice(row, row + len(lengths)), slice(start, offsets[-1]), same))
        row += len(lengths)
    lens = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    address = address_for([20 + n for n in lens], offsets[-1], page_size)
    return AttentionBatch(
        num_rows=row,
        num_tokens=offsets[-1],
        segments=tuple(segments),
        query_offsets=torch.tensor(offsets, dtype=torch.int32),
        max_query_len=max(lens, default=0),
        addresses=(address,) * pools,
        query_offsets_cpu=torch.tensor(offsets, dtype=torch.int32),
    )


def inputs_for(tokens: int, geometry: MhaGeometry) -> MhaInputs:
    return MhaInputs(
        torch.randn(tokens, geometry.q_heads, geometry.qk_dim),
        torch.randn(tokens, geometry.kv_heads, geometry.qk_dim),
        torch.randn(tokens, geometry.kv_heads, geometry.v_dim),
    )


def two_way(**options: Any) -> tuple[Router, list[MhaLayer], RecordingPlugin, RecordingPlugin]:
    """Prefill on `a` (writes 1), decode on `b` (writes 2)."""
    a, b = RecordingPlugin(1.0), RecordingPlugin(2.0)
    features = ["lse", "spec_topk1", "sliding_window"]
    router = make(
        mha_model(v_dim=64),
        {"a": a, "b": b},
        [toy("a", features=features, page_size=[16]), toy("b", features=features, page_size=[16])],
        prefill_attention_backend="a",
        decode_attention_backend="b",
        page_size=16,
        **options,
    )
    return router, bind_all(router), a, b


def test_phases_go_to_their_backends() -> None:
    router, layers, a, b = two_way()
    geometry = layers[0].geometry
    step = router.begin(batch_of([("prefill", [3, 5])]))
    assert (step.attend(layers[0], inputs_for(8, geometry)) == 1).all()
    step = router.begin(batch_of([("decode", [1, 1])]))
    assert (step.attend(layers[1], inputs_for(2, geometry)) == 2).all()
    assert router.stats() == {"a": {"prefill": 1}, "b": {"decode": 1}}
    assert a.calls["attn_store"] == b.calls["attn_store"] == 1


def test_metadata_is_made_once_a_step_and_group_not_once_a_layer() -> None:
    router, layers, a, _ = two_way()
    step = router.begin(batch_of([("prefill", [4])]))
    for layer in layers:
        step.attend(layer, inputs_for(4, layer.geometry))
    assert a.calls["attn_metadata"] == a.calls["attn_metadata_in_graph"] == 1
    assert a.calls["attn_extend"] == len(layers) == 4


def test_mixed_batches_are_split_where_the_backend_takes_none() -> None:
    router, layers, a, b = two_way()
    batch = batch_of([("decode", [1, 1]), ("prefill", [3, 2])])
    step = router.begin(batch)
    out = torch.full((7, 32, 64), float("nan"))
    result = step.attend(layers[0], inputs_for(7, layers[0].geometry), out)
    assert result.data_ptr() == out.data_ptr()
    assert (out[:2] == 2).all()
    assert (out[2:] == 1).all()
    seen = b.made[0].batches[-1]
    assert (seen.num_rows, seen.num_tokens) == (2, 2)
    assert a.made[0].batches[-1].query_offsets.tolist() == [0, 3, 5]


def test_c119_a_mixed_batch_goes_whole_to_a_prefill_backend_that_takes_it() -> None:
    """C119: any prefill token, the prefill backend."""
    a, b = RecordingPlugin(1.0), RecordingPlugin(2.0)
    router = make(
        mha_model(),
        {"a": a, "b": b},
        [toy("a"), toy("b")],
        prefill_attention_backend="a",
        decode_attention_backend="b",
        page_size=16,
    )
    layers = bind_all(router)
    step = router.begin(batch_of([("decode", [1, 1]), ("prefill", [3])]))
    assert (step.attend(layers[0], inputs_for(5, layers[0].geometry)) == 1).all()
    assert b.calls["attn_metadata"] == 0
    assert router.plan.mixed_batch == "a"


def test_c76_an_idle_rank_calls_no_hook() -> None:
    """C76: no rows, no hooks, an empty output of the right width."""
    router, layers, a, b = two_way()
    empty = AttentionBatch(0, 0, (), torch.zeros(1, dtype=torch.int32), 0)
    step = router.begin(empty)
    out = step.attend(layers[0], inputs_for(0, layers[0].geometry))
    assert tuple(out.shape) == (0, 32, 64)
    assert not a.calls
    assert not b.calls


def test_rows_of_padding_are_zeroed_by_the_router_where_they_are_garbage() -> None:
    router, layers, _, b = two_way()
    batch = batch_of([("decode", [1, 1, 1])])
    batch.num_rows, batch.num_tokens = 2, 2
    batch.segments = (Segment("decode", slice(0, 2), slice(0, 2), 1),)
    out = router.begin(batch).attend(layers[0], inputs_for(3, layers[0].geometry))
    assert (out[:2] == 2).all()
    assert (out[2:] == 0).all()
    assert b.calls["attn_decode"] == 1


def test_verify_and_drafts_follow_the_mode() -> None:
    router, layers, a, b = two_way(
        speculative_algorithm="EAGLE", speculative_attention_mode="decode", draft_attention_backend="a"
    )
    step = router.begin(batch_of([("verify", [4, 4])]))
    assert (step.attend(layers[0], inputs_for(8, layers[0].geometry)) == 2).all()
    router.commit(step, torch.tensor([1, 2], dtype=torch.int32))
    assert b.calls["attn_commit"] == 1
    assert router.stats()["b"] == {"verify": 1}


def test_all_draft_steps_get_their_metadata_in_one_call() -> None:
    router, _, _, _ = two_way(speculative_algorithm="EAGLE", draft_attention_backend="a")
    draft_group = next(g.group for g in router.plan.groups if g.group.model == "draft")
    layer = MhaLayer(0, draft_group)
    other = Router(router.plan, router.registry, device="cpu")
    other.bind([layer], [cache_for(draft_group.geometry)])
    batch = batch_of([("draft", [1, 1])], pools=2)
    steps = other.begin_draft(batch, DraftSteps(3, 1, torch.arange(6).reshape(2, 1, 3)))
    assert len(steps) == 3
    for number, step in enumerate(steps):
        run = step.runs()[0]
        assert run.address is not None
        assert run.address.new_slots.tolist() == [number, 3 + number]
        step.attend(layer, inputs_for(2, layer.geometry))


def test_lse_is_asked_for_never_assumed() -> None:
    router, layers, a, _ = two_way()
    step = router.begin(batch_of([("prefill", [4])]))
    inputs = inputs_for(4, layers[0].geometry)
    step.attend(layers[0], inputs)
    assert not a.made[0].batches[0].needs_lse
    out, lse = step.attend_lse(layers[0], inputs)
    assert lse.shape == (4, 32)
    assert (out == 1).all()
    plain = make(mha_model(), {"p": RecordingPlugin()}, [toy("p", features=["mixed"])], page_size=16)
    layer = bind_all(plain)[0]
    with pytest.raises(BindError, match="does not declare lse"):
        plain.begin(batch_of([("prefill", [4])])).attend_lse(layer, inputs_for(4, layer.geometry))


def test_groups_have_their_own_metadata_and_pools() -> None:
    a = RecordingPlugin()
    router = make(mixed_model(), {"a": a}, [toy("a")], page_size=16)
    layers = bind_all(router)
    step = router.begin(batch_of([("decode", [1])], pools=2))
    for layer in layers:
        step.attend(layer, inputs_for(1, layer.geometry))
    assert len(a.made) == 2
    assert {backend.context.group.name for backend in a.made if backend.context} == {"full", "sliding"}
    assert all(backend.calls["attn_metadata"] == 1 for backend in a.made)
    with pytest.raises(BatchError, match="addresses"):
        router.begin(batch_of([("decode", [1])], pools=1))


# --- graphs -------------------------------------------------------------------------------------------------------------


def test_under_a_graph_the_same_metadata_comes_back_and_contents_change() -> None:
    router, layers, _, b = two_way()
    graph = router.graph_state(LIMITS)
    first = router.begin(batch_of([("decode", [1, 1])]), graph, capture=True)
    assert b.calls["attn_metadata_in_graph"] == 0  # recorded by the caller, first thing inside the capture
    router.in_graph(first)
    second = router.begin(batch_of([("decode", [1, 1])]), graph)
    assert first.runs()[0].metadata is second.runs()[0].metadata
    assert b.calls["attn_metadata_in_graph"] == 1
    assert graph.pad_kv_len == 1
    second.attend(layers[0], inputs_for(2, layers[0].geometry))


def test_new_metadata_for_a_captured_key_is_an_error() -> None:
    plugin = RecordingPlugin(forget=True)
    router = make(mha_model(), {"f": plugin}, [toy("f")], page_size=16)
    graph = router.graph_state(LIMITS)
    router.begin(batch_of([("decode", [1, 1])]), graph)
    with pytest.raises(GraphError, match="new Metadata object"):
        router.begin(batch_of([("decode", [1, 1])]), graph)


def test_capture_above_the_level_or_the_limits_is_refused() -> None:
    router, _, _, _ = two_way()
    graph = router.graph_state(LIMITS)
    with pytest.raises(GraphError, match="ragged_query"):
        router.begin(batch_of([("prefill", [3, 2])]), graph)
    with pytest.raises(GraphError, match="rows exceed"):
        router.begin(batch_of([("decode", [1] * 5)]), graph)


def test_c95_every_backend_of_the_plan_sees_capture_before_replay() -> None:
    """C95: a split plan captures both of its backends."""
    router, _, a, b = two_way(speculative_algorithm="NGRAM")
    graph = router.graph_state(LIMITS)
    for phase, length in (("decode", 1), ("verify", 4)):
        router.begin(batch_of([(phase, [length, length])]), graph, capture=True)
        router.begin(batch_of([(phase, [length, length])]), graph)
    assert a.calls["attn_metadata"] == b.calls["attn_metadata"] == 2
    assert {key[0] for key in ((k[2].phase,) for k in graph.metadata)} == {"decode", "verify"}


# --- completeness and refusals ------------------------------------------------------------------------------------------


def dsa_router(plugin: RecordingPlugin) -> tuple[Router, DsaLayer]:
    """A sparse group by hand: its planner rules belong to plugins, the router's part does not."""
    manifest = toy("s", kind="mha")
    group = LayerGroup(
        "target",
        "dsa",
        "mla_sparse_dsa",
        (0,),
        DsaGeometry(MlaGeometry(4, 32, 8, 16, 16, 1.0), 2, 16, 4),
        {"attend": "latent", "index": "index"},
    )
    table = manifest.to_dict() | {"kind": "dsa"}
    table["variant"][0]["roles"] = ["sparse", "index"]
    from attn_core.manifest import parse_manifest

    sparse = parse_manifest(table)
    parts = tuple(PartPlan(role, "s", "default", "attn-s", "1.0") for role in ("sparse", "index"))
    phase = PhasePlan("s", "default", "attn-s", "1.0", parts, kernel_page_size=16)
    pools = (
        Pool("latent", "target", (0,), "mla_plain", "fp32", "NHD", 16, 1, "latent"),
        Pool("index", "target", (0,), "index_132_planar", "fp8_e4m3", "NHD", 16, 1, "index"),
    )
    plan = Plan("m", "cpu", 16, "fp32", "NHD", "fp32", (GroupPlan(group, {"decode": phase, "prefill": phase}),), pools)
    router = Router(plan, Registry.with_manifests([sparse], modules={"attn-s": plugin}))
    layer = DsaLayer(MlaLayer(0, group), 1.0)
    router.bind(
        [layer], [DsaCache(MlaCache(torch.zeros(8, 16, 40)), IndexCache(torch.zeros(8, 16 * 132, dtype=torch.uint8)))]
    )
    return router, layer


def mm_router(plugin: RecordingPlugin) -> tuple[Router, MhaLayer]:
    group = LayerGroup(
        "vision", "vision", "vit_full_bidirectional", (0,), MhaGeometry(2, 2, 72, 72, 72**-0.5, causal=False)
    )
    model = Model("v", "Toy", "toy", "fp32", (group,), 1)
    router = make(model, {"v": plugin}, [toy("v", kind="mm", features=["bidirectional"])])
    layer = MhaLayer(0, router.plan.groups[0].group)
    router.bind([layer], [None])
    return router, layer


def test_the_router_leaves_no_hook_out() -> None:
    """Every hook of the contract is reached through the router; a hook added to the contract fails here until it is."""
    plugin = RecordingPlugin()
    router = make(mha_model(), {"r": plugin}, [toy("r")], page_size=16, speculative_algorithm="EAGLE")
    layers = bind_all(router)
    router.warmup(LIMITS)
    router.graph_state(LIMITS)
    step = router.begin(batch_of([("prefill", [2])]))
    step.attend(layers[0], inputs_for(2, layers[0].geometry))
    step.gather(layers[0])
    step = router.begin(batch_of([("decode", [1])]))
    step.attend(layers[0], inputs_for(1, layers[0].geometry))
    router.commit(router.begin(batch_of([("verify", [4])])), torch.zeros(1, dtype=torch.int32))
    router.begin_draft(batch_of([("draft", [1])], pools=2), DraftSteps(2, 1, torch.zeros(1, 1, 2, dtype=torch.int64)))
    sparse, layer = dsa_router(plugin)
    sparse.begin(batch_of([("decode", [1])], pools=2)).index(
        layer, IndexInputs(torch.zeros(1, 2, 16), torch.zeros(1, 16), torch.zeros(1, 2))
    )
    vision, tower = mm_router(plugin)
    images = AttentionBatch(
        1, 3, (Segment("prefill", slice(0, 1), slice(0, 3), 3),), torch.tensor([0, 3], dtype=torch.int32), 3
    )
    q = torch.zeros(3, 2, 72)
    vision.begin(images, model="vision").attend(tower, MmInputs(q, q, q))
    assert set(plugin.calls) == set(BACKEND_HOOKS)


def test_layers_are_checked_against_the_plan() -> None:
    router, layers, _, _ = two_way()
    fresh = Router(router.plan, router.registry, device="cpu")
    group = router.plan.groups[0].group
    with pytest.raises(BindError, match="sinks that were not planned"):
        fresh.bind([MhaLayer(0, group, sinks=torch.zeros(32))], [cache_for(group.geometry)])
    with pytest.raises(BindError, match="cache v has shape"):
        fresh.bind([MhaLayer(0, group)], [cache_for(MhaGeometry(32, 8, 128, 128, 1.0))])
    with pytest.raises(BindError, match="not the planned one"):
        other = replace(group, geometry=replace(group.geometry, softcap=30.0))
        fresh.bind([MhaLayer(0, other)], [cache_for(group.geometry)])
    with pytest.raises(BindError, match="no cache"):
        fresh.bind([MhaLayer(0, group)], [None])


def test_scales_do_not_apply_to_a_cache_of_16_bit_elements() -> None:
    router, _, _, _ = two_way()
    fresh = Router(router.plan, router.registry, device="cpu")
    layer = MhaLayer(
        0, fresh.plan.groups[0].group, k_scale=Scale(torch.tensor([0.5]), 0.5), v_scale=Scale(torch.ones(1))
    )
    fresh.bind([layer], [cache_for(layer.geometry)])
    assert layer.k_scale is None
    assert layer.v_scale is None


def test_a_batch_in_a_phase_that_was_not_planned_is_refused() -> None:
    router, _, _, _ = two_way()
    with pytest.raises(BatchError, match="no plan for phase 'verify'"):
        router.begin(batch_of([("verify", [4])]))
    with pytest.raises(BatchError, match="lane 1"):
        batch = batch_of([("decode", [1])])
        batch.lane = 1
        router.begin(batch)


def test_a_worker_without_the_planned_plugin_says_so() -> None:
    router, _, _, _ = two_way()
    with pytest.raises(WorkerMismatch):
        Router(router.plan, Registry.with_manifests([toy("a")], modules={"attn-a": RecordingPlugin()}))


def test_verify_rows_are_not_merged_with_others() -> None:
    """A tree belongs to its verify rows; decode beside it is a call of its own, and commit sees verify rows only."""
    plugin = RecordingPlugin()
    router = make(mha_model(), {"r": plugin}, [toy("r")], page_size=16, speculative_algorithm="NGRAM")
    layers = bind_all(router)
    step = router.begin(batch_of([("decode", [1]), ("verify", [4, 4])]))
    step.attend(layers[0], inputs_for(9, layers[0].geometry))
    assert (plugin.calls["attn_decode"], plugin.calls["attn_extend"]) == (1, 1)
    seen: list[Any] = []
    run = step.runs()[1]
    run.bound = replace(
        run.bound, attn_commit=lambda batch, group, caches, metadata, accepted: seen.append(accepted.tolist())
    )
    router.commit(step, torch.tensor([7, 1, 2], dtype=torch.int32))
    assert seen == [[1, 2]]


def test_one_segment_can_be_attended_alone() -> None:
    router = make(mha_model(), {"a": RecordingPlugin()}, [toy("a")], page_size=16)
    layers = bind_all(router)
    step = router.begin(batch_of([("decode", [1, 1]), ("prefill", [3])]))
    for segment, tokens in ((0, 2), (1, 3)):
        out = step.attend(layers[0], inputs_for(tokens, layers[0].geometry), segment=segment)
        assert out.shape[0] == tokens
    with pytest.raises(BatchError, match="segment 7"):
        step.attend(layers[0], inputs_for(3, layers[0].geometry), segment=7)


def test_a_layer_belongs_to_one_router() -> None:
    router, layers, _, _ = two_way()
    step = router.begin(batch_of([("decode", [1])]))
    stranger = MhaLayer(0, layers[0].group)
    with pytest.raises(BindError, match="not bound to this router"):
        step.attend(stranger, inputs_for(1, layers[0].geometry))
    unbound = Router(router.plan, router.registry, device="cpu").begin(batch_of([("decode", [1])]))
    with pytest.raises(BindError, match="not bound to this router"):
        unbound.attend(layers[0], inputs_for(1, layers[0].geometry))


def test_a_failed_bind_leaves_the_router_as_it_was() -> None:
    router, _, _, _ = two_way()
    fresh = Router(router.plan, router.registry, device="cpu")
    group = fresh.plan.groups[0].group
    with pytest.raises(BindError, match="no cache"):
        fresh.bind([MhaLayer(0, group)], [None])
    fresh.bind([MhaLayer(0, group)], [cache_for(group.geometry)])


def test_bind_checks_dtypes_pages_indices_and_sharing() -> None:
    router, _, _, _ = two_way()
    group = router.plan.groups[0].group
    good = cache_for(group.geometry)

    def refuse(match: str, layers: list[MhaLayer], caches: list[Any]) -> None:
        with pytest.raises(BindError, match=match):
            Router(router.plan, router.registry, device="cpu").bind(layers, caches)

    refuse("holds torch.float16", [MhaLayer(0, group)], [replace_planes(good, lambda x: x.half())])
    refuse("the group has layers", [MhaLayer(77, group)], [good])
    twice = MhaLayer(0, group)
    refuse("given twice", [twice, twice], [good, cache_for(group.geometry)])
    refuse("k_scale has 7 values", [MhaLayer(0, group, k_scale=Scale(torch.ones(7)))], [good])


def replace_planes(cache: Any, change: Any) -> Any:
    return type(cache)(change(cache.k), change(cache.v))


def test_a_layer_outside_the_step_is_an_error_not_an_empty_output() -> None:
    router, layers, _, _ = two_way(speculative_algorithm="EAGLE", draft_attention_backend="a")
    draft = next(g.group for g in router.plan.groups if g.group.model == "draft")
    both = Router(router.plan, router.registry, device="cpu")
    layer = MhaLayer(0, draft)
    both.bind([layer], [cache_for(draft.geometry)])
    step = both.begin(batch_of([("decode", [1])], pools=2))
    with pytest.raises(BatchError, match="takes no part"):
        step.attend(layer, inputs_for(1, layer.geometry))
    with pytest.raises(UsageError, match="xyz"):
        both.begin(batch_of([("decode", [1])], pools=2), model="xyz")


def test_out_is_filled_and_views_are_straightened_where_undeclared() -> None:
    class Careless(RecordingPlugin):
        @hookimpl
        def attn_create(self, manifest: Any, variant: Any, context: Any) -> Any:
            made = super().attn_create(manifest, variant, context)

            def attend(inputs: Any, layer: Any, metadata: Any, out: Any) -> Any:
                assert inputs.q.is_contiguous()
                return torch.full((inputs.q.shape[0], 32, 128), 3.0), None

            made._attend = attend  # type: ignore[method-assign]
            return made

    router = make(mha_model(), {"c": Careless()}, [toy("c", features=["mixed"])], page_size=16)
    layers = bind_all(router)
    out = torch.full((2, 32, 128), -9.0)
    q = torch.randn(2, 128, 32).transpose(1, 2)
    step = router.begin(batch_of([("decode", [1, 1])]))
    assert step.attend(layers[0], inputs_for(2, layers[0].geometry)._replace(q=q), out).data_ptr() == out.data_ptr()
    assert (out == 3).all()


def test_lse_of_one_group_or_step_does_not_leak_into_the_next() -> None:
    router, layers, a, _ = two_way()
    batch = batch_of([("prefill", [4])])
    router.begin(batch).attend_lse(layers[0], inputs_for(4, layers[0].geometry))
    assert not batch.needs_lse
    router.begin(batch)
    assert [seen.needs_lse for seen in a.made[0].batches] == [False, True, False]


def test_an_idle_rank_has_an_empty_lse() -> None:
    router, layers, _, _ = two_way()
    out, lse = router.begin(AttentionBatch(0, 0, (), torch.zeros(1, dtype=torch.int32), 0)).attend_lse(
        layers[0], inputs_for(0, layers[0].geometry)
    )
    assert (tuple(out.shape), tuple(lse.shape)) == ((0, 32, 64), (0, 32))


def test_batches_are_checked_with_host_data_only() -> None:
    router, _, _, _ = two_way(lanes=2)

    def refuse(match: str, change: Any) -> None:
        batch = batch_of([("decode", [1, 1]), ("prefill", [3])])
        change(batch)
        with pytest.raises(BatchError, match=match):
            router.begin(batch)

    def gap(batch: AttentionBatch) -> None:
        batch.segments = (batch.segments[0], replace(batch.segments[1], rows=slice(1, 3)))

    def short(batch: AttentionBatch) -> None:
        batch.segments = batch.segments[:1]

    def narrow(batch: AttentionBatch) -> None:
        address = batch.kv(0)
        batch.addresses = (replace(address, table=address.table[:, :1], kv_lens_cpu=address.kv_lens),)

    def lane(batch: AttentionBatch) -> None:
        batch.lane = -1

    def lens(batch: AttentionBatch) -> None:
        batch.addresses = (replace(batch.kv(0), kv_lens=torch.ones(1, dtype=torch.int32)),)

    refuse("without gaps", gap)
    refuse("segments cover 2 rows", short)
    refuse("the table reaches 16", narrow)
    refuse("lane -1", lane)
    refuse("kv_lens has 1 rows", lens)
    with pytest.raises(BatchError, match="at least one segment"):
        router.begin(AttentionBatch(0, 0, (), torch.zeros(5, dtype=torch.int32), 1, padded_rows=4, padded_tokens=4))


def test_rope_positions_are_cut_with_their_tokens() -> None:
    from attn_core.layers import Rope
    from attn_core.router._run import slice_inputs

    inputs = MhaInputs(torch.zeros(6, 1, 4), rope=Rope(torch.zeros(9, 4), torch.arange(6), False))
    assert slice_inputs(inputs, slice(2, 4)).rope.positions.tolist() == [2, 3]


def test_draft_steps_are_counted() -> None:
    router, _, _, _ = two_way(speculative_algorithm="EAGLE", draft_attention_backend="a")
    draft = next(g.group for g in router.plan.groups if g.group.model == "draft")
    other = Router(router.plan, router.registry, device="cpu")
    layer = MhaLayer(0, draft)
    other.bind([layer], [cache_for(draft.geometry)])
    for step in other.begin_draft(
        batch_of([("draft", [1])], pools=2), DraftSteps(3, 1, torch.zeros(1, 1, 3, dtype=torch.int64))
    ):
        step.attend(layer, inputs_for(1, layer.geometry))
    assert other.stats() == {"a": {"draft": 3}}


def test_lanes_have_steps_of_their_own() -> None:
    router, layers, _, _ = two_way(lanes=2)
    first, second = batch_of([("decode", [1])]), batch_of([("prefill", [2])])
    second.lane = 1
    a, b = router.begin(first), router.begin(second)
    assert (b.attend(layers[0], inputs_for(2, layers[0].geometry)) == 1).all()
    assert (a.attend(layers[0], inputs_for(1, layers[0].geometry)) == 2).all()
