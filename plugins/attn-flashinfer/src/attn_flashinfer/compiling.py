"""The first use of a kernel family compiles it: said before it starts, done by one process, waited for by the others.

flashinfer keeps compiled modules in its own cache (``~/.cache/flashinfer``) and locks it while it builds. What it does not do
is say so, and a step that takes two minutes looks like a hang. The lock, the marker of what was built, and the messages are
:class:`attn_core.jit_cache.JitCache`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from attn_core.jit_cache import JitCache, cache_directory

#: Modules that this process has loaded: a fact about the process, not about a step.
_ready: set[str] = set()


def first_use(key: str, version: str, action: Callable[[], None], log: logging.Logger) -> None:
    """Run `action`, which makes the library load the module `key`, and compile it if nobody has.

    Later calls with the same key run `action` and nothing else. Raises what `action` raises, and
    :class:`attn_core.errors.JitError` if another process compiles for longer than half an hour.
    """
    if key in _ready or not torch.cuda.is_available():
        action()
        return
    full = f"{key}-{_machine()}-{version}"
    cache = JitCache(cache_directory())
    done = False

    def build(folder: Path) -> None:
        nonlocal done
        log.warning(
            "first use of %s: flashinfer compiles it with nvcc unless it has done so before "
            "(about 10 s for decode, 30 s for fa2 and sink, 100 s for fa3 on 16 cores)",
            key,
        )
        action()
        done = True
        (folder / "compiled").write_text(f"{full}\n", encoding="utf-8")

    cache.build(full, build)
    if not done:
        action()
    _ready.add(key)


@lru_cache(maxsize=1)
def _machine() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}-cuda{torch.version.cuda}"
