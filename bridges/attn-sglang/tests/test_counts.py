"""Counted calls reach a file after every forward: SGLang kills its workers."""

from __future__ import annotations

import json

from fake_server import Server, backend_of


def test_a_file_for_each_backend_and_process(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_SGLANG_STATS", str(tmp_path))
    server = Server(windows=(-1, -1, -1))
    backend = backend_of(server, name="attn-torch_native")
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["calls"] == {}
    server.run(backend, server.extend({1: 5, 2: 4}))
    assert json.loads(file.read_text())["calls"] == {"torch_native": {"prefill": 3}}
    server.run(backend, server.decode([1]))
    found = json.loads(file.read_text())
    assert found["calls"] == backend.calls() == {"torch_native": {"prefill": 3, "decode": 3}}
    assert found["backends"] == {"full": {"prefill": "torch_native:sdpa", "decode": "torch_native:sdpa"}}
    assert found["plan"] == backend.plan.fingerprint


def test_nothing_is_written_unless_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = Server()
    server.run(backend_of(server), server.extend({1: 5}))
    assert list(tmp_path.iterdir()) == []
