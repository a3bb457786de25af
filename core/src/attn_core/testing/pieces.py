"""Parts of a step as steps of their own: chunks of a prompt, single tokens, single rows, all over one cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.layers import MhaInputs
from attn_core.testing.batches import UNIFORM
from attn_core.testing.guards import Watch, guarded
from attn_core.testing.oracle_mha import Answer
from attn_core.testing.spec import Case


def piece(case: Case, ranges: Sequence[tuple[int, int]], phase: str = "") -> Case:
    """Queries ``start`` to ``stop`` of each row as a step of its own; keys after the last of them do not exist yet.

    The piece shares the case's cache and layer. Its problems are those of its canaries alone: only the last piece has
    the whole expected cache.
    """
    phase = phase or case.phase
    tokens, offsets, kv_lens = [], [0], []
    starts = case.batch.query_offsets.tolist()
    for row, (start, stop) in enumerate(ranges):
        tokens += list(range(starts[row] + start, starts[row] + stop))
        offsets.append(offsets[-1] + stop - start)
        kv_lens.append(case.spec.kv_lens[row] - case.spec.query_lens[row] + stop)
    index = torch.tensor(tokens, dtype=torch.int64, device=case.inputs.q.device)
    batch = _batch(case, phase, index, offsets, kv_lens)
    out = guarded("out", (len(tokens), *case.out.shape[1:]), case.out.dtype, case.out.device)
    spec = case.spec.but(
        phase=phase,
        query_lens=tuple(stop - start for start, stop in ranges),
        kv_lens=tuple(kv_lens),
        pad_rows=0,
        pad_tokens=0,
    )
    return replace(
        case, spec=spec, batch=batch, inputs=_inputs(case.inputs, index), out=out.tensor, guards=[out], watch=Watch()
    )


def answer_of(whole: Answer, case: Case, ranges: Sequence[tuple[int, int]]) -> Answer:
    """The part of a whole step's answer that belongs to a piece."""
    starts = case.batch.query_offsets.tolist()
    tokens = [t for row, (a, b) in enumerate(ranges) for t in range(starts[row] + a, starts[row] + b)]
    return Answer(whole.out[tokens], whole.lse[tokens])


def one_row(case: Case, row: int) -> Case:
    """One row of a case as a batch of its own, with the same pages."""
    start, stop = case.batch.query_offsets.tolist()[row : row + 2]
    address = case.batch.kv(case.pool_index)
    index = torch.arange(start, stop, device=case.inputs.q.device)
    alone = replace(address, kv_lens=address.kv_lens[row : row + 1], new_slots=address.new_slots[start:stop])
    alone.kv_lens_cpu = None if address.kv_lens_cpu is None else address.kv_lens_cpu[row : row + 1]
    alone.max_kv_len = max(case.spec.kv_lens[row], 1)
    alone.origin = None if address.origin is None else address.origin[row : row + 1]
    if address.table is not None:
        assert address.table_rows is not None
        alone.table_rows = address.table_rows[row : row + 1].clone()
    else:
        assert address.indices is not None
        assert address.indptr is not None
        first, last = address.indptr.tolist()[row : row + 2]
        alone.indices, alone.indptr = address.indices[first:last].clone(), address.indptr[row : row + 2] - first
    batch = _plain_batch(case, case.phase, [0, stop - start], alone, case.batch.positions, index)
    batch.tree = None if case.batch.tree is None else replace_tree(case, row)
    out = guarded("out", (stop - start, *case.out.shape[1:]), case.out.dtype, case.out.device)
    spec = case.spec.but(query_lens=(stop - start,), kv_lens=(case.spec.kv_lens[row],), pad_rows=0, pad_tokens=0)
    return replace(
        case, spec=spec, batch=batch, inputs=_inputs(case.inputs, index), out=out.tensor, guards=[out], watch=Watch()
    )


def replace_tree(case: Case, row: int):  # type: ignore[no-untyped-def]
    """The tree of one row."""
    tree = case.batch.tree
    assert tree is not None
    return replace(tree, **{n: getattr(tree, n)[row : row + 1] for n in ("parents", "depth", "mask_bits")})


def _batch(case: Case, phase: str, index: torch.Tensor, offsets: list[int], kv_lens: list[int]) -> AttentionBatch:
    address, slack = case.batch.kv(case.pool_index), 0 if case.spec.host == "exact" else 2
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=address.kv_lens.device)
    rows = len(kv_lens)
    part = replace(
        address,
        kv_lens=lens,
        new_slots=address.new_slots[index],
        max_kv_len=max(max(kv_lens, default=0), 1) + slack,
        kv_lens_cpu=None if case.spec.host == "none" else lens.cpu() + slack,
        table_rows=None if address.table_rows is None else address.table_rows[:rows],
        indptr=None if address.indptr is None else address.indptr[: rows + 1],
        origin=None if address.origin is None else address.origin[:rows],
    )
    return _plain_batch(case, phase, offsets, part, case.batch.positions, index)


def _plain_batch(
    case: Case,
    phase: str,
    offsets: list[int],
    address: KvAddress,
    positions: torch.Tensor | None,
    index: torch.Tensor,
) -> AttentionBatch:
    lens = {b - a for a, b in zip(offsets, offsets[1:], strict=False)}
    query_len = lens.pop() if len(lens) == 1 and phase in UNIFORM else None
    rows = len(offsets) - 1
    tensor = torch.tensor(offsets, dtype=torch.int32)
    decoys = []
    for other in case.batch.addresses[: case.pool_index]:
        assert isinstance(other, KvAddress)
        assert other.table is not None
        short = replace(other, kv_lens=other.kv_lens[:rows], new_slots=other.new_slots[index])
        decoys.append(replace(short, table=other.table[:rows]))
    return AttentionBatch(
        num_rows=rows,
        num_tokens=offsets[-1],
        segments=(Segment(phase, slice(0, rows), slice(0, offsets[-1]), query_len),),
        query_offsets=tensor.to(address.kv_lens.device),
        query_offsets_cpu=None if case.spec.host == "none" else tensor,
        cpu_exact=case.spec.host == "exact",
        max_query_len=max([1, *(b - a for a, b in zip(offsets, offsets[1:], strict=False))]),
        positions=None if positions is None else positions[index],
        addresses=(*decoys, address),
        lane=case.batch.lane,
        needs_lse=case.batch.needs_lse,
        partial=case.batch.partial,
    )


def _inputs(inputs: MhaInputs, index: torch.Tensor) -> MhaInputs:
    k = None if inputs.k is None else inputs.k[index]
    v = None if inputs.v is None else inputs.v[index]
    return MhaInputs(inputs.q[index], k, v, None, inputs.store)
