"""vLLM's ``CommonAttentionMetadata`` as an attn-core batch. Pure functions; the metadata is read by attribute.

Rows come as vLLM orders them: rows with one token, or a full chain of drafts, lead (``reorder_batch_threshold``). They become
a ``decode`` or ``verify`` segment; everything behind them is a ``prefill`` segment, which is right for any row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.errors import BatchError


def make_batch(
    common: Any, *, page_size: int, pools: int, phases: Collection[str], verify_len: int = 0, exact: bool = True
) -> AttentionBatch:
    """The batch of one step for the layers of one block table; all its pools get the same address.

    ``common`` has ``query_start_loc_cpu`` i32[R+1], ``seq_lens`` i32[R], ``block_table_tensor`` i32[R, W] in pages of
    ``page_size``, ``slot_mapping`` i64[T]. Rows of padding (no tokens, last) are left out. ``verify_len`` is 1 + drafts.
    ``exact`` False: lengths on the host are bounds, because drafts are accepted on the device.

    Raises :class:`BatchError` for what a batch cannot express (bidirectional rows, an encoder's lengths).
    """
    refuse_unserved(common)
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    lengths = [stop - start for start, stop in zip(starts, starts[1:], strict=False)]
    rows = len(lengths)
    while rows and lengths[rows - 1] <= 0:
        rows -= 1
    tokens = starts[rows]
    lens = common.seq_lens[:rows]
    return AttentionBatch(
        num_rows=rows,
        num_tokens=tokens,
        segments=split_rows(lengths[:rows], starts, phases, verify_len),
        query_offsets=common.query_start_loc[: rows + 1],
        max_query_len=max(lengths[:rows], default=0),
        addresses=(_address(common, rows, tokens, page_size, lens),) * pools,
        positions=None if common.positions is None else common.positions[:tokens],
        query_offsets_cpu=common.query_start_loc_cpu[: rows + 1],
        cpu_exact=exact,
    )


def split_rows(
    lengths: list[int], starts: list[int], phases: Collection[str], verify_len: int = 0
) -> tuple[Segment, ...]:
    """Segments of rows with `lengths` query tokens each: decode or verify in front, the rest prefill."""
    if not lengths:
        return ()
    phase, size = "decode", 1
    if verify_len > 1 and "verify" in phases and lengths[0] == verify_len:
        phase, size = "verify", verify_len
    front = next((row for row, length in enumerate(lengths) if length != size), len(lengths))
    segments = []
    if front:
        segments.append(Segment(phase, slice(0, front), slice(0, starts[front]), size))
    if front < len(lengths):
        rest = lengths[front:]
        same = rest[0] if len(set(rest)) == 1 else None
        segments.append(
            Segment("prefill", slice(front, len(lengths)), slice(starts[front], starts[len(lengths)]), same)
        )
    return tuple(segments)


def _address(common: Any, rows: int, tokens: int, page_size: int, lens: torch.Tensor) -> KvAddress:
    bound = common.seq_lens_cpu_upper_bound
    on_host = lens if lens.device.type == "cpu" else None if bound is None else bound[:rows]
    slots = common.slot_mapping[:tokens]
    return KvAddress(
        page_size=page_size,
        kv_lens=lens,
        new_slots=slots if slots.dtype == torch.int64 else slots.long(),
        max_kv_len=int(common.max_seq_len),
        table=common.block_table_tensor[:rows],
        kv_lens_cpu=on_host,
    )


def refuse_unserved(common: Any) -> None:
    """Raises :class:`BatchError` for rows that are not causal, prefix-LM spans, an encoder's lengths and shards."""
    causal = common.causal
    facts = {
        "causal is not True": causal is not True,
        "bidirectional spans (mm_req_doc_ranges)": any((common.mm_req_doc_ranges or {}).values()),
        "encoder lengths": common.encoder_seq_lens is not None,
        "context-parallel lengths": common.dcp_local_seq_lens is not None,
        "reference sliding windows": common.rswa_prefix_lens is not None,
    }
    found = [what for what, there in facts.items() if there]
    if found:
        raise BatchError(
            f"vLLM asks for attention that this bridge does not serve: {', '.join(found)}",
            fix="start vLLM without ATTN_BACKEND",
        )
