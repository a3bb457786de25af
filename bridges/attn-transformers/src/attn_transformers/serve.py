"""``attn serve``: transformers' own OpenAI-compatible server, its model's attention served by attn-core.

transformers builds and runs the server; only its model manager is replaced, by one that binds the model as soon as it is
loaded: to a plan and a paged cache, or with ``--continuous-batching`` to transformers' own page pool.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from attn_core.errors import UsageError
from attn_core.plan import Plan
from attn_transformers._compat import serving_modules

#: Options of ``transformers serve`` that would take the attention, the model or the cache out of our hands: why, and what to do.
_TAKEN = {
    "--attn-implementation": ("the plan chooses the attention", "--attention-backend NAME"),
    "--force-model": ("the model is the argument", "attn serve MODEL"),
    "--compile": ("a static cache would replace the paged one", "leave it out"),
}
_BATCHING, _GRAPH, _NO_GRAPH = "--continuous-batching", "--cb-use-cuda-graph", "--no-cb-use-cuda-graph"


def serve(model: str, options: Mapping[str, Any], *, max_tokens: int, server: Sequence[str] = ()) -> None:
    """Serve `model` (a path or hub name) until interrupted. `server` are options of ``transformers serve``.

    `options` are planning options; `max_tokens` is the room for keys and values of one request (with continuous batching
    the pool is transformers', see its ``--cb-*`` options). The plan goes to stderr before the first request, the calls that
    every backend served after the last.

    Raises :class:`UsageError` for missing packages or an option that cannot be used here, :class:`PlanError` when no backend
    can serve the model.
    """
    if model.startswith("-"):
        raise UsageError(f"MODEL comes first, {model} was found in its place", fix="attn serve MODEL --port 8000 …")
    arguments = server_arguments(server)
    app, manager = serving_modules()
    binder = Binder(options, max_tokens=max_tokens, batching=_BATCHING in arguments, log=_to_stderr)
    with _terminated(), binder, _replaced(manager, "ModelManager", binder.manager(manager.ModelManager)):
        app(["serve", model, *arguments], standalone_mode=False)


def server_arguments(given: Sequence[str]) -> list[str]:
    """The options for ``transformers serve``, checked. Raises :class:`UsageError`."""
    names = [argument.partition("=")[0] for argument in given]
    for name, (why, fix) in _TAKEN.items():
        if name in names:
            raise UsageError(f"{name} cannot be given to attn serve: {why}", fix=fix)
    if _GRAPH in names:
        raise UsageError(
            f"{_GRAPH} cannot be given to attn serve",
            "transformers would capture steps that this bridge builds on the host",
            fix="leave it out",
        )
    extra = [_NO_GRAPH] if _BATCHING in names and _NO_GRAPH not in names else []
    return [*given, *extra]


class Binder:
    """Binds every model that the server loads, and gives all of them back at the end."""

    def __init__(
        self, options: Mapping[str, Any], *, max_tokens: int, batching: bool, log: Callable[[str], None]
    ) -> None:
        self.options = {name: value for name, value in options.items() if value is not None}
        self.max_tokens, self.batching, self.log = max_tokens, batching, log
        self._bound: dict[int, Any] = {}
        self._lock, self._open = threading.Lock(), ExitStack()

    def __enter__(self) -> Binder:
        return self

    def __exit__(self, *problem: object) -> None:
        for line in self.calls():
            self.log(line)
        self._open.close()

    def bind(self, model: Any) -> None:
        """Plan for `model` and switch it to attn-core; a model that is bound already stays as it is."""
        with self._lock:
            if id(model) not in self._bound:
                self._bound[id(model)] = self._batched(model) if self.batching else self._paged(model)

    def calls(self) -> list[str]:
        """One line per backend: what it served."""
        lines = []
        for bound in self._bound.values():
            stats = bound.stats() if self.batching else bound.router.stats()
            for backend, phases in stats.items():
                lines.append(f"calls   {backend}: " + ", ".join(f"{count} {phase}" for phase, count in phases.items()))
        return lines

    def manager(self, base: type) -> type:
        """`base`, transformers' model manager, with models bound as they are loaded."""
        binder = self

        class AttnModelManager(base):
            def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
                loaded = super().load_model_and_processor(*args, **kwargs)
                binder.bind(loaded[0])
                return loaded

        return AttnModelManager

    def _batched(self, model: Any) -> Any:
        from attn_transformers.paged import continuous_batching

        bridge = self._open.enter_context(continuous_batching(model, **self.options))
        start = model.init_continuous_batching

        def started(*args: Any, **kwargs: Any) -> Any:
            manager = start(*args, **kwargs)
            self._open.callback(manager.stop, timeout=10.0, hard_stop=True)  # the server leaves its thread running
            return manager

        model.init_continuous_batching = started
        self._open.callback(delattr, model, "init_continuous_batching")
        self._show(bridge.plan)
        return bridge

    def _paged(self, model: Any) -> Any:
        from attn_transformers.runtime import load

        attn = load(model, max_tokens=self.max_tokens, **self.options)
        self._open.callback(attn.detach)
        model.generate = attn.generate
        self._open.callback(delattr, model, "generate")
        self._show(attn.plan)
        return attn

    def _show(self, plan: Plan) -> None:
        from attn_core.explain import as_text

        self.log(as_text(plan, rivals=False))


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM, which the server hands on once it has shut down, ends the process by an exception: contexts are left."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    former = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, former)
