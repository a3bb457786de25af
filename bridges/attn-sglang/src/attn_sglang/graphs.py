"""CUDA graphs: one static batch for each captured shape, rewritten in place before every replay.

SGLang owns the graphs and their order of calls: ``init_cuda_graph_state`` once, then for each shape
``init_forward_metadata_out_graph(in_capture=True)``, ``init_forward_metadata_in_graph`` inside the capture and the layers;
before a replay ``init_forward_metadata_out_graph`` again. Padded rows hold :attr:`StaticBatches.pad_kv_len` keys, page 0
and slot 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.context import GraphLimits
from attn_core.errors import GraphError
from attn_core.paging import refresh_views
from attn_sglang.batches import BatchMaker, Rows, phase_of

if TYPE_CHECKING:
    from attn_core.plan import Plan
    from attn_core.router import Router, Step
    from attn_sglang.pools import PoolSource

#: Phase, rows and tokens of a captured shape.
Shape = tuple[str, int, int]


class StaticBatches:
    """The static state of one runner's graphs."""

    def __init__(
        self, router: Router, maker: BatchMaker, *, rows: int, tokens: int, context: int, slots: int, verify_width: int
    ) -> None:
        """Static buffers for up to `rows` rows and `tokens` tokens, `context` keys a row, pools of `slots` token slots.

        Raises :class:`GraphError` where no planned backend may be captured.
        """
        check_level(router.plan, verify_width)
        width = max(verify_width, -(-tokens // max(rows, 1)), 1)
        smallest = min(source.page_size for source in maker.sources)
        self.router, self.maker = router, maker
        self.limits = GraphLimits(
            rows=_buckets(rows),
            max_tokens=max(tokens, rows * width),
            max_query_len=width,
            max_kv_len=context + width,
            max_pages=-(-slots // smallest) + 1,
        )
        self.state = router.graph_state(self.limits)
        router.warmup(self.limits)
        self._batches: dict[Shape, AttentionBatch] = {}
        self.replays = 0

    @property
    def pad_kv_len(self) -> int:
        """Keys of a padded row, 0 or 1: what SGLang fills its lengths with."""
        return 1 if self.state.pad_kv_len else 0

    def known(self, batch: Any) -> bool:
        """Whether the shape of `batch` was captured."""
        mode = batch.forward_mode
        if not (mode.is_decode() or mode.is_target_verify()):
            return False
        return self._shape(batch) in self._batches

    def capture(self, batch: Any) -> Step:
        """A static batch for a shape that is about to be captured."""
        phase = phase_of(batch.forward_mode)
        if phase not in ("decode", "verify"):
            raise GraphError(
                f"{phase} is captured with its metadata, which this bridge does not do",
                fix="--cuda-graph-backend-prefill breakable or disabled",
            )
        rows = self.maker.rows(batch)
        made = self.maker.assemble(
            rows,
            _static_positions(batch, rows),
            tuple(self._static_address(source, rows) for source in self.maker.sources),
            static=True,
        )
        self._batches[phase, rows.count, rows.tokens] = made
        self._fill(made, rows, batch)
        return self.router.begin(made, self.state, capture=True)

    def replay(self, batch: Any) -> Step:
        """Rewrite the static batch of this shape and its metadata; nothing is allocated for them."""
        made = self._batches[self._shape(batch)]
        self._fill(made, self.maker.rows(batch), batch)
        self.replays += 1
        return self.router.begin(made, self.state)

    def refill_tree(self, spec: Any, rows: int) -> Step | None:
        """The drafter has finished its mask: bring tree and metadata of the captured verify step up to date."""
        width = int(spec.draft_token_num)
        made = self._batches.get(("verify", rows, rows * width))
        if made is None or made.tree is None:
            return None
        lens = made.kv(0).kv_lens.to(torch.int64) - width
        _copy_tree(made, self.maker.verify_tree(spec, lens, width))
        if spec.positions is not None and made.positions is not None:
            made.positions[: spec.positions.numel()].copy_(spec.positions.reshape(-1))
        return self.router.begin(made, self.state)

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _shape(self, batch: Any) -> Shape:
        verify = batch.forward_mode.is_target_verify()
        width = int(batch.spec_info.draft_token_num) if verify else 1
        return "verify" if verify else "decode", batch.batch_size, batch.batch_size * width

    def _static_address(self, source: PoolSource, rows: Rows) -> KvAddress:
        device = rows.lens.device
        width = -(-self.limits.max_kv_len // source.page_size)
        return KvAddress(
            page_size=source.page_size,
            kv_lens=torch.zeros(rows.count, dtype=torch.int32, device=device),
            max_kv_len=self.limits.max_kv_len,
            new_slots=torch.zeros(rows.tokens, dtype=torch.int64, device=device),
            table=torch.zeros(rows.count, width, dtype=torch.int32, device=device),
        )

    def _fill(self, made: AttentionBatch, rows: Rows, batch: Any) -> None:
        numbers = batch.req_pool_indices[: rows.count]
        made.query_offsets_cpu, made.cpu_exact = rows.offsets_cpu, rows.lens_cpu is not None
        for source, address in zip(self.maker.sources, made.addresses, strict=True):
            assert isinstance(address, KvAddress)
            assert address.table is not None
            table = self.maker.pages(source, numbers, min(rows.most, address.max_kv_len))
            width = min(table.shape[1], address.table.shape[1])
            # columns behind the longest row keep what they held: valid pages that nobody reads
            address.table[:, :width].copy_(table[:, :width])
            address.kv_lens.copy_(rows.lens)  # padded rows: SGLang's fill value, and the drafts of a verify step
            address.kv_lens_cpu = rows.lens_cpu
            address.new_slots.copy_(self.maker.new_slots(source, batch.out_cache_loc[: rows.tokens]))
        if made.positions is not None and batch.positions is not None:
            made.positions.copy_(batch.positions[: rows.tokens])
        if rows.tree is not None:
            _copy_tree(made, rows.tree)
        refresh_views(made)


def check_level(plan: Plan, verify_width: int) -> None:
    """Whether decode (and verify) of every group may be captured. Raises :class:`GraphError` naming the flag to pass."""
    needed = ("decode", "verify") if verify_width > 1 else ("decode",)
    for group in plan.groups:
        for phase in needed:
            found = group.phases.get(phase)
            if found is not None and found.graph.level == "none":
                raise GraphError(
                    f"{found.backend}:{found.variant} may not be captured in a CUDA graph ({phase})",
                    f"group    {group.group.name}",
                    fix="--cuda-graph-backend-decode disabled, or a backend that declares a graph level",
                )


def _buckets(rows: int) -> tuple[int, ...]:
    """Powers of two and the largest: what is warmed up. SGLang decides later which numbers up to it are captured."""
    return (*(1 << power for power in range((rows - 1).bit_length())), rows)


def _static_positions(batch: Any, rows: Rows) -> torch.Tensor | None:
    if batch.positions is None:
        return None
    return torch.zeros(rows.tokens, dtype=torch.int64, device=rows.lens.device)


def _copy_tree(made: AttentionBatch, tree: Any) -> None:
    assert made.tree is not None
    for name in ("parents", "depth", "mask_bits"):
        getattr(made.tree, name).copy_(getattr(tree, name))
