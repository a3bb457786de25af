"""Eager steps: which wrappers a step borrows, and their plans."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.context import Context
from attn_flashinfer.lengths import Array, Lengths, host_offsets, lengths_of, on_host
from attn_flashinfer.metadata import FlashInferMetadata
from attn_flashinfer.pages import pack_pages
from attn_flashinfer.wrappers import MOST_IDLE, Lease, Planner

#: Phases with one query a row.
SINGLE = ("decode", "draft")


class Steps:
    """Plans the steps of one layer group."""

    def __init__(self, planner: Planner, context: Context) -> None:
        self.planner, self.context, self.rules = planner, context, planner.rules
        self.recent: dict[tuple[int, int], Lengths] = {}  # of decode steps, by lane and rows
        self.read = str(context.options.get("prefill_read", "auto"))
        shared = context.group.kv_from or "shared_kv" in context.group.features
        plain = self.rules.causal and self.rules.kv_dtype == self.rules.q_dtype and self.rules.variant != "sink"
        #: A prefill may read its new tokens from k and v.
        self.may_pack = plain and not shared and not self.rules.invariant and self.read != "paged"
        if self.may_pack and self.read == "ragged":
            planner.prepare_merge()

    def kind(self, phase: str) -> str:
        """The wrapper of a phase."""
        if self.rules.variant in ("decode", "sink"):
            return self.rules.variant
        one = phase in SINGLE and self.rules.variant == "fa2" and self.rules.qk_dim == self.rules.v_dim
        return "tensor" if one else "prefill"

    def causal(self, phase: str) -> bool:
        """One query a row sees all its keys; a tree's mask replaces the causal one."""
        return self.rules.causal and phase not in SINGLE

    def lengths(self, batch: AttentionBatch, address: KvAddress, phase: str) -> Lengths:
        """The lengths of an eager step. Those of a decode step mostly follow from the ones before it."""
        if phase not in SINGLE:
            return lengths_of(batch, address, self.rules.window, padded=False)
        key = (batch.lane, batch.num_rows)
        last = self.recent.get(key)
        found = lengths_of(batch, address, self.rules.window, padded=False, last=last)
        if last is None or found.page_offsets is not last.page_offsets:
            if last is None and len(self.recent) >= MOST_IDLE:
                self.recent.clear()
            self.recent[key] = found
        return found

    def plan_pages(self, batch: AttentionBatch, address: KvAddress, lengths: Lengths, phase: str, tree: bool) -> Lease:
        """An eager step over pages. Of fixed shape, whose plans may be kept, is what has as many queries in every row."""
        planner, kind, rows = self.planner, self.kind(phase), lengths.rows
        mask_bytes = int(lengths.mask_offsets()[-1]) if tree else 0
        query_len = lengths.tokens // rows if tree or phase in SINGLE else 0
        if query_len:
            lease = planner.borrow_fixed(kind, batch.lane, rows, lengths.tokens, lengths.pages, mask_bytes, True)
        elif self.rules.invariant and kind == "prefill" and phase != "verify":
            # a tile chosen by the average query would depend on the other rows
            most = lengths.tokens + rows + 128
            lease = planner.borrow_fixed(kind, batch.lane, rows, most, lengths.pages, 0, False)
        else:
            lease = planner.borrow(kind, batch.lane)
            indices = torch.empty(max(lengths.pages, 1), dtype=torch.int32, device=self.context.device)
            pack_pages(address, lengths, indices)
            planner.plan(lease.slot, lengths, indices, address.page_size, self.causal(phase))
            return lease
        planner.refresh(lease.slot, address, lengths, self.causal(phase), query_len, True)
        return lease

    def pack(self, batch: AttentionBatch, address: KvAddress, lengths: Lengths, metadata: FlashInferMetadata) -> bool:
        """Plan to read the new tokens from the inputs: all keys where no row has a prefix, else merged with the prefix.

        False if this step is better, or can only be, read from pages.
        """
        host = address.kv_lens_cpu if address.kv_lens_cpu is not None else address.kv_lens
        keys = host[: lengths.rows].cpu().numpy()
        at = lengths.query_offsets
        prefix = keys - (at[1:] - at[:-1])
        metadata.prefix = bool((prefix > 0).any())
        if (prefix < 0).any() or (metadata.prefix and (self.read == "auto" or self.rules.window)):
            metadata.prefix = False
            return False
        packed = self.planner.borrow("ragged", batch.lane)
        offsets = on_host(at)
        self.planner.plan_packed(packed.slot, offsets, offsets, True)
        metadata.packed = packed.slot
        metadata.leases.append(packed)
        metadata.fallback = lambda: self.plan_pages(batch, address, lengths, "prefill", False)
        if metadata.prefix:
            lease = self._plan_prefix(batch, address, lengths, prefix)
            metadata.slot = lease.slot
            metadata.leases.append(lease)
        return True

    def _plan_prefix(self, batch: AttentionBatch, address: KvAddress, lengths: Lengths, prefix: Array) -> Lease:
        """Pages of the cached prefix alone, all of which every query sees."""
        known = replace(address, kv_lens_cpu=on_host(prefix))
        front = lengths_of(batch, known, 0, padded=False)
        lease = self.planner.borrow("prefill", batch.lane)
        indices = torch.empty(max(front.pages, 1), dtype=torch.int32, device=self.context.device)
        pack_pages(address, front, indices)
        self.planner.plan(lease.slot, front, indices, address.page_size, False)
        return lease

    def packed(self, batch: AttentionBatch, phase: str) -> FlashInferMetadata:
        """Keys without a cache. Their offsets are known on the device only: this waits for them, once a step."""
        metadata = FlashInferMetadata(phase, batch.num_tokens, batch.needs_lse, batch.partial, tokens=batch.num_tokens)
        if not batch.num_tokens:
            return metadata
        assert batch.key_offsets is not None
        queries = host_offsets(batch, batch.num_rows).copy()
        keys = batch.key_offsets[: batch.num_rows + 1].cpu().numpy()
        lengths = keys[1:] - keys[:-1]
        metadata.without_keys = [
            (int(queries[r]), int(queries[r + 1]))
            for r in range(batch.num_rows)
            if not lengths[r] and queries[r + 1] > queries[r]
        ]
        lease = self.planner.borrow("ragged", batch.lane)
        self.planner.plan_packed(lease.slot, on_host(queries), on_host(keys), self.rules.causal)
        metadata.packed = lease.slot
        metadata.leases.append(lease)
        return metadata
