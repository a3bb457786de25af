"""What the shipped manifests amount to: the published rules as tables, one row a rule, planned backends allowed.

`DEFAULT` is the model of a row that names none. A row of `REFUSED` quotes what the error must say.
"""

from __future__ import annotations

from typing import Any

import pytest

from attn_core.errors import AttnError, PlanError
from attn_core.options import Options
from attn_core.plan import Plan
from attn_core.planner import solve_plan
from attn_core.planner.routes import warmup_routes
from attn_core.platform import parse_platform
from shipped import MODELS, model_of, shipped

DEFAULT = "llama-3.1-8b"
SMS = (75, 80, 86, 89, 90, 100, 103, 110, 120, 121)


def plan(model: str = DEFAULT, platform: str = "sm90", draft: str = "", **options: Any) -> Plan:
    place = f"cuda:{platform},cuda=13.0" if platform.startswith("sm") and "," not in platform else platform
    chosen = Options.of({"allow_planned": True, **options})
    return solve_plan(
        model_of(model), parse_platform(place), chosen, shipped(), {}, draft=model_of(draft) if draft else None
    )


def served(found: Plan, group: str = "", model: str = "target") -> dict[str, str]:
    """phase -> backend of one group (default: the first one that is served)."""
    plans = [g for g in found.groups if g.group.model == model and g.phases and group in ("", g.group.name)]
    return {phase: p.backend for phase, p in plans[0].phases.items()}


def both(name: str) -> dict[str, str]:
    return {"prefill": name, "decode": name}


# --- automatic choice (§8) ------------------------------------------------------------------------------------------------

SPEC = {"speculative_algorithm": "EAGLE"}
TREE = {**SPEC, "speculative_eagle_topk": 4}
AUTO = [
    # MHA
    (DEFAULT, "sm90", {}, both("fa3")),
    (DEFAULT, "cuda:sm90,cuda=12.2", {}, both("flashinfer")),
    (DEFAULT, "sm90", SPEC, {**both("fa3"), "verify": "fa3"}),
    (DEFAULT, "sm90", TREE, {**both("flashinfer"), "verify": "flashinfer"}),
    (DEFAULT, "sm100", {}, both("trtllm_mha")),
    (DEFAULT, "sm103", {}, both("trtllm_mha")),
    (DEFAULT, "sm100", SPEC, {**both("trtllm_mha"), "verify": "trtllm_mha"}),
    (DEFAULT, "sm100", TREE, {**both("flashinfer"), "verify": "flashinfer"}),
    ("mimo-v2-flash", "sm100", {}, both("fa4")),
    (DEFAULT, "rocm:gfx942", {}, both("aiter")),
    (DEFAULT, "rocm:gfx950", {}, both("aiter")),
    (DEFAULT, "rocm:gfx1100", {}, both("triton")),
    (DEFAULT, "sm80", {}, both("flashinfer")),
    (DEFAULT, "sm89", {}, both("flashinfer")),
    (DEFAULT, "sm120", {}, both("flashinfer")),
    (DEFAULT, "cpu", {}, both("torch_native")),
    (DEFAULT, "cpu:amx", {}, both("intel_amx")),
    (DEFAULT, "npu:a2", {}, both("ascend")),
    (DEFAULT, "xpu", {}, both("intel_xpu")),
    # sinks
    ("gpt-oss-20b", "sm80", {}, both("triton")),
    ("gpt-oss-20b", "sm89", {}, both("triton")),
    ("gpt-oss-20b", "sm90", {}, both("fa3")),
    ("gpt-oss-20b", "sm100", {}, both("trtllm_mha")),
    ("gpt-oss-20b", "sm120", {}, both("triton")),
    # MLA
    ("deepseek-v3", "sm90", {}, both("fa3")),
    ("deepseek-v3", "sm100", {}, both("flashinfer")),
    ("deepseek-v3", "sm120", {}, both("triton")),
    ("deepseek-v3", "rocm:gfx942", {}, both("aiter")),
    ("deepseek-v3", "rocm:gfx942", {"tp_size": 8}, both("aiter")),
    ("deepseek-v3", "rocm:gfx942", {"tp_size": 4}, both("triton")),
    ("deepseek-v3", "npu:a2", {}, both("ascend")),
    # encoder-decoder
    ("whisper-large-v3", "sm90", {}, both("flashinfer")),
    # dtypes
    (DEFAULT, "sm90", {"kv_cache_dtype": "fp8_e5m2"}, both("triton")),
    (DEFAULT, "sm80", {"dtype": "float32"}, both("triton")),
    # deterministic
    (DEFAULT, "sm90", {"deterministic": True}, both("fa3")),
    (DEFAULT, "sm100", {"deterministic": True}, both("flashinfer")),
    (DEFAULT, "sm120", {"deterministic": True}, both("flashinfer")),
    ("deepseek-v3", "sm100", {"deterministic": True}, both("triton")),
    ("deepseek-v3", "sm90", {"deterministic": True}, both("fa3")),
]


