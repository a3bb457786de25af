"""What both generations share: a step's description, graph state and the hooks. A subclass makes the library call.

The kernels take a batch as it is: packed queries with offsets, a dense page table, lengths. So metadata is a handful of
references, nothing is planned on the host, and one object serves every phase, mixed batches included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attn_core.context import Context, GraphLimits
from attn_core.errors import BatchError, GraphError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_flash.caches import Views
from attn_flash.rules import OFF, Rules
from attn_flash.steps import Buffers, FlashMetadata, FlashState, allocate, check_replayed, key_of
from attn_flash.trees import fill_tree, list_width, tree_step

if TYPE_CHECKING:
    from attn_core.batch import AttentionBatch, KvAddress, Part

Result = tuple[torch.Tensor, torch.Tensor | None]


class FlashBackend:
    """One layer group. Holds no state of a step: metadata and graph state do."""

    #: Whether the kernel reads ``table_rows`` itself; otherwise a table of its own is gathered once a step.
    reads_table_rows = False
    #: Whether trees are lists of slots (filled by :mod:`attn_flash.trees`); otherwise the subclass masks.
    lists_trees = False

    def __init__(self, context: Context) -> None:
        geometry = context.group.geometry
        assert isinstance(geometry, MhaGeometry)
        self.context, self.geometry = context, geometry
        self.rules = Rules.of(geometry)
        self.views = Views()
        index = context.pool_index
        self.address_index = index.get("attend", index.get("cross", -1))  # towers have no pool
        pool = context.pools.get("attend") or context.pools.get("cross")
        self.narrow = pool is not None and pool.dtype.startswith("fp8")
        self.finite = bool(context.options.get("finite_pool", False))
        self.trees = frozenset(
            phase for phase, plan in context.phases.items() if any("spec_tree" in part.features for part in plan.parts)
        )

    # --- for subclasses ---------------------------------------------------------------------------------------------------

    def page_to_read(self, address: KvAddress, planned: int, query_len: int, tree: bool) -> int:
        """Tokens of a page as the kernel shall read it; divides the pool's page."""
        raise NotImplementedError

    def make_call(self, metadata: FlashMetadata) -> None:
        """Fill ``metadata.call`` (and the calls of a tree): whatever does not change from layer to layer."""
        raise NotImplementedError

    def attend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: FlashMetadata, out: torch.Tensor | None
    ) -> Result:
        """One layer over its cache."""
        raise NotImplementedError

    def attend_packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        sinks: torch.Tensor | None,
        rules: Rules,
        metadata: FlashMetadata,
        offsets: torch.Tensor,
        max_key_len: int,
        with_lse: bool,
    ) -> Result:
        """One layer without a cache; `sinks` where they belong into this result."""
        raise NotImplementedError

    def split_entries(self, rows: int) -> int:
        """Entries of the plan of splits that is made once a step; 0 where none is made."""
        return 0

    def fill_splits(self, metadata: FlashMetadata) -> None:
        """Make the plan of splits, on the device."""

    def bound_query_len(self, batch: AttentionBatch) -> int:
        """The bound on query lengths that the kernel is told."""
        return max(1, batch.max_query_len)

    # --- once a step ------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: FlashState | None, capture: bool
    ) -> FlashMetadata:
        """References to the batch's tensors. Nothing waits for the device, nothing runs on it unless a table is re-paged."""
        tree = batch.tree if phase in self.trees else None
        address = None
        if batch.key_offsets is None:
            source = batch.kv(self.address_index)
            page = self.page_to_read(
                source, self.context.kernel_page_size(phase), batch.max_query_len, tree is not None
            )
            address = batch.view(self.address_index, "table", page)
        if state is not None:
            found = state.metadata.get(key_of(batch, phase))
            if found is not None:
                check_replayed(found, batch, address, tree)
                found.num_tokens = batch.num_tokens
                return found
        metadata = FlashMetadata(
            phase,
            batch.num_tokens,
            batch.needs_lse,
            batch.partial,
            rows=batch.padded_rows,
            tokens=batch.padded_tokens,
            max_query_len=self.bound_query_len(batch),
            query_offsets=batch.query_offsets,
            key_offsets=batch.key_offsets,
            max_key_len=batch.max_key_len,
        )
        if address is not None:
            metadata.address, metadata.page, metadata.masks = address, address.page_size, tree
            self._describe(metadata, address, state.buffers if state is not None else None)
            self.make_call(metadata)
        if state is not None:
            state.metadata[key_of(batch, phase)] = metadata
        return metadata

    def _describe(self, metadata: FlashMetadata, address: KvAddress, buffers: Buffers | None) -> None:
        """Lengths and table: the batch's own where they serve, derived ones otherwise."""
        rows, tree = metadata.rows, metadata.masks
        assert address.table is not None
        metadata.table_rows = address.table_rows if self.reads_table_rows else None
        columns, gathered = self._columns(address), address.table_rows is not None and not self.reads_table_rows
        fitting = address.table.shape[1] >= columns
        shifted = address.origin is not None or address.local_lens is not None
        listed = tree is not None and self.lists_trees
        splits = self.split_entries(rows) if self.plans_splits(metadata) else 0
        metadata.derived = gathered or shifted or listed or not fitting or bool(splits)
        if metadata.derived and buffers is None:
            drafts = tree.mask_bits.shape[1] if tree is not None else 0
            own = metadata.tokens * list_width(drafts, self.rules, address.max_kv_len) if listed else 0
            table = rows * columns if gathered or not fitting else 0
            buffers = allocate(self.context.device, rows, metadata.tokens if listed else 0, own, table, splits)
        metadata.key_lens = address.kv_lens if not shifted else buffers.key_lens[:rows]  # type: ignore[union-attr]
        if gathered or not fitting:
            assert buffers is not None
            if buffers.table.numel() < rows * columns:
                raise GraphError(
                    "a graph has no room for a table that is gathered by row numbers",
                    f"needed   {rows} x {columns} entries, {buffers.table.numel()} are there",
                    fix="give the static batch a dense table with one line a row",
                )
            metadata.table, metadata.table_rows = _part(buffers.table, rows, columns), None
        else:
            metadata.table = _cut(address.table, None if metadata.table_rows is not None else rows, columns)
        if splits:
            assert buffers is not None
            metadata.splits = buffers.splits[:splits]
        if listed:
            assert buffers is not None
            assert tree is not None
            width = list_width(tree.mask_bits.shape[1], self.rules, address.max_kv_len)
            metadata.tree = tree_step(buffers, rows, metadata.tokens, width, self.rules)

    def _columns(self, address: KvAddress) -> int:
        """Columns of the table that the kernel is told: those that the longest row needs.

        Batch invariance asks for more than the window holds: a narrower table makes the library drop the window, and choose
        other tiles with it.
        """
        columns = max(1, -(-address.max_kv_len // address.page_size))
        if self.context.batch_invariant and self.rules.left != OFF:
            columns = max(columns, -(-(self.rules.left + 2) // address.page_size) + 1)
        return columns

    def plans_splits(self, metadata: FlashMetadata) -> bool:
        """Whether this step gets a plan of splits for all its layers."""
        return False

    @hookimpl
    def attn_metadata_in_graph(self, metadata: FlashMetadata) -> None:
        """Derived lengths, tables, trees and split plans. Most steps have none."""
        if not metadata.derived:
            return
        address = metadata.address
        assert address is not None
        assert metadata.key_lens is not None
        assert metadata.table is not None
        assert address.table is not None
        if metadata.key_lens is not address.kv_lens:
            lens = address.kv_lens if address.local_lens is None else address.local_lens
            if address.origin is not None:
                lens = (lens - address.origin).clamp_(min=0)
            metadata.key_lens.copy_(lens)
        if metadata.table.data_ptr() != address.table.data_ptr():
            lines = address.table if address.table_rows is None else address.table[address.table_rows.long()]
            width = min(metadata.table.shape[1], lines.shape[1])
            metadata.table[:, :width].copy_(lines[: metadata.rows, :width])
        if metadata.tree is not None:
            fill_tree(metadata, self.rules)
        if metadata.splits is not None:
            self.fill_splits(metadata)

    @hookimpl
    def attn_graph_state(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits, lane: int) -> FlashState:
        """Buffers for the largest step that the limits allow; small where no phase verifies trees."""
        listed = self.lists_trees and any(phase in self.trees for phase in phases)
        own = limits.max_tokens * list_width(limits.max_query_len, self.rules, limits.max_kv_len) if listed else 0
        columns = 0
        if self.context.batch_invariant and self.rules.left != OFF:
            columns = limits.max_kv_len + self.rules.left + 3
        tokens = limits.max_tokens if listed else 0
        buffers = allocate(
            self.context.device,
            limits.max_rows,
            tokens,
            own,
            limits.max_rows * columns,
            self.split_entries(limits.max_rows),
        )
        return FlashState(limits, lane, buffers)

    # --- once a layer -----------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_extend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: FlashMetadata, out: torch.Tensor | None
    ) -> Result:
        """Queries against the cache, which holds the new tokens already: q[T, Hq, D] -> out[T, Hq, Dv]."""
        return self.attend(inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_decode(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: FlashMetadata, out: torch.Tensor | None
    ) -> Result:
        """As :meth:`attn_extend`: one query a row is nothing special to these kernels."""
        return self.attend(inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: MhaLayer,
        metadata: FlashMetadata,
        part: Part | None,
    ) -> Result:
        """Packed q[T, Hq, D] over packed k[Tk, Hk, D], v[Tk, Hk, Dv]; `part` is one chunk of a prefix, without sinks."""
        with_lse = metadata.needs_lse or part is not None
        if part is None:
            offsets, longest, rules = metadata.key_offsets, metadata.max_key_len, self.rules
        else:
            offsets, longest = part.offsets, part.max_len
            rules = self.rules if part.causal else self.rules.without_mask()
        if offsets is None:
            raise BatchError(
                "packed attention needs to know where each row's keys are",
                fix="give the batch key_offsets and max_key_len, or the call a part",
            )
        sinks = layer.sinks if part is None and not metadata.partial else None
        if not q.shape[0] or not k.shape[0]:
            return empty_result(q, v.shape[2], q.dtype)
        return self.attend_packed(q, k, v, layer, sinks, rules, metadata, offsets, max(1, longest), with_lse)


def empty_result(q: torch.Tensor, v_dim: int, dtype: torch.dtype) -> Result:
    """The result where there is no query or no key at all: zeros, and an LSE of -inf."""
    shape = (q.shape[0], q.shape[1])
    return q.new_zeros((*shape, v_dim), dtype=dtype), q.new_full(shape, float("-inf"), dtype=torch.float32)


def _cut(table: torch.Tensor, rows: int | None, columns: int) -> torch.Tensor:
    """The first rows and columns of a table; the table itself where that is all of it."""
    if table.shape[1] != columns:
        table = table.narrow(1, 0, columns)
    return table if rows is None or table.shape[0] == rows else table.narrow(0, 0, rows)


def _part(buffer: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The first entries of a buffer as [rows, columns]."""
    return buffer[: rows * columns].view(rows, columns)
