"""What the package declares, and what its probe answers on machines without the library, a compiler, or a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

import attn_flashinfer
from attn_core.availability import Availability
from attn_core.manifest import parse_manifests
from attn_core.platform import parse_platform
from attn_core.reasons import Reason


@pytest.fixture(scope="module")
def manifest(shipped):
    return parse_manifests(shipped)[0]


def test_it_is_implemented_and_names_four_kernel_families(manifest):
    assert (manifest.id, manifest.status) == ("mha/flashinfer", "implemented")
    assert [variant.name for variant in manifest.variants] == ["decode", "fa3", "fa2", "sink"]


def test_importing_the_plugin_loads_neither_torch_nor_the_library():
    code = "import sys, attn_flashinfer; print({'torch', 'flashinfer', 'triton'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_a_missing_library_is_named_with_the_command(manifest, monkeypatch):
    import importlib_metadata

    def absent(name):
        raise importlib_metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib_metadata.version", absent)
    for answer in attn_flashinfer.attn_probe(manifest, parse_platform("cuda:sm90")).values():
        assert not answer.ok
        assert "pip install 'flashinfer-python" in answer.needs


@pytest.mark.parametrize("platform", ["cpu", "rocm:gfx942"])
def test_other_hardware_is_a_reason(manifest, platform, monkeypatch):
    monkeypatch.setattr(attn_flashinfer, "default_availability", lambda variant: Availability(True))
    for answer in attn_flashinfer.attn_probe(manifest, parse_platform(platform)).values():
        assert [reason.code for reason in answer.reasons] == ["device"]
        assert answer.reasons[0].fix


def test_an_nvidia_gpu_with_everything_is_ready(manifest, monkeypatch):
    monkeypatch.setattr(attn_flashinfer, "default_availability", lambda variant: Availability(True))
    answers = attn_flashinfer.attn_probe(manifest, parse_platform("cuda:sm90"))
    assert {name: answer.ok for name, answer in answers.items()} == dict.fromkeys(
        ("decode", "fa3", "fa2", "sink"), True
    )


@pytest.mark.parametrize(
    ("variant", "feature", "declared"),
    [("fa3", "custom_mask", False), ("fa3", "spec_tree", False), ("fa2", "spec_tree", True), ("decode", "sinks", False), ("sink", "sinks", True), ("sink", "softcap", False)],
)  # fmt: skip
def test_limits_of_the_kernels(manifest, variant, feature, declared):
    assert any(feature in row.features for row in manifest.variant(variant).allow) is declared


def test_no_row_declares_what_needs_lengths_that_only_the_device_knows(manifest):
    for variant in manifest.variants:
        for row in variant.allow:
            assert not {"dcp_decode", "chunked_prefix", "partial"} & row.features


def test_the_wheel_of_compiled_modules_stands_in_for_nvcc(manifest, monkeypatch):
    lacking = Availability(False, (Reason("toolkit", need="nvcc", have="not on PATH"),))
    monkeypatch.setattr(attn_flashinfer, "default_availability", lambda variant: lacking)
    platform = parse_platform("cuda:sm90")
    assert not attn_flashinfer.attn_probe(manifest, platform)["fa2"].ok
    monkeypatch.setattr(attn_flashinfer, "find_spec", lambda name: object())
    assert attn_flashinfer.attn_probe(manifest, platform)["fa2"].ok
