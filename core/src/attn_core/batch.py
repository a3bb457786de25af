"""What one forward step looks like to attention: rows, tokens, segments and one address per pool.

Letters in shapes: R = padded rows, T = padded tokens, S = query length, P = tokens in a page, N = rows of a server's own
table, W = columns of a table. Index tensors are int32 unless said otherwise; products of indices are computed in 64 bits.
A batch is built by a server once a step (or copied into static tensors under a graph) and never kept by a backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from attn_core.errors import BatchError

if TYPE_CHECKING:
    import torch

#: Form of an address: dense table, CSR of pages, or token slots (CSR with page size 1).
Form = Literal["table", "csr", "slots"]


@dataclass(slots=True)
class Segment:
    """A run of rows in one phase. ``query_len`` is set when all its rows have that many query tokens."""

    phase: str
    rows: slice
    tokens: slice
    query_len: int | None = None


@dataclass(slots=True)
class KvAddress:
    """Where the keys and values of each row lie in one pool, dense or CSR.

    Dense: row r reads pages ``table[table_rows[r]]`` (``table[r]`` without ``table_rows``). CSR: row r reads
    ``indices[indptr[r]:indptr[r + 1]]``. An entry is a page number; with ``page_size`` 1 it is a token slot.
    Entries beyond a row's length may hold anything that is a valid page number.
    """

    page_size: int
    kv_lens: torch.Tensor  #: i32[R] keys incl. the new ones, from position 0
    new_slots: (
        torch.Tensor
    )  #: i64[T] slot of each new token (page * page_size of the *pool* + offset); -1 = do not write
    max_kv_len: int  #: upper bound on kv_lens, host
    table: torch.Tensor | None = None  #: i32[N, W]
    table_rows: torch.Tensor | None = None  #: i32[R]
    indices: torch.Tensor | None = None  #: i32[n]
    indptr: torch.Tensor | None = None  #: i32[R + 1]
    kv_lens_cpu: torch.Tensor | None = None  #: i32[R] on the host
    local_lens: torch.Tensor | None = None  #: i32[R] this rank's share under a ContextShard
    origin: torch.Tensor | None = None  #: i32[R] position of column 0 (trimmed pools), page aligned

    @property
    def form(self) -> Form:
        """``table``, ``csr`` or ``slots``."""
        if self.table is not None:
            return "table"
        return "slots" if self.page_size == 1 else "csr"


@dataclass(slots=True)
class Checkpoints:
    """Recurrent states to keep while prefilling: state of `row` after `length` tokens goes to `slot`. i32[C] each."""

    row: torch.Tensor
    length: torch.Tensor
    slot: torch.Tensor


@dataclass(slots=True)
class StateAddress:
    """Where the recurrent states of each row lie: read and write slots (-1 = padded row), and which rows start from zero."""

    read_slots: torch.Tensor  #: i32[R]
    write_slots: torch.Tensor  #: i32[R]
    fresh: torch.Tensor  #: bool[R]
    step_slots: torch.Tensor | None = None  #: i32[R, S + 1]
    accepted: torch.Tensor | None = None  #: i32[R]
    checkpoints: Checkpoints | None = None


@dataclass(slots=True)
class Tree:
    """The token tree of a verify step. Draft j of row r sees the whole prefix and the drafts whose bit is set.

    Bit j of ``mask_bits[r, i, j // 32]`` (bit ``j % 32``, little-endian) means: draft i sees draft j. A draft sees itself
    and its ancestors. ``depth`` of a root is 0; the absolute position of draft i is prefix length + depth.
    """

    parents: torch.Tensor  #: i32[R, S], -1 for a root
    depth: torch.Tensor  #: i32[R, S]
    mask_bits: torch.Tensor  #: i32[R, S, ceil(S / 32)]


@dataclass(slots=True)
class DraftSteps:
    """Slots of all draft steps at once: ``slots`` i64[R, topk, steps]; the batch has one token a row, its kv_lens are the prefix.

    Step s of branch b of row r writes to ``slots[r, b, s]`` and sees the prefix and the branch's slots before it. A chain (topk
    1) over a dense table reads the drafts' pages from the table; branches, and rows of a CSR, take them from the slots.
    """

    steps: int
    topk: int
    slots: torch.Tensor


@dataclass(slots=True)
class Part:
    """One chunk of a prefix for ``attn_ragged``: packed keys ``offsets`` i32[R + 1], first position ``start`` i32[R]."""

    index: int
    offsets: torch.Tensor
    start: torch.Tensor
    max_len: int
    has_empty: bool
    causal: bool


@dataclass(slots=True)
class AttentionBatch:
    """One forward step (one per lane). Rows are ordered as ``segments`` says; 0 rows is an idle rank.

    ``num_*`` are real, ``padded_*`` are what the tensors hold; padded rows come last, with kv_len ``GraphState.pad_kv_len``,
    slot 0 and new_slot -1. ``query_offsets`` has R + 1 entries; its last entry is ``num_tokens`` for ragged batches.
    """

    num_rows: int
    num_tokens: int
    segments: tuple[Segment, ...]
    query_offsets: torch.Tensor  #: i32[R + 1] starts in the token axis
    max_query_len: int  #: upper bound, host
    addresses: tuple[KvAddress | StateAddress, ...] = ()  #: by pool index
    padded_rows: int = -1
    padded_tokens: int = -1
    positions: torch.Tensor | None = None  #: i64[T] absolute positions
    query_offsets_cpu: torch.Tensor | None = None  #: i32[R + 1] on the host
    cpu_exact: bool = True  #: host lengths are exact, not only bounds
    key_offsets: torch.Tensor | None = None  #: i32[R + 1] packed keys without a cache (encoder, ragged, vision)
    max_key_len: int = 0
    tree: Tree | None = None
    spans: torch.Tensor | None = None  #: i32[n, 3] (row, start, end) bidirectional spans, end exclusive
    lane: int = 0
    static: bool = (
        False  #: tensors are replayed by a graph: views have the sizes of the bounds and are rewritten in place
    )
    needs_lse: bool = False  #: set by the router: this step's attend calls must return an LSE
    partial: bool = False  #: set by the router: leave sinks out, results will be merged
    _views: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.padded_rows < 0:
            self.padded_rows = self.num_rows
        if self.padded_tokens < 0:
            self.padded_tokens = self.num_tokens
        if self.padded_rows < self.num_rows or self.padded_tokens < self.num_tokens:
            raise BatchError(
                "padded counts are smaller than real ones",
                f"rows     {self.num_rows} real, {self.padded_rows} padded",
                f"tokens   {self.num_tokens} real, {self.padded_tokens} padded",
            )

    @property
    def idle(self) -> bool:
        """No rows at all: no hook is called for this batch."""
        return self.padded_rows == 0

    def kv(self, pool: int) -> KvAddress:
        """The KV address of a pool as the server gave it. Raises :class:`BatchError` for a state pool or a missing one."""
        if not 0 <= pool < len(self.addresses):
            raise BatchError(f"the batch has no address for pool {pool}; it has {len(self.addresses)}")
        address = self.addresses[pool]
        if not isinstance(address, KvAddress):
            raise BatchError(f"pool {pool} holds states, not keys and values")
        return address

    def state(self, pool: int) -> StateAddress:
        """The state address of a pool. Raises :class:`BatchError` for a KV pool or a missing one."""
        if not 0 <= pool < len(self.addresses) or not isinstance(self.addresses[pool], StateAddress):
            raise BatchError(f"pool {pool} has no state address")
        return self.addresses[pool]  # type: ignore[return-value]

    def view(self, pool: int, form: Form, page_size: int) -> KvAddress:
        """The address of `pool` in `form` with pages of `page_size` tokens, converted at most once a step.

        ``page_size`` must divide the pool's page size. Raises :class:`BatchError` otherwise.
        """
        key = (pool, form, page_size)
        view = self._views.get(key)
        if view is None:
            from attn_core.paging import convert

            view = self._views[key] = convert(self.kv(pool), form, page_size, static=self.static)
        return view  # type: ignore[no-any-return]

    def part(self, index: int) -> AttentionBatch:
        """Segment `index` as a batch of its own (views, no copies; memoised). Used where a backend takes no mixed batch."""
        key = ("part", index)
        part = self._views.get(key)
        if part is None:
            from attn_core.paging import slice_batch

            part = self._views[key] = slice_batch(self, self.segments[index])
        return part  # type: ignore[no-any-return]
