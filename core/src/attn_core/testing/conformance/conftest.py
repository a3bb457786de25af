"""Turns the cells of a backend into tests, and their results into a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_core.testing.cells import Cell, CellResult, list_cells, run_cell
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.report import make_report, split_name, write_report

_STATE = pytest.StashKey["Examination"]()


class Examination:
    """The backend of this run with its cells, and the results so far."""

    def __init__(self, config: pytest.Config) -> None:
        kind, name = split_name(config.getoption("--attn-backend"))
        self.backend = BackendUnderTest.installed(kind, name)
        self.device = str(config.getoption("--device", default="cpu"))
        self.quick = bool(config.getoption("--quick", default=False))
        only = config.getoption("--attn-only")
        cells = list_cells(self.backend, self.device, self.quick)
        self.cells = [cell for cell in cells if not only or cell.check in only]
        self.results: list[CellResult] = []

    def run(self, cell: Cell) -> CellResult:
        """Run one cell and keep its result."""
        result = run_cell(self.backend, cell, self.device)
        self.results.append(result)
        return result


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a backend there is nothing to examine: said aloud if the kit was asked for, else the folder is passed over."""
    if config.getoption("--attn-backend", default=None):
        return None
    if any("conformance" in argument for argument in config.invocation_params.args):
        raise pytest.UsageError(
            "the conformance kit needs --attn-backend KIND/NAME, e.g. --attn-backend mha/torch_native"
        )
    return True


def _examination(config: pytest.Config) -> Examination:
    if _STATE not in config.stash:
        config.stash[_STATE] = Examination(config)
    return config.stash[_STATE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a cell: declared ones for ``declared_cell``, undeclared ones for ``undeclared_cell``."""
    for fixture, undeclared in (("declared_cell", False), ("undeclared_cell", True)):
        if fixture in metafunc.fixturenames:
            cells = [c for c in _examination(metafunc.config).cells if bool(c.undeclared) is undeclared]
            metafunc.parametrize(fixture, cells, ids=[cell.id for cell in cells])


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[[Cell], CellResult]:
    """Runs a cell on the examined backend."""
    return _examination(request.config).run


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> BackendUnderTest:
    """The examined backend."""
    return _examination(request.config).backend


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, if one was asked for."""
    path: Any = session.config.getoption("--attn-report", default=None)
    if path and _STATE in session.config.stash:
        state = session.config.stash[_STATE]
        write_report(make_report(state.backend, state.results, state.device, state.quick), path)


def pytest_report_header(config: pytest.Config) -> Iterator[str]:
    """Which backend is examined, and where."""
    if config.getoption("--attn-backend", default=None):
        device = config.getoption("--device", default="cpu")
        yield f"attn: examines {config.getoption('--attn-backend')} on {device}"
