"""What dual chunk attention refuses, what it takes from a model's configuration, and how it calls the library."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_core.errors import BatchError, BindError, PlanError, UsageError
from attn_core.geometry import LayerGroup, MhaGeometry, Model
from attn_core.layers import Rope, Scale
from attn_core.manifest import load_toml, parse_manifests
from attn_core.options import Options
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.testing.batches import build
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.spec import Case, CaseSpec
from attn_flash.dual_chunk import Chunks, DualChunk, as_versions, options_from_config, plain
from attn_flash.dual_chunk.fa3 import over_fa3
from attn_flash.dual_chunk.parts import RangeCall
from attn_flash.operators import Bound

GEOMETRY = MhaGeometry(4, 2, 64, 64, 0.125)
OPTIONS = {"chunk_size": 12, "local_size": 4}
MANIFESTS = parse_manifests(
    load_toml((Path(__file__).parents[1] / "src" / "attn_flash" / "attn_manifest.toml").read_text("utf-8")),
    package="attn-flash",
    version="0",
)
DECLARED = next(manifest for manifest in MANIFESTS if manifest.name == "dual_chunk_flash_attn")


def backend() -> BackendUnderTest:
    return BackendUnderTest(DECLARED, lambda manifest, variant, context: DualChunk(context, plain.attend))


def case_of(keys: int = 20, geometry: MhaGeometry = GEOMETRY, **more) -> Case:
    return build(CaseSpec(geometry, "decode", (1,), (keys,), **more))


def run(case: Case, options=OPTIONS):
    return backend().open(case, options=options).run(case)


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"window": 4}, "sliding window"),
        ({"softcap": 20.0}, "soft cap"),
        ({"sinks": True}, "sinks"),
        ({"chunk": 4}, "chunked-local"),
        ({"causal": False}, "not causal"),
        ({"window_right": 2}, "not causal"),
        ({"v_dim": 32}, "64 and 32"),
    ],
)
def test_other_attention_is_refused_at_creation(changes, word) -> None:
    sinks = (0.0,) * 4 if "sinks" in changes else None
    case = case_of(geometry=replace(GEOMETRY, **changes), sinks=sinks)
    with pytest.raises(BindError, match=word):
        run(case)


def test_sinks_of_a_layer_are_refused() -> None:
    case = case_of(keys=3)
    case.layer.sinks = torch.zeros(4)
    with pytest.raises(BindError, match="sinks"):
        run(case)


def test_scales_of_quantised_caches_change_nothing_in_a_16_bit_one() -> None:
    results = []
    for scale in (None, 0.5):
        case = case_of(keys=8)
        if scale is not None:
            case.layer.k_scale = case.layer.v_scale = Scale(torch.tensor([scale]), scale)
        results.append(backend().open(case, options=OPTIONS).run(case, give_out=False).out)
    assert torch.equal(*results)


def test_one_version_of_the_query_serves_one_chunk_and_no_more() -> None:
    assert run(case_of(keys=8)).out.isfinite().all()
    with pytest.raises(BindError, match=r"a row of 9 keys spans chunks of 8.*one version") as error:
        run(case_of(keys=9))
    assert "inputs.rope" in str(error.value)


def test_the_sizes_must_be_the_model_s_own() -> None:
    case = case_of()
    case.inputs = case.inputs._replace(q=torch.randn(1, 4, 5, 64))
    with pytest.raises(BindError, match="chunk size of this model is not known") as error:
        run(case, {})
    assert "--backend-option dual_chunk_flash_attn.chunk_size" in str(error.value)


@pytest.mark.parametrize("shape", [(1, 4, 4, 64), (1, 4, 5, 32), (1, 20, 64), (1, 2, 5, 64)])
def test_queries_of_other_shapes_are_refused(shape) -> None:
    case = case_of()
    case.inputs = case.inputs._replace(q=torch.randn(shape))
    with pytest.raises(BindError, match="queries of shape"):
        run(case)


def test_versions_and_a_rotary_table_exclude_each_other() -> None:
    case = case_of()
    rope = Rope(torch.zeros(20, 64), torch.zeros(1, dtype=torch.int64), False)
    case.inputs = case.inputs._replace(q=torch.randn(1, 4, 5, 64), rope=rope)
    with pytest.raises(BindError, match="together"):
        run(case)


@pytest.mark.parametrize("shape", [(12, 64), (13, 66), (13, 63)])
def test_a_rotary_table_must_reach_the_chunk_size(shape) -> None:
    case = case_of()
    case.inputs = case.inputs._replace(rope=Rope(torch.zeros(shape), torch.tensor([19]), False))
    with pytest.raises(BindError, match="at least 13 positions"):
        run(case)


@pytest.mark.parametrize("host", ["bound", "none"])
def test_lengths_must_be_known_on_the_host(host) -> None:
    with pytest.raises(BatchError, match="exact lengths on the host"):
        run(case_of(host=host))


def test_trimmed_pools_are_refused() -> None:
    case = case_of()
    for address in case.batch.addresses:
        address.origin = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(BatchError, match="trimmed"):
        run(case)


def test_sizes_that_cannot_be_are_refused() -> None:
    for options in ({"chunk_size": 8, "local_size": 8}, {"chunk_size": 0, "local_size": 0}, {"chunk_size": 512}):
        with pytest.raises(BindError, match="local_size < chunk_size"):
            Chunks.of(options)


def test_sparse_prefill_is_refused_with_the_way_out() -> None:
    with pytest.raises(BindError, match=r"sparse.*not built") as error:
        Chunks.of({"sparse_attention_enabled": True})
    assert "sparse_attention_enabled=false" in str(error.value)


def test_a_width_that_is_no_five_versions_is_refused() -> None:
    with pytest.raises(BindError, match="not 5 versions of 4 heads"):
        as_versions(torch.zeros(2, 3 * 4 * 64), 4)


# --- a model's configuration ----------------------------------------------------------------------------------------------


def test_options_from_the_published_configuration() -> None:
    published = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    for config in (
        {"dual_chunk_attention_config": published},
        type("Config", (), {"dual_chunk_attention_config": published}),
    ):
        options = options_from_config(config)
        assert options == published
        chunks = Chunks.of(options)
        assert (chunks.length, chunks.stated) == (253952, True)
        assert chunks.factor(262144) == 1.0
        assert chunks.factor(524288) == pytest.approx((0.1 * math.log(2) + 1) ** 2)
    assert options_from_config({"dual_chunk_attention_config": {"chunk_size": 4096}})["local_size"] == 1024


def test_configurations_that_cannot_be_served() -> None:
    with pytest.raises(UsageError, match="no dual_chunk_attention_config"):
        options_from_config({"model_type": "qwen2"})
    with pytest.raises(UsageError, match="does not know: stride"):
        options_from_config({"dual_chunk_attention_config": {"stride": 3}})
    sparse = {"dual_chunk_attention_config": {"chunk_size": 4096, "sparse_attention_config": [{"0": {}}]}}
    with pytest.raises(UsageError, match="sparse"):
        options_from_config(sparse)
    assert options_from_config(sparse, dense=True) == {"chunk_size": 4096, "local_size": 1024}


# --- planning -------------------------------------------------------------------------------------------------------------


def model(*features: str) -> Model:
    group = LayerGroup(
        "target", "full", "full", (0, 1), MhaGeometry(28, 4, 128, 128, 0.088), {"attend": "kv"}, features=frozenset(features)
    )  # fmt: skip
    return Model("qwen", "Qwen2ForCausalLM", "qwen2", "bf16", (group,), 2)


def test_only_this_backend_serves_a_model_that_needs_it() -> None:
    platform = parse_platform("cuda:sm90")
    options = Options.of({"allow_planned": True, "backend_options": {"dual_chunk_flash_attn": OPTIONS}})
    phases = solve_plan(model("dual_chunk"), platform, options, MANIFESTS).groups[0].phases
    assert {name: plan.backend for name, plan in phases.items()} == dict.fromkeys(
        ("prefill", "decode"), "dual_chunk_flash_attn"
    )
    assert phases["decode"].parts[0].options == OPTIONS
    plain_plan = solve_plan(model(), platform, options, MANIFESTS)
    assert plain_plan.groups[0].phases["decode"].backend == "fa3"
    with pytest.raises(PlanError, match="dual_chunk is not declared"):
        solve_plan(model("dual_chunk"), platform, options.but(attention_backend="fa3"), MANIFESTS)


def test_unknown_options_are_refused() -> None:
    options = Options.of({"allow_planned": True, "backend_options": {"dual_chunk_flash_attn": {"chunk": 8}}})
    with pytest.raises(UsageError, match="chunk_size"):
        solve_plan(model(), parse_platform("cuda:sm90"), options, MANIFESTS)


# --- the library ------------------------------------------------------------------------------------------------------------

#: Arguments of the library's operator in their order.
FORWARD = (
    "q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
    "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left",
    "window_size_right", "attention_chunk", "softcap", "is_rotary_interleaved", "scheduler_metadata", "num_splits",
    "pack_gqa", "sm_margin", "sinks",
)  # fmt: skip


def library(*arguments):
    """The operator in torch, by its places; refuses what the real one refuses."""
    given = dict(zip(FORWARD, arguments, strict=True))
    offsets, lens, table = given["cu_seqlens_q"], given["seqused_k"], given["page_table"]
    for tensor in (offsets, lens, table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert table.shape[0] == len(lens) == len(offsets) - 1
    assert (given["window_size_left"], given["window_size_right"]) == (-1, -1)
    for name in ("cu_seqlens_k", "kv_batch_idx", "out", "sinks", "k_new"):
        assert given[name] is None
    longest = int(lens.max()) if len(lens) else 0
    call = RangeCall(0, given["is_causal"], offsets, table, lens, given["max_seqlen_q"], longest)
    out, lse = plain.attend(given["q"], given["k"], given["v"], call, given["softmax_scale"])
    return out, lse.t().contiguous(), torch.empty(0), torch.empty(0)


def test_the_library_gets_every_argument_in_its_place() -> None:
    bound = Bound(library, FORWARD, [None] * len(FORWARD), "fwd")
    spec = CaseSpec(GEOMETRY, "prefill", (3, 11), (21, 11), needs_lse=True)
    results = []
    for attend in (plain.attend, over_fa3(bound)):
        case = build(spec)
        versions = torch.randn(14, 4, 5, 64, generator=torch.Generator().manual_seed(1))
        case.inputs = case.inputs._replace(q=versions)
        made = BackendUnderTest(DECLARED, lambda m, v, context, attend=attend: DualChunk(context, attend))
        results.append(made.open(case, options=OPTIONS).run(case, give_out=False))
    assert torch.equal(results[0].out, results[1].out)
    assert torch.equal(results[0].lse, results[1].lse)


def test_a_library_without_an_argument_is_refused() -> None:
    names = [name for name in FORWARD if name != "page_table"]
    with pytest.raises(BindError, match="page_table"):
        over_fa3(Bound(library, names, [None] * len(names), "fwd"))


def test_importing_the_plugin_imports_none_of_it() -> None:
    code = "import sys, attn_flash; assert not {'torch', 'attn_flash.dual_chunk'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
