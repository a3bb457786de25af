"""A plan that is made can be bound and stepped: every shipped plan, on backends that answer every hook and compute nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_core.batch import AttentionBatch, DraftSteps, KvAddress, Segment, StateAddress
from attn_core.discovery import Registry
from attn_core.errors import PlanError
from attn_core.formats import torch_dtype
from attn_core.geometry import DsaGeometry, GdnGeometry, LayerGroup, MhaGeometry, MlaGeometry, Model
from attn_core.layers import (
    Cache,
    DsaCache,
    DsaLayer,
    GdnCache,
    GdnLayer,
    IndexCache,
    Layer,
    MhaCache,
    MhaLayer,
    MlaCache,
    MlaLayer,
)
from attn_core.manifest import Manifest, parse_manifest
from attn_core.options import Options
from attn_core.plan import GroupPlan, Plan, load_plan
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.router import Router
from recording import RecordingPlugin
from shipped import MODELS, model_of, shipped
from toys import hybrid_model, limited, mha_model, toy

PLATFORMS = [f"cuda:sm{n},cuda=13.0" for n in (80, 89, 90, 100, 103, 120)] + [
    "rocm:gfx942",
    "rocm:gfx950",
    "npu:a2",
    "xpu",
    "cpu",
]
FEWER = ("cuda:sm90,cuda=13.0", "cuda:sm100,cuda=13.0", "rocm:gfx942")
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "chain": {"speculative_algorithm": "EAGLE"},
    "tree": {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
    "whole_prefix": {"disable_chunked_prefix_cache": True},
    "bound": {"host_lengths": "bound"},
}


def bind(plan: Plan, manifests: tuple[Manifest, ...]) -> Router:
    """A router of fakes on a CPU, with the first layer of every group and a cache of two pages."""
    modules = {manifest.package: RecordingPlugin() for manifest in manifests}
    router = Router(plan, Registry.with_manifests(manifests, modules=modules), device="cpu")
    pairs = [(layer_of(group), cache_of(group, plan)) for group in plan.groups if group.phases]
    router.bind([layer for layer, _ in pairs], [cached for _, cached in pairs])
    return router


def layer_of(plan: GroupPlan) -> Layer:
    group, geometry = plan.group, plan.group.geometry
    index = next(layer for layer in group.layers if layer not in group.kv_from)
    if isinstance(geometry, DsaGeometry):
        return DsaLayer(MlaLayer(index, group), 1.0)
    if isinstance(geometry, MlaGeometry):
        return MlaLayer(index, group)
    if isinstance(geometry, GdnGeometry):
        return GdnLayer(index, group, torch.zeros(1), torch.zeros(1))
    assert isinstance(geometry, MhaGeometry)
    return MhaLayer(index, group, sinks=torch.zeros(geometry.q_heads) if geometry.sinks else None)


def cache_of(plan: GroupPlan, whole: Plan) -> Cache | None:
    group, geometry = plan.group, plan.stored.geometry
    if not group.pools:
        return None
    role = next(role for role in ("attend", "cross", "state") if role in group.pools)
    pool = whole.pools[whole.pool_index(group.pools[role], group.model)]
    if isinstance(geometry, GdnGeometry):
        return GdnCache(torch.zeros(1), torch.zeros(1))
    if isinstance(geometry, DsaGeometry):
        return DsaCache(MlaCache(torch.zeros(1)), IndexCache(torch.zeros(1, dtype=torch.uint8)))
    if isinstance(geometry, MlaGeometry):
        return MlaCache(torch.zeros(1))
    assert isinstance(geometry, MhaGeometry)
    packed = pool.format == "fp4_block16"
    dtype = torch.uint8 if packed else torch_dtype(pool.dtype)

    def plane(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(2, pool.page_size, geometry.kv_heads, width, dtype=dtype)

    widths = [width // (2 if packed else 1) for width in (geometry.qk_dim, geometry.v_dim)]
    blocks = (
        [plane(w // 16, torch.float8_e4m3fn) for w in (geometry.qk_dim, geometry.v_dim)] if packed else [None, None]
    )
    return MhaCache(*(plane(width, dtype) for width in widths), *blocks, format=pool.format)


def batch_for(plan: Plan, phase: str, lens: list[int], new: int, exact: bool) -> AttentionBatch:
    rows, tokens = len(lens), len(lens) * new
    kv_lens, slots = torch.tensor(lens, dtype=torch.int32), torch.arange(rows, dtype=torch.int32)
    offsets = torch.arange(0, tokens + 1, new, dtype=torch.int32)
    addresses: list[KvAddress | StateAddress] = []
    for pool in plan.pools:
        if pool.kind == "state":
            addresses.append(StateAddress(slots, slots, torch.zeros(rows, dtype=torch.bool)))
            continue
        width = -(-(max(lens) + 8) // pool.page_size)
        addresses.append(
            KvAddress(
                pool.page_size, kv_lens, torch.full((tokens,), -1), max(lens),
                table=torch.zeros(rows, width, dtype=torch.int32), kv_lens_cpu=kv_lens,
            )
        )  # fmt: skip
    segment = Segment(phase, slice(0, rows), slice(0, tokens), new)
    return AttentionBatch(
        rows, tokens, (segment,), offsets, new, tuple(addresses), query_offsets_cpu=offsets, cpu_exact=exact
    )


def step(router: Router) -> Iterator[str]:
    """One step of every phase of the plan; gives the phases."""
    plan = router.plan
    exact = plan.options.get("host_lengths", "exact") == "exact"
    phases = {(g.group.model, phase) for g in plan.groups for phase in g.phases if g.group.backend_kind != "mm"}
    for model, phase in sorted(phases):
        if phase == "draft":
            topk = int(plan.options.get("speculative_eagle_topk", 1))
            batch = batch_for(plan, phase, [9, 4], 1, exact)
            router.begin_draft(batch, DraftSteps(2, topk, torch.zeros(2, topk, 2, dtype=torch.int64)), model=model)
        elif phase == "prefill":
            for lens in ([4, 4], [9, 4]):  # without a cached prefix and with one
                router.begin(batch_for(plan, phase, lens, 4, exact), model=model)
        else:
            router.begin(
                batch_for(plan, phase, [9, 4], 4 if phase in ("verify", "draft_extend") else 1, exact), model=model
            )
        yield f"{model}.{phase}"


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("model", sorted(path.stem for path in MODELS.glob("*.json")))
def test_every_shipped_plan_binds_and_steps(model: str, flags: str) -> None:
    made = 0
    for platform in PLATFORMS if flags == "plain" else FEWER:
        options = Options.of(
            {"allow_planned": True, "tp_size": 8 if model.endswith(("405b", "r1")) else 1, **FLAGS[flags]}
        )
        try:
            plan = solve_plan(model_of(model), parse_platform(platform), options, shipped(), {})
        except PlanError:
            continue
        assert list(step(bind(plan, shipped())))
        made += 1
    if flags == "plain":
        assert made, "nothing was planned at all"


EXPLICIT = [
    ("deepseek-v3", "cuda:sm100,cuda=13.0", {"attention_backend": "trtllm_mla", "prefill_attention_backend": "fa4"}),
    ("deepseek-v3", "cuda:sm100,cuda=13.0", {"attention_backend": "trtllm_mla", "disable_chunked_prefix_cache": True}),
    ("deepseek-v3", "cuda:sm90,cuda=13.0", {"attention_backend": "flashmla"}),
    (
        "llama-3.1-8b",
        "cuda:sm100,cuda=13.0",
        {"prefill_attention_backend": "fa4", "decode_attention_backend": "trtllm_mha"},
    ),
    ("qwen3-next-80b-a3b", "cuda:sm90,cuda=13.0", {"linear_attn_backend": "triton", "shared_allocation": True}),
    ("qwen2.5-vl-7b", "cuda:sm90,cuda=13.0", {"mm_attention_backend": "triton"}),
]


@pytest.mark.parametrize(("model", "platform", "flags"), EXPLICIT)
def test_what_was_asked_for_binds_and_steps(model: str, platform: str, flags: Any) -> None:
    options = Options.of({"allow_planned": True, **flags})
    plan = solve_plan(model_of(model), parse_platform(platform), options, shipped(), {})
    assert list(step(bind(load_plan(plan.to_json()), shipped())))


@pytest.mark.parametrize(
    "pads", [{"pads": ["head_dims"], "head_dims": [[192, 192]]}, {"pads": ["q_heads"], "q_heads": [64]}]
)
def test_padded_plans_bind_and_step_from_their_json(pads: Any) -> None:
    manifest = limited("wide", **pads)
    plan = solve_plan(mha_model(), parse_platform("cuda:sm90"), Options.of(dtype="float32"), [manifest], tie_order={})
    assert plan.groups[0].phases["decode"].pads
    assert sorted(step(bind(load_plan(plan.to_json()), (manifest,)))) == ["target.decode", "target.prefill"]


# --- what cannot be run is refused by the plan ------------------------------------------------------------------------------


def test_trees_of_a_draft_model_with_states_are_refused() -> None:
    manifests = [toy("a"), toy("g", kind="gdn", features=["spec_topk1", "spec_tree"])]
    whole = hybrid_model()
    flags: dict[str, Any] = {"speculative_algorithm": "EAGLE"}
    place = parse_platform("cuda:sm90")
    chain = solve_plan(whole, place, Options.of(flags), manifests, tie_order={}, draft=whole)
    assert list(step(bind(chain, tuple(manifests))))
    with pytest.raises(PlanError) as caught:
        solve_plan(whole, place, Options.of(flags, speculative_eagle_topk=4), manifests, tie_order={}, draft=whole)
    assert "needs a state of its own" in str(caught.value)
    assert caught.value.suggestions == ("--speculative-eagle-topk 1",)


def test_host_lengths_are_part_of_what_is_planned() -> None:
    table = toy("hosted").to_dict()
    table["variant"][0]["host_lengths"] = "exact"
    manifests = [parse_manifest(table), toy("other", order=[{"rank": 70}])]
    place = parse_platform("cuda:sm90")

    def backend(**flags: Any) -> Plan:
        return solve_plan(mha_model(), place, Options.of(flags), manifests, tie_order={})

    assert backend().groups[0].phases["decode"].backend == "hosted"
    bound = backend(host_lengths="bound")
    assert bound.groups[0].phases["decode"].backend == "other"
    (lost,) = {(r.code, r.asked_by) for item in bound.rejected if item.backend == "hosted" for r in item.reasons}
    assert lost == ("host_lengths", "--host-lengths")
    with pytest.raises(PlanError, match="hosted cannot serve") as caught:
        backend(host_lengths="bound", attention_backend="hosted")
    assert "exact lengths on the host" in str(caught.value)
    assert "--host-lengths exact" in caught.value.suggestions


def test_a_tower_does_not_ask_for_lengths() -> None:
    """Packed images are laid out on the host, whatever the scheduler does."""
    geometry = MhaGeometry(4, 4, 64, 64, 0.125, causal=False)
    tower = LayerGroup("vision", "tower", "vit_full", (0,), geometry, {})
    table = toy("m", kind="mm").to_dict()
    table["variant"][0]["host_lengths"] = "exact"
    model = Model("seeing", "ToyModel", "toy", "bf16", (tower,), 1, max_positions=64)
    options = Options.of(host_lengths="bound")
    assert solve_plan(model, parse_platform("cuda:sm90"), options, [parse_manifest(table)], tie_order={}).ok
