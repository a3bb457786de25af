"""The entry point: puts a factory for every installed backend into SGLang's registry. Imports no plugin and no torch.

SGLang logs and swallows what an entry point raises, and then knows nothing but ``Invalid attention backend``. So nothing
is raised here: whatever went wrong is kept, and raised by the factory when its name is asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attn_sglang import PREFIX, ROUTER, SUPPORTED_SGLANG

if TYPE_CHECKING:
    from attn_sglang.names import Registration

log = logging.getLogger("attn_sglang")

Factory = Callable[[Any], Any]

#: What this process registered, and what went wrong; for people and tests.
registered: dict[str, Registration] = {}
failure: BaseException | None = None


def register() -> None:
    """Register every name, once a process. SGLang calls this in each of its processes."""
    global failure
    if registered or failure is not None:
        return
    try:
        _register()
    except (Exception, SystemExit) as error:
        failure = error
        log.error("attn-core's backends could not be registered: %s", error)
        _register_failure(error)


def _register() -> None:
    from attn_core.discovery import discover
    from attn_sglang import _compat
    from attn_sglang.names import registrations

    _compat.check_version()
    registry = discover()
    backends = [manifest.name for manifest in registry.manifests if manifest.kind == "mha"]
    taken = _compat.own_names()
    found = registrations(backends, registry.problems, taken, os.environ, _hints(bool(registry.problems)))
    _compat.add_backends({item.name: _factory(item) for item in found})
    for item in found:
        if item.replaces:
            log.warning("%s of SGLang's own was replaced by attn-core's %s", item.name, item.backend or "router")
    registered.update({item.name: item for item in found})


def _hints(wanted: bool) -> Mapping[str, str]:
    """Backend name -> distribution; read only where a broken plugin's names have to be found."""
    if not wanted:
        return {}
    from attn_core.planner import load_directory

    hints: Mapping[str, str] = load_directory()["hints"]
    return hints


def _factory(item: Registration) -> Factory:
    """What SGLang calls with a model runner."""

    def create_backend(runner: Any) -> Any:
        if item.problem is not None:
            raise item.problem.to_error(f"--attention-backend {item.name} cannot be used: its plugin failed to load")
        from attn_sglang.build import create

        return create(runner, item.name, item.backend)

    return create_backend


def _register_failure(error: BaseException) -> None:
    """Factories that say why there is nothing: for the router, and for every backend name that can still be found."""

    def create_backend(runner: Any) -> Any:
        raise RuntimeError(f"attn-core's backends are not there: attn-sglang failed to load: {error}") from error

    try:
        _put(dict.fromkeys(_names_anyway(), create_backend))
    except Exception:
        log.exception("SGLang's registry could not be reached either; supported are %s", ", ".join(SUPPORTED_SGLANG))


def _names_anyway() -> list[str]:
    names = [ROUTER]
    try:
        from attn_core.discovery import discover

        names += [PREFIX + manifest.name for manifest in discover().manifests if manifest.kind == "mha"]
    except Exception as error:
        log.debug("no names could be found: %s", error)
    return names


def _put(factories: Mapping[str, Factory]) -> None:
    """Names that are free, into the registry and onto the command line; any version that still has both."""
    from attn_sglang import _compat

    taken = _compat.own_names()
    _compat.add_backends({name: factory for name, factory in factories.items() if name not in taken})
