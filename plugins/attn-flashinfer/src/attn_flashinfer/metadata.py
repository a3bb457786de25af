"""What a step carries, and the static state of a lane under graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_core.batch import Tree
from attn_core.context import GraphKey, GraphLimits, StepMetadata
from attn_flashinfer.wrappers import Buffers, Lease, Slot


@dataclass(slots=True)
class FlashInferMetadata(StepMetadata):
    """One step of one group. ``tokens`` is what the wrapper was planned for; the query may have more (padding).

    ``slot`` reads pages; ``packed`` reads new tokens from the inputs (``prefix`` True: merged with ``slot``'s result over
    the cached prefix; False: there is none). ``fallback`` plans the pages after all, for a layer that brings no k and v.
    """

    tokens: int = 0
    slot: Slot | None = None
    packed: Slot | None = None
    prefix: bool = False
    fallback: Callable[[], Lease] | None = None
    leases: list[Lease] = field(default_factory=list)
    without_keys: list[tuple[int, int]] = field(default_factory=list)
    tree: Tree | None = None
    mask_is_old: bool = False  #: the mask is built by the first layer: a drafter fills the tree after metadata is made
    page_size: int = 1
    plain: Callable[..., Any] | None = None  #: the wrapper's run, where a call needs nothing else
    shape: tuple[int, ...] = ()  #: the query's, for :attr:`plain`


@dataclass(slots=True)
class FlashInferState:
    """Static buffers of one (group, lane): every key's wrapper reads the front of them. ``owner`` made the plan that the
    shared plan memory holds."""

    limits: GraphLimits
    lane: int
    buffers: Buffers
    plan_memory: torch.Tensor
    pad_kv_len: int = 1  #: a row without keys has no place in a captured plan
    owner: Slot | None = None
    metadata: dict[tuple[GraphKey, bool], FlashInferMetadata] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers."""
        return self.buffers.nbytes + self.plan_memory.nbytes
