"""What a backend object is given at creation, and the protocols of what it gives back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from attn_core.errors import BindError

if TYPE_CHECKING:
    import torch

    from attn_core.geometry import LayerGroup
    from attn_core.plan import ContextShard, PhasePlan, Pool

log = logging.getLogger("attn_core")


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Sizes that static buffers are allocated for, once. ``rows`` are the buckets; ``draft`` is (steps, topk)."""

    rows: tuple[int, ...]
    max_tokens: int
    max_query_len: int
    max_kv_len: int
    max_pages: int
    draft: tuple[int, int] | None = None

    @property
    def max_rows(self) -> int:
        """The largest bucket."""
        return max(self.rows, default=0)


class GraphKey(NamedTuple):
    """What a captured graph is looked up by. Lengths may change between replays, the key may not."""

    phase: str
    padded_rows: int
    padded_tokens: int
    query_len: int | None = None
    kv_bucket: int | None = None
    form: str | None = None


@runtime_checkable
class GraphState(Protocol):
    """Static buffers of one (group, lane); serves all buckets and phases and is never re-allocated."""

    limits: GraphLimits
    lane: int
    pad_kv_len: int
    nbytes: int


@runtime_checkable
class Metadata(Protocol):
    """What ``attn_metadata`` returns; the rest of the object is the backend's own."""

    phase: str
    num_tokens: int
    needs_lse: bool


@dataclass(slots=True)
class StepMetadata:
    """A plain implementation of :class:`Metadata` that backends may use or extend.

    ``reads_batch_until`` is the fence for overlap schedulers: ``metadata`` (the batch's tensors may be overwritten once
    attn_metadata has returned) or ``layers`` (only after the last layer).
    """

    phase: str
    num_tokens: int
    needs_lse: bool = False
    partial: bool = False
    form: str | None = None
    reads_batch_until: str = "layers"


@dataclass(slots=True)
class Context:
    """Everything a backend object may know beyond its batch: one per (model, layer group, variant).

    ``phases`` holds the plan of each phase this object serves (kernel page size, needs_lse, graph level); ``pool_index``
    maps a role of the group (``attend``, ``cross``, ``state``, ``index``) to the batch's address. Workspaces come from
    here, one per lane and name, so that two lanes never share one.
    """

    device: torch.device
    dtype: torch.dtype
    group: LayerGroup
    pools: Mapping[str, Pool] = field(default_factory=dict)
    pool_index: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, PhasePlan] = field(default_factory=dict)
    limits: GraphLimits | None = None
    lanes: int = 1
    shard: ContextShard | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False
    log: logging.Logger = log
    frozen: bool = False  #: after the first capture no workspace grows
    _workspaces: dict[tuple[str, int], Any] = field(default_factory=dict, repr=False)

    @property
    def pool(self) -> Pool:
        """The pool that the group's attention reads."""
        return self.pools["attend"]

    def kernel_page_size(self, phase: str) -> int:
        """The page size the kernel of `phase` reads; divides the pool's page size."""
        return self.phases[phase].kernel_page_size

    def address_index(self, role: str = "attend") -> int:
        """Index into ``batch.addresses`` of the pool that plays `role` for this group."""
        return self.pool_index[role]

    def workspace(self, name: str, nbytes: int, lane: int = 0, *, zeroed: bool = False) -> torch.Tensor:
        """A uint8 tensor of at least `nbytes`, private to (this object, name, lane). Grows until the first capture.

        Raises :class:`BindError` if it would have to grow afterwards.
        """
        import torch

        buffer = self._workspaces.get((name, lane))
        if buffer is None or buffer.numel() < nbytes:
            if self.frozen:
                have = 0 if buffer is None else buffer.numel()
                raise BindError(f"workspace {name!r} would grow from {have} to {nbytes} bytes after a capture")
            make = torch.zeros if zeroed else torch.empty
            buffer = self._workspaces[name, lane] = make(nbytes, dtype=torch.uint8, device=self.device)
        return buffer  # type: ignore[no-any-return]
