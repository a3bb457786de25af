"""Attention in plain PyTorch for attn-core: ``torch_native`` and ``flex_attention`` (mha), ``torch_native`` (mm).

Importing this package loads no torch: ``attn_probe`` reads installed versions only, ``attn_create`` imports the kernels.
"""

from __future__ import annotations

import shutil
from importlib import metadata
from typing import TYPE_CHECKING

from attn_core.availability import Availability
from attn_core.hookspecs import hookimpl
from attn_core.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attn_core.context import Context
    from attn_core.manifest import Manifest
    from attn_core.platform import Platform

__version__ = "0.1.0"

_NEEDS = "pip install 'torch>=2.6'"


@hookimpl
def attn_probe(manifest: Manifest, platform: Platform) -> Mapping[str, Availability]:
    """Whether torch is new enough and, for compiled variants on a CPU, whether there is a C++ compiler."""
    found = _torch_version()
    if found is None:
        missing = Availability.missing("torch", _NEEDS)
        return {variant.name: missing for variant in manifest.variants}
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < (2, 6):
        old = Availability.missing("torch>=2.6", _NEEDS, found)
        return {variant.name: old for variant in manifest.variants}
    fine = Availability(True, versions={"torch": found})
    return {v.name: _compiler(found) if v.jit and platform.vendor == "cpu" else fine for v in manifest.variants}


@hookimpl
def attn_create(manifest: Manifest, variant: str, context: Context) -> object:
    """A backend object. Raises :class:`ManifestError` for a backend that is not of this package."""
    from attn_core.errors import ManifestError

    manifest.variant(variant)
    if manifest.kind == "mm":
        from attn_torch.vision import TorchVision

        return TorchVision(context)
    if manifest.name == "torch_native":
        from attn_torch.native import TorchNative

        return TorchNative(context)
    if manifest.name == "flex_attention":
        from attn_torch.flex import FlexAttention

        return FlexAttention(context, compiled=variant == "compiled")
    raise ManifestError(f"attn-torch has no backend {manifest.id}")


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _compiler(torch_version: str) -> Availability:
    """A C++ compiler as torch's code generator looks for it: ``$CXX``, then g++, clang++ and c++."""
    import os

    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    if any(shutil.which(name) for name in names):
        return Availability(True, versions={"torch": torch_version})
    reason = Reason("toolkit", need="a C++ compiler", have="none of " + ", ".join(names), fix="install g++ or set CXX")
    return Availability(False, (reason,), {"torch": torch_version}, needs="install g++ or set CXX")
