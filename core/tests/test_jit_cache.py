"""The kernel cache: one build among many processes, recovery after a kill, and directories that cannot be used."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attn_core import jit_cache
from attn_core.errors import JitError, UsageError
from attn_core.jit_cache import JitCache, cache_directory

KEY = "mha_fwd<sm90, d=128>"


def compile_kernel(folder: Path) -> None:
    (folder / "kernel.so").write_text("code")


# --- directories --------------------------------------------------------------------------------------------------------


def test_c110_order_of_places(tmp_path: Path) -> None:
    variable, config, xdg, home = (tmp_path / name for name in ("variable", "config", "xdg", "home"))
    environ = {"ATTN_CACHE_DIR": str(variable), "XDG_CACHE_HOME": str(xdg), "HOME": str(home)}
    assert cache_directory(config, environ) == variable
    del environ["ATTN_CACHE_DIR"]
    assert cache_directory(config, environ) == config
    assert cache_directory(None, environ) == xdg / "attn-core"
    del environ["XDG_CACHE_HOME"]
    assert cache_directory(None, environ) == home / ".cache" / "attn-core"
    assert all(path.is_dir() for path in (variable, config, xdg, home))
    assert cache_directory(None, {}).parent == Path(jit_cache.tempfile.gettempdir())


def test_c110_a_chosen_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """Permission bits mean nothing to root, so the read-only place here is below a file."""
    (tmp_path / "ro").write_text("")
    place = tmp_path / "ro" / "cache"
    for config, environ in ((None, {"ATTN_CACHE_DIR": str(place)}), (place, {})):
        with pytest.raises(UsageError) as caught:
            cache_directory(config, environ)
        for part in (str(place), "ATTN_CACHE_DIR", "not writable"):
            assert part in str(caught.value)


def test_c110_defaults_fall_back_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    place = cache_directory(None, {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert place.parent == Path(jit_cache.tempfile.gettempdir())
    assert "ATTN_CACHE_DIR" in caplog.text


def test_c110_never_in_site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_cache.site, "getsitepackages", lambda: [str(tmp_path)])
    with pytest.raises(UsageError, match="inside site-packages"):
        cache_directory(tmp_path / "attn_toy" / "cache", {})


# --- entries ------------------------------------------------------------------------------------------------------------


def test_built_once(tmp_path: Path) -> None:
    cache = JitCache(tmp_path / "cache")
    assert cache.get(KEY) is None
    folder = cache.build(KEY, compile_kernel)
    assert (folder / "kernel.so").read_text() == "code"
    assert cache.build(KEY, lambda folder: pytest.fail("built twice")) == folder == cache.get(KEY)
    assert cache.build("another", compile_kernel) != folder
    assert sorted(path.name for path in cache.root.iterdir() if path.name.startswith(".")) == []


def test_any_key_is_a_folder(tmp_path: Path) -> None:
    cache = JitCache(tmp_path)
    keys = ["a/b", "a-b", "../../etc", "", "x" * 500, "ключ"]
    folders = {cache.build(key, compile_kernel) for key in keys}
    assert len(folders) == len(keys)
    assert {folder.parent for folder in folders} == {tmp_path}


def test_a_builder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = JitCache(tmp_path)

    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("nvcc failed")

    with pytest.raises(RuntimeError, match="nvcc failed"):
        cache.build(KEY, broken)
    assert list(tmp_path.iterdir()) == []
    assert cache.build(KEY, compile_kernel).is_dir()


def test_threads_build_once(tmp_path: Path) -> None:
    builds: list[int] = []

    def slow(folder: Path) -> None:
        builds.append(1)
        time.sleep(0.2)

    threads = [threading.Thread(target=lambda: JitCache(tmp_path).build(KEY, slow)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(builds) == 1


_PROCESS = """
import os, sys, time
from pathlib import Path
from attn_core.jit_cache import JitCache
root, log, key, seconds = sys.argv[1:]
def build(folder):
    (folder / "part1").write_text("1")
    with open(log, "a") as file: file.write(f"{os.getpid()}\\n")
    time.sleep(float(seconds))
    (folder / "part2").write_text("2")
folder = JitCache(root).build(key, build)
assert sorted(p.name for p in folder.iterdir()) == ["part1", "part2"]
"""


def start(root: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROCESS, str(root), str(log), KEY, str(seconds)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for(condition: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_c109_eight_processes_one_build(tmp_path: Path) -> None:
    log = tmp_path / "builds"
    processes = [start(tmp_path / "cache", log, 0.5) for _ in range(8)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert len(log.read_text().splitlines()) == 1


def test_c109_the_builder_is_killed(tmp_path: Path) -> None:
    log, root = tmp_path / "builds", tmp_path / "cache"
    builder = start(root, log, 60)
    wait_for(log.exists)
    others = [start(root, log, 0.2) for _ in range(2)]
    time.sleep(0.3)
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    for process in others:
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
    assert len(log.read_text().splitlines()) == 2
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []  # what was half done is gone


def test_c109_the_lock_of_a_dead_owner_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that the builder forked may outlive it, and holds its lock."""
    cache = JitCache(tmp_path, timeout=20)
    lock = jit_cache._Lock(tmp_path / f".{cache.folder(KEY).name}.lock", KEY)
    assert lock.take()
    record = lock.owner()
    assert (record["pid"], record["key"]) == (os.getpid(), KEY)
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    lock.path.write_text(json.dumps({**record, "pid": int(done.stdout)}))
    start_time = time.monotonic()
    assert cache.build(KEY, compile_kernel).is_dir()
    assert 0.9 < time.monotonic() - start_time < 10
    lock.release()


def test_c109_a_pid_that_was_given_again_is_not_the_owner(tmp_path: Path) -> None:
    lock = jit_cache._Lock(tmp_path / "lock", KEY)
    assert lock.take()
    assert not lock._owner_is_dead()
    lock.path.write_text(json.dumps({**lock.owner(), "started": "1"}))
    assert lock._owner_is_dead()
    lock.path.write_text(json.dumps({**lock.owner(), "host": "elsewhere"}))
    assert not lock._owner_is_dead()  # nothing is known about processes of another host
    lock.path.write_text("half a rec")
    assert not lock._owner_is_dead()
    lock.release()


def test_c109_waiting_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit_cache, "_FIRST_MESSAGE", 0.1)
    cache = JitCache(tmp_path, timeout=0.5)
    lock = jit_cache._Lock(tmp_path / f".{cache.folder(KEY).name}.lock", KEY)
    assert lock.take()
    with caplog.at_level(logging.WARNING, "attn_core"), pytest.raises(JitError) as caught:
        cache.build(KEY, compile_kernel)
    lock.release()
    assert f"waiting for pid {os.getpid()} compiling {KEY} (0 s)" in caplog.text
    assert f"owner    pid {os.getpid()}" in str(caught.value)
    assert str(lock.path) in str(caught.value)
    assert cache.build(KEY, compile_kernel).is_dir()
