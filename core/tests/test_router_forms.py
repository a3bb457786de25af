"""What a plan may ask of the router beside plain dispatch: padded heads and widths, and the expanded form of latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_core._plan_json import plain as as_json
from attn_core.batch import AttentionBatch, Segment
from attn_core.cache import PagedKVCache
from attn_core.context import GraphLimits
from attn_core.discovery import Registry
from attn_core.errors import BatchError, BindError, GraphError, PlanError
from attn_core.geometry import LayerGroup, MhaGeometry, MlaGeometry, Model
from attn_core.graphs import GraphRunner, RerunRecorder
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, MlaCache, MlaInputs, MlaLayer, MmInputs, Scale
from attn_core.manifest import Manifest, parse_manifest
from attn_core.options import Options
from attn_core.paging import PoolRows, build_batch
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.router import Router, _latent
from attn_core.testing import reference_backend, reference_mla
from attn_core.testing.oracle_mla import project
from toys import limited, mha_model

PAGE = 16


def router_of(model: Model, *manifests: Manifest, module: Any = reference_backend, **options: Any) -> Router:
    chosen = Options.of({"page_size": PAGE, "dtype": "float32", **options})
    plan = solve_plan(model, parse_platform("cuda:sm90"), chosen, list(manifests), tie_order={})
    modules = {manifest.package: module for manifest in manifests}
    return Router(plan, Registry.with_manifests(list(manifests), modules=modules), device="cpu")


# --- padding ----------------------------------------------------------------------------------------------------------------


def bound_pair(model: Model, *manifests: Manifest, **options: Any) -> tuple[tuple[Router, MhaLayer], ...]:
    """(router, layer) of the padded plan and of the plain reference, with the same sinks and cache contents."""
    torch.manual_seed(3)
    plain = router_of(model, limited("plain"), **options)
    padded = router_of(model, *manifests, **options)
    geometry = model.groups[0].geometry
    assert isinstance(geometry, MhaGeometry)
    made: list[tuple[Router, MhaLayer]] = []
    sinks = torch.randn(geometry.q_heads) if geometry.sinks else None
    first: MhaCache | None = None
    for router in (plain, padded):
        kv = PagedKVCache.from_plan(router.plan, num_pages=12).layer(0)
        assert isinstance(kv, MhaCache)
        for plane in (kv.k, kv.v):
            plane.view(torch.uint8).fill_(255)  # NaN in every type
        if first is None:
            shapes = (*kv.k.shape[:-1], geometry.qk_dim), (*kv.v.shape[:-1], geometry.v_dim)
            values = [torch.randn(shape).to(kv.k.dtype) for shape in shapes]
            first = kv
        kv.k[..., : geometry.qk_dim], kv.v[..., : geometry.v_dim] = values
        layer = MhaLayer(0, router.plan.groups[0].group, sinks=None if sinks is None else sinks.clone())
        router.bind([layer], [kv])
        made.append((router, layer))
    return tuple(made)


def step_of(phase: str, lens: list[int], new: list[int]) -> AttentionBatch:
    return build_batch(new, lens, PoolRows(PAGE, [[1 + 3 * r, 2 + 3 * r, 3 + 3 * r] for r in range(len(lens))]), phase)


def inputs_for(geometry: MhaGeometry, tokens: int) -> MhaInputs:
    return MhaInputs(
        torch.randn(tokens, geometry.q_heads, geometry.qk_dim),
        torch.randn(tokens, geometry.kv_heads, geometry.qk_dim),
        torch.randn(tokens, geometry.kv_heads, geometry.v_dim),
    )


STEPS = [("prefill", [20, 7, 33], [5, 7, 1]), ("decode", [21, 8, 34], [1, 1, 1]), ("decode", [22, 9, 35], [1, 1, 1])]
WIDER = [
    ({"head_dims": ["head_dims"]}, {"head_dims": [[32, 32]]}, (24, 16), {"head_dims": [[24, 16], [32, 32]]}),
    ({"v_dim": ["v_dim"]}, {"head_dims": {"equal": True}}, (24, 16), {"v_dim": [16, 24]}),
    ({"q_heads": ["q_heads"]}, {"q_heads": {"multiple": 16}}, (24, 16), {"q_heads": [6, 16]}),
    (
        {"both": ["q_heads", "head_dims"]}, {"q_heads": {"multiple": 8}, "head_dims": [[40, 40]]}, (24, 16),
        {"head_dims": [[24, 16], [40, 40]], "q_heads": [6, 8]},
    ),
]  # fmt: skip


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("pads", "when", "dims", "planned"), WIDER, ids=lambda value: "/".join(value) if isinstance(value, dict) else ""
)
def test_a_padded_backend_gives_the_model_s_numbers(pads: Any, when: Any, dims: Any, planned: Any, sinks: bool) -> None:
    model = mha_model(layers=1, q_heads=6, kv_heads=2, qk_dim=dims[0], v_dim=dims[1], scale=0.3, sinks=sinks)
    (plain, one), (padded, two) = bound_pair(model, limited("wide", pads=next(iter(pads.values())), **when))
    assert as_json(padded.plan.groups[0].phases["decode"].pads) == planned
    for phase, lens, new in STEPS:
        inputs = inputs_for(one.geometry, sum(new))
        want, want_lse = plain.begin(step_of(phase, lens, new)).attend_lse(one, inputs)
        given = torch.full_like(want, 7.0)
        step = padded.begin(step_of(phase, lens, new))
        made, lse = step.attend_lse(two, inputs, given)
        assert made is given
        torch.testing.assert_close(given, want)
        torch.testing.assert_close(lse, want_lse)
        free = step.attend(two, inputs)
        torch.testing.assert_close(free, want)
        assert free.is_contiguous()
        k, v = step.gather(two)
        assert (k.shape[-1], v.shape[-1]) == dims


def test_sinks_that_a_server_rewrites_in_place_are_followed() -> None:
    model = mha_model(layers=1, q_heads=6, kv_heads=2, qk_dim=24, v_dim=16, scale=0.3, sinks=True)
    (plain, one), (padded, two) = bound_pair(model, limited("wide", pads=["q_heads"], q_heads=[16]))
    inputs, seen = inputs_for(one.geometry, 1), []
    for value in (None, 3.0, -1.0):
        for layer in (one, two):
            assert layer.sinks is not None
            layer.sinks.fill_(value) if value is not None else None
        want = plain.begin(step_of("decode", [20], [1])).attend(one, inputs)
        seen.append(padded.begin(step_of("decode", [20], [1])).attend(two, inputs))
        torch.testing.assert_close(seen[-1], want)
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_phases_of_one_pool_may_be_padded_differently(kv: str) -> None:
    """The cache has the widest columns; every backend reads the width it was planned with, and new tokens are found by all."""
    model = mha_model(layers=1, q_heads=6, kv_heads=2, qk_dim=24, v_dim=16, scale=0.3)
    manifests = (
        limited("first", pads=["head_dims"], head_dims=[[48, 48]], phase=["prefill"]),
        limited("second", phase=["decode"]),
    )
    flags: dict[str, Any] = {"kv_cache_dtype": kv} | ({} if kv == "auto" else {"dtype": "bfloat16"})
    (plain, one), (padded, two) = bound_pair(model, *manifests, **flags)
    pool = padded.plan.pools[0]
    assert pool.bytes_per_page == 2 * plain.plan.pools[0].bytes_per_page * 48 // (24 + 16)
    for phase, lens, new in STEPS:
        inputs = MhaInputs(*(x.to(plain.dtype) for x in inputs_for(one.geometry, sum(new))[:3] if x is not None))
        want = plain.begin(step_of(phase, lens, new)).attend(one, inputs)
        made = padded.begin(step_of(phase, lens, new)).attend(two, inputs)
        torch.testing.assert_close(made, want)
    assert padded.stats() == {"first": {"prefill": 1}, "second": {"decode": 2}}


def test_one_variant_may_be_padded_in_one_phase_only() -> None:
    """A backend object belongs to one geometry: the two phases get one each."""
    table = limited("wide").to_dict()
    rows = table["variant"][0]["allow"]
    narrow = [{**row, "when": {**row["when"], "phase": ["decode"]}} for row in rows]
    wide = [
        {**row, "pads": ["head_dims"], "when": {**row["when"], "phase": ["prefill"], "head_dims": [[32, 32]]}}
        for row in rows
    ]
    table["variant"][0]["allow"] = [*narrow, *wide]
    model = mha_model(layers=1, q_heads=6, kv_heads=2, qk_dim=24, v_dim=16, scale=0.3)
    (plain, one), (padded, two) = bound_pair(model, parse_manifest(table))
    assert [bool(p.pads) for p in padded.plan.groups[0].phases.values()] == [True, False]
    assert len(padded._groups[0].backends) == 2
    for phase, lens, new in STEPS:
        inputs = inputs_for(one.geometry, sum(new))
        want = plain.begin(step_of(phase, lens, new)).attend(one, inputs)
        torch.testing.assert_close(padded.begin(step_of(phase, lens, new)).attend(two, inputs), want)


def test_a_padded_step_is_captured_like_any_other() -> None:
    model = mha_model(layers=1, q_heads=6, kv_heads=2, qk_dim=24, v_dim=16, scale=0.3)
    (plain, one), (padded, two) = bound_pair(model, limited("wide", pads=["head_dims"], head_dims=[[32, 32]]))
    example = dict(zip("qkv", inputs_for(one.geometry, 1)[:3], strict=True))

    def forward(step: Any, given: Any) -> torch.Tensor:
        made: torch.Tensor = step.attend(two, MhaInputs(given["q"], given["k"], given["v"]))
        return made

    limits = GraphLimits(rows=(4,), max_tokens=4, max_query_len=1, max_kv_len=48, max_pages=12)
    runner = GraphRunner(padded, forward, limits, example, recorder=RerunRecorder())  # type: ignore[arg-type]
    runner.capture("decode")
    for lens in ([20, 7, 33], [21, 8]):
        inputs = inputs_for(one.geometry, len(lens))
        want = plain.begin(step_of("decode", lens, [1] * len(lens))).attend(one, inputs)
        given = dict(zip("qkv", inputs[:3], strict=True))
        torch.testing.assert_close(runner.run(step_of("decode", lens, [1] * len(lens)), given), want)  # type: ignore[arg-type]
    assert runner.replays == 2


def test_a_cache_without_room_for_the_padding_is_refused() -> None:
    model = mha_model(layers=1, q_heads=6, kv_heads=2, qk_dim=24, v_dim=16, scale=0.3)
    router = router_of(model, limited("wide", pads=["head_dims"], head_dims=[[32, 32]]))
    layer = MhaLayer(0, router.plan.groups[0].group)
    with pytest.raises(BindError, match=r"needed   .*, 2, 32"):
        router.bind([layer], [MhaCache(torch.zeros(4, PAGE, 2, 24), torch.zeros(4, PAGE, 2, 16))])


def test_two_nodes_with_other_padding_cannot_exchange_caches() -> None:
    model = mha_model(layers=1, q_heads=6, kv_heads=2, qk_dim=24, v_dim=16, scale=0.3)
    plain = router_of(model, limited("plain")).plan
    wide = router_of(model, limited("wide", pads=["head_dims"], head_dims=[[32, 32]])).plan
    assert {item.field.rpartition(".")[2] for item in plain.differences(wide) if item.fatal} == {"qk_dim", "v_dim"}


def test_a_tower_is_padded_too() -> None:
    tower = LayerGroup("vision", "tower", "vit_full", (0,), MhaGeometry(4, 4, 18, 18, 0.2, causal=False), {})
    model = Model("seeing", "ToyModel", "toy", "fp32", (tower,), 1, max_positions=64)

    def packed(name: str, **fields: Any) -> Manifest:
        table = limited(name, **fields).to_dict()
        table["kind"] = "mm"
        for row in table["variant"][0]["allow"]:
            row["when"].pop("page_size")
            row["when"].pop("format", None)
        return parse_manifest(table)

    outs = []
    for manifest in (packed("plain"), packed("wide", pads=["head_dims"], head_dims=[[24, 24]])):
        plan = solve_plan(model, parse_platform("cuda:sm90"), Options.of(dtype="float32"), [manifest], tie_order={})
        router = Router(
            plan, Registry.with_manifests([manifest], modules={manifest.package: reference_backend}), device="cpu"
        )
        layer = MhaLayer(0, plan.groups[0].group)
        router.bind([layer], [None])
        offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
        batch = AttentionBatch(
            2, 5, (Segment("prefill", slice(0, 2), slice(0, 5)),), offsets, 3, key_offsets=offsets, max_key_len=3,
            query_offsets_cpu=offsets,
        )  # fmt: skip
        torch.manual_seed(1)
        inputs = MmInputs(*(torch.randn(5, 4, 18) for _ in range(3)))
        outs.append(router.begin(batch, model="vision").attend(layer, inputs))
    torch.testing.assert_close(outs[1], outs[0])


# --- latent attention ---------------------------------------------------------------------------------------------------------

LATENT = MlaGeometry(4, 32, 8, 16, 24, 0.25)


def latent_model() -> Model:
    group = LayerGroup("target", "mla", "mla", (0,), LATENT, {"attend": "latent"})
    return Model("latent", "ToyForCausalLM", "toy", "fp32", (group,), 1, frozenset({"mla"}), 256)


def latent_parts(name: str, *, chunks: bool, pads: list[str] | None = None, **absorbed: Any) -> Manifest:
    """Expanded prefill with or without chunks of a prefix, and absorbed attention for everything."""
    drop = {"chunked_prefix"} if not chunks else set()
    table = limited(name, "mla", features=lambda given: [f for f in given if f not in drop]).to_dict()
    (both,) = table["variant"]
    expanded = {**both, "name": "ragged", "roles": ["ragged"]}
    latent = limited(name, "mla", pads=pads, **absorbed).to_dict()["variant"][0]
    table["variant"] = [expanded, {**latent, "name": "latent", "roles": ["absorbed"]}]
    return parse_manifest(table)


class Latent:
    """A router with one latent layer; attention by hand in float64 over expanded keys."""

    def __init__(self, manifest: Manifest, **options: Any) -> None:
        torch.manual_seed(5)
        self.router = router_of(latent_model(), manifest, module=reference_mla, **options)
        self.w_uk, self.w_uv = torch.randn(4, 16, 32) * 0.2, torch.randn(4, 32, 24) * 0.2
        self.layer = MlaLayer(0, self.router.plan.groups[0].group, expand=project(self.w_uk, self.w_uv))
        data = torch.full((16, PAGE, 40), torch.nan)
        data[0] = 0.0
        self.cache = MlaCache(data, data[..., :32], data[..., 32:])
        self.router.bind([self.layer], [self.cache])
        self.keys: dict[int, torch.Tensor] = {}

    def step(self, phase: str, new: dict[int, int], form: str, **pieces: Any) -> Any:
        """One step of rows {row: new tokens}; checks the form, and every token's result."""
        lens = [len(self.keys.get(row, ())) + count for row, count in new.items()]
        rows = PoolRows(PAGE, [[1 + 5 * row + n for n in range(5)] for row in new])
        batch = build_batch(list(new.values()), lens, rows, phase, **pieces)
        tokens = batch.padded_tokens
        q, q_pe = torch.randn(tokens, 4, 16), torch.randn(tokens, 4, 8)
        c_kv, k_pe = torch.randn(tokens, 32), torch.randn(tokens, 8)
        step = self.router.begin(batch)
        assert [found for _, found in step.segments("target", "mla")] == [form] * len(batch.segments)
        if form == "ragged":
            out = step.attend(self.layer, MlaInputs(q, None, q_pe, c_kv, k_pe))
        else:
            latent = torch.einsum("thd,hdl->thl", q, self.w_uk)
            out = step.attend(self.layer, MlaInputs(None, latent, q_pe, c_kv, k_pe))
            out = torch.einsum("thl,hlv->thv", out, self.w_uv)
        start = 0
        for row, count in new.items():
            part = slice(start, start + count)
            fresh = torch.cat([c_kv[part], k_pe[part]], -1)
            self.keys[row] = torch.cat([self.keys[row], fresh]) if row in self.keys else fresh
            self.check(out[part], q[part], q_pe[part], self.keys[row])
            start += count
        return step

    def check(self, out: torch.Tensor, q: torch.Tensor, q_pe: torch.Tensor, keys: torch.Tensor) -> None:
        keys, q, q_pe = keys.double(), q.double(), q_pe.double()
        k = torch.einsum("nl,hdl->nhd", keys[:, :32], self.w_uk.double())
        v = torch.einsum("nl,hlv->nhv", keys[:, :32], self.w_uv.double())
        logits = (torch.einsum("qhd,nhd->hqn", q, k) + torch.einsum("qhd,nd->hqn", q_pe, keys[:, 32:])) * 0.25
        at = torch.arange(len(keys) - len(q), len(keys))[:, None]
        logits = logits.masked_fill(torch.arange(len(keys)) > at, -torch.inf)
        want = torch.einsum("hqn,nhv->qhv", logits.softmax(-1), v)
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_by_length_expands_rows_without_a_prefix_and_absorbs_the_rest() -> None:
    world = Latent(latent_parts("m", chunks=False))
    assert world.router.plan.groups[0].phases["prefill"].form == "by_length(0)"
    world.step("prefill", {0: 5, 1: 20}, "ragged")
    world.step("prefill", {0: 4, 1: 1}, "absorbed")
    world.step("prefill", {0: 3, 2: 7}, "absorbed")  # one row with a prefix, one without
    world.step("decode", {0: 1, 1: 1, 2: 1}, "absorbed")
    assert world.router.stats() == {"m": {"prefill": 3, "decode": 1}}


