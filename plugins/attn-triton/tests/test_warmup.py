"""``attn_warmup``: after it, no step of the planned sizes meets a kernel that was not launched before."""

from __future__ import annotations

import pytest
import torch

import attn_triton
from attn_core.context import GraphLimits
from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import make_case
from attn_core.testing.harness import BackendUnderTest

pytestmark = pytest.mark.needs_triton
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def launches(monkeypatch):
    """Every launch as (kernel, its compile-time arguments): what decides whether it is compiled again."""
    from attn_triton.kernels import attention, merge, prepare, store

    seen = set()
    for module in (attention, merge, prepare, store):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(name, getattr(module, name), seen))
    return seen


class Recorder:
    def __init__(self, name, kernel, seen):
        self.name, self.kernel, self.seen = name, kernel, seen

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.seen.add((self.name, *sorted((key, str(value)) for key, value in constants.items())))
            return self.kernel[grid](*args, **constants)

        return launch


def open_session(case, phases, **more):
    from attn_triton.crosscompile import _manifests

    return BackendUnderTest.of_module(attn_triton, _manifests()["mha"]).open(case, phases=phases, **more)


GEOMETRY = MhaGeometry(4, 2, 32, 16, 0.3, window=40, sinks=True)
FIELDS = {"dtype": "fp16", "page_size": 16, "sinks": (0.1, 0.2, 0.3, 0.4), "device": DEVICE}


@pytest.mark.parametrize("kv", ["", "fp8_e4m3", "fp4"])
def test_nothing_is_left_to_compile(launches, kv):
    scales = {"k_scale": 0.5, "v_scale": 2.0} if kv else {}
    lens = {"query_lens": (1,) * 3, "kv_lens": (5, 40, 70)}
    decode = make_case(GEOMETRY, "decode", kv_dtype=kv, **lens, **FIELDS, **scales)
    short = make_case(GEOMETRY, "prefill", kv_dtype=kv, query_lens=(3, 7), kv_lens=(5, 40), **FIELDS, **scales)
    tall = make_case(GEOMETRY, "prefill", kv_dtype=kv, query_lens=(150,), kv_lens=(150,), **FIELDS, **scales)
    limits = GraphLimits((1, 4), 1024, 1, 4096, 64)
    session = open_session(decode, ("decode", "prefill"))
    session.call("attn_warmup", session.context.group, ("decode", "prefill"), limits)
    warmed = set(launches)
    assert {name for name, *_ in warmed} == {"attention_kernel", "merge_kernel", "prepare_kernel", "store_kernel"}
    for case in (decode, short, tall):
        session.run(case)
    assert not launches - warmed


def test_trees_and_both_layouts(launches):
    parents = ((-1, 0, 0, 1),) * 2
    case = make_case(GEOMETRY, "verify", query_lens=(4, 4), kv_lens=(9, 30), parents=parents, storage="hnd", **FIELDS)
    session = open_session(case, ("verify",))
    limits = GraphLimits((2,), 64, 4, 4096, 64, draft=(2, 2))
    session.call("attn_warmup", session.context.group, ("verify",), limits)
    warmed = set(launches)
    session.run(case)
    assert not launches - warmed


def test_packed_sequences(launches):
    from attn_triton.backend import TritonBackend

    case = make_case(GEOMETRY, "prefill", query_lens=(3,), kv_lens=(3,), **FIELDS)
    context = open_session(case, ("prefill",)).context
    context.pools = {}
    TritonBackend(context).attn_warmup(context.group, ("prefill",), GraphLimits((1,), 1024, 1, 4096, 64))
    assert {name for name, *_ in launches} == {"attention_kernel", "prepare_kernel"}
