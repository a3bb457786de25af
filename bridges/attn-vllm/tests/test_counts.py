"""The opt-in count of calls."""

from __future__ import annotations

import json

from vllm_fakes import FakeServer

from attn_vllm import counts as module
from attn_vllm.counts import Counts, counts


def test_nobody_counts_unless_asked(monkeypatch):
    monkeypatch.delenv(module.VARIABLE, raising=False)
    assert counts() is None


def test_the_file_says_who_ran(tmp_path):
    server = FakeServer(None, {"attention_backend": "torch_native"})
    found = Counts(tmp_path / "stats")
    found.add(server.service, server.plan.fingerprint)
    server.step([(0, 5), (1, 3)])
    server.step([(0, 1), (1, 1)])
    found.write()
    report = json.loads(found.path.read_text())
    assert report["calls"] == {"torch_native": {"prefill": 2, "decode": 2}}  # two layers each
    assert (report["steps"], report["plan"]) == (2, server.plan.fingerprint)
    assert report["packages"] == {"attn-torch": "0.1.0"}