@pytest.mark.parametrize(("model", "platform", "options", "expected"), AUTO, ids=lambda value: str(value)[:48])
def test_automatic_choice(model: str, platform: str, options: dict, expected: dict) -> None:
    assert served(plan(model, platform, **options)) == expected


def test_old_gpus_have_a_plan_in_float16() -> None:
    """C10: nothing but a portable backend serves sm75."""
    assert set(served(plan(DEFAULT, "sm75", dtype="float16")).values()) <= {"triton", "torch_native"}


def test_deterministic_inference_has_the_published_set() -> None:
    """§8: {ascend, fa3, fa4, flashinfer, intel_xpu, triton} of the backends for accelerators."""
    able = set()
    for place in (*(f"sm{n}" for n in SMS), "rocm:gfx942", "npu:a2", "xpu"):
        for manifest in shipped():
            if manifest.kind == "mha":
                try:
                    plan(platform=place, dtype="float16", deterministic=True, attention_backend=manifest.name)
                    able.add(manifest.name)
                except PlanError:
                    continue
    assert able - {"torch_native", "flex_attention"} == {"ascend", "fa3", "fa4", "flashinfer", "intel_xpu", "triton"}


# --- explicit backend x architecture: the golden table ---------------------------------------------------------------------

FLASHINFER = {80, 86, 89, 90, 100, 103, 110, 120, 121}
GOLDEN = {
    ("mha", "fa3"): {90},
    ("mha", "fa4"): {90, 100, 103},
    ("mha", "flashinfer"): FLASHINFER,
    ("mha", "trtllm_mha"): set(),  # prefill on sm90 and sm12x is bf16 only; the row below
    ("mha", "triton"): FLASHINFER,
    ("mha", "hpc_ops"): set(),  # bf16 only; the row below
    ("mha", "aiter"): set(),
    ("mha", "wave"): set(),
    ("mha", "ascend"): set(),
    ("mha", "intel_xpu"): set(),
    ("mha", "intel_amx"): set(),
    ("mla", "fa3"): {90},
    ("mla", "fa4"): {100, 103},
    ("mla", "flashmla"): {90},
    ("mla", "cutlass_mla"): {100, 103},
    ("mla", "trtllm_mla"): set(),  # bf16 only
    ("mla", "cutedsl_mla"): set(),  # its prefill companion is bf16 only
    ("mla", "flashinfer"): {80, 86, 89, 90, 100, 103, 120, 121},
    ("mla", "triton"): FLASHINFER,
}
IN_BF16 = {
    ("mha", "hpc_ops"): {90},
    ("mha", "trtllm_mha"): {90, 100, 103, 120, 121},
    ("mla", "trtllm_mla"): {100, 103},
    ("mla", "cutedsl_mla"): {100, 103},
}


