"""A distribution's files against the hashes that its RECORD holds: what was installed, or what somebody changed since."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from attn_core.discovery._entrypoints import origin_of

#: Files in a package that are code: one that RECORD does not list came from elsewhere.
_CODE = (".py", ".so", ".pyd")


@dataclass(frozen=True, slots=True)
class FileCheck:
    """``result``: ``verified``, ``changed`` (files changed, missing or unlisted), or ``unknown`` (cannot be verified)."""

    distribution: str
    version: str
    result: str
    text: str
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        names = ("distribution", "version", "result", "text")
        table = {name: getattr(self, name) for name in names}
        return {**table, **{name: list(getattr(self, name)) for name in ("changed", "missing", "unlisted")}}


def verify_distribution(name: str) -> FileCheck:
    """Check every file of one installed distribution that RECORD has a hash for, and look for code it does not list."""
    distribution = importlib_metadata.distribution(name)
    version = str(distribution.version)
    if origin_of(distribution).startswith("editable"):
        return FileCheck(name, version, "unknown", "cannot verify: an editable install, its files are meant to change")
    try:
        text = distribution.read_text("RECORD")
    except OSError:
        text = None
    if not text:
        return FileCheck(name, version, "unknown", "cannot verify: it was installed without a RECORD")
    listed = dict(_rows(text))
    hashed = {path: digest for path, digest in listed.items() if digest}
    if not hashed:
        return FileCheck(name, version, "unknown", "cannot verify: its RECORD has no hashes")
    files = {path: distribution.locate_file(path) for path in hashed}
    missing = sorted(path for path, file in files.items() if not file.exists())
    changed = sorted(p for p, digest in hashed.items() if p not in missing and not _same(files[p], digest))
    unlisted = sorted(_unlisted(distribution, listed))
    if missing or changed or unlisted:
        counts = f"{len(changed)} changed, {len(missing)} missing, {len(unlisted)} not in RECORD"
        return FileCheck(name, version, "changed", counts, tuple(changed), tuple(missing), tuple(unlisted))
    return FileCheck(name, version, "verified", f"{len(hashed)} files as installed")


def _rows(record: str) -> Iterator[tuple[str, str]]:
    """Path and hash of each line. Read here, because importlib_metadata leaves out files that are missing."""
    for row in csv.reader(record.splitlines()):
        if row:
            yield row[0], row[1] if len(row) > 1 else ""


def _same(file: Any, digest: str) -> bool:
    algorithm, _, value = digest.partition("=")
    found = hashlib.new(algorithm, file.read_bytes()).digest()
    return base64.urlsafe_b64encode(found).rstrip(b"=").decode() == value


def _unlisted(distribution: Any, listed: Iterable[str]) -> list[str]:
    known = frozenset(listed)
    packages = {path.split("/")[0] for path in known if "/" in path and path.endswith("/__init__.py")}
    found = []
    for package in packages:
        root = distribution.locate_file(package)
        for path in root.rglob("*") if hasattr(root, "rglob") else ():
            relative = f"{package}/{path.relative_to(root).as_posix()}" if hasattr(path, "as_posix") else ""
            if relative.endswith(_CODE) and relative not in known:
                found.append(relative)
    return found
