"""Which backend really ran: calls per backend and phase, one JSON file a process, only where ``ATTN_VLLM_STATS`` names a folder.

A call is one layer in one step. A replay of a CUDA graph runs no Python: it counts as a step, not as calls.
The file is rewritten as steps are begun and when the process ends, so that a server that is killed leaves a count too.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_vllm.service import Service

VARIABLE = "ATTN_VLLM_STATS"
#: Seconds between two writes of a busy process.
_INTERVAL = 0.5


class Counts:
    """Collects the services of this process and writes what they have counted."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"attn-vllm-{os.getpid()}.json"
        self.services: list[Service] = []
        self.fingerprint = ""
        self._written = 0.0
        atexit.register(self.write)

    def add(self, service: Service, fingerprint: str) -> None:
        """Count `service` too. ``fingerprint`` is that of the whole plan."""
        self.services.append(service)
        self.fingerprint = fingerprint

    def tick(self) -> None:
        """A step has begun: write if the last time is a while ago."""
        now = time.monotonic()
        if now - self._written >= _INTERVAL:
            self._written = now
            self.write()

    def write(self) -> None:
        """Write the file, atomically."""
        draft = self.path.with_suffix(".tmp")
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(self.report(), indent=1))
        draft.replace(self.path)

    def report(self) -> dict[str, Any]:
        """Calls (one a layer and step), steps, the plan's fingerprint and versions."""
        from attn_vllm import __version__
        from attn_vllm.service import merged_stats

        packages = {k: v for service in self.services for k, v in service.plan.packages().items()}
        return {
            "schema_version": 1,
            "pid": os.getpid(),
            "attn_vllm": __version__,
            "vllm": getattr(sys.modules.get("vllm"), "__version__", None),
            "packages": packages,
            "plan": self.fingerprint,
            "steps": sum(service.steps for service in self.services),
            "calls": merged_stats(self.services),
        }


_COUNTS: Counts | None = None


def counts() -> Counts | None:
    """This process's counter; None where nobody asks."""
    global _COUNTS
    folder = os.environ.get(VARIABLE)
    if folder and _COUNTS is None:
        _COUNTS = Counts(Path(folder))
    return _COUNTS if folder else None