@pytest.mark.parametrize(("kind", "name"), GOLDEN, ids=str)
@pytest.mark.parametrize("sm", SMS[1:])
def test_an_explicit_backend_is_kept_or_refused(kind: str, name: str, sm: int) -> None:
    """C117, C124: (explicit backend x sm) rows; raising one minimum must not remove another GPU."""
    model, options = {"mha": DEFAULT, "mla": "deepseek-v3"}[kind], {"dtype": "float16"}
    expected = GOLDEN[kind, name]
    if (kind, name) in IN_BF16 and sm >= 80:
        options, expected = {}, IN_BF16[kind, name]
    if sm in expected:
        assert served(plan(model, f"sm{sm}", attention_backend=name, **options))["decode"] == name
    else:
        with pytest.raises(AttnError, match=name):
            plan(model, f"sm{sm}", attention_backend=name, **options)


# --- pages (§3) -------------------------------------------------------------------------------------------------------------

PAGES = [
    ("deepseek-v3", "sm90", "flashmla", 64),
    ("deepseek-v3", "sm100", "cutlass_mla", 128),
    ("deepseek-v3", "sm100", "trtllm_mla", 64),
    ("deepseek-v3", "sm100", "cutedsl_mla", 64),
    ("deepseek-v3", "sm100", "flashinfer", 1),
    ("deepseek-v3", "npu:a2", "ascend", 128),
    (DEFAULT, "sm100", "trtllm_mha", 64),
    (DEFAULT, "sm100", "fa4", 128),
    (DEFAULT, "sm90", "hpc_ops", 64),
    (DEFAULT, "npu:a2", "ascend", 128),
    (DEFAULT, "xpu", "intel_xpu", 64),
    (DEFAULT, "sm90", "fa3", 1),
]


@pytest.mark.parametrize(("model", "platform", "backend", "page"), PAGES, ids=str)
def test_the_page_size_follows_the_backend_and_says_so(model: str, platform: str, backend: str, page: int) -> None:
    found = plan(model, platform, attention_backend=backend)
    assert found.page_size == page
    changed = {a.field: (a.after, a.by) for a in found.adjustments}
    assert ("page_size" in changed) is (page != 1)
    if page != 1:
        assert changed["page_size"][0] == page
        assert backend in changed["page_size"][1]


FIXED = [
    ("deepseek-v3", "sm90", "flashmla", (1, 16, 32, 128), 64),
    ("deepseek-v3", "sm100", "cutlass_mla", (1, 64, 256), 128),
    ("deepseek-v3", "sm100", "trtllm_mla", (1, 16, 128), 32),
    ("deepseek-v3", "sm100", "cutedsl_mla", (1, 16, 128), 32),
    (DEFAULT, "sm100", "trtllm_mha", (1, 8, 256), 16),
    (DEFAULT, "sm90", "hpc_ops", (1, 16, 128), 64),
    (DEFAULT, "npu:a2", "ascend", (1, 64), 128),
    (DEFAULT, "xpu", "intel_xpu", (1, 16, 32), 64),
]


@pytest.mark.parametrize(("model", "platform", "backend", "refused", "kept"), FIXED, ids=str)
def test_a_fixed_page_is_neither_reduced_nor_emulated(
    model: str, platform: str, backend: str, refused: tuple[int, ...], kept: int
) -> None:
    for page in refused:
        with pytest.raises(PlanError, match="page"):
            plan(model, platform, attention_backend=backend, page_size=page)
    assert plan(model, platform, attention_backend=backend, page_size=kept).page_size == kept


def test_slots_are_emulated_for_every_page() -> None:
    found = plan("deepseek-v3", "sm100", attention_backend="flashinfer", page_size=16)
    assert (found.page_size, found.group("mla").phases["decode"].kernel_page_size) == (16, 1)


