"""Planned wrappers of the library: made, planned, lent to steps and taken back.

A wrapper's plan is valid until its next ``plan()``, and a later step may be planned before an earlier one has run. So every
eager step borrows a wrapper of its own and gives it back when its metadata goes. Under graphs a wrapper belongs to one key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_core.batch import KvAddress
from attn_core.context import Context
from attn_core.errors import PluginError
from attn_flashinfer.compiling import first_use
from attn_flashinfer.lengths import Lengths, on_host
from attn_flashinfer.library import Library, WrapperClass
from attn_flashinfer.pages import pack_pages
from attn_flashinfer.rules import WORKSPACE_BYTES, Rules

#: Device memory for plans: the library's own size, for wrappers of any shape and for a graph state.
PLAN_BYTES = 8 * 1024 * 1024
#: Idle wrappers of fixed shape that are kept; each has plan memory of its own on both sides.
MOST_IDLE = 64


@dataclass(slots=True)
class Buffers:
    """Static tensors that a fixed-shape wrapper reads: i32[n + 1], i32[n + 1], i32[n], i32[pages], u8[bytes], i32[n + 1]."""

    query_offsets: torch.Tensor
    page_offsets: torch.Tensor
    last_page: torch.Tensor
    indices: torch.Tensor
    mask: torch.Tensor | None = None
    mask_offsets: torch.Tensor | None = None

    @classmethod
    def make(cls, rows: int, pages: int, device: torch.device, mask_bytes: int = 0) -> Buffers:
        """Zeroed buffers for `rows` rows with `pages` pages together."""

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(max(count, 1), dtype=dtype, device=device)

        made = cls(zeros(rows + 1), zeros(rows + 1), zeros(rows), zeros(pages))
        if mask_bytes:
            made.mask, made.mask_offsets = zeros(mask_bytes, torch.uint8), zeros(rows + 1)
        return made

    def first(self, rows: int) -> Buffers:
        """The part of these buffers that a wrapper of `rows` rows reads (views)."""
        offsets = None if self.mask_offsets is None else self.mask_offsets[: rows + 1]
        return Buffers(
            self.query_offsets[: rows + 1],
            self.page_offsets[: rows + 1],
            self.last_page[:rows],
            self.indices,
            self.mask,
            offsets,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        parts = (
            self.query_offsets,
            self.page_offsets,
            self.last_page,
            self.indices,
            self.mask,
            self.mask_offsets,
        )
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(slots=True, eq=False)
class Slot:
    """One wrapper. ``planned`` are the lengths of its last plan; ``event`` says when the plan has left the host."""

    kind: str
    wrapper: Any
    taken: WrapperClass
    buffers: Buffers | None = None
    planned: Lengths | None = None
    event: Any = None
    stream: Any = None

    def wait_for_host(self) -> None:
        """Before planning again: the last plan's pinned memory may still be waiting to be copied."""
        if self.event is not None and not self.event.query():
            self.event.synchronize()

    def sent(self, device: torch.device) -> None:
        """After planning."""
        if device.type != "cuda":
            return
        if self.event is None:
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        if self.stream is None or self.stream.cuda_stream != stream_of(device):
            self.stream = torch.cuda.current_stream(device)
        self.event.record(self.stream)


def stream_of(device: torch.device) -> int:
    """The handle of the current stream; 0 on a CPU. ``torch.cuda.current_stream`` takes 20 us to say the same."""
    if device.type != "cuda":
        return 0
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(raw(device.index if device.index is not None else torch.cuda.current_device()))


class Lease:
    """A slot on loan; it goes back when the lease is forgotten."""

    __slots__ = ("home", "slot")

    def __init__(self, slot: Slot, home: list[Slot]) -> None:
        self.slot, self.home = slot, home

    def __del__(self) -> None:
        self.home.append(self.slot)


