"""FlashInfer attention for attn-core. Importing this module loads neither torch nor flashinfer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from attn_core.availability import Availability
from attn_core.context import Context
from attn_core.discovery._requirements import default_availability
from attn_core.hookspecs import hookimpl
from attn_core.manifest import Manifest
from attn_core.platform import Platform
from attn_core.reasons import Reason


@hookimpl
def attn_probe(manifest: Manifest, platform: Platform) -> Mapping[str, Availability]:
    """Needs flashinfer-python, nvcc for the first compilation, and an NVIDIA GPU. Imports nothing, opens no context."""
    return {variant.name: _probe(default_availability(variant), platform) for variant in manifest.variants}


def _probe(found: Availability, platform: Platform) -> Availability:
    if platform.vendor == "nvidia":
        rest = tuple(reason for reason in found.reasons if reason.code != "toolkit")
        if not rest and find_spec("flashinfer_jit_cache") is not None:  # compiled modules for every architecture
            return Availability(True, versions=found.versions)
        return found
    reason = Reason("device", need="an NVIDIA GPU, sm80 or later", have=str(platform), fix="--attention-backend triton")
    return Availability(False, (*found.reasons, reason), found.versions, needs=found.needs)


@hookimpl
def attn_create(manifest: Manifest, variant: str, context: Context) -> object:
    """The backend of one layer group and variant."""
    from attn_flashinfer.backend import FlashInferBackend

    return FlashInferBackend(variant, context)
