"""A place for compiled kernels that several processes share without building twice or reading half-written files.

::

    cache = JitCache(cache_directory())
    folder = cache.build("mha_fwd-sm90-d128", compile_into)     # compile_into(folder: Path) writes its files there

One process builds, the others wait and say for whom; a finished entry appears at once, by renaming; a builder that is
killed leaves nothing behind that the next one would mistake for an entry.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import site
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attn_core.discovery._problems import log
from attn_core.errors import JitError, UsageError

VARIABLE = "ATTN_CACHE_DIR"

#: Seconds between two looks at a lock, until the first message, and between messages.
_POLL, _FIRST_MESSAGE, _NEXT_MESSAGE = 0.05, 2.0, 10.0


# --- where --------------------------------------------------------------------------------------------------------------


def cache_directory(config: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory for everything that attn-core and plugins cache, created and known to be writable.

    In this order: the variable ATTN_CACHE_DIR, `config`, ``$XDG_CACHE_HOME/attn-core`` (``~/.cache/attn-core``), a folder in
    the temporary directory. The first two are somebody's choice: if one cannot be written, :class:`UsageError` says so and
    nothing else is tried. Otherwise the next place is taken, with a warning.
    """
    for source, path in ((VARIABLE, environ.get(VARIABLE)), ("config", config)):
        if path:
            chosen = Path(path).expanduser()
            why = _unusable(chosen)
            if why:
                raise _bad_choice(source, chosen, why)
            return chosen
    for candidate in _default_places(environ):
        why = _unusable(candidate)
        if not why:
            return candidate
        log.warning("cache directory %s cannot be used (%s); set %s to choose another", candidate, why, VARIABLE)
    raise UsageError(f"no cache directory can be written; set {VARIABLE} to one that can")


def _default_places(environ: Mapping[str, str]) -> Iterator[Path]:
    base = environ.get("XDG_CACHE_HOME")
    home = environ.get("HOME")
    if base or home:
        yield Path(base) / "attn-core" if base else Path(str(home)) / ".cache" / "attn-core"
    user = os.getuid() if hasattr(os, "getuid") else 0  # two users must not share files in a common folder
    yield Path(tempfile.gettempdir()) / f"attn-core-{user}"


def _bad_choice(source: str, path: Path, why: str) -> UsageError:
    return UsageError(
        f"the cache directory {path} cannot be used",
        f"asked by {source}",
        f"found    {why}",
        fix=f"{VARIABLE}=<a directory that this user can write> ({VARIABLE} goes before config)",
    )


def _unusable(path: Path) -> str:
    """Why `path` cannot hold a cache, or an empty string. Writes and removes a file: permission bits do not tell all."""
    resolved = str(path.resolve())
    packages = [*site.getsitepackages(), site.getusersitepackages()] if hasattr(site, "getsitepackages") else []
    if any(resolved == str(Path(p).resolve()) or resolved.startswith(f"{Path(p).resolve()}{os.sep}") for p in packages):
        return "it lies inside site-packages, where an upgrade would mix with it"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-"):
            pass
    except OSError as error:
        return f"not writable: {error.strerror or error}"
    return ""


# --- entries ------------------------------------------------------------------------------------------------------------