@dataclass
class Planner:
    """Makes and plans wrappers for one layer group."""

    rules: Rules
    context: Context
    library: Library
    free: dict[tuple[Any, ...], list[Slot]] = field(default_factory=dict)
    fixed: OrderedDict[tuple[Any, ...], list[Slot]] = field(default_factory=OrderedDict)

    # --- eager: borrowed ----------------------------------------------------------------------------------------------------

    def borrow(self, kind: str, lane: int) -> Lease:
        """A wrapper that takes any shape. A stream has its own: a plan's device memory is re-used in stream order."""
        home = self.free.setdefault((kind, lane, stream_of(self.context.device)), [])
        return Lease(home.pop() if home else self.make(kind, lane), home)

    def borrow_fixed(
        self, kind: str, lane: int, rows: int, tokens: int, pages: int, mask_bytes: int, uniform: bool
    ) -> Lease:
        """A wrapper for `rows` rows with buffers of its own, rounded up so that steps share them.

        Not `uniform`: for up to `tokens` query tokens, rounded up, with one tile whatever they are.
        """
        room = _rounded(pages), _rounded(mask_bytes)
        most = tokens if uniform else 1 << max(tokens, 127).bit_length()
        key = (kind, lane, stream_of(self.context.device), rows, most, *room)
        home = self.fixed.get(key)
        if home is None:
            self._drop_idle()
            home = self.fixed[key] = []
        else:
            self.fixed.move_to_end(key)
        if home:
            return Lease(home.pop(), home)
        device = self.context.device
        slot = self.make(kind, lane, Buffers.make(rows, room[0], device, room[1]), 0 if uniform else most)
        # a plan of so many tokens needs a fraction of what the library allocates for any
        self.share(slot, lane, torch.empty(2**20 + 32 * most, dtype=torch.uint8, device=device))
        return Lease(slot, home)

    def _drop_idle(self) -> None:
        """Forget the wrappers of the shapes that have not been used for longest."""
        while len(self.fixed) >= MOST_IDLE:
            self.fixed.popitem(last=False)

    def share(self, slot: Slot, lane: int, plan_memory: torch.Tensor) -> None:
        """Let a wrapper keep its plan in ``plan_memory`` u8[n] on the device."""
        reset = getattr(slot.wrapper, "reset_workspace_buffer", None)
        if reset is not None:
            reset(self.context.workspace("split_keys", 0, lane), plan_memory)

    # --- making ---------------------------------------------------------------------------------------------------------------

    def make(self, kind: str, lane: int, buffers: Buffers | None = None, most_tokens: int = 0) -> Slot:
        """A new wrapper: `kind` is decode, tensor, prefill, ragged or sink. With `buffers` its number of rows is fixed.

        `most_tokens` > 0: plans may have up to so many query tokens, and the same tile whatever they have.
        """
        rules = self.rules
        taken = self.library.wrappers["decode" if kind == "tensor" else kind]
        space = self.context.workspace("split_keys", WORKSPACE_BYTES, lane, zeroed=True)
        words: dict[str, Any] = {"kv_layout": "NHD", "backend": rules.backend}
        if kind in ("decode", "tensor"):
            words |= {"use_tensor_cores": kind == "tensor", "backend": "fa2"}
        if kind == "sink":
            words |= {
                "q_data_type": rules.q_dtype, "kv_data_type": rules.kv_dtype,
                "head_dim_qk": rules.qk_dim, "head_dim_vo": rules.v_dim, "window_left": rules.window_left,
            }  # fmt: skip
        if buffers is not None:
            words |= _graph_words(kind, buffers)
            if most_tokens and kind == "prefill":
                if "max_total_num_rows" not in taken.init:
                    raise PluginError(
                        f"flashinfer-python {self.library.version} cannot fix the size of a prefill plan",
                        fix="pip install -U flashinfer-python",
                    )
                words["max_total_num_rows"] = most_tokens
        if kind != "sink":
            return Slot(kind, taken.make(space, **words), taken, buffers)
        made: list[Any] = []  # sink wrappers compile when they are made, the others when they are first planned
        first_use(rules.key, self.library.version, lambda: made.append(taken.make(space, **words)), self.context.log)
        return Slot(kind, made[-1], taken, buffers)

    # --- planning -------------------------------------------------------------------------------------------------------------

    def refresh(
        self, slot: Slot, address: KvAddress, lengths: Lengths, causal: bool, query_len: int, valid: bool
    ) -> None:
        """Bring a wrapper with buffers up to date. `valid`: its plan memory still holds its last plan, which is kept if the
        new one would be the same; then only page numbers and the lengths of last pages are written."""
        buffers = slot.buffers
        assert buffers is not None
        if not (valid and lengths.same_plan(slot.planned)):
            self.plan(slot, lengths, buffers.indices, address.page_size, causal, query_len)
        pack_pages(address, lengths, buffers.indices, buffers.page_offsets, buffers.last_page)
        if buffers.mask_offsets is not None:
            buffers.mask_offsets.copy_(on_host(lengths.mask_offsets()), non_blocking=True)

    def plan(self, slot: Slot, lengths: Lengths, indices: torch.Tensor, page_size: int, causal: bool, query_len: int = 0) -> None:  # fmt: skip
        """Plan a paged wrapper from host lengths; ``indices`` i32[>= pages] are on the device. Nothing waits.

        `query_len` > 0 promises that every row has so many queries. A wrapper with a mask gets no window: it is in the mask.
        """
        rules = self.rules
        host = (on_host(lengths.page_offsets), indices[: lengths.pages], on_host(lengths.last_page))
        masked = slot.buffers is not None and slot.buffers.mask is not None
        words = self._common(slot, -1 if masked else self.rules.window_left)
        if "seq_lens" in slot.taken.plan:
            words["seq_lens"] = on_host(lengths.keys)
        if slot.kind in ("decode", "tensor"):
            arguments: tuple[Any, ...] = (*host, rules.q_heads, rules.kv_heads, rules.qk_dim, page_size)
        else:
            words |= {"head_dim_vo": rules.v_dim, "causal": causal}
            if query_len and "uniform_q_len" in slot.taken.plan:
                words["uniform_q_len"] = query_len
            offsets = on_host(lengths.query_offsets)
            arguments = (offsets, *host, rules.q_heads, rules.kv_heads, rules.qk_dim, page_size)
        self._do(slot, arguments, words)
        slot.planned = lengths

    def plan_packed(self, slot: Slot, query_offsets: torch.Tensor, key_offsets: torch.Tensor, causal: bool) -> None:
        """Plan a ragged wrapper: offsets i32[n + 1] on the host."""
        rules = self.rules
        words = {
            **self._common(slot, self.rules.window_left),
            "head_dim_vo": rules.v_dim,
            "causal": causal,
            "kv_data_type": rules.q_dtype,
        }
        arguments = (query_offsets, key_offsets, rules.q_heads, rules.kv_heads, rules.qk_dim)
        self._do(slot, arguments, words)

    def prepare_merge(self) -> None:
        """Compile the library's merge before a layer needs it."""
        merge, rules, device = self.library.merge_in_place, self.rules, self.context.device
        if merge is None or device.type != "cuda":
            return
        parts = [torch.zeros((1, 1, rules.v_dim), dtype=rules.q_dtype, device=device) for _ in range(2)]
        ends = [torch.zeros((1, 1), dtype=torch.float32, device=device) for _ in range(2)]
        first_use(
            "flashinfer-merge",
            self.library.version,
            lambda: merge(parts[0], ends[0], parts[1], ends[1]),
            self.context.log,
        )

    def _common(self, slot: Slot, window_left: int) -> dict[str, Any]:
        rules = self.rules
        words: dict[str, Any] = {
            "window_left": window_left,
            "logits_soft_cap": rules.softcap or None,
            "q_data_type": rules.q_dtype,
            "kv_data_type": rules.kv_dtype,
            "sm_scale": rules.scale,
        }
        if "o_data_type" in slot.taken.plan:
            words["o_data_type"] = rules.q_dtype
        if rules.invariant:  # a split of keys depends on the batch
            words["disable_split_kv"] = True
        return words

    def _do(self, slot: Slot, arguments: tuple[Any, ...], words: Mapping[str, Any]) -> None:
        slot.wait_for_host()
        first_use(
            self.rules.key, self.library.version, lambda: slot.wrapper.plan(*arguments, **words), self.context.log
        )
        slot.sent(self.context.device)


def _rounded(count: int) -> int:
    """A power of two from 16 on that is at least `count`; 0 for 0."""
    return 1 << max(count - 1, 15).bit_length() if count else 0


def _graph_words(kind: str, buffers: Buffers) -> dict[str, Any]:
    """The constructor's keywords for fixed buffers."""
    if kind in ("decode", "tensor"):
        return {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": buffers.page_offsets,
            "paged_kv_indices_buffer": buffers.indices,
            "paged_kv_last_page_len_buffer": buffers.last_page,
        }
    words = {
        "use_cuda_graph": True,
        "qo_indptr_buf": buffers.query_offsets,
        "paged_kv_indptr_buf": buffers.page_offsets,
        "paged_kv_indices_buf": buffers.indices,
        "paged_kv_last_page_len_buf": buffers.last_page,
    }
    if buffers.mask is not None:
        words |= {"custom_mask_buf": buffers.mask, "mask_indptr_buf": buffers.mask_offsets}
    return words
