"""Which backend ran, counted: for tests and for people who ask. Off unless ``ATTN_SGLANG_STATS`` names a folder."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_core.router import Router

#: A folder; every backend object writes ``<name>-<pid>-<number>.json`` there after each forward.
STATS_VARIABLE = "ATTN_SGLANG_STATS"
_numbers = itertools.count()


class Counter:
    """Calls per attn-core backend and phase of one bridged backend. SGLang kills its workers, so it writes as it goes."""

    def __init__(self, name: str, router: Router, facts: dict[str, Any]) -> None:
        self._name, self._router, self._facts = name, router, facts
        folder = os.environ.get(STATS_VARIABLE, "").strip()
        self._file = Path(folder) / f"{name}-{os.getpid()}-{next(_numbers)}.json" if folder else None
        self.write()

    def calls(self) -> dict[str, dict[str, int]]:
        """``{"torch_native": {"prefill": 30, "decode": 990}}``: layer calls since the start."""
        return self._router.stats()

    def write(self) -> None:
        """Replace the file, in one step, if one was asked for."""
        if self._file is None:
            return
        text = json.dumps({"name": self._name, **self._facts, "calls": self.calls()})
        part = self._file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, self._file)