def test_intel_xpu_takes_smaller_pages_for_latent_decode() -> None:
    assert plan("deepseek-v2-lite", "xpu", attention_backend="intel_xpu", page_size=32).page_size == 32


# --- who is refused, and what the error says --------------------------------------------------------------------------------

REFUSED = [
    # fa3 and types
    (DEFAULT, "sm90", {"attention_backend": "fa3", "kv_cache_dtype": "fp8_e5m2"}, ["fp8_e4m3", "fp8_e5m2"]),
    (DEFAULT, "sm90", {"attention_backend": "fa3", "dtype": "float32"}, ["float32"]),
    # KV4
    (DEFAULT, "sm100", {"attention_backend": "fa4", "kv_cache_dtype": "fp4"}, ["fa4", "FP4", "--decode-attention-backend"]),
    (DEFAULT, "sm100", {"prefill_attention_backend": "fa4", "decode_attention_backend": "trtllm_mha",
                        "kv_cache_dtype": "fp4"}, ["trtllm_mha"]),
    # latent types
    ("deepseek-v3", "sm100", {"attention_backend": "trtllm_mla", "kv_cache_dtype": "fp8_e5m2"}, ["fp8_e5m2"]),
    ("deepseek-v3", "sm90", {"attention_backend": "trtllm_mla"}, ["sm100", "sm90"]),
    ("deepseek-v3", "sm100", {"attention_backend": "cutedsl_mla", "kv_cache_dtype": "fp4"}, ["fp8_e4m3"]),
    ("deepseek-v3", "sm100", {"attention_backend": "tokenspeed_mla"}, ["requires an fp8_e4m3 cache"]),
    ("deepseek-v3", "sm90", {"attention_backend": "tokenspeed_mla", "kv_cache_dtype": "fp8_e4m3"}, ["sm100"]),
    # speculation
    (DEFAULT, "sm100", {"attention_backend": "trtllm_mha", **TREE}, ["--speculative-eagle-topk 1"]),
    (DEFAULT, "sm90", {"attention_backend": "fa3", "page_size": 16, **TREE}, ["topk", "page"]),
    (DEFAULT, "sm90", {"attention_backend": "fa4", "page_size": 128, **TREE}, ["topk", "page"]),
    (DEFAULT, "rocm:gfx942", {"attention_backend": "aiter", "page_size": 16, **TREE}, ["page"]),
    ("deepseek-v3", "sm90", {"attention_backend": "fa3", "page_size": 16, **TREE}, ["page"]),
    ("deepseek-v3", "sm90", {"attention_backend": "flashmla", **TREE}, ["spec_tree"]),
    # hybrid linear models
    ("qwen3-next-80b-a3b", "sm120", {"attention_backend": "trtllm_mha"}, ["SM120", "decode only"]),
    ("qwen3-next-80b-a3b", "npu:a2", {"attention_backend": "triton"}, ["a2"]),
    # wrong numbers
    ("qwen3-next-80b-a3b", "sm100", {"attention_backend": "trtllm_mha", "page_size": 16}, ["wrong numbers", "--page-size 32"]),
    # Gemma 4
    ("gemma-4-26b-a4b", "rocm:gfx942", {"attention_backend": "aiter", "kv_cache_dtype": "fp8_e4m3"}, ["Gemma 4", "auto"]),
    # sparse attention
    ("deepseek-v3.2", "sm90", {"dsa_decode_backend": "flashmla_auto"}, ["prefill only"]),
    ("deepseek-v3.2", "sm90", {"dsa_decode_backend": "flashmla_sparse_q8"}, ["prefill only"]),
    ("deepseek-v3.2", "sm90", {"dsa_prefill_backend": "flashmla_sparse_q8"}, ["fp8_e4m3"]),
    ("deepseek-v3.2", "sm90", {"dsa_decode_backend": "trtllm"}, ["sm100"]),
    ("deepseek-v3.2", "sm90", {"dsa_decode_backend": "fa3", "kv_cache_dtype": "fp8_e4m3"}, ["bf16"]),
    # hardware
    (DEFAULT, "sm75", {}, ["bfloat16", "sm75", "float16"]),
    (DEFAULT, "cpu", {"attention_backend": "intel_amx"}, ["AMX", "torch_native"]),
    (DEFAULT, "rocm:gfx1100", {"attention_backend": "aiter"}, ["gfx942", "gfx1100"]),
    # heads
    ("deepseek-v3", "sm90", {"tp_size": 3}, ["128 query heads", "--tp-size"]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "platform", "options", "words"), REFUSED, ids=lambda value: str(value)[:48])
