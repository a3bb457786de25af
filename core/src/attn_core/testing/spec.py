"""What a case is made from, and the case itself.

A :class:`CaseSpec` is small, frozen and prints as the call that makes it: a failure report quotes it, and the shrinker
edits it. A :class:`Case` holds everything that is needed to run a backend and to judge it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from attn_core.batch import AttentionBatch
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.plan import Pool
from attn_core.testing.guards import Guarded, Watch, bytes_of


@dataclass(frozen=True)
class CaseSpec:
    """One step of one layer, described. ``kv_lens`` count the new tokens; defaults are the plainest choice.

    ``parents``: trees of a verify step, a row each. ``spans``: (row, start, end) in positions. ``shared``: pages that
    every row shares with row 0 (as many as its prefix has whole). ``unused``: what fills slots nobody may read: nan, inf,
    big or zero. ``strides``: contiguous, fused (slices of one qkv buffer) or transposed. ``storage``: separate, joint
    (k and v interleaved a page) or hnd. ``form``: table, csr. ``decode_rows``: so many leading rows are a decode segment
    of a mixed batch. ``q_given``: an fp8 query arrives in the model's type (the backend quantises with q_scale, exactly)
    or as fp8. ``host``: what the host knows about lengths: exact, bound (too large by a few) or none. ``origins``: where the
    columns of each row of a trimmed pool start; only with a window, and never after the first key that a query sees.
    ``kernel_page``: pages that the kernel reads, where they are parts of the pool's pages. ``layers``: how many layers the group
    has; ``layer``: which of them this is. Layers share the batch and its pages; their queries, keys and values differ.
    """

    geometry: MhaGeometry
    phase: str
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    dtype: str = "fp32"
    kv_dtype: str = ""
    out_dtype: str = ""
    page_size: int = 4
    seed: int = 0
    form: str = "table"
    unused: str = "nan"
    strides: str = "contiguous"
    storage: str = "separate"
    shared: int = 0
    pad_rows: int = 0
    pad_tokens: int = 0
    pad_kv_len: int = 0
    parents: tuple[tuple[int, ...], ...] | None = None
    spans: tuple[tuple[int, int, int], ...] = ()
    k_scale: float | tuple[float, ...] | None = None
    v_scale: float | tuple[float, ...] | None = None
    q_scale: float | None = None
    q_given: str = "model"
    sinks: tuple[float, ...] | None = None
    store: bool = True
    give_kv: bool = True
    decoy_pool: bool = True
    decode_rows: int = 0
    needs_lse: bool = False
    partial: bool = False
    host: str = "exact"
    lane: int = 0
    device: str = "cpu"
    spare_pages: int = 3
    origins: tuple[int, ...] = ()
    kernel_page: int = 0
    layers: int = 1
    layer: int = 0

    @property
    def kv(self) -> str:
        """Element type of the cache (default: the query's)."""
        return self.kv_dtype or self.dtype

    @property
    def out(self) -> str:
        """Element type of the result (default: the query's, bf16 for an fp8 query)."""
        return self.out_dtype or ("bf16" if self.dtype.startswith("fp8") else self.dtype)

    @property
    def content_seed(self) -> int:
        """What the layer's numbers are drawn from; pages and tables are drawn from ``seed``."""
        return self.seed + 7919 * self.layer

    def latest_origin(self, row: int) -> int:
        """The last page boundary of `row` before which no query sees a key; 0 without a window."""
        window, prefix = self.geometry.window, self.kv_lens[row] - self.query_lens[row]
        first = 0 if window is None else max(prefix - window + 1, 0)
        return first - first % self.page_size

    def but(self, **changes: Any) -> CaseSpec:
        """This spec with some fields replaced."""
        return replace(self, **changes)

    def __str__(self) -> str:
        shown = [f"{self.geometry!r}", repr(self.phase)]
        for f in fields(self)[2:]:
            value = getattr(self, f.name)
            if f.name in ("query_lens", "kv_lens") or value != f.default:
                shown.append(f"{f.name}={value!r}")
        return f"make_case({', '.join(shown)})"


@dataclass(eq=False)
class Case:
    """A case ready to run. ``cache`` lacks the new tokens when ``inputs.store``; ``expected`` has them.

    ``out`` is poisoned with NaN and stands between canaries; ``watch`` remembers every tensor that no backend may change.
    """

    spec: CaseSpec
    group: LayerGroup
    pool: Pool
    pool_index: int
    batch: AttentionBatch
    layer: MhaLayer
    cache: MhaCache
    expected: MhaCache
    inputs: MhaInputs
    out: torch.Tensor
    guards: list[Guarded] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    @property
    def phase(self) -> str:
        """The phase of the step."""
        return self.spec.phase

    def problems(self) -> list[str]:
        """Writes outside what the step owns: canaries, inputs, tables, cache slots other than the new ones."""
        return self.problems_outside_cache() + self._cache_problems()

    def problems_outside_cache(self) -> list[str]:
        """:meth:`problems` without the cache, for a step that writes only a part of what is expected."""
        found = [line for guard in self.guards for line in guard.problems()]
        return found + self.watch.problems()

    def _cache_problems(self) -> list[str]:
        watch = Watch()
        for name in ("k", "v", "k_blocks", "v_blocks"):
            have, want = getattr(self.cache, name), getattr(self.expected, name)
            if want is not None:
                watch.seen.append((f"cache.{name}", have, bytes_of(want)))
        return watch.problems()
