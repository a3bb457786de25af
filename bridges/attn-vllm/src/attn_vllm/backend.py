"""vLLM's side of the bridge: backend, metadata builder and layer implementation, for the two slots of its registry.

vLLM imports this module when it builds its first attention layer, in a worker. Everything that decides is in the plan.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from attn_core.errors import BindError
from attn_vllm.counts import counts
from attn_vllm.layers import LayerFacts, check_against_any
from attn_vllm.planning import lengths_are_exact
from attn_vllm.service import ServedStep, Service
from attn_vllm.worker import active_plan, graph_limits, graph_support, reasons_against, verify_length

_LAYOUTS = {
    "NHD": (KVCacheLayout.LBNHC, KVCacheLayout.BLNHC),
    "HND": (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC),
}


class PlannedImpl(AttentionImpl[ServedStep]):
    """One attention layer. Its facts are checked against the plan while the model is built, before weights are loaded."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        """vLLM's arguments. Raises :class:`BindError` for a layer that was not planned."""
        unserved = {
            "ALiBi": alibi_slopes is not None,
            f"attention type {attn_type}": attn_type != AttentionType.DECODER,
            **{f"{name}={value!r}": True for name, value in extra.items() if value not in (None, False, -1)},
        }
        asked = [what for what, there in unserved.items() if there]
        if asked:
            raise BindError(
                f"a layer of this model needs {', '.join(asked)}, which this bridge does not serve",
                fix="start vLLM without ATTN_BACKEND",
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window, self.kv_cache_dtype, self.sinks = sliding_window, kv_cache_dtype, sinks
        self.logits_soft_cap, self.attn_type, self.alibi_slopes = logits_soft_cap, attn_type, None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.facts = LayerFacts(
            num_heads,
            self.num_kv_heads,
            head_size,
            self.scale,
            sliding_window,
            logits_soft_cap or None,
            sinks is not None,
        )
        check_against_any(self.facts, active_plan())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ServedStep | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write attention into output[T, heads, width]. Without metadata (memory profiling, warm-up) the output is 0."""
        if output_scale is not None or output_block_scale is not None:
            raise BindError("quantised attention outputs are not served", fix="switch off vLLM's fuse_attn_quant pass")
        if attn_metadata is None:
            return output.zero_()
        attn_metadata.attend(layer.layer_name, query, key, value, output)
        return output


class PlannedBuilder(AttentionMetadataBuilder[ServedStep]):
    """Metadata of one set of layers that share a block table."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        plan = active_plan(vllm_config)
        context = vllm_config.compilation_config.static_forward_context
        verify_len = verify_length(vllm_config, plan)
        self.service = Service(
            plan,
            {name: context[name] for name in layer_names},
            device,
            verify_len=verify_len,
            exact=lengths_are_exact(vllm_config, device.type),
            limits=graph_limits(vllm_config, plan) if device.type != "cpu" else None,
        )
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=verify_len > 1)
        self._counts = counts()
        if self._counts is not None:
            self._counts.add(self.service, plan.fingerprint)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """The plan's graph level in vLLM's words."""
        return AttentionCGSupport[graph_support(active_plan(vllm_config), verify_length(vllm_config, active_plan()))]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> ServedStep:
        """The metadata of one step."""
        if self._counts is not None:
            self._counts.tick()
        return self.service.begin(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> ServedStep:
        """The metadata that vLLM captures a graph with."""
        return self.service.capture(common_attn_metadata)


class PlannedBackend(AttentionBackend):
    """What vLLM asks a backend about itself, answered from the plan."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[PlannedImpl]:
        """The layer implementation."""
        return PlannedImpl

    @staticmethod
    def get_builder_cls() -> type[PlannedBuilder]:
        """The metadata builder."""
        return PlannedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """The planned page sizes, exactly: vLLM splits its blocks down to them."""
        return sorted({pool.page_size for pool in active_plan().pools})

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The planned memory order of a page."""
        return _LAYOUTS[active_plan().kv_layout]

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether a planned group has sinks."""
        return any(getattr(item.group.geometry, "sinks", False) for item in active_plan().groups)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether a planned group has a window."""
        return any(getattr(item.group.geometry, "window", None) for item in active_plan().groups)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether the plan is batch invariant."""
        return active_plan().batch_invariant

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """The planner has decided about the dtype already."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: batches are cut on the host."""
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        """Why a layer with these properties is not served. New properties of later releases are refused if they are set."""
        return reasons_against(active_plan(), asked)


class CustomSlot(PlannedBackend):
    """The slot that vLLM keeps for third parties (GPUs)."""

    @staticmethod
    def get_name() -> str:
        """The slot's name; vLLM looks it up in its registry."""
        return "CUSTOM"


class CpuSlot(PlannedBackend):
    """vLLM's CPU platform knows one backend, which is overridden on request."""

    @staticmethod
    def get_name() -> str:
        """The slot's name; vLLM looks it up in its registry."""
        return "CPU_ATTN"
