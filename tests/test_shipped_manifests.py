"""The manifests of the packages in this repository: their form, the support tables they amount to, and their rules."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest

from attn_core.manifest import Manifest, Row, load_toml, parse_manifest, parse_manifests
from attn_core.matrix import compare_matrix, published_cells, published_matrix, support_matrix

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path for path in (ROOT / "plugins").iterdir() if (path / "pyproject.toml").exists())
FILES = sorted(ROOT.glob("plugins/*/src/*/attn_manifest.toml"))


@lru_cache(maxsize=1)
def shipped() -> dict[str, Manifest]:
    """All manifests by kind/name."""
    found: dict[str, Manifest] = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        package = path.relative_to(ROOT).parts[1]
        for manifest in parse_manifests(load_toml(text), package=package, version="0.1.0", where=str(path)):
            assert manifest.id not in found, f"{manifest.id} is declared by {package} and {found[manifest.id].package}"
            found[manifest.id] = manifest
    return found


def read(path: Path) -> dict:
    return load_toml(path.read_text(encoding="utf-8"), path.name)


# --- form -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_manifest_survives_json(path):
    for manifest in parse_manifests(read(path), package=path.parent.name, version="0.1.0"):
        again = parse_manifest(json.loads(json.dumps(manifest.to_dict())))
        assert again == manifest
        assert again.to_dict() == manifest.to_dict()


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda path: path.name)
def test_package_is_a_plugin_of_its_own(folder):
    project = read(folder / "pyproject.toml")["project"]
    module = folder.name.replace("-", "_")
    assert project["name"] == folder.name
    assert list(project["entry-points"]["attn.backends"].values()) == [module]
    ours = {read(other / "pyproject.toml")["project"]["name"] for other in PLUGINS}
    depends = {text.split(">")[0].split("<")[0].split("=")[0].strip() for text in project["dependencies"]}
    assert "attn-core" in depends
    assert not depends & ours, "a plugin depends on attn-core and on no other plugin"


@pytest.mark.parametrize(
    "folder", [folder for folder in PLUGINS if list(folder.glob("src/*/attn_manifest.toml"))], ids=str
)
def test_package_has_its_papers(folder):
    module = folder / "src" / folder.name.replace("-", "_")
    for path in (folder / "README.md", folder / "CHANGELOG.md", module / "__init__.py", module / "py.typed"):
        assert path.exists(), path


def all_rows(manifest: Manifest) -> list[tuple[str, Row]]:
    rows = [
        (name, row) for variant in manifest.variants for name in ("allow", "deny") for row in getattr(variant, name)
    ]
    return [*rows, *(("order", row) for row in manifest.order)]


def test_every_refusal_has_a_code_and_a_sentence():
    for manifest in shipped().values():
        for name, row in all_rows(manifest):
            if name == "deny":
                assert row.code != "denied", f"{manifest.id}: {row.reason}"
                assert not row.reason.endswith("."), f"{manifest.id}: {row.reason}"


def test_names_in_rows_are_known():
    traits = {
        "hybrid_linear",
        "mixed_head_dims",
        "shared_kv",
        "swa_pools",
        "encoder_decoder",
        "mla",
        "sinks",
        "mm_spans",
    }
    for manifest in shipped().values():
        for _, row in all_rows(manifest):
            for condition in row.conditions:
                if condition.axis == "vendor":
                    assert set(listed(condition.value)) <= {"nvidia", "amd", "ascend", "intel", "cpu"}, manifest.id
                if condition.axis == "traits":
                    assert set(listed(condition.value)) <= traits, manifest.id


def listed(value: object) -> list[str]:
    """Every name in a frozen condition, whatever its form."""
    if isinstance(value, str):
        return [] if value == "not" else [value]
    return [name for item in value for name in listed(item)]


def test_backends_named_in_rows_exist():
    names = {manifest.name for manifest in shipped().values()}
    for manifest in shipped().values():
        for row in manifest.companions:
            assert f"{manifest.kind}/{row.backend}" in shipped(), f"{manifest.id} names {row.backend} as a companion"
        for _, row in all_rows(manifest):
            for condition in row.conditions:
                if condition.axis.startswith("peer."):
                    assert set(listed(condition.value)) <= names


# --- the directory ----------------------------------------------------------------------------------------------------------


def test_directory_and_manifests_agree():
    directory = read(ROOT / "core" / "src" / "attn_core" / "directory.toml")
    for name, entry in directory["backends"].items():
        assert entry["distribution"] == next(iter(entry["kinds"].values()))
        for kind, distribution in entry["kinds"].items():
            assert (ROOT / "plugins" / distribution / "pyproject.toml").exists(), distribution
            if list(ROOT.glob(f"plugins/{distribution}/src/*/attn_manifest.toml")):
                assert shipped()[f"{kind}/{name}"].package == distribution
    for manifest in shipped().values():
        entry = directory["backends"].get(manifest.name, {"kinds": {}})
        assert manifest.kind in entry["kinds"], f"{manifest.id} is not in directory.toml"
    for kind, names in directory["order"].items():
        known = {name for name, entry in directory["backends"].items() if kind in entry["kinds"]}
        assert set(names) <= known


# --- the support tables ---------------------------------------------------------------------------------------------------


def test_every_published_cell_comes_out_or_is_explained():
    published = published_matrix()
    explained = {
        (item["kind"], item["row"], item["column"]): item
        for item in read(ROOT / "docs" / "matrix-differences.toml").get("difference", [])
    }
    waiting = set() if "mha/torch_native" in shipped() else {"torch_native", "flex_attention"}
    differences = {
        (item.kind, item.row, item.column): item
        for item in compare_matrix(published, support_matrix(shipped().values()))
        if item.row not in waiting
    }
    assert len(list(published_cells(published))) == 192
    assert set(differences) - set(explained) == set(), "differences that docs/matrix-differences.toml does not explain"
    assert set(explained) - set(differences) == set(), "explanations of differences that are gone"
    for place, item in differences.items():
        note = explained[place]
        assert (note["published"], note["ours"], note["verdict"]) == (item.published, item.ours, item.verdict)
        assert item.verdict == "better"
        assert len(note["why"].split()) > 5


def test_published_defaults_of_sparse_attention_have_the_best_rank():
    hardware = {"hopper": "sm90", "blackwell": "sm100"}
    for case, phases in published_matrix()["dsa"]["defaults"].items():
        family, _, dtype = case.partition("/")
        where = (
            {"arch": hardware[family], "vendor": "nvidia"}
            if family in hardware
            else {"arch": "gfx950", "vendor": "amd"}
        )
        for phase, expected in phases.items():
            request = {**where, "phase": phase, "format.dtype": dtype or "bf16"}
            assert best("dsa", request, role="sparse") == expected, (case, phase)


# --- rules ------------------------------------------------------------------------------------------------------------------


def holds(row: Row, request: dict, unknown: bool) -> bool:
    return all(condition.holds(request, unknown=unknown) for condition in row.conditions)


def grants(backend: str, request: dict, *features: str) -> list[str]:
    """The variants of a backend with an allow row that holds and lists the features, and no deny row that holds."""
    return [
        variant.name
        for variant in shipped()[backend].variants
        if any(holds(row, request, True) and set(features) <= row.features for row in variant.allow)
        and not any(holds(row, request, False) for row in variant.deny)
    ]


def denials(backend: str, request: dict) -> set[str]:
    """The codes of deny rows that hold."""
    return {row.code for variant in shipped()[backend].variants for row in variant.deny if holds(row, request, False)}


def rank(manifest: Manifest, request: dict) -> int:
    return min((row.rank for row in manifest.order if holds(row, request, False)), default=50)


def best(kind: str, request: dict, role: str) -> str:
    """The backend with the best rank among those with a variant of this role that an allow row grants."""
    found = {}
    for manifest in shipped().values():
        variants = [variant for variant in manifest.variants if role in variant.roles]
        if manifest.kind == kind and any(holds(row, request, True) for variant in variants for row in variant.allow):
            found[manifest.name] = rank(manifest, request)
    return min(found, key=lambda name: found[name])


def test_fa4_with_fp4_caches_needs_another_decode_backend():
    for phase in ("decode", "verify", "draft"):
        assert "fp4_decode" in denials("mha/fa4", {"format.dtype": "fp4", "phase": phase})
    for peer in ("fa4", "trtllm_mha"):
        assert "fp4_peer" in denials("mha/fa4", {"format.dtype": "fp4", "phase": "prefill", "peer.decode": peer})
    assert not denials("mha/fa4", {"format.dtype": "fp4", "phase": "prefill", "peer.decode": "triton"})


def test_cutedsl_mla_leaves_prefill_to_its_companion():
    (row,) = shipped()["mla/cutedsl_mla"].companions
    assert (row.phase, row.backend) == ("prefill", "trtllm_mla")
    assert holds(row, {"explicit.prefill": False}, False)
    assert not holds(row, {"explicit.prefill": True}, False)


def test_paged_trees_are_verified_by_few():
    """The requirement names flashinfer alone; our own triton and torch backends read pages under a tree mask, too."""
    request = {"phase": "verify", "page_size": 16, "topk": 4}
    able = {
        name
        for name, manifest in shipped().items()
        if manifest.kind == "mha" and manifest.status != "experimental" and grants(name, request, "spec_tree")
    }
    assert able <= {"mha/flashinfer", "mha/triton", "mha/torch_native", "mha/flex_attention"}
    assert "mha/flashinfer" in able


def test_fa3_latent_trees_need_slots():
    request = {"arch": "sm90", "phase": "verify", "topk": 4, "head_dims": (576, 512)}
    assert grants("mla/fa3", {**request, "page_size": 1}, "spec_tree") == ["absorbed"]
    assert grants("mla/fa3", {**request, "page_size": 64}, "spec_tree") == []
    assert "tree_page_size" in denials("mla/fa3", {**request, "page_size": 64})


AUTOMATIC_GDN = {
    "phase": "prefill",
    "arch": "sm103",
    "cuda": "13.0",
    "state_dtype": "bf16",
    "state_dims": (128, 128),
    "chunked_prefill_size": 8192,
    "dynamic_chunking": False,
    "page_major": False,
    "explicit.linear": False,
}


def test_flashinfer_takes_linear_prefill_by_itself_when_everything_holds():
    assert rank(shipped()["gdn/flashinfer"], AUTOMATIC_GDN) < rank(shipped()["gdn/triton"], AUTOMATIC_GDN)


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "sm90"},
        {"cuda": "12.9"},
        {"state_dtype": "fp32"},
        {"state_dims": (128, 256)},
        {"chunked_prefill_size": 0},
        {"chunked_prefill_size": 8193},
        {"dynamic_chunking": True},
        {"page_major": True},
        {"explicit.linear": True},
        {"phase": "decode"},
    ],
    ids=str,
)
def test_flashinfer_leaves_linear_prefill_when_one_condition_fails(change):
    request = {**AUTOMATIC_GDN, **change}
    assert rank(shipped()["gdn/flashinfer"], request) > rank(shipped()["gdn/triton"], request)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_aiter_refuses_fp8_decode_of_models_that_mix_head_dims(arch):
    request = {"arch": arch, "format.dtype": "fp8_e4m3", "traits": frozenset({"mixed_head_dims"}), "phase": "decode"}
    for pages in (1, 16):
        for dims in ((256, 256), (512, 512)):
            found = {**request, "page_size": pages, "head_dims": dims, "dtypes": ("bf16", "fp8_e4m3", "bf16")}
            assert grants("mha/aiter", found) == []
    assert "gemma4_fp8" in denials("mha/aiter", request)
    assert not denials("mha/aiter", {**request, "format.dtype": "bf16"})


def test_aiter_routes_wide_heads_and_windows_to_the_unified_kernel():
    request = {"arch": "gfx942", "phase": "prefill", "page_size": 16, "dtypes": ("bf16", "bf16", "bf16")}
    assert grants("mha/aiter", {**request, "head_dims": (512, 512)}) == ["unified"]
    assert grants("mha/aiter", {**request, "head_dims": (256, 256)}, "sliding_window") == ["unified"]
    assert grants("mha/aiter", {**request, "page_size": 1, "head_dims": (128, 128)}) == ["ck"]


@pytest.mark.parametrize("arch", ["sm120", "sm121"])
def test_sm120_hybrid_models_take_trtllm_mha_for_decode_only(arch):
    request = {"arch": arch, "traits": frozenset({"hybrid_linear"}), "head_dims": (256, 256), "page_size": 64}
    request["dtypes"] = ("bf16", "bf16", "bf16")
    assert grants("mha/trtllm_mha", {**request, "phase": "prefill"}) == []
    assert grants("mha/trtllm_mha", {**request, "phase": "decode"}) == ["xqa"]
    assert grants("mha/trtllm_mha", {**request, "phase": "prefill", "traits": frozenset()}) == ["fmha_v2"]


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm120"])
def test_page_16_does_not_go_with_head_dim_256(arch):
    request = {"arch": arch, "phase": "decode", "page_size": 16, "head_dims": (256, 256)}
    assert "page_head_dim" in denials("mha/trtllm_mha", request)
    assert grants("mha/trtllm_mha", request) == []
    assert grants("mha/trtllm_mha", {**request, "page_size": 32})
    assert grants("mha/trtllm_mha", {**request, "head_dims": (128, 128)})


def test_variants_of_trtllm_mha_state_their_own_dtype_triples():
    request = {"arch": "sm90", "page_size": 64, "head_dims": (128, 128)}
    mixed, quantised = ("bf16", "fp8_e4m3", "bf16"), ("fp8_e4m3", "fp8_e4m3", "bf16")
    assert grants("mha/trtllm_mha", {**request, "phase": "decode", "dtypes": mixed}) == ["xqa"]
    assert grants("mha/trtllm_mha", {**request, "phase": "decode", "dtypes": quantised}) == []
    assert grants("mha/trtllm_mha", {**request, "phase": "prefill", "dtypes": mixed}) == []
    assert grants("mha/trtllm_mha", {**request, "phase": "prefill", "dtypes": quantised}) == ["fmha_v2"]


@pytest.mark.parametrize("backend", ["mha/fa3", "mla/fa3"])
def test_fa3_decode_does_not_go_with_the_hierarchical_cache(backend):
    assert "hicache" in denials(backend, {"hicache": True, "phase": "decode"})
    assert "hicache" not in denials(backend, {"hicache": True, "phase": "prefill"})
    assert "hicache" not in denials(backend, {"hicache": False, "phase": "decode"})


def test_deterministic_latent_attention_on_blackwell_is_triton():
    request = {"deterministic": True, "traits": frozenset({"mla"}), "arch": "sm100", "vendor": "nvidia"}
    ranks = {name: rank(manifest, request) for name, manifest in shipped().items() if manifest.kind == "mla"}
    assert min(ranks, key=lambda name: ranks[name]) == "mla/triton"
    assert rank(shipped()["mla/fa3"], {**request, "arch": "sm90"}) < rank(
        shipped()["mla/triton"], {**request, "arch": "sm90"}
    )


def test_deterministic_requests_have_the_allowed_backends_only():
    """Allowed: ascend, fa3, fa4, flashinfer, intel_xpu, triton; torch_native and flex_attention declare their own."""
    able = {
        manifest.name
        for manifest in shipped().values()
        if manifest.kind in ("mha", "mla") and manifest.package != "attn-torch"
        for variant in manifest.variants
        if any("batch_invariant" in row.features for row in variant.allow)
    }
    assert able == {"ascend", "fa3", "fa4", "flashinfer", "intel_xpu", "triton"}


def test_trtllm_mha_takes_topk_1_only():
    for arch in ("sm90", "sm100"):
        assert grants("mha/trtllm_mha", {"arch": arch, "phase": "decode", "topk": 1})
        assert grants("mha/trtllm_mha", {"arch": arch, "phase": "decode", "topk": 2}) == []


def test_fa3_reads_no_e5m2_and_tokenspeed_nothing_but_e4m3():
    assert "kv_cache_dtype" in denials("mha/fa3", {"format.dtype": "fp8_e5m2"})
    assert "kv_cache_dtype" not in denials("mha/fa3", {"format.dtype": "fp8_e4m3"})
    assert "kv_cache_dtype" in denials("mla/tokenspeed_mla", {"format.dtype": "bf16"})
    assert "kv_cache_dtype" not in denials("mla/tokenspeed_mla", {"format.dtype": "fp8_e4m3"})


def test_flashinfer_fp8_caches_go_to_fa2():
    request = {"arch": "sm90", "page_size": 1, "head_dims": (128, 128), "gqa_ratio": 4, "format.dtype": "fp8_e4m3"}
    for phase in ("prefill", "decode"):
        for q in ("bf16", "fp8_e4m3"):
            found = grants(
                "mha/flashinfer", {**request, "phase": phase, "traits": frozenset(), "dtypes": (q, "fp8_e4m3", "bf16")}
            )
            assert found == (["fa2"] if q == "bf16" else [])


@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm89", "sm100", "sm120"])
def test_architectures_are_sets(arch):
    """A backend for one architecture is not eligible on a newer one."""
    assert grants("mla/flashmla", {"arch": arch, "phase": "decode"}) == []
    assert grants("mha/hpc_ops", {"arch": arch, "phase": "decode"}) == []


# --- automatic choice: the published rules ---------------------------------------------------------------------------------


def mha(arch: str, vendor: str = "nvidia", **more: object) -> dict:
    plain = {
        "head_dims": (128, 128),
        "dtypes": ("bf16", "bf16", "bf16"),
        "format.dtype": "bf16",
        "topk": 0,
        "gqa_ratio": 4,
    }
    return {
        "arch": arch,
        "vendor": vendor,
        "phase": "prefill",
        "traits": frozenset(),
        "deterministic": False,
        **plain,
        **more,
    }


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (mha("sm90", cuda="12.3"), "fa3"),
        (mha("sm90", cuda="12.3", topk=1), "fa3"),
        (mha("sm90", cuda="12.3", topk=4), "flashinfer"),
        (mha("sm90", cuda="12.2"), "flashinfer"),
        (mha("sm100"), "trtllm_mha"),
        (mha("sm103", topk=1), "trtllm_mha"),
        (mha("sm100", topk=4), "flashinfer"),
        (mha("sm100", head_dims=(192, 128)), "fa4"),
        (mha("sm80"), "flashinfer"),
        (mha("sm120"), "flashinfer"),
        (mha("sm89", traits=frozenset({"sinks"})), "triton"),
        (mha("sm90", **{"cuda": "13.0", "dtypes": ("bf16", "fp8_e5m2", "bf16"), "format.dtype": "fp8_e5m2"}), "triton"),
        (mha("gfx942", "amd"), "aiter"),
        (mha("gfx1100", "amd"), "triton"),
        (mha("gfx950", "amd", traits=frozenset({"hybrid_linear"})), "triton"),
        (mha("a2", "ascend"), "ascend"),
        (mha("xpu", "intel"), "intel_xpu"),
        (mha("amx", "cpu"), "intel_amx"),
        (mha("sm90", cuda="13.0", traits=frozenset({"encoder_decoder"})), "flashinfer"),
        (mha("sm90", cuda="13.0", deterministic=True), "fa3"),
        (mha("sm100", deterministic=True), "flashinfer"),
        (mha("sm120", deterministic=True), "flashinfer"),
    ],
    ids=str,
)
def test_automatic_choice_of_mha(request_, expected):
    assert best("mha", request_, role="attend") == expected


@pytest.mark.parametrize(
    ("arch", "vendor", "q_heads", "expected"),
    [
        ("sm90", "nvidia", 128, "fa3"),
        ("sm100", "nvidia", 128, "flashinfer"),
        ("sm80", "nvidia", 128, "triton"),
        ("sm120", "nvidia", 128, "triton"),
        ("gfx942", "amd", 16, "aiter"),
        ("gfx942", "amd", 128, "aiter"),
        ("gfx942", "amd", 32, "triton"),
        ("a2", "ascend", 128, "ascend"),
    ],
)
def test_automatic_choice_of_mla(arch, vendor, q_heads, expected):
    request = {
        "arch": arch,
        "vendor": vendor,
        "q_heads": q_heads,
        "phase": "decode",
        "head_dims": (576, 512),
        "cuda": "13.0",
    }
    request |= {
        "dtypes": ("bf16", "bf16", "bf16"),
        "format.dtype": "bf16",
        "traits": frozenset({"mla"}),
        "deterministic": False,
    }
    assert best("mla", request, role="absorbed") == expected


@pytest.mark.parametrize(
    ("arch", "vendor", "expected"),
    [("sm90", "nvidia", "fa3"), ("sm100", "nvidia", "fa4"), ("sm103", "nvidia", "triton"), ("gfx942", "amd", "aiter"),
     ("sm80", "nvidia", "triton"), ("a2", "ascend", "ascend")],
)  # fmt: skip
def test_automatic_choice_of_vision_towers(arch, vendor, expected):
    request = {
        "arch": arch,
        "vendor": vendor,
        "phase": "prefill",
        "head_dims": (72, 72),
        "dtypes": ("bf16", "bf16", "bf16"),
    }
    assert best("mm", request, role="attend") == expected
