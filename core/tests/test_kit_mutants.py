"""Planted faults: every one is caught by the check that is named for it, and the unmutated backend passes that check."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from attn_core.manifest import Manifest
from attn_core.testing.cells import FAILED, PASSED, CellResult
from attn_core.testing.reference_backend import ReferenceBackend, load_manifest
from attn_core.testing.reference_gdn import GdnReference, load_gdn_manifest
from attn_core.testing.reference_mla import MlaReference, load_mla_manifest
from kit_faults import Fault, caught, load_faults

#: Faults that core itself stops with an exception; all others are found in numbers, bits or addresses.
REFUSED_BY_CORE = {"workspace grows after capture"}
FAULTS = {fault.name: fault for fault in load_faults()}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def slots_only(manifest: Manifest) -> Manifest:
    variant = manifest.variants[0]
    row = variant.allow[0]
    return replace(manifest, variants=(replace(variant, allow=(replace(row, when={**row.when, "page_size": [1]}),)),))


def manifest_for(fault: Fault) -> Manifest:
    if fault.kind != "mha":
        return {"gdn": load_gdn_manifest, "mla": load_mla_manifest}[fault.kind]()
    manifest = load_manifest()
    if fault.check == "trimmed" and fault.ask.page_size == 1:  # of slots alone: larger pages of a pool are split
        return slots_only(manifest)
    if fault.check == "refuses_bad_inputs":  # is about a feature that is not declared
        row = manifest.variants[0].allow[0]
        bare = replace(row, features=row.features - {"sinks"})
        return replace(manifest, variants=(replace(manifest.variants[0], allow=(bare,)),))
    return manifest


@cache
def try_fault(name: str) -> CellResult:
    fault = FAULTS[name]
    return caught(fault, fault.backend, manifest_for(fault))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    result = try_fault(name)
    assert result.outcome == FAILED, f"{name}: not caught by {FAULTS[name].check}"
    by_exception = re.match(r"\w+(Error|Exception): ", result.problems[0]) is not None
    assert by_exception == (name in REFUSED_BY_CORE), result.problems[0]


@pytest.mark.parametrize("name", FAULTS)
def test_right_backend_passes_the_same_check(name: str) -> None:
    fault = FAULTS[name]
    right = {"mha": ReferenceBackend, "gdn": GdnReference, "mla": MlaReference}[fault.kind]
    result = caught(fault, right, manifest_for(fault))
    assert result.outcome == PASSED, result.problems or result.reason


def test_caught_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = sum(try_fault(name).outcome == FAILED for name in FAULTS)
    with capsys.disabled():
        print(f"\ncaught {found}/{len(FAULTS)}")
    assert found == len(FAULTS) >= 40