@pytest.mark.parametrize("keys", [3, 7, 1 << 15])
def test_the_ragged_form_attends_to_prefixes_in_chunks(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_latent, "CHUNK_KEYS", keys)
    world = Latent(latent_parts("m", chunks=True))
    assert world.router.plan.groups[0].phases["prefill"].form == "ragged"
    world.step("prefill", {0: 5, 1: 20}, "ragged")
    world.step("prefill", {0: 4, 1: 1, 2: 3}, "ragged")
    world.step("prefill", {1: 2}, "ragged")
    world.step("decode", {0: 1, 1: 1, 2: 1}, "absorbed")


def test_rows_of_padding_are_no_prefix() -> None:
    world = Latent(latent_parts("m", chunks=False))
    world.step("prefill", {0: 5, 1: 3}, "ragged", padded_rows=4, padded_tokens=12)


def test_bounds_on_the_host_choose_the_form_that_is_right_for_every_row() -> None:
    world = Latent(latent_parts("m", chunks=False))
    batch = build_batch([5], [5], PoolRows(PAGE, [[1]]), "prefill")
    address = batch.kv(0)
    batch.cpu_exact = False
    forms = []
    for lens, bound in (
        (torch.tensor([5], dtype=torch.int32), 5),
        (torch.tensor([9], dtype=torch.int32), 9),
        (None, 16),
    ):
        batch.addresses = (replace(address, kv_lens_cpu=lens, max_kv_len=bound),)
        forms += [form for _, form in world.router.begin(batch).segments("target", "mla")]
    assert forms == ["ragged", "absorbed", "absorbed"]