def test_refusals_say_why_and_what_helps(model: str, platform: str, options: dict, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(model, platform, **options)
    text = "\n".join([str(caught.value), *caught.value.suggestions])
    for word in words:
        assert word in text, text


def test_paged_trees_are_served_by_one_accelerator_backend_only() -> None:
    """§7: page_size > 1 and topk > 1 is flashinfer's, whatever the GPU."""
    able = set()
    for place in ("sm80", "sm90", "sm100", "sm120", "rocm:gfx942", "npu:a2", "xpu"):
        for manifest in shipped():
            if manifest.kind == "mha" and manifest.package != "attn-torch":
                try:
                    plan(platform=place, attention_backend=manifest.name, page_size=64, **TREE)
                    able.add(manifest.name)
                except PlanError:
                    continue
    assert able - {"triton"} == {"flashinfer"}  # our Triton kernel reads pages and trees in one pass


# --- hybrid split, speculation (§7) -------------------------------------------------------------------------------------------


def test_deepseek_r1_with_fa4_prefill_and_trtllm_mla_decode() -> None:
    found = plan("deepseek-v3", "sm100", attention_backend="trtllm_mla", prefill_attention_backend="fa4")
    phases = found.group("mla").phases
    assert served(found) == {"prefill": "fa4", "decode": "trtllm_mla"}
    assert (phases["prefill"].form, phases["prefill"].needs_lse, phases["decode"].form) == ("ragged", True, "absorbed")
    assert found.page_size in (32, 64)


@pytest.mark.parametrize(("mode", "who"), [("prefill", "flashinfer"), ("decode", "trtllm_mha")])
def test_the_speculative_attention_mode_decides_who_verifies(mode: str, who: str) -> None:
    names = {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "trtllm_mha"}
    found = plan(DEFAULT, "sm100", **names, **SPEC, speculative_attention_mode=mode)
    assert served(found)["verify"] == who


def test_cutedsl_leaves_prefill_to_its_companion_unless_one_is_named() -> None:
    found = plan("deepseek-v3", "sm100", attention_backend="cutedsl_mla")
    assert served(found) == {"prefill": "trtllm_mla", "decode": "cutedsl_mla"}
    change = next(a for a in found.adjustments if a.field == "mla.prefill")
    assert (change.before, change.after) == ("cutedsl_mla", "trtllm_mla")
    named = plan("deepseek-v3", "sm100", attention_backend="cutedsl_mla", prefill_attention_backend="triton")
    assert served(named)["prefill"] == "triton"


def test_an_fp4_cache_beside_fa4_prefill() -> None:
    found = plan(
        DEFAULT, "sm100", prefill_attention_backend="fa4", decode_attention_backend="triton", kv_cache_dtype="fp4"
    )
    assert served(found) == {"prefill": "fa4", "decode": "triton"}
    assert found.pools[0].format == "fp4_block16"


def test_fa3_latent_trees_at_page_one() -> None:
    found = plan("deepseek-v3", "sm90", attention_backend="fa3", **TREE)
    assert (found.page_size, served(found)["verify"]) == (1, "fa3")


# --- gated delta networks (§4) -------------------------------------------------------------------------------------------------

BF16 = {"mamba_ssm_dtype": "bfloat16"}
LINEAR = [
    ("sm100", BF16, {"prefill": "flashinfer", "decode": "triton"}),
    ("sm103", BF16, {"prefill": "flashinfer", "decode": "triton"}),
    ("sm90", BF16, both("triton")),
    ("cuda:sm100,cuda=12.9", BF16, both("triton")),
    ("sm100", {"mamba_ssm_dtype": "float32"}, both("triton")),
    ("sm100", {**BF16, "chunked_prefill_size": 16384}, both("triton")),
    ("sm100", {**BF16, "chunked_prefill_size": -1}, both("triton")),
    ("sm100", {**BF16, "dynamic_chunking": True}, both("triton")),
    ("sm100", {**BF16, "page_major": True}, both("triton")),
    ("sm100", {**BF16, "linear_attn_decode_backend": "cutedsl"}, {"prefill": "triton", "decode": "cutedsl"}),
    ("sm100", {**BF16, "linear_attn_backend": "triton"}, both("triton")),
    ("sm100", {**BF16, "linear_attn_backend": "cutedsl"}, {"prefill": "triton", "decode": "cutedsl"}),
    ("rocm:gfx942", {}, both("triton")),
    ("npu:a2", {}, both("triton")),
    ("cpu", {}, both("triton")),
]


@pytest.mark.parametrize(("platform", "options", "expected"), LINEAR, ids=lambda value: str(value)[:48])
def test_linear_layers(platform: str, options: dict, expected: dict) -> None:
    assert served(plan("qwen3-next-80b-a3b", platform, **options), "linear") == expected


FULL_OF_HYBRIDS = [
    ("sm90", {}, both("fa3")),
    ("sm100", {}, both("trtllm_mha")),
    ("sm120", {}, both("flashinfer")),
    ("sm120", {"decode_attention_backend": "trtllm_mha"}, {"prefill": "flashinfer", "decode": "trtllm_mha"}),
    ("rocm:gfx942", {}, both("triton")),
    ("npu:a2", {}, both("ascend")),
    ("cpu", {}, both("torch_native")),
]


@pytest.mark.parametrize(("platform", "options", "expected"), FULL_OF_HYBRIDS, ids=lambda value: str(value)[:48])
def test_full_layers_of_hybrid_models(platform: str, options: dict, expected: dict) -> None:
    assert served(plan("qwen3-next-80b-a3b", platform, **options), "full") == expected


def test_linear_chains_are_verified_by_flashinfer_and_trees_by_triton() -> None:
    named = {**BF16, "linear_attn_backend": "flashinfer"}
    chain = plan("qwen3-next-80b-a3b", "sm100", **named, **SPEC)
    assert served(chain, "linear")["verify"] == "flashinfer"
    tree = plan("qwen3-next-80b-a3b", "sm100", **named, **TREE)
    assert served(tree, "linear") == {"prefill": "flashinfer", "decode": "flashinfer", "verify": "triton"}
    assert any(a.field == "linear.verify" and a.by == "flashinfer" for a in tree.adjustments)
    state = next(pool for pool in tree.pools if pool.kind == "state")
    assert (state.verify_state, state.states_per_row) == ("intermediate", 5)


# --- sparse attention (§5) -----------------------------------------------------------------------------------------------------

SPARSE = [
    ("sm90", "bfloat16", "flashmla_sparse", "fa3", "mla_plain"),
    ("sm90", "fp8_e4m3", "flashmla_kv", "flashmla_kv", "flashmla_656"),
    ("sm100", "bfloat16", "flashmla_sparse", "trtllm", "mla_plain"),
    ("sm100", "fp8_e4m3", "trtllm", "trtllm", "mla_plain_fp8"),
    ("rocm:gfx942", "bfloat16", "tilelang", "tilelang", "mla_plain"),
    ("rocm:gfx950", "fp8_e4m3", "tilelang", "tilelang", "mla_plain_fp8"),
]


@pytest.mark.parametrize(("platform", "kv", "prefill", "decode", "layout"), SPARSE, ids=str)
def test_sparse_attention(platform: str, kv: str, prefill: str, decode: str, layout: str) -> None:
    found = plan("deepseek-v3.2", platform, kv_cache_dtype=kv)
    assert served(found) == {"prefill": prefill, "decode": decode}
    latent, index = found.pools
    assert (latent.format, latent.page_size, index.format, index.page_size) == (layout, 64, "index_132_planar", 64)
    assert all({part.role for part in p.parts} == {"sparse", "index"} for _, _, p in found.phase_plans())


@pytest.mark.parametrize("prefill", ["flashmla_sparse", "flashmla_auto", "fa3"])
def test_sparse_verify_belongs_to_decode(prefill: str) -> None:
    """A prefill-only member does not break speculation: verify rows are single queries."""
    found = plan("deepseek-v3.2", "sm90", dsa_prefill_backend=prefill, **SPEC)
    assert served(found) == {"prefill": prefill, "decode": "fa3", "verify": "fa3"}


@pytest.mark.parametrize("name", ["dsa", "nsa"])
def test_the_family_name_asks_for_any_member(name: str) -> None:
    found = plan("deepseek-v3.2", "sm90", attention_backend=name)
    assert served(found) == {"prefill": "flashmla_sparse", "decode": "fa3"}
    assert any("deprecated" in warning for warning in found.warnings) is (name == "nsa")


def test_a_deprecated_backend_name_is_kept_with_a_warning() -> None:
    found = plan("deepseek-v3", "sm100", attention_backend="tokenspeed_mla", kv_cache_dtype="fp8_e4m3")
    assert any("tokenspeed_mla" in warning and "alias" in warning for warning in found.warnings)


# --- Gemma 4 on aiter (§6) -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_gemma_4_is_served_by_aiter(arch: str) -> None:
    found = plan("gemma-4-26b-a4b", f"rocm:{arch}", attention_backend="aiter")
    for group in ("full", "sliding"):
        for phase in ("prefill", "decode"):
            path = found.group(group).phases[phase]
            assert (path.backend, path.variant) == ("aiter", "unified")


def test_models_without_windows_keep_the_ck_path() -> None:
    assert plan(DEFAULT, "rocm:gfx942").group("full").phases["prefill"].variant == "ck"


# --- vision towers, encoders ----------------------------------------------------------------------------------------------------

VISION = [
    ("sm90", "fa3"),
    ("sm100", "fa4"),
    ("sm103", "triton"),
    ("sm80", "triton"),
    ("rocm:gfx942", "aiter"),
    ("npu:a2", "ascend"),
]


@pytest.mark.parametrize(("platform", "expected"), VISION)
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "auto"}])
def test_vision_towers_have_backends_of_their_own(platform: str, expected: str, options: dict) -> None:
    found = plan("qwen2.5-vl-7b", platform, **options)
    assert served(found, model="vision") == {"prefill": expected}


