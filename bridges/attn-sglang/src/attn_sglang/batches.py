"""From SGLang's ``ForwardBatch`` to attn-core's batch: rows, lengths, and token slots as pages.

SGLang addresses tokens: row r of ``req_to_token`` holds the slot of every token of request r. Pages of p tokens are
aligned runs of p slots, so column c of the page table is ``req_to_token[r, c * p] // p``. At page size 1 the server's own
table is read without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.errors import BatchError
from attn_sglang.trees import tree_of

if TYPE_CHECKING:
    from attn_core.batch import Tree
    from attn_sglang.pools import PoolSource


@dataclass(slots=True)
class Rows:
    """One forward, host and device facts: R rows, T tokens. ``lens`` counts the new tokens; ``most`` bounds it (host)."""

    phase: str
    count: int
    tokens: int
    query_len: int | None  #: of every row, or None for ragged rows
    longest: int  #: most query tokens in a row
    offsets: torch.Tensor  #: i32[R + 1]
    offsets_cpu: torch.Tensor | None
    lens: torch.Tensor  #: i32[R]
    lens_cpu: torch.Tensor | None
    most: int
    tree: Tree | None = None


def phase_of(mode: Any) -> str:
    """attn-core's phase of a ``ForwardMode``. Raises :class:`BatchError` for a mode that this bridge does not serve."""
    if mode.is_decode():
        return "decode"
    if mode.is_target_verify():
        return "verify"
    if mode.is_dllm_extend() or mode.is_draft_extend_v2() or mode.is_idle() or mode.is_prebuilt():
        raise BatchError(f"forward mode {mode.name} is not served through attn-core")
    return "prefill"  # EXTEND, SPLIT_PREFILL, and MIXED: decode rows of a mixed batch are extends by one token


