"""The pytest plugin of the conformance kit, loaded in every pytest run of an environment that has attn-core.

It imports nothing heavy and adds two options with names of their own. ``--device`` and ``--quick`` are added only when
``--attn-backend`` is given, so that they cannot clash with another project's options::

    pytest --pyargs attn_core.testing.conformance --attn-backend mha/NAME [--device cuda] [--quick] [--attn-report r.json]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_GROUP = "attn", "conformance kit of attn-core"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--attn-backend``, ``--attn-report`` and ``--attn-only``."""
    group = parser.getgroup(*_GROUP)
    group.addoption(
        "--attn-backend", metavar="KIND/NAME", help="backend that the conformance kit examines, e.g. mha/triton"
    )
    group.addoption("--attn-report", metavar="FILE", help="write the kit's JSON report to FILE")
    group.addoption("--attn-only", metavar="CHECK", action="append", default=[], help="run this check of the kit only")


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """``--device`` and ``--quick``, for runs of the kit alone."""
    if not any(argument.split("=")[0] == "--attn-backend" for argument in args):
        return
    group = parser.getgroup(*_GROUP)
    options: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--device", {"default": "cpu", "help": "device that the kit runs on: cpu, cuda, cuda:1, …"}),
        ("--quick", {"action": "store_true", "help": "one combination for each check and phase"}),
    )
    for name, settings in options:
        try:
            group.addoption(name, **settings)
        except ValueError:  # the project has an option of this name already: use that
            continue
