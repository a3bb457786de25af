"""Steps: what holds between calls, layers, steps, lanes and threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from attn_core.batch import DraftSteps
from attn_core.testing.batches import build, watch
from attn_core.testing.bench import Bench
from attn_core.testing.checks._registry import check
from attn_core.testing.guards import same_bits
from attn_core.testing.pieces import answer_of, one_row, piece
from attn_core.testing.spec import Case, CaseSpec


@check(phases=("prefill",), spread="all")
def chunked_prefill(bench: Bench) -> None:
    """A prompt in chunks gives every row what it gives in one step; the chunks end inside and at the end of pages (case C77)."""
    page = min(bench.ask.page_size, 32)
    total = 2 * page + 3
    spec = bench.spec(query_lens=(total, page), kv_lens=(total, page), needs_lse=False)
    case = build(spec)
    want = bench.oracle(case)
    session = bench.open(case)
    cuts = sorted({0, 1, page - 1, page, page + 1, total})
    for start, stop in zip(cuts, cuts[1:], strict=False):
        ranges = [(start, stop), (min(start, page), min(stop, page))]
        if "zero_rows" not in bench.row.features:
            ranges = [pair for pair in ranges if pair[1] > pair[0]]
        part = piece(case, ranges)
        problems = bench.compare(part, session.run(part), answer_of(want, case, ranges)) + part.problems_outside_cache()
        bench.require_none([f"chunk {start}:{stop} of {total}: {line}" for line in problems], spec)
    bench.require_none(case.problems(), spec)


@check(phases=("decode",), spread="types")
def decode_equals_extend(bench: Bench) -> None:
    """Token by token through decode gives what one extend step gives, windows included (case C80)."""
    windows: list[int | None] = [None, 4] if "sliding_window" in bench.row.features else [None]
    for window in windows:
        spec = bench.spec(
            bench.geometry(window=window), query_lens=(5, 5), kv_lens=(5, 9), needs_lse=False, phase="prefill"
        )
        case = build(spec)
        want = bench.oracle(case)
        session = bench.open(spec.but(phase="decode"))
        for position in range(5):
            ranges = [(position, position + 1)] * 2
            part = piece(case, ranges, "decode")
            problems = bench.compare(part, session.run(part), answer_of(want, case, ranges))
            bench.require_none([f"decode of token {position}, window {window}: {line}" for line in problems], spec)


@check(spread="types")
def metadata_serves_all_layers(bench: Bench) -> None:
    """One step's metadata serves every layer of the group: caches and scales of layers differ, metadata does not."""
    first = build(bench.spec())
    second = build(first.spec)
    for name in ("k", "v"):
        _halve(second, name)
    session = bench.open(first)
    metadata = session.metadata(first.batch, first.phase)
    session.in_graph(metadata)
    for case in (first, second):
        session.store(case)
        result = session.attend(case, metadata, case.out)
        bench.require_none(bench.compare(case, result, bench.oracle(case)), case.spec)


@check(spread="types")
def two_layers(bench: Bench) -> None:
    """In a group of two layers the metadata is made once; each layer brings its queries, cache, scales and sinks, and gets its result.

    A layer stores and attends before the next one, as in a server. Work that a backend does once for all layers of a group is
    left out by backends that see one layer only, so a group of one layer does not prove it.
    """
    cases = layers_of(bench, bench.spec())
    session = bench.open(cases[0])
    metadata = session.metadata(cases[0].batch, cases[0].phase)
    session.in_graph(metadata)
    wants = [bench.oracle(case) for case in cases]
    results = []
    for case, want in zip(cases, wants, strict=True):
        session.store(case)
        results.append(session.attend(case, metadata, case.out))
        found = bench.compare(case, results[-1], want) + case.problems()
        bench.require_none([f"layer {case.layer.index}: {line}" for line in found], case.spec)
    if "writes_out" in bench.row.features:
        found = bench.compare(cases[0], results[0], wants[0])
        bench.require_none([f"layer 0, after layer 1 ran: {line}" for line in found], cases[0].spec)


def layers_of(bench: Bench, spec: CaseSpec, count: int = 2) -> list[Case]:
    """One step of a group of `count` layers: a case each, with one batch. Scales and sinks differ where there are any."""
    sinks = "sinks" in bench.row.features and bench.turn % 2 == 1
    cases: list[Case] = []
    for number in range(count):
        fields: dict[str, Any] = {"layers": count, "layer": number}
        for name in ("k_scale", "v_scale"):
            value = getattr(spec, name)
            if value is not None:
                fields[name] = value * 2.0**-number
        if sinks:
            fields["geometry"] = replace(spec.geometry, sinks=True)
            fields["sinks"] = tuple(((5 * h + 3 * number) % 7 - 3) * 0.5 for h in range(spec.geometry.q_heads))
        cases.append(build(spec.but(**fields)))
    for case in cases[1:]:
        case.batch = cases[0].batch
        watch(case)
    return cases


def _halve(case: Case, name: str) -> None:
    """Another layer's contents on the same pages: the scale doubled where there is one, else values halved (both exact)."""
    scale = getattr(case.layer, f"{name}_scale")
    if scale is not None:
        scale.tensor, scale.value = scale.tensor * 2, None if scale.value is None else scale.value * 2
        replaced = {name: getattr(case.inputs, name) * 2}
    else:
        for cache in (case.cache, case.expected):
            setattr(cache, name, getattr(cache, name) / 2)
        replaced = {name: getattr(case.inputs, name) / 2}
    case.inputs = case.inputs._replace(**replaced)