class BatchMaker:
    """Makes batches for one runner. `context` bounds lengths that are not known on the host; `tree` says that verified
    drafts form a tree."""

    def __init__(self, sources: tuple[PoolSource, ...], requests: torch.Tensor, context: int, tree: bool) -> None:
        """`requests` is SGLang's ``req_to_token``, i32[requests, columns]: token slots."""
        self.sources, self.requests, self.context, self.tree = sources, requests, context, tree
        self.own_mask: torch.Tensor | None = None  #: the mask that this bridge hands to the drafter (drafts only)

    # --- rows -----------------------------------------------------------------------------------------------------------

    def rows(self, batch: Any) -> Rows:
        """The rows of a ``ForwardBatch``."""
        phase = phase_of(batch.forward_mode)
        if phase == "prefill":
            return self._ragged(batch)
        width = 1 if phase == "decode" else self._width(batch.spec_info)
        more = width if phase == "verify" else 0  # SGLang's lengths leave the drafts out
        count = batch.batch_size
        lens_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu[:count] + more
        offsets = torch.arange(0, count * width + 1, width, dtype=torch.int32, device=batch.seq_lens.device)
        made = Rows(
            phase,
            count,
            count * width,
            width,
            width,
            offsets,
            torch.arange(0, count * width + 1, width, dtype=torch.int32),
            (batch.seq_lens[:count] + more).to(torch.int32),
            None if lens_cpu is None else lens_cpu.to(torch.int32),
            self._most(lens_cpu, more),
        )
        if phase == "verify" and self.tree:
            made.tree = self.verify_tree(batch.spec_info, batch.seq_lens[:count], width)
        return made

    def verify_tree(self, spec: Any, lens: torch.Tensor, width: int) -> Tree:
        """The tree of the drafts of `spec`; `lens` i64[R] counts the prefix."""
        mask = spec.custom_mask
        own = mask is not None and self.own_mask is not None and mask.data_ptr() == self.own_mask.data_ptr()
        return tree_of(mask, lens, lens.numel(), width, drafts_only=own)

    def _ragged(self, batch: Any) -> Rows:
        count = batch.batch_size
        new = batch.extend_seq_lens[:count]
        host = batch.extend_seq_lens_cpu
        host_lens = None if host is None else torch.tensor(list(host)[:count], dtype=torch.int32)
        tokens = int(new.sum()) if host_lens is None else int(host_lens.sum())
        lens_cpu = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu[:count]
        return Rows(
            "prefill",
            count,
            tokens,
            None,
            int(new.max()) if host_lens is None else int(host_lens.max()),
            _starts(new),
            None if host_lens is None else _starts(host_lens),
            batch.seq_lens[:count].to(torch.int32),
            None if lens_cpu is None else lens_cpu.to(torch.int32),
            self._most(lens_cpu, 0),
        )

    def _width(self, spec: Any) -> int:
        if getattr(spec, "ragged_verify_layout", None) is not None:
            raise BatchError("a ragged verify batch is not served through attn-core", fix="SGLANG_RAGGED_VERIFY_MODE=0")
        width = int(getattr(spec, "draft_token_num", 0) or 0)
        if width < 1:
            raise BatchError(f"{type(spec).__name__} does not say how many drafts a row verifies (draft_token_num)")
        return width

    def _most(self, lens: torch.Tensor | None, more: int) -> int:
        return self.context + more if lens is None or not lens.numel() else int(lens.max())

    # --- batches --------------------------------------------------------------------------------------------------------

    def eager(self, batch: Any) -> AttentionBatch:
        """A batch with tensors of its own (page size 1: the server's table itself)."""
        rows = self.rows(batch)
        row_numbers = batch.req_pool_indices[: rows.count]
        return self.assemble(
            rows,
            batch.positions,
            tuple(self._address(source, rows, row_numbers, batch.out_cache_loc) for source in self.sources),
        )

    def assemble(self, rows: Rows, positions: Any, addresses: tuple[KvAddress, ...], **more: Any) -> AttentionBatch:
        """The batch of `rows`; one segment, for SGLang never mixes phases in a forward."""
        segment = Segment(rows.phase, slice(0, rows.count), slice(0, rows.tokens), rows.query_len)
        return AttentionBatch(
            num_rows=rows.count,
            num_tokens=rows.tokens,
            segments=(segment,) if rows.count else (),
            query_offsets=rows.offsets,
            query_offsets_cpu=rows.offsets_cpu,
            max_query_len=rows.longest,
            addresses=addresses,
            positions=None if positions is None else positions[: rows.tokens].to(torch.int64),
            cpu_exact=rows.lens_cpu is not None and rows.offsets_cpu is not None,
            tree=rows.tree,
            **more,
        )

    def _address(self, source: PoolSource, rows: Rows, numbers: torch.Tensor, slots: torch.Tensor) -> KvAddress:
        direct = source.page_size == 1 and source.translate is None
        return KvAddress(
            page_size=source.page_size,
            kv_lens=rows.lens,
            kv_lens_cpu=rows.lens_cpu,
            max_kv_len=rows.most,
            new_slots=self.new_slots(source, slots[: rows.tokens]),
            table=self.requests if direct else self.pages(source, numbers, rows.most),
            table_rows=numbers.to(torch.int32) if direct else None,
        )

    def pages(self, source: PoolSource, numbers: torch.Tensor, most: int) -> torch.Tensor:
        """i32[R, ceil(most / p)]: the page of every p-th token of the requests `numbers`."""
        size = source.page_size
        width = max(1, -(-most // size))
        slots = self.requests[:, : width * size : size].index_select(0, numbers.to(torch.int64))
        if source.translate is not None:
            slots = source.translate[slots.to(torch.int64)].clamp_min(0)  # keys behind the window were freed: slot 0
        return (slots // size).to(torch.int32)

    def new_slots(self, source: PoolSource, slots: torch.Tensor) -> torch.Tensor:
        """i64[T]: where new keys go in this pool."""
        slots = slots.to(torch.int64)
        return slots if source.translate is None else source.translate[slots].to(torch.int64)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    starts = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=starts[1:])
    return starts
