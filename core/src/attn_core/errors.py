"""Every exception of attn-core, in one tree, each with a stable code that has a section in ``docs/errors.md``.

::

    AttnError
     ├── UsageError            AC-USE-001   bad flag, unknown name, malformed file (exit status 2)
     ├── ModelError            AC-MOD-001   a model config that cannot be described
     ├── PlatformError         AC-PLT-001   a platform description that cannot be read
     ├── ManifestError         AC-MAN-001   a manifest that breaks the published schema
     ├── PluginError           AC-PLG-001   a plugin problem, raised under ATTN_STRICT=1 or when its backend is asked for
     ├── PlanError             AC-PLAN-001  no plan; carries the rejected candidates (exit status 3)
     ├── BindError             AC-BIND-001  a backend object, layer or cache that does not fit the plan
     ├── BatchError            AC-BAT-001   a batch over its limits or in the wrong form
     ├── GraphError            AC-GRA-001   capture or replay outside the declared level
     ├── CacheError            AC-CAC-001   misuse of the paged cache
     │    └── OutOfPages       AC-CAC-002   no free page left; nothing was changed
     ├── JitError              AC-JIT-001   a kernel cache entry that cannot be had
     └── WorkerMismatch        AC-WRK-001   a worker lacks a planned plugin or has another version
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_core.plan import Rejection


class AttnError(Exception):
    """Base of all errors of attn-core. ``code`` is stable; ``lines`` holds one fact a line; ``fix`` is the next step."""

    code = "AC-000"

    def __init__(self, message: str, *facts: str, fix: str | None = None) -> None:
        self.message = message
        self.facts = facts
        self.fix = fix
        super().__init__(message)

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.message}"]
        lines += [f"  {fact}" for fact in self.facts]
        if self.fix:
            lines.append(f"  try      {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[AttnError], args: tuple[Any, ...], state: dict[str, Any]) -> AttnError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class UsageError(AttnError):
    """A flag, name, option or file given by the user cannot be used."""

    code = "AC-USE-001"


class ModelError(AttnError):
    """A model configuration that cannot be described as layer groups."""

    code = "AC-MOD-001"


class PlatformError(AttnError):
    """A platform description that cannot be read."""

    code = "AC-PLT-001"


class ManifestError(AttnError):
    """A manifest that breaks the published schema. The message says where, what was found and what is needed."""

    code = "AC-MAN-001"


class PluginError(AttnError):
    """A plugin problem that stops the program: ``ATTN_STRICT=1``, or the user asked for that plugin's backend."""

    code = "AC-PLG-001"


class PlanError(AttnError):
    """No backend can serve the model as asked. ``rejected`` has every candidate with its reasons."""

    code = "AC-PLAN-001"

    def __init__(
        self,
        message: str,
        *facts: str,
        fix: str | None = None,
        rejected: Sequence[Rejection] = (),
        suggestions: Sequence[str] = (),
    ) -> None:
        super().__init__(message, *facts, fix=fix or (suggestions[0] if suggestions else None))
        self.rejected = tuple(rejected)
        self.suggestions = tuple(suggestions)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: ``ok`` false and ``error`` with message, rejected candidates and suggestions."""
        return {
            "schema_version": 1,
            "ok": False,
            "error": {
                "code": self.code,
                "message": self.message,
                "facts": list(self.facts),
                "rejected": [rejection.to_dict() for rejection in self.rejected],
                "suggestions": list(self.suggestions),
            },
        }


class BindError(AttnError):
    """A backend object, a layer or a cache that does not fit the plan or the contract."""

    code = "AC-BIND-001"


class BatchError(AttnError):
    """A batch over its limits, in the wrong phase order, or with tensors of the wrong form."""

    code = "AC-BAT-001"


class GraphError(AttnError):
    """A capture or replay outside the level that the plan allows."""

    code = "AC-GRA-001"


class CacheError(AttnError):
    """Misuse of the paged cache: unknown request, double free, token past its pages."""

    code = "AC-CAC-001"


class OutOfPages(CacheError):
    """No free page is left. The cache is exactly as it was before the call."""

    code = "AC-CAC-002"


class JitError(AttnError):
    """An entry of the kernel cache cannot be had: another process builds it for too long."""

    code = "AC-JIT-001"


class WorkerMismatch(AttnError):
    """A worker process lacks a planned plugin or has another version of it."""

    code = "AC-WRK-001"