def test_an_absorbed_part_that_plans_from_exact_lengths_gets_them() -> None:
    table = latent_parts("m", chunks=False).to_dict()
    table["variant"][1]["host_lengths"] = "exact"
    world = Latent(parse_manifest(table))
    batch = build_batch([1], [5], PoolRows(PAGE, [[1]]), "prefill")
    batch.cpu_exact = False
    with pytest.raises(BatchError, match="exact lengths"):
        world.router.begin(batch)


def test_a_plan_for_bounds_is_not_refused_for_a_row_it_left_out() -> None:
    table = latent_parts("m", chunks=False).to_dict()
    (row,) = table["variant"][1]["allow"]
    table["variant"][1]["allow"] = [{**row, "host_lengths": "exact", "when": {**row["when"], "page_size": [PAGE]}}, row]
    world = Latent(parse_manifest(table), host_lengths="bound")
    batch = build_batch([1], [5], PoolRows(PAGE, [[1]]), "prefill")
    batch.cpu_exact = False
    assert [form for _, form in world.router.begin(batch).segments("target", "mla")] == ["absorbed"]


def test_inputs_of_the_other_form_are_refused_with_the_way_to_ask() -> None:
    world = Latent(latent_parts("m", chunks=True))
    step = world.router.begin(build_batch([2], [2], PoolRows(PAGE, [[1]]), "prefill"))
    inputs = MlaInputs(None, torch.zeros(2, 4, 32), torch.zeros(2, 4, 8), torch.zeros(2, 32), torch.zeros(2, 8))
    with pytest.raises(BatchError, match="inputs in absorbed form") as caught:
        step.attend(world.layer, inputs)
    assert "step.segments" in str(caught.value)