class JitCache:
    """A directory with one folder a key. Safe to use from several threads, processes and ranks on one file system.

    `timeout` is how long to wait for another process that builds the same key.
    """

    def __init__(self, root: str | Path, timeout: float = 1800.0) -> None:
        self.root = Path(root)
        self.timeout = timeout

    def folder(self, key: str) -> Path:
        """Where the entry of `key` is, once it is built: a readable prefix and a hash, so that any key will do."""
        prefix = re.sub(r"[^A-Za-z0-9._-]+", "-", key)[:80].strip(".-") or "key"
        return self.root / f"{prefix}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def get(self, key: str) -> Path | None:
        """The finished entry of `key`, or None."""
        folder = self.folder(key)
        return folder if folder.is_dir() else None

    def build(self, key: str, builder: Callable[[Path], object]) -> Path:
        """The entry of `key`, made by `builder` (which writes into the folder it is given) if nobody has made it yet.

        Whatever `builder` raises passes through, and nothing is kept. Raises :class:`JitError` if another process builds
        the key for longer than the timeout.
        """
        folder = self.folder(key)
        if folder.is_dir():
            return folder
        self.root.mkdir(parents=True, exist_ok=True)
        with self._locked(key, folder) as finished:
            if not finished:
                self._make(folder, builder)
        return folder

    def _make(self, folder: Path, builder: Callable[[Path], object]) -> None:
        prefix = f".building-{folder.name}-"
        for leftover in self.root.glob(f"{prefix}*"):
            pid = leftover.name.removeprefix(prefix).partition("-")[0]
            if pid.isdecimal() and not _alive(int(pid)):  # its builder was killed
                shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=self.root))
        try:
            builder(scratch)
            scratch.chmod(0o755)  # mkdtemp makes it private
            try:
                scratch.rename(folder)
            except OSError:
                if not folder.is_dir():  # somebody else was faster: theirs is as good
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @contextmanager
    def _locked(self, key: str, folder: Path) -> Iterator[bool]:
        """Holds the lock of `key`; yields True at once if the entry appears while waiting."""
        lock = _Lock(self.root / f".{folder.name}.lock", key)
        start = said = time.monotonic()
        pause = _FIRST_MESSAGE
        while not lock.take():
            if folder.is_dir():
                yield True
                return
            now = time.monotonic()
            if now - start > self.timeout:
                raise _waited_too_long(key, lock, now - start)
            if now - said >= pause:
                said, pause = now, _NEXT_MESSAGE
                log.warning("waiting for pid %s compiling %s (%.0f s)", lock.owner_pid(), key, now - start)
            time.sleep(_POLL)
        try:
            yield folder.is_dir()
        finally:
            lock.release()


def _waited_too_long(key: str, lock: _Lock, seconds: float) -> JitError:
    return JitError(
        f"waited {seconds:.0f} s for {key} to be compiled",
        f"owner    pid {lock.owner_pid()}, {lock.owner().get('host', 'unknown host')}",
        f"lock     {lock.path}",
        fix="see what that process does; if it hangs, end it: its lock goes with it",
    )


class _Lock:
    """A lock file that names its owner. The kernel's lock decides; the text is for messages and for dead owners.

    ``flock`` goes away with its process, however that ends. One case is left: a child that the builder forked may still
    hold it. If the owner named in the file stays dead on this host, the file is removed and a new one is made. Two waiters
    that do so at the same time may both build, which costs time and harms nothing: entries appear by renaming.
    """

    #: A new owner writes its name a moment after it has the lock: the old name alone proves nothing.
    _DEAD_FOR = 1.0

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self._descriptor: int | None = None
        self._dead_since: float | None = None

    def take(self) -> bool:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _flock(descriptor):
            os.close(descriptor)
            self._break_if_stale()
            return False
        if not self._is_current(descriptor):  # it was removed between opening and locking
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        record = {"pid": os.getpid(), "started": _started(os.getpid()), "host": _host(), "key": self.key}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)
        return True

    def release(self) -> None:
        assert self._descriptor is not None
        if self._is_current(self._descriptor):
            with suppress(FileNotFoundError):
                self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def owner(self) -> dict[str, Any]:
        try:
            record = json.loads(self.path.read_text())
        except (OSError, ValueError):  # being written, or gone
            return {}
        return record if isinstance(record, dict) else {}

    def owner_pid(self) -> str:
        return str(self.owner().get("pid", "unknown"))

    def _break_if_stale(self) -> None:
        now = time.monotonic()
        self._dead_since = (self._dead_since or now) if self._owner_is_dead() else None
        if self._dead_since is not None and now - self._dead_since >= self._DEAD_FOR:
            self._dead_since = None
            with suppress(FileNotFoundError):
                self.path.unlink()

    def _owner_is_dead(self) -> bool:
        owner = self.owner()
        pid = owner.get("pid")
        if not isinstance(pid, int) or owner.get("host") != _host():
            return False
        return not _alive(pid) or owner.get("started") != _started(pid)

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # there, but somebody else's
        return True
    return True


def _started(pid: int) -> str:
    """When a process started, so that a number that was given again is not taken for its old owner; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _host() -> str:
    """Host and, in containers that share a cache, the process namespace: numbers of another one mean nothing here."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
