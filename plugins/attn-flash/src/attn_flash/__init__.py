"""FlashAttention 3 and 4 for attn-core. Importing this module loads no torch and no kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attn_core.availability import Availability
from attn_core.hookspecs import hookimpl
from attn_core.manifest import Manifest

if TYPE_CHECKING:
    from attn_core.context import Context


@hookimpl
def attn_probe(manifest: Manifest) -> Mapping[str, Availability]:
    """Whether the kernels of each variant are installed. Looks for distributions and packages, imports none."""
    from attn_flash import builds, cutedsl

    answers: dict[str, Availability] = {}
    for variant in manifest.variants:
        if manifest.name == "fa4":
            found = cutedsl.probe()
        elif variant.name in builds.BUILDS:
            found = builds.BUILDS[variant.name].probe()
        else:
            found = builds.any_probe()
        answers[variant.name] = builds.checked(found, variant.requires)
    return answers


@hookimpl
def attn_create(manifest: Manifest, variant: str, context: Context) -> object:
    """The backend of one layer group. Kernels are loaded here."""
    if manifest.name == "dual_chunk_flash_attn":
        from attn_flash.dual_chunk import create_dual_chunk

        return create_dual_chunk(manifest, variant, context)
    from attn_flash.paged import FlashBackend

    paged: FlashBackend
    if manifest.name == "fa4":
        from attn_flash.fa4 import Fa4Backend

        paged = Fa4Backend(context)
    else:
        from attn_flash import builds
        from attn_flash.fa3 import Fa3Backend

        paged = Fa3Backend(context, builds.BUILDS.get(variant) or builds.any_build())
    if manifest.kind == "mm":
        from attn_flash.vision import VisionBackend

        return VisionBackend(paged)
    return paged
