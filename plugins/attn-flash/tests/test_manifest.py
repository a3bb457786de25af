"""What the package declares, and what its probe says where nothing is installed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import attn_flash
from attn_core.manifest import Manifest
from attn_core.options import Options
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_flash import builds, cutedsl
from toys import mha_model


def test_the_backends_are_declared(manifests: dict[str, Manifest]) -> None:
    assert list(manifests) == ["mha/fa3", "mha/fa4", "mha/dual_chunk_flash_attn", "mm/fa3", "mm/fa4"]
    assert {manifest.status for manifest in manifests.values()} == {"implemented"}
    assert [v.name for v in manifests["mha/fa3"].variants] == list(builds.BUILDS)


def test_importing_the_package_loads_no_torch_and_no_kernels() -> None:
    code = "import sys, attn_flash; print([m for m in ('torch', 'flash_attn_3', 'sgl_kernel', 'flash_attn', 'cutlass') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def _without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return (
            "9.9" if name in ("tokenspeed-fa3", "sglang-kernel", "flash-attn-4", "nvidia-cutlass-dsl") else real(name)
        )

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_the_probe_names_what_is_missing_and_the_command(
    manifests: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, "tokenspeed-fa3", "sglang-kernel", "flash-attn-4")
    answers = attn_flash.attn_probe(manifests["mha/fa3"])
    assert {name: answer.needs for name, answer in answers.items()} == {
        "tokenspeed": "pip install tokenspeed-fa3",
        "sgl-kernel": "pip install sglang-kernel",
    }
    assert not any(answer.ok for answer in answers.values())
    assert attn_flash.attn_probe(manifests["mm/fa3"])["default"].needs == "pip install tokenspeed-fa3"
    found = attn_flash.attn_probe(manifests["mha/fa4"])
    assert {answer.needs for answer in found.values()} == {"pip install flash-attn-4"}
    assert set(found) == {variant.name for variant in manifests["mha/fa4"].variants}


def test_one_build_is_enough_for_the_towers(manifests: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "tokenspeed-fa3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    answer = attn_flash.attn_probe(manifests["mm/fa3"])["default"]
    assert answer.ok
    assert answer.versions == {"sglang-kernel": "9.9"}
    assert builds.any_build() is builds.SGL_KERNEL


@pytest.mark.parametrize(
    ("backend", "distribution", "have"),
    [
        ("mha/fa3", "tokenspeed-fa3", "2.9"),
        ("mha/fa3", "sglang-kernel", "0.4.4"),
        ("mha/fa4", "flash-attn-4", "4.0.0b18"),
    ],
)
def test_a_release_that_is_too_old_is_not_available(
    backend: str, distribution: str, have: str, manifests: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: have)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    answers = attn_flash.attn_probe(manifests[backend])
    answer = next(a for a in answers.values() if distribution in a.versions)
    assert not answer.ok
    assert distribution in answer.needs
    assert have in str(answer.reasons[0])


def test_fa4_without_its_compiler_is_not_available(
    manifests: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cutlass" else object())
    answer = cutedsl.probe()
    assert not answer.ok
    assert "nvidia-cutlass-dsl" in answer.needs
    assert "cutlass" in str(answer.reasons[0])


def test_a_half_installed_build_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = builds.TOKENSPEED.probe()
    assert not answer.ok
    assert "without its package flash_attn_3" in str(answer.reasons[0])


def _plan(manifests: dict[str, Manifest], platform: str, **flags: object):
    model = mha_model(layers=2, **flags.pop("geometry", {}))  # type: ignore[arg-type]
    options = Options.of({"allow_experimental": True, **flags})
    return solve_plan(model, parse_platform(platform), options, list(manifests.values()), tie_order={})


@pytest.mark.parametrize(
    ("platform", "flags", "want"),
    [
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa3"}, "tokenspeed"),
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa3", "geometry": {"softcap": 30.0}}, "sgl-kernel"),
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa3", "geometry": {"qk_dim": 192, "v_dim": 128}}, "sgl-kernel"),
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa4"}, "hopper"),
        ("cuda:sm100,cuda=13.0", {"attention_backend": "fa4"}, "blackwell"),
        ("cuda:sm100,cuda=13.0", {"attention_backend": "fa4", "geometry": {"qk_dim": 192, "v_dim": 128}}, "blackwell"),
    ],
)
def test_the_planner_takes_the_variant_that_can(
    manifests: dict[str, Manifest], platform: str, flags: dict, want: str
) -> None:
    plan = _plan(manifests, platform, **flags)
    assert {phase.variant for phase in plan.groups[0].phases.values()} == {want}


@pytest.mark.parametrize(
    ("platform", "flags", "word"),
    [
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa3", "kv_cache_dtype": "fp8_e5m2"}, "fp8_e4m3"),
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa3", "dtype": "float32"}, "float32"),
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa3:tokenspeed", "geometry": {"softcap": 30.0}}, "softcap"),
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa4", "geometry": {"qk_dim": 72, "v_dim": 72}}, "72"),
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa4", "kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ("cuda:sm90,cuda=13.0", {"attention_backend": "fa4", "kv_cache_dtype": "fp4"}, "decode"),
        ("cuda:sm80,cuda=13.0", {"attention_backend": "fa3"}, "sm90"),
        ("cuda:sm120,cuda=13.0", {"attention_backend": "fa4"}, "sm1"),
        ("cuda:sm90,cuda=12.2", {"attention_backend": "fa3"}, "12.3"),
        (
            "cuda:sm90,cuda=13.0",
            {"attention_backend": "fa3", "page_size": 16, "speculative_algorithm": "eagle", "speculative_eagle_topk": 4,
             "speculative_num_draft_tokens": 8, "speculative_num_steps": 3},
            "page",
        ),
    ],
)  # fmt: skip
def test_what_is_not_declared_is_refused(manifests: dict[str, Manifest], platform: str, flags: dict, word: str) -> None:
    from attn_core.errors import PlanError

    with pytest.raises(PlanError) as error:
        _plan(manifests, platform, **flags)
    assert word in str(error.value)


def test_every_deny_row_says_what_to_do(manifests: dict[str, Manifest]) -> None:
    for manifest in manifests.values():
        for variant in manifest.variants:
            for row in variant.deny:
                assert row.reason
                assert row.fix


def test_the_package_lists_its_libraries() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert "tokenspeed-fa3" in text
    assert "flash-attn-4" in text
