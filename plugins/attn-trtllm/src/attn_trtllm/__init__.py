"""TensorRT-LLM attention kernels for attn-core, through FlashInfer. Importing this module loads no kernel library.

``mha/trtllm_mha`` is implemented; ``mla/trtllm_mla`` is declared only, and the probe says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from attn_core.availability import Availability
from attn_core.context import Context
from attn_core.errors import BindError
from attn_core.hookspecs import hookimpl
from attn_core.manifest import Manifest
from attn_core.platform import Platform


@hookimpl
def attn_probe(manifest: Manifest, platform: Platform) -> Mapping[str, Availability] | Availability:
    """What each variant lacks here: FlashInfer, a function of it, the compiler, the GPU. Nothing is imported for it."""
    from attn_trtllm.probe import planned, probe

    return planned(manifest) if manifest.kind == "mla" else probe(manifest, platform)


@hookimpl
def attn_create(manifest: Manifest, variant: str, context: Context) -> object:
    """The backend of one layer group. Raises :class:`BindError` on a GPU that the variant's kernels do not run on."""
    if manifest.kind != "mha":
        raise BindError(f"{manifest.id} is declared only, its kernels are not connected")
    from attn_trtllm.fmha_v2 import FmhaV2
    from attn_trtllm.trtllm_gen import TrtllmGen
    from attn_trtllm.xqa import Xqa

    classes = {cls.variant: cls for cls in (Xqa, FmhaV2, TrtllmGen)}
    if variant not in classes:
        raise BindError(f"{manifest.id} has no variant {variant!r}", f"known    {', '.join(classes)}")
    return classes[variant](context)