def test_the_cache_type_is_nothing_to_a_vision_tower() -> None:
    found = plan("qwen2.5-vl-7b", "sm90", kv_cache_dtype="fp8_e4m3")
    assert served(found, model="vision") == {"prefill": "fa3"}


def test_the_mm_backend_is_a_flag_of_its_own() -> None:
    found = plan("qwen2.5-vl-7b", "sm90", mm_attention_backend="triton", attention_backend="fa3")
    assert served(found, model="vision")["prefill"] == "triton"
    assert served(found)["prefill"] == "fa3"
    with pytest.raises(PlanError, match="trtllm_mha"):
        plan("qwen2.5-vl-7b", "sm100", mm_attention_backend="trtllm_mha")


# --- forms, routes, workspaces --------------------------------------------------------------------------------------------------


def test_without_chunked_prefix_the_absorbed_form_serves_prefixes() -> None:
    found = plan("deepseek-v3", "sm100", attention_backend="trtllm_mla", disable_chunked_prefix_cache=True)
    prefill = found.group("mla").phases["prefill"]
    assert (prefill.form, [part.role for part in prefill.parts]) == ("by_length(0)", ["ragged", "absorbed"])
    routes = {route.name: (route.by.variant, route.form) for route in warmup_routes(found)}
    assert routes["extend_no_prefix"] == ("ragged", "ragged")
    assert routes["extend_prefix"] == ("trtllm-gen", "absorbed")
    without = plan("deepseek-v3", "sm100", attention_backend="trtllm_mla", disable_prefix_cache=True)
    assert "extend_prefix" not in {route.name for route in warmup_routes(without)}


