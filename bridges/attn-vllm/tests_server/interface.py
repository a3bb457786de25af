"""Runs in the environment of vLLM: the parts of its attention interface that the bridge relies on, as JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json

from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, CommonAttentionMetadata
from vllm.v1.kv_cache_layout import KVCacheLayout

from attn_vllm import backend

print(
    json.dumps(
        {
            "common": [field.name for field in dataclasses.fields(CommonAttentionMetadata)],
            "asked": [*inspect.signature(AttentionBackend.validate_configuration).parameters],
            "forward": [*inspect.signature(AttentionImpl.forward).parameters],
            "our forward": [*inspect.signature(backend.PlannedImpl.forward).parameters],
            "abstract": sorted(
                name
                for cls in (backend.PlannedImpl, backend.PlannedBuilder, backend.CustomSlot, backend.CpuSlot)
                for name in cls.__abstractmethods__
            ),
            "layouts": {layout.name: list(layout.value) for layout in KVCacheLayout},
        }
    )
)
