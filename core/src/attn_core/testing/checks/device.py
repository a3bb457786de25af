"""What only a real device can show: 64-bit offsets, no host synchronisation, work on other streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy
import torch

from attn_core.layers import MhaCache
from attn_core.testing.batches import build
from attn_core.testing.bench import Bench, NotHere
from attn_core.testing.checks._registry import check
from attn_core.testing.checks.steps import two_lanes
from attn_core.testing.spec import Case, CaseSpec


@check(spread="once")
def offsets_of_64_bits(bench: Bench) -> None:
    """Pages beyond element 2^31 of a pool are read and written at their own place."""
    spec = bench.spec(storage="separate", form="table")
    if spec.kv == "fp4":
        raise NotHere("an fp4 pool of 2^31 elements is left to plain types")
    case = build(spec)
    per_page = min(case.cache.k[0].numel(), case.cache.v[0].numel())
    shift = 2**31 // per_page + 16
    pages = shift + len(case.cache.k)
    _require_memory(pages * (case.cache.k[0].nbytes + case.cache.v[0].nbytes), bench.device)
    moved = _shift(case, shift)
    result = bench.open(moved).run(moved)
    bench.require_none(bench.compare(moved, result, bench.oracle(case)), spec)


def _require_memory(needed: int, device: str) -> None:
    """On a GPU the pool must fit; on a CPU pages that nobody touches cost address space only."""
    free = torch.cuda.mem_get_info()[0] if device.startswith("cuda") else 2**36
    if needed > 0.8 * free:
        raise NotHere(f"needs {needed >> 30} GiB of memory, {free >> 30} are free")


def _shift(case: Case, shift: int) -> Case:
    """The same case with all its pages `shift` pages further in a pool that is mostly poison-free zeros."""

    def far(tensor: torch.Tensor) -> torch.Tensor:
        raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        pool = untouched_zeros((shift + len(tensor), *tensor.shape[1:]), raw)
        pool[shift:] = raw
        return pool.view(tensor.dtype)

    address = case.batch.kv(case.pool_index)
    assert address.table is not None
    slots = address.new_slots
    moved = replace(
        address,
        table=address.table + shift,
        new_slots=torch.where(slots < 0, slots, slots + shift * case.spec.page_size),
    )
    addresses = (*case.batch.addresses[: case.pool_index], moved)
    batch = replace(case.batch, addresses=addresses, _views={})
    return replace(case, batch=batch, cache=MhaCache(far(case.cache.k), far(case.cache.v), format=case.cache.format))


def untouched_zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Zeros of `like`'s type and device; on a CPU memory that is mapped only once it is written to."""
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    nbytes = like.element_size()
    for size in shape:
        nbytes *= size
    return torch.from_numpy(numpy.zeros(nbytes, dtype=numpy.uint8)).view(like.dtype).view(shape)


@check(device="cuda", spread="types")
def no_host_sync(bench: Bench) -> None:
    """A layer's call never waits for the device, not even for scales that only the device knows.

    Metadata does not either, unless exact host lengths are declared.
    """
    spec = bench.spec()
    scaled = [name for name in ("k_scale", "v_scale", "q_scale") if getattr(spec, name) is not None]
    for hidden in ((), scaled) if scaled else ((),):
        _run_without_waiting(bench, spec, hidden)


def _run_without_waiting(bench: Bench, spec: CaseSpec, hidden: Iterable[str]) -> None:
    """One step under CUDA's own watch for waits; the host does not know the values of the scales `hidden`."""
    case, fresh = build(spec), build(spec)
    for name in hidden:
        for layer in (case.layer, fresh.layer):
            getattr(layer, name).value = None
    session = bench.open(case)
    session.run(case)  # compile and load first
    torch.cuda.synchronize()
    try:
        if bench.host_lengths() != "exact":
            torch.cuda.set_sync_debug_mode("error")
        metadata = session.metadata(fresh.batch, fresh.phase)
        torch.cuda.set_sync_debug_mode("error")
        session.in_graph(metadata)
        session.store(fresh)
        result = session.attend(fresh, metadata, fresh.out)
    except RuntimeError as error:
        torch.cuda.set_sync_debug_mode("default")
        where = f", {' and '.join(hidden)} on the device only" if hidden else ""
        bench.require_none([f"the host waits for the device{where}: {error}"], fresh.spec)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bench.require_none(bench.compare(fresh, result, bench.oracle(fresh)), fresh.spec)


@check(device="cuda", spread="phase")
def other_streams(bench: Bench) -> None:
    """Work goes to the current stream: two steps on two streams, interleaved, give what they give alone."""
    cases = two_lanes(bench)
    session = bench.open(cases[0], lanes=2)
    streams = [torch.cuda.Stream() for _ in cases]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    results = []
    plans = []
    for case, stream in zip(cases, streams, strict=True):
        with torch.cuda.stream(stream):
            plans.append(session.metadata(case.batch, case.phase))
            session.in_graph(plans[-1])
            session.store(case)
    for case, stream, metadata in zip(cases, streams, plans, strict=True):
        with torch.cuda.stream(stream):
            results.append(session.attend(case, metadata, case.out))
    torch.cuda.synchronize()
    for case, result in zip(cases, results, strict=True):
        bench.require_none(bench.compare(case, result, bench.oracle(case)), case.spec)