def test_workspaces_are_in_the_plan() -> None:
    plain = plan(DEFAULT, "sm100", attention_backend="flashinfer")
    sure = plan(DEFAULT, "sm100", attention_backend="flashinfer", deterministic=True)
    assert plain.limits["workspace_bytes"] >= 128 << 20
    assert sure.limits["workspace_bytes"] >= 2 << 30
    assert {item["variant"] for item in plain.limits["workspaces"]} == {"fa2"}


def test_a_pool_must_stay_in_a_kernels_address_range() -> None:
    with pytest.raises(PlanError, match="pool_elements"):
        plan(DEFAULT, "npu:a2", num_pages=20000, page_size=128, attention_backend="ascend")
    assert plan(DEFAULT, "npu:a2", num_pages=1000, page_size=128, attention_backend="ascend").ok


def test_every_model_has_a_plan_or_a_reason_everywhere() -> None:
    """Whatever is asked, the answer is a plan or a PlanError with suggestions or reasons, never anything else."""
    for path in sorted(MODELS.glob("*.json")):
        for place in ("sm80", "sm90", "sm100", "sm120", "rocm:gfx942", "npu:a2", "xpu", "cpu"):
            try:
                plan(path.stem, place)
            except PlanError as error:
                silent = not (error.rejected or error.facts)
                if silent:
                    pytest.fail(f"{path.stem} on {place}: {error}")


