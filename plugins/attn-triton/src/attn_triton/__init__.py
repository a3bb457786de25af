"""Portable Triton attention kernels for attn-core: NVIDIA, AMD and Intel GPUs. Importing this module loads no triton."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping

from attn_core.availability import Availability
from attn_core.context import Context
from attn_core.hookspecs import hookimpl
from attn_core.manifest import Manifest
from attn_core.platform import Platform
from attn_core.reasons import Reason

_INSTALL = "pip install triton"


@hookimpl
def attn_probe(manifest: Manifest, platform: Platform) -> Mapping[str, Availability]:
    """Needs triton and a GPU; ``TRITON_INTERPRET=1`` runs the kernels on a CPU, slowly, for tests."""
    if importlib.util.find_spec("triton") is None:
        answer = Availability.missing("triton", _INSTALL)
    elif platform.vendor == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        reason = Reason("device", need="an NVIDIA, AMD or Intel GPU", have="cpu", fix="TRITON_INTERPRET=1 for tests")
        answer = Availability(False, (reason,))
    else:
        answer = Availability(True, versions={"triton": importlib.metadata.version("triton")})
    return {variant.name: answer for variant in manifest.variants}


@hookimpl
def attn_create(manifest: Manifest, variant: str, context: Context) -> object:
    """The backend of one layer group: the same object serves ``mha`` and ``mm``."""
    from attn_triton.backend import TritonBackend

    return TritonBackend(context)
