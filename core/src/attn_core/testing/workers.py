"""``attn verify --jobs N``: cells in worker processes, so that they share the cores and a crash costs one cell only.

Every worker lists the cells by itself (the list is a function of the installed backend, the device and ``quick``) and is told
numbers in that list. A process that dies, hangs, or has lost its device to a kernel's fault is replaced; its cell has failed.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess

from attn_core.errors import PluginError
from attn_core.testing.cells import FAILED, Cell, CellResult, list_cells, run_cell
from attn_core.testing.harness import BackendUnderTest

#: Seconds after which a cell that has not answered is given up. Compiling a CUDA library can take minutes.
CELL_LIMIT_S = 900.0


@dataclass(frozen=True)
class Job:
    """What every worker is started with; all of it can be pickled."""

    kind: str
    name: str
    device: str
    quick: bool


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    ready: bool = False
    number: int | None = None
    since: float = field(default_factory=time.perf_counter)

    def give(self, number: int) -> None:
        """Hand a cell over; a process that has died meanwhile is noticed when its answer is read."""
        self.number, self.since = number, time.perf_counter()
        with suppress(OSError):
            self.pipe.send(number)

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def run_cells(
    job: Job,
    cells: Sequence[Cell],
    numbers: Sequence[int],
    jobs: int,
    *,
    late: Callable[[Cell], CellResult | None] | None = None,
    done: Callable[[CellResult], object] | None = None,
    cell_limit_s: float = CELL_LIMIT_S,
) -> list[CellResult]:
    """Results of ``cells[n] for n in numbers``, in the order of `numbers`, from `jobs` processes.

    `late` may answer for a cell instead of running it (its time budget is spent). `done` sees every result.
    """
    context = multiprocessing.get_context("spawn")
    waiting, found = deque(numbers), dict[int, CellResult]()
    workers = [_start(context, job) for _ in range(max(1, min(jobs, len(numbers))))]

    def keep(number: int, result: CellResult) -> None:
        found[number] = result
        if done is not None:
            done(result)

    def feed(worker: _Worker) -> None:
        while waiting:
            number = waiting.popleft()
            skipped = late(cells[number]) if late is not None else None
            if skipped is None:
                worker.give(number)
                return
            keep(number, skipped)

    def replace(worker: _Worker) -> None:
        worker.stop()
        fresh = workers[workers.index(worker)] = _start(context, job)
        feed(fresh)

    try:
        for worker in workers:
            feed(worker)
        while busy := [worker for worker in workers if worker.number is not None]:
            answered = set(map(id, wait([worker.pipe for worker in busy], timeout=1.0)))
            for worker in busy:
                number = worker.number
                assert number is not None
                if id(worker.pipe) in answered:
                    answer = _receive(job, worker, cells[number], started=bool(found))
                    if answer is None:
                        continue
                    result, healthy = answer
                elif time.perf_counter() - worker.since > cell_limit_s:
                    result, healthy = _lost(cells[number], f"no answer in {cell_limit_s:.0f} s", worker.since), False
                else:
                    continue
                worker.number = None
                keep(number, result)
                (feed if healthy else replace)(worker)
    finally:
        for worker in workers:
            worker.stop()
    return [found[number] for number in numbers]


def _receive(job: Job, worker: _Worker, cell: Cell, *, started: bool) -> tuple[CellResult, bool] | None:
    """The result of a worker's cell and whether it can go on; None for its first message, which says that it is ready.

    Raises :class:`PluginError` if no worker gets ready at all; once there are results (`started`) a cell is lost instead.
    """
    try:
        answer = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(timeout=10)
        if not (worker.ready or started):
            raise _unusable(job, worker.process) from None
        return _lost(cell, _ending(worker.process), worker.since), False
    if isinstance(answer, str):
        worker.ready = True
        return None
    facts, healthy = answer  # not the cell: its row's predicates cannot be pickled
    return CellResult(cell, *facts), healthy


def _start(context: SpawnContext, job: Job) -> _Worker:
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(job, there), daemon=False)
    process.start()
    there.close()
    return _Worker(process, here)


def _work(job: Job, pipe: Connection) -> None:
    """A worker: cell numbers in, (result, whether the device still works) out, until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    backend = BackendUnderTest.installed(job.kind, job.name)
    cells = list_cells(backend, job.device, job.quick)
    pipe.send("ready")
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        result = run_cell(backend, cells[number], job.device)
        facts = (result.outcome, result.reason, result.problems, result.smallest, result.seconds)
        pipe.send((facts, result.outcome != FAILED or _device_works(job.device)))


def _device_works(device: str) -> bool:
    """False once a fault has made the process's device context unusable; every later cell would fail with it."""
    import torch

    try:
        return bool(torch.ones(1, device=device).add(1).item() == 2.0)
    except Exception:
        return False


def _lost(cell: Cell, why: str, since: float) -> CellResult:
    return CellResult(
        cell, FAILED, problems=[f"the process running it was lost: {why}"], seconds=time.perf_counter() - since
    )


def _unusable(job: Job, process: BaseProcess) -> PluginError:
    return PluginError(
        f"{job.kind}/{job.name} cannot be verified in worker processes",
        f"found    a worker ended before its first cell: {_ending(process)}; its traceback is above",
        fix="attn verify without --jobs runs in this process",
    )


def _ending(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"
