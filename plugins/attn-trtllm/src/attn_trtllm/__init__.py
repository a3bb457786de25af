"""TensorRT-LLM attention kernels for attn-core, through FlashInfer.

Status: planned. ``attn_manifest.toml`` declares what the backends will do, so that plans can be made with them
(``attn plan --allow-planned``); the kernels are not connected yet, and the probe says so.
"""

from __future__ import annotations

from attn_core.availability import Availability
from attn_core.hookspecs import hookimpl
from attn_core.manifest import Manifest
from attn_core.reasons import Reason


@hookimpl
def attn_probe(manifest: Manifest) -> Availability:
    """Not available: every backend of this package is declared only."""
    reason = Reason(
        "planned",
        need="an implementation",
        have=f"{manifest.id} is declared only, its kernels are not connected",
        fix="--allow-planned shows it in a plan; choose an implemented backend to run",
    )
    return Availability(False, (reason,))