def test_the_expanded_form_is_not_captured() -> None:
    table = latent_parts("m", chunks=True).to_dict()
    world = Latent(parse_manifest(table))
    group = world.router._groups[0]
    batch = build_batch([2], [2], PoolRows(PAGE, [[1]]), "prefill")
    with pytest.raises(GraphError, match="not captured"):
        world.router._expanded(group, next(iter(group.backends.values())), batch, object())  # type: ignore[arg-type]


def test_latent_heads_are_padded_in_absorbed_form_only() -> None:
    world = Latent(latent_parts("m", chunks=True, pads=["q_heads"], q_heads=[16, 64]))
    phases = world.router.plan.groups[0].phases
    assert phases["decode"].pads == {"q_heads": [4, 16]}
    assert not phases["prefill"].pads
    world.step("prefill", {0: 5, 1: 20}, "ragged")
    world.step("decode", {0: 1, 1: 1}, "absorbed")


def test_the_part_for_prefixes_is_never_a_padded_one() -> None:
    """The plan records padding of main parts; a part that would need it of its own is not taken."""
    world = Latent(latent_parts("m", chunks=True, pads=["q_heads"], q_heads=[16]), disable_chunked_prefix_cache=True)
    prefill = world.router.plan.groups[0].phases["prefill"]
    assert (prefill.form, prefill.pads) == ("absorbed", {"q_heads": [4, 16]})
    world.step("prefill", {0: 5}, "absorbed")
    world.step("prefill", {0: 5}, "absorbed")


