"""Slices of batches, and static batches that a graph replays. Public through :mod:`attn_core.paging`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attn_core.batch import AttentionBatch, Checkpoints, KvAddress, Segment, StateAddress, Tree
from attn_core.errors import BatchError

_TREE_PHASES = ("verify", "draft")


def slice_batch(batch: AttentionBatch, segment: Segment) -> AttentionBatch:
    """The rows and tokens of `segment` as a batch of their own.

    Tensors are views; only ``query_offsets`` (and row numbers of spans and checkpoints) are rebased. A CSR keeps its whole
    ``indices``: ``indptr[0]`` of the slice may be greater than 0. ``key_offsets`` keep counting in the whole key axis.
    Spans and checkpoints of other rows become empty: (0, 0, 0), and slot -1.
    """
    rows, tokens = segment.rows, segment.tokens
    num_rows = max(0, min(rows.stop, batch.num_rows) - rows.start)
    num_tokens = max(0, min(tokens.stop, batch.num_tokens) - tokens.start)
    offset_rows = slice(rows.start, rows.stop + 1)
    host = batch.query_offsets_cpu
    longest = segment.query_len if segment.query_len is not None else batch.max_query_len
    if host is not None:
        host = host[offset_rows] - tokens.start
        longest = min(longest, int(host.diff().max())) if host.numel() > 1 else 0
    padded = rows.stop - rows.start, tokens.stop - tokens.start
    part = Segment(segment.phase, slice(0, padded[0]), slice(0, padded[1]), segment.query_len)
    return replace(
        batch,
        num_rows=num_rows,
        num_tokens=num_tokens,
        padded_rows=padded[0],
        padded_tokens=padded[1],
        segments=(part,),
        query_offsets=batch.query_offsets[offset_rows] - tokens.start,
        query_offsets_cpu=host,
        max_query_len=longest,
        positions=None if batch.positions is None else batch.positions[tokens],
        addresses=tuple(_slice_address(address, rows, tokens) for address in batch.addresses),
        key_offsets=None if batch.key_offsets is None else batch.key_offsets[offset_rows],
        tree=_slice_tree(batch.tree, segment),
        spans=_slice_spans(batch.spans, rows),
        _views={},
    )


def copy_batch(source: AttentionBatch, static: AttentionBatch) -> AttentionBatch:
    """Copy the contents of `source` into the tensors of `static`, whose addresses a graph has recorded; returns `static`.

    Both must have the same padded rows and tokens; tables and index lists of `static` may be wider (the rest becomes 0).
    Bounds of `static` stay as they are, and its memoised views are rewritten in place.
    Raises :class:`BatchError` if anything does not fit; `static` may then be partly overwritten.
    """
    have, need = (static.padded_rows, static.padded_tokens), (source.padded_rows, source.padded_tokens)
    if have != need or len(static.addresses) != len(source.addresses):
        raise BatchError(
            "a batch does not fit the static one",
            f"static   {have[0]} rows, {have[1]} tokens, {len(static.addresses)} pools",
            f"fresh    {need[0]} rows, {need[1]} tokens, {len(source.addresses)} pools",
            fix="pad the batch to the bucket of the graph: padded_rows, padded_tokens",
        )
    if source.max_query_len > static.max_query_len:
        raise BatchError(f"query length {source.max_query_len} is over the static batch's {static.max_query_len}")
    static.num_rows, static.num_tokens, static.segments = source.num_rows, source.num_tokens, source.segments
    static.query_offsets_cpu, static.cpu_exact = source.query_offsets_cpu, source.cpu_exact
    _copy_fields(source, static, ("query_offsets", "positions", "key_offsets", "spans"))
    if (source.tree is None) != (static.tree is None):
        raise BatchError("only one of the batch and the static batch has a tree")
    if source.tree is not None and static.tree is not None:
        _copy_fields(source.tree, static.tree, ("parents", "depth", "mask_bits"))
    for fresh, target in zip(source.addresses, static.addresses, strict=True):
        _copy_address(fresh, target)
    refresh_views(static)
    return static


def refresh_views(batch: AttentionBatch) -> None:
    """Rewrite every memoised view of `batch` in place, after its tensors were changed.

    The views must be static ones (``convert(..., static=True)``). Raises :class:`BatchError` if one is too small.
    """
    from attn_core.paging import convert

    for key, view in batch._views.items():
        if isinstance(view, AttentionBatch):
            fresh = slice_batch(batch, batch.segments[key[1]])
            copy_batch(fresh, view)
        elif isinstance(view, KvAddress) and view is not batch.addresses[key[0]]:
            convert(batch.kv(key[0]), key[1], key[2], out=view)


# --- slicing and copying --------------------------------------------------------------------------------------------------


def _slice_address(address: KvAddress | StateAddress, rows: slice, tokens: slice) -> KvAddress | StateAddress:
    def cut(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[rows]

    if isinstance(address, StateAddress):
        return StateAddress(
            address.read_slots[rows],
            address.write_slots[rows],
            address.fresh[rows],
            cut(address.step_slots),
            cut(address.accepted),
            _slice_checkpoints(address.checkpoints, rows),
        )
    host = cut(address.kv_lens_cpu)
    shared = address.table_rows is not None
    return replace(
        address,
        kv_lens=address.kv_lens[rows],
        new_slots=address.new_slots[tokens],
        max_kv_len=address.max_kv_len if host is None or not host.numel() else int(host.max()),
        table=address.table if shared else cut(address.table),
        table_rows=cut(address.table_rows),
        indptr=None if address.indptr is None else address.indptr[rows.start : rows.stop + 1],
        kv_lens_cpu=host,
        local_lens=cut(address.local_lens),
        origin=cut(address.origin),
    )


def _slice_tree(tree: Tree | None, segment: Segment) -> Tree | None:
    if tree is None or segment.phase not in _TREE_PHASES:
        return None
    return Tree(tree.parents[segment.rows], tree.depth[segment.rows], tree.mask_bits[segment.rows])


def _slice_spans(spans: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    if spans is None:
        return None
    inside = (spans[:, 0] >= rows.start) & (spans[:, 0] < rows.stop)
    rebased = torch.stack((spans[:, 0] - rows.start, spans[:, 1], spans[:, 2]), dim=1)
    return torch.where(inside[:, None], rebased, 0)


def _slice_checkpoints(checkpoints: Checkpoints | None, rows: slice) -> Checkpoints | None:
    if checkpoints is None:
        return None
    inside = (checkpoints.row >= rows.start) & (checkpoints.row < rows.stop)
    return Checkpoints(
        torch.where(inside, checkpoints.row - rows.start, 0),
        torch.where(inside, checkpoints.length, 0),
        torch.where(inside, checkpoints.slot, -1),
    )


def _copy_fields(source: object, target: object, names: Sequence[str]) -> None:
    for name in names:
        fresh, static = getattr(source, name), getattr(target, name)
        if (fresh is None) != (static is None):
            which = "the batch" if static is None else "the static batch"
            raise BatchError(f"only {which} has {name}", fix="allocate the static batch with the same parts")
        if fresh is not None and fresh is not static:
            overwrite(static, fresh, name)


def _copy_address(source: KvAddress | StateAddress, static: KvAddress | StateAddress) -> None:
    if isinstance(source, StateAddress) or isinstance(static, StateAddress):
        _copy_fields(source, static, ("read_slots", "write_slots", "fresh", "step_slots", "accepted"))
        return
    if (source.page_size, source.form) != (static.page_size, static.form) or source.max_kv_len > static.max_kv_len:
        raise BatchError(
            "an address does not fit the static one",
            f"static   {static.form}, pages of {static.page_size}, up to {static.max_kv_len} keys",
            f"fresh    {source.form}, pages of {source.page_size}, up to {source.max_kv_len} keys",
        )
    names = ("kv_lens", "new_slots", "table", "table_rows", "indices", "indptr", "local_lens", "origin")
    _copy_fields(source, static, names)
    static.kv_lens_cpu = source.kv_lens_cpu


def overwrite(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Copy `source` into `target`; a narrower table or index list is followed by zeros. Raises :class:`BatchError`."""
    width = source.shape[-1]
    surplus = name in ("table", "indices") and width <= target.shape[-1]
    if source.shape[:-1] != target.shape[:-1] or (width != target.shape[-1] and not surplus):
        raise BatchError(
            f"{name} does not fit the static tensor",
            f"static   {list(target.shape)}",
            f"fresh    {list(source.shape)}",
            fix="allocate the static batch for the largest rows, tokens and max_kv_len",
        )
    target[..., :width].copy_(source)
    target[..., width:].zero_()
