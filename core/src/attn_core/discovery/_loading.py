"""Running plugin code: under a time limit, in a daemon thread, with every way out turned into a :class:`Failure`."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from attn_core.discovery._problems import log, timeout_seconds

T = TypeVar("T")

#: Plugins whose code is running in this context: asking for one of them again would wait for itself.
running: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("attn_core_running", default=frozenset())

PROGRESS_SECONDS = 15.0


class Failure(Exception):
    """Plugin code raised ``error`` (anything, SystemExit included), or did not come back: ``error`` is None."""

    def __init__(self, error: BaseException | None, seconds: float = 0.0) -> None:
        self.error, self.seconds = error, seconds
        super().__init__(f"no answer within {seconds:g} s" if error is None else repr(error))


def call_guarded(plugin: str, function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` within ATTN_PLUGIN_TIMEOUT. Raises :class:`Failure` whatever goes wrong.

    The thread of a call that does not come back is left behind: Python cannot stop it, and a daemon thread does not keep
    the process alive.
    """
    seconds = timeout_seconds()
    outcome: list[tuple[bool, Any]] = []
    context = contextvars.copy_context()

    def run() -> None:
        running.set(running.get() | {plugin})
        try:
            outcome.append((True, function(*arguments)))
        except BaseException as error:  # SystemExit at import is a plugin problem, too
            outcome.append((False, error))

    if seconds is None:
        context.run(run)
    else:
        thread = threading.Thread(target=context.run, args=(run,), name=f"attn plugin {plugin}", daemon=True)
        thread.start()
        thread.join(seconds)
    if not outcome:
        raise Failure(None, seconds or 0.0)
    good, value = outcome[0]
    if not good:
        raise Failure(value)
    return value  # type: ignore[no-any-return]


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A line every few seconds while the body runs: a JIT compilation may take minutes and must not look like a hang."""
    done = threading.Event()
    start = time.monotonic()

    def watch() -> None:
        while not done.wait(PROGRESS_SECONDS):
            log.warning("still %s (%.0f s)", what, time.monotonic() - start)

    threading.Thread(target=watch, name="attn progress", daemon=True).start()
    try:
        yield
    finally:
        done.set()