# --- further spot checks ----------------------------------------------------------------------------------------------------------


def test_fa3_decode_and_the_hierarchical_cache() -> None:
    assert served(plan(DEFAULT, "sm90", hicache=True)) == {"prefill": "fa3", "decode": "flashinfer"}
    with pytest.raises(PlanError, match="hicache"):
        plan(DEFAULT, "sm90", hicache=True, attention_backend="fa3")
    assert served(plan(DEFAULT, "rocm:gfx942", hicache=True, attention_backend="aiter")) == both("aiter")


def test_query_types_are_those_of_the_path() -> None:
    """XQA reads an fp8 cache with 16-bit queries, FMHA v2 with fp8 queries: triples of one backend's variants."""
    phases = plan(DEFAULT, "sm90", attention_backend="trtllm_mha", kv_cache_dtype="fp8_e4m3").group("full").phases
    assert {phase: (p.variant, p.q_dtype) for phase, p in phases.items()} == {
        "prefill": ("fmha_v2", "fp8_e4m3"),
        "decode": ("xqa", "bf16"),
    }


def test_fp8_caches_on_hopper_take_a_named_path() -> None:
    phases = plan(DEFAULT, "sm90", attention_backend="flashinfer", kv_cache_dtype="fp8_e4m3").group("full").phases
    assert {p.variant for p in phases.values()} == {"fa2"}


def test_preference_exclusion_and_maps() -> None:
    assert served(plan(DEFAULT, "sm90", prefer_backends="triton")) == both("triton")
    assert served(plan(DEFAULT, "sm90", exclude_backends="fa3")) == both("flashinfer")
    found = plan("gemma-3-27b", "sm90", attention_backend="full=triton,sliding=fa3")
    assert (served(found, "full"), served(found, "sliding")) == (both("triton"), both("fa3"))