@check(spread="types")
def steps_do_not_interfere(bench: Bench) -> None:
    """A later step's metadata leaves an earlier step's valid: all state of a step lives in its metadata."""
    first = build(bench.spec())
    second = build(
        bench.spec(seed=bench.turn + 31).but(query_lens=first.spec.query_lens[:2], kv_lens=first.spec.kv_lens[:2])
    )
    session = bench.open(first)
    plans = [session.metadata(case.batch, case.phase) for case in (first, second)]
    for case, metadata in zip((first, second), plans, strict=True):
        session.in_graph(metadata)
        session.store(case)
    for case, metadata in ((second, plans[1]), (first, plans[0]), (second, plans[1])):
        result = session.attend(case, metadata, case.out)
        bench.require_none(bench.compare(case, result, bench.oracle(case)), case.spec)


@check(spread="phase")
def lanes(bench: Bench) -> None:
    """Two lanes interleave call by call: nothing is shared between them."""
    cases = two_lanes(bench)
    session = bench.open(cases[0], lanes=2)
    plans = [session.metadata(case.batch, case.phase) for case in cases]
    for metadata in plans:
        session.in_graph(metadata)
    for case in cases:
        session.store(case)
    results = [session.attend(case, metadata, case.out) for case, metadata in zip(cases, plans, strict=True)]
    for case, result in zip(cases, results, strict=True):
        bench.require_none(bench.compare(case, result, bench.oracle(case)), case.spec)


def two_lanes(bench: Bench) -> list[Case]:
    """Two cases with the same rows in opposite order, one a lane."""
    first = bench.spec(lane=0)
    second = first.but(lane=1, seed=bench.turn + 17, query_lens=first.query_lens[::-1], kv_lens=first.kv_lens[::-1])
    return [build(first), build(second)]


@check(spread="once")
def threads(bench: Bench) -> None:
    """Two threads run their own lanes at once, many times, and get what they get alone."""
    cases = two_lanes(bench)
    session = bench.open(cases[0], lanes=2)
    alone = [session.run(case, give_out=False).out for case in cases]
    wrong: list[str] = []
    start = threading.Barrier(2)

    def work(number: int) -> None:
        start.wait()
        try:
            for _ in range(12):
                out = session.run(cases[number], give_out=False, store=False).out
                if not torch.allclose(out.float(), alone[number].float(), rtol=1e-3, atol=1e-5, equal_nan=True):
                    wrong.append(f"lane {number} gives other numbers beside another thread")
        except Exception as error:
            wrong.append(f"lane {number} raised {type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    bench.require_none(sorted(set(wrong)), cases[0].spec)


@check("batch_invariant", spread="types")
def batch_invariance(bench: Bench) -> None:
    """A row's bits do not depend on the other rows, on padding, or on its place in the batch."""
    spec = bench.spec(strides="contiguous", pad_rows=0)
    whole = build(spec)
    session = bench.open(whole, batch_invariant=True)  # as --deterministic asks for it
    together = session.run(whole).out.clone()
    starts = whole.batch.query_offsets.tolist()
    for row in range(len(spec.kv_lens)):
        alone = one_row(whole, row)
        out = session.run(alone, store=False).out
        if not same_bits(out.contiguous(), together[starts[row] : starts[row + 1]].contiguous()):
            difference = float((out.float() - together[starts[row] : starts[row + 1]].float()).abs().max())
            bench.require_none([f"row {row} differs by {difference:.3g} when it is alone"], spec)
    padded = build(spec.but(pad_rows=2, pad_tokens=3))
    more = session.run(padded).out[: whole.batch.num_tokens]
    if not same_bits(more.contiguous(), together.contiguous()):
        bench.require_none(["padding changes the bits of real rows"], spec)


@check("spec_topk1", phases=("draft",), spread="types")
def draft_steps(bench: Bench) -> None:
    """attn_draft_metadata gives the metadata of all draft steps at once: step i sees the prefix and i + 1 drafts."""
    steps = 3
    spec = bench.spec(query_lens=(steps, steps), kv_lens=(7, 4), phase="draft_extend", needs_lse=False, form="table")
    case = build(spec)
    want = bench.oracle(case)
    session = bench.open(spec.but(phase="draft"))
    slots = case.batch.kv(case.pool_index).new_slots.view(2, 1, steps)
    batch = piece(case, [(0, 1), (0, 1)], "draft").batch
    address = batch.kv(case.pool_index)
    address.kv_lens = address.kv_lens - 1
    if address.kv_lens_cpu is not None:
        address.kv_lens_cpu = address.kv_lens_cpu - 1
    draft = DraftSteps(steps, 1, slots)
    plans = session.call("attn_draft_metadata", batch, session.context.group, draft, None)
    for number in range(steps):
        ranges = [(number, number + 1)] * 2
        part = piece(case, ranges, "draft")
        session.in_graph(plans[number])
        session.store(part)
        result = session.attend(part, plans[number], part.out)
        problems = bench.compare(part, result, answer_of(want, case, ranges))
        bench.require_none([f"draft step {number}: {line}" for line in problems], spec)