def test_a_deny_row_about_the_width_that_kernels_see_counts_for_padded_models() -> None:
    """With page 16 refused at width 32, a model of width 24 that is padded to 32 gets slots, as one of width 32 does."""

    def denying(**when: Any) -> Manifest:
        table = limited("wide", pads=["head_dims"], head_dims=[[32, 32]]).to_dict()
        table["variant"][0]["deny"] = [{"when": {"head_dims": [[32, 32]], **when}, "reason": "wrong numbers"}]
        return parse_manifest(table)

    for dims in ((32, 32), (24, 16)):
        model = mha_model(layers=1, qk_dim=dims[0], v_dim=dims[1])
        with pytest.raises(PlanError, match="wrong numbers"):
            router_of(model, denying())
        router = router_of(model, denying(page_size=16))
        assert {phase.kernel_page_size for phase in router.plan.groups[0].phases.values()} == {1}


def test_a_padded_backend_gets_one_cache_object_for_each_cache() -> None:
    """Backends keep what they made of a cache under its identity."""
    model = mha_model(layers=1, q_heads=6, kv_heads=2, qk_dim=24, v_dim=16)
    _, (router, _) = bound_pair(model, limited("wide", pads=["head_dims"], head_dims=[[32, 32]]))
    adapter: Any = next(iter(router._groups[0].backends.values())).attn_gather.__self__  # type: ignore[attr-defined]
    fitting, wider = (MhaCache(torch.zeros(2, PAGE, 2, width), torch.zeros(2, PAGE, 2, width)) for width in (32, 40))
    assert adapter.cache(fitting) is fitting
    narrowed = adapter.cache(wider)
    assert narrowed.k.shape[-1] == 32
    assert adapter.cache(wider) is narrowed


def test_scales_and_sinks_that_a_server_replaces_are_followed() -> None:
    model = mha_model(layers=1, q_heads=6, kv_heads=2, qk_dim=24, v_dim=16, scale=0.3, sinks=True)
    _, (router, layer) = bound_pair(model, limited("wide", pads=["head_dims"], head_dims=[[32, 32]]))
    adapter: Any = next(iter(router._groups[0].backends.values())).attn_gather.__self__  # type: ignore[attr-defined]
    first = layer.sinks
    assert first is not None
    before = first.clone()
    adapter.layer(layer)
    layer.sinks = torch.ones(6)
    assert torch.equal(adapter.layer(layer).sinks, torch.ones(6))
    assert torch.equal(first, before)  # the server's old tensor is the server's
    latent = Latent(latent_parts("m", chunks=True, pads=["q_heads"], q_heads=[16, 64]))
    own = latent.layer
    hooks = [bound.attn_gather for bound in latent.router._groups[0].backends.values()]
    made: Any = next(hook.__self__ for hook in hooks if hasattr(hook, "__self__"))  # prefill is not padded
    made.layer(own)
    own.k_scale = Scale(torch.tensor([0.5]), 0.5)
    assert made.layer(own).k_scale is own.k_scale
