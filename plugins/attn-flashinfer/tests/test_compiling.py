"""First uses are announced once a machine, done by one process, and not announced again."""

from __future__ import annotations

import logging

import pytest

from attn_flashinfer import compiling

LOG = logging.getLogger("attn_core.test")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU, as far as this module looks, and an empty cache."""
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiling, "_machine", lambda: "sm90-cuda13.0")
    monkeypatch.setattr(compiling, "_ready", set())
    return tmp_path


def use(done, key="flashinfer-fa2", version="0.7.4"):
    compiling.first_use(key, version, lambda: done.append(key), LOG)


def test_it_is_said_before_it_starts_and_once(machine, caplog):
    done: list[str] = []
    with caplog.at_level(logging.WARNING):
        compiling.first_use("flashinfer-fa2", "0.7.4", lambda: done.append(caplog.messages[-1]), LOG)
        use(done)
    assert "nvcc" in done[0], "the line comes before the work"
    assert "flashinfer-fa2" in done[0]
    assert len(done) == 2
    assert sum("first use" in line for line in caplog.messages) == 1


def test_another_process_finds_the_marker_and_only_loads(machine, caplog, monkeypatch):
    done: list[str] = []
    use(done)
    monkeypatch.setattr(compiling, "_ready", set())  # what a new process knows
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        use(done)
    assert done == ["flashinfer-fa2"] * 2
    assert not caplog.messages


def test_another_version_compiles_again(machine, caplog, monkeypatch):
    done: list[str] = []
    use(done)
    monkeypatch.setattr(compiling, "_ready", set())
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        use(done, version="0.8.0")
    assert any("first use" in line for line in caplog.messages)


def test_a_failure_leaves_no_marker(machine):
    def fail():
        raise RuntimeError("nvcc fatal")

    with pytest.raises(RuntimeError, match="nvcc fatal"):
        compiling.first_use("flashinfer-fa3", "0.7.4", fail, LOG)
    done: list[str] = []
    use(done, "flashinfer-fa3")
    assert done == ["flashinfer-fa3"]
    assert [path.name for path in machine.glob("flashinfer-fa3*")], "built this time"
