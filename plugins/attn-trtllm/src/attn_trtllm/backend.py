"""What the variants share: metadata, graph state, scales, results. A backend holds no state of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.context import Context, GraphKey, GraphLimits
from attn_core.errors import BatchError, BindError
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.hookspecs import hookimpl
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, Scale
from attn_trtllm import compiling, device
from attn_trtllm.library import ENTRIES, Function, bind
from attn_trtllm.steps import TrtllmMetadata, TrtllmState, offsets_of, query_length, table_of

Result = tuple[torch.Tensor, torch.Tensor | None]

#: Phases whose rows all have one number of query tokens.
UNIFORM = ("decode", "draft", "verify")


class TrtllmBackend:
    """One layer group on one variant. Subclasses say which GPUs they run on, and call the library."""

    variant: ClassVar[str] = ""
    capabilities: ClassVar[tuple[tuple[int, int], ...]] = ()
    workspace_bytes: ClassVar[int] = 0

    def __init__(self, context: Context) -> None:
        geometry = context.group.geometry
        if not isinstance(geometry, MhaGeometry) or geometry.qk_dim != geometry.v_dim:
            raise BindError(f"trtllm_mha:{self.variant} needs keys and values of one width", f"have     {geometry}")
        have = device.capability(context.device)
        if have not in self.capabilities:
            names = ", ".join(f"sm{major}{minor}" for major, minor in self.capabilities)
            raise BindError(
                f"trtllm_mha:{self.variant} does not run on this GPU",
                f"needs    {names}",
                f"have     sm{have[0]}{have[1]}",
                fix="plan on this machine: the planner knows which variant serves it",
            )
        self.context, self.geometry, self.capability, self.dtype = context, geometry, have, context.dtype
        self.functions: dict[str, Function] = {entry.name: bind(entry) for entry in ENTRIES[self.variant]}
        pool = context.pools.get("attend")
        self.finite = bool(context.options.get("finite_pool", pool is not None and pool.zero_init))
        self.window_left = -1 if geometry.window is None else geometry.window - 1

    # --- once a step --------------------------------------------------------------------------------------------------------

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: TrtllmState | None, capture: bool
    ) -> TrtllmMetadata:
        """Table and lengths of one step. Nothing waits for the device. Raises :class:`BatchError` for trimmed pools."""
        address = batch.view(self.context.address_index(), "table", self.context.kernel_page_size(phase))
        if address.origin is not None:
            raise BatchError("trtllm_mha reads no trimmed pools: the kernels take every table from position 0")
        if state is None:
            metadata = self._eager(batch, phase, address)
        else:
            metadata = self._static(batch, phase, address, state)
        metadata.needs_lse, metadata.partial = batch.needs_lse, batch.partial
        metadata.exact = batch.padded_tokens == metadata.tokens
        return metadata

    def _eager(self, batch: AttentionBatch, phase: str, address: KvAddress) -> TrtllmMetadata:
        rows = batch.num_rows
        metadata = TrtllmMetadata(phase, batch.num_tokens, rows=rows, tokens=batch.num_tokens)
        if not rows:
            return metadata
        lens = address.kv_lens
        # no view where none is needed: the library makes views of its own every layer, which cost more on top of one
        metadata.table, metadata.kv_lens = table_of(address, rows), lens if len(lens) == rows else lens[:rows]
        metadata.max_kv_len = max(1, address.max_kv_len)
        self._shape(metadata, batch, phase)
        self._scratch(metadata, batch.lane)
        return metadata

    def _static(self, batch: AttentionBatch, phase: str, address: KvAddress, state: TrtllmState) -> TrtllmMetadata:
        rows = batch.padded_rows
        key = GraphKey(phase, rows, batch.padded_tokens, query_length(batch))
        metadata = state.metadata.get(key)
        if metadata is None:
            metadata = state.metadata[key] = TrtllmMetadata(phase, batch.num_tokens, rows=rows)
            metadata.table, metadata.kv_lens = state.table[:rows], state.kv_lens[:rows]
            metadata.max_kv_len = state.limits.max_kv_len
            self._shape(metadata, batch, phase)
            self._scratch(metadata, state.lane)
        assert metadata.table is not None
        assert address.table is not None
        width = min(address.table.shape[1], metadata.table.shape[1])
        source = address.table[:, :width]
        source = source[:rows] if address.table_rows is None else source.index_select(0, address.table_rows[:rows])
        metadata.table[:, :width].copy_(source)
        # padded rows have a key for each of their queries, whatever their length says
        torch.clamp(address.kv_lens[:rows], min=metadata.query_len, out=metadata.kv_lens)
        metadata.num_tokens = batch.num_tokens
        return metadata

    def _shape(self, metadata: TrtllmMetadata, batch: AttentionBatch, phase: str) -> None:
        """Query lengths, and what depends on them."""
        if phase in UNIFORM:
            metadata.query_len = query_length(batch)
            metadata.tokens = metadata.rows * metadata.query_len
            return
        assert metadata.kv_lens is not None
        metadata.query_len = max(1, batch.max_query_len)
        metadata.query_offsets = batch.query_offsets[: metadata.rows + 1]
        metadata.key_offsets = offsets_of(metadata.kv_lens)

    def _scratch(self, metadata: TrtllmMetadata, lane: int) -> None:
        """Workspaces of this lane, zeroed once: the kernels leave their counters as they found them."""
        metadata.workspace = self.context.workspace(self.variant, self.workspace_bytes, lane, zeroed=True)

    @hookimpl
    def attn_graph_state(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits, lane: int) -> TrtllmState:
        """The static table and lengths; the workspaces of the lane, so that none grows after a capture."""
        page = min(self.context.kernel_page_size(phase) for phase in self.context.phases)
        shape = (limits.max_rows, max(1, -(-limits.max_kv_len // page)))
        table = torch.zeros(shape, dtype=torch.int32, device=self.context.device)
        kv_lens = torch.ones(limits.max_rows, dtype=torch.int32, device=self.context.device)
        self._scratch(TrtllmMetadata("decode", 0, rows=limits.max_rows), lane)
        return TrtllmState(limits, lane, table, kv_lens)

    @hookimpl
    def attn_warmup(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits) -> None:
        """Run one small step of each phase, so that its kernel is compiled and loaded."""
        from attn_trtllm.warmup import warm_up

        for phase in phases:
            if phase in self.context.phases:
                warm_up(self, phase, limits)

    # --- once a layer -------------------------------------------------------------------------------------------------------

    def attend(
        self, inputs: MhaInputs, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor | None
    ) -> Result:
        """q[T, Hq, D] -> out[T, Hq, D]; tokens of padding keep what `out` held."""
        q, tokens = inputs.q, metadata.tokens
        if out is None:
            make = torch.empty if metadata.rows else torch.zeros
            out = make((q.shape[0], self.geometry.q_heads, self.geometry.v_dim), dtype=self.dtype, device=q.device)
        if not tokens:
            return out, None
        part = out
        if not metadata.exact:
            q, part = q[:tokens], out[:tokens]
        if part.is_contiguous() and part.dtype is self.dtype:
            return out, self.launch(q.contiguous(), layer, cache, metadata, part)
        target = torch.empty(part.shape, dtype=self.dtype, device=part.device)
        lse = self.launch(q.contiguous(), layer, cache, metadata, target)
        part.copy_(target)
        return out, lse

    def launch(
        self, q: torch.Tensor, layer: MhaLayer, cache: MhaCache, metadata: TrtllmMetadata, out: torch.Tensor
    ) -> torch.Tensor | None:
        """Call the library with contiguous q[T, Hq, D] and out[T, Hq, D]; returns an LSE if one was asked for."""
        raise NotImplementedError

    def call(self, name: str, key: str, seconds: str, **arguments: Any) -> Any:
        """Call a library function, announcing its compilation."""
        return compiling.run(key, seconds, self.context.log, self._capturing, self.functions[name].call, arguments)

    def _capturing(self) -> bool:
        return device.capturing(self.context.device)

    def scales(self, layer: MhaLayer, q: torch.Tensor) -> tuple[Any, Any]:
        """(scale of the logits, scale of the result): floats, or f32[1] where only the device knows a factor.

        ``q_scale`` belongs to 8-bit queries only.
        """
        q_scale = layer.q_scale if q.element_size() == 1 else None
        if q_scale is layer.k_scale is layer.v_scale is None:
            return self.geometry.scale, 1.0
        logits = product(self.geometry.scale, factor(q_scale, "q_scale"), factor(layer.k_scale, "k_scale"))
        return logits, factor(layer.v_scale, "v_scale")


def factor(scale: Scale | None, name: str) -> float | torch.Tensor:
    """A scale as a float, or as its tensor f32[1]. Raises :class:`BindError` for one value a head."""
    if scale is None:
        return 1.0
    if scale.value is not None:
        return float(scale.value)
    if scale.tensor.numel() != 1:
        raise BindError(
            f"trtllm_mha takes one {name} a layer", f"have     {scale.tensor.numel()} values, one for each KV head"
        )
    return scale.tensor.reshape(1)


def product(*factors: float | torch.Tensor) -> float | torch.Tensor:
    """The product of host and device factors; a float as long as all are."""
    result: float | torch.Tensor = 1.0
    for item in factors:
        result = result * item
    return result
