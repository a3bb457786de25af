"""Every call of the library fits the library's own signatures, of two generations of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attn_core.errors import PluginError
from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import make_case
from attn_flashinfer.library import WRAPPERS, load

TREE = ((-1, 0, 0, 1),) * 2
#: (variant, phase, fields of a case, options): together they make every call that the adapter knows.
STEPS = (
    ("decode", "decode", {"kv_lens": (5, 9)}, {}),
    ("fa2", "decode", {"kv_lens": (5, 9), "needs_lse": True}, {}),
    ("fa2", "decode", {"kv_lens": (5, 9), "kv_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 2.0}, {}),
    ("fa2", "prefill", {"query_lens": (3, 2), "kv_lens": (3, 2)}, {}),
    ("fa2", "prefill", {"query_lens": (3, 2), "kv_lens": (5, 9)}, {"prefill_read": "ragged"}),
    ("fa2", "verify", {"query_lens": (4, 4), "kv_lens": (5, 9), "parents": TREE}, {}),
    ("fa3", "prefill", {"query_lens": (3, 2), "kv_lens": (5, 9)}, {}),
    ("sink", "prefill", {"query_lens": (3, 2), "kv_lens": (5, 9), "sinks": (0.5, 1.0, -1.0, 0.0)}, {}),
    ("sink", "decode", {"kv_lens": (5, 9), "sinks": (0.5, 1.0, -1.0, 0.0)}, {}),
)  # fmt: skip


def _versions():
    return sorted(path.stem.removeprefix("signatures-") for path in Path(__file__).parent.glob("signatures-*.txt"))


@pytest.fixture(params=_versions())
def bound(request, fake, signatures, monkeypatch):
    """The stand-in behind the real signatures: a call that would not fit the real function is a TypeError here."""
    known = {name: signatures.signature(text) for name, text in signatures.read(request.param).items()}
    calls = []

    def behind(owner, cls, method):
        name, inner = f"{owner}.{method}", getattr(cls, method)
        real = known.get(name) or known[f"BatchPrefillWithPagedKVCacheWrapper.{method}"]  # what it does not override
        planned = known.get(f"{owner}._plan_impl") if method == "plan" else None

        def call(self, *args, **kwargs):
            real.bind(self, *args, **kwargs)
            if planned is not None:  # what `plan(**kwargs)` hands on
                planned.bind(self, *args, **kwargs)
            calls.append((name, kwargs))
            return inner(self, *args, **kwargs)

        call.__signature__ = real
        return call

    for path, *_ in WRAPPERS.values():
        owner = path.split(".")[-1]
        cls = getattr(fake, owner)
        methods = {m: behind(owner, cls, m) for m in ("__init__", "plan", "run")}
        made = type(owner, (cls,), methods)
        monkeypatch.setattr(fake.attention if "." in path else fake, owner, made)
    return calls


def test_every_call_fits_the_real_signature(bound, backend):
    for variant, phase, fields, options in STEPS:
        geometry = MhaGeometry(4, 4, 64, 64, 0.2, sinks="sinks" in fields)
        case = make_case(geometry, phase, dtype="bf16", **fields)
        backend.open(case, variant, options=options).run(case)
    made = {name for name, _ in bound}
    assert {f"{path.split('.')[-1]}.{m}" for path, *_ in WRAPPERS.values() for m in ("__init__", "plan", "run")} <= made
    for name, words in bound:
        if name.endswith(".plan"):
            assert words["q_data_type"] is not None, "the library's default is float16"
            assert words["sm_scale"] is not None, "the library's default is 1 / sqrt(head dim)"


def test_keywords_that_a_generation_lacks_are_left_out_or_reported(fake, monkeypatch):
    class Old(fake.BatchPrefillWithRaggedKVCacheWrapper):
        def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk):
            raise AssertionError

    monkeypatch.setattr(fake, "BatchPrefillWithRaggedKVCacheWrapper", Old)
    with pytest.raises(PluginError, match="no usable BatchPrefillWithRaggedKVCacheWrapper") as error:
        load(("decode", "prefill", "ragged"))
    assert "window_left" in str(error.value)
    assert "pip install" in str(error.value)
    assert load(("decode", "prefill")).wrappers.keys() == {"decode", "prefill", "sink"}


@pytest.mark.skipif("ATTN_FLASHINFER_SOURCE" not in os.environ, reason="ATTN_FLASHINFER_SOURCE names no unpacked wheel")
def test_the_fixture_is_what_the_wheel_says(signatures):
    source = Path(os.environ["ATTN_FLASHINFER_SOURCE"])
    version = os.environ.get("ATTN_FLASHINFER_VERSION", _versions()[-1])
    assert signatures.derive(source) == signatures.read(version)
