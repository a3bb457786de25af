"""What is missing for each variant, without importing FlashInfer or touching a device."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from packaging.requirements import Requirement

from attn_core.availability import Availability
from attn_core.manifest import Manifest, Variant
from attn_core.platform import Platform
from attn_core.reasons import Reason
from attn_trtllm.library import DISTRIBUTION, ENTRIES, misfits, signature_in_source, source_of

_TOOLS: Mapping[str, str] = {
    "nvcc": "install the CUDA toolkit and set CUDA_HOME, or put nvcc on PATH",
    "ninja": "pip install ninja",
}


def probe(manifest: Manifest, platform: Platform) -> dict[str, Availability]:
    """Each variant's own answer: the library, its functions, the tools of the compiler, and the architecture."""
    return {variant.name: _variant(variant, platform) for variant in manifest.variants}


def planned(manifest: Manifest) -> Availability:
    """Not available: declared only."""
    reason = Reason(
        "planned",
        need="an implementation",
        have=f"{manifest.id} is declared only, its kernels are not connected",
        fix="--allow-planned shows it in a plan; choose an implemented backend to run",
    )
    return Availability(False, (reason,))


def _variant(variant: Variant, platform: Platform) -> Availability:
    reasons, versions, missing = [], {}, []
    for text in variant.requires:
        requirement = Requirement(text)
        found = _version(requirement.name)
        if found is not None:
            versions[requirement.name] = found
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            missing.append(text)
            reasons.append(Reason("library", need=text, have=found or "not installed", fix=f"pip install '{text}'"))
    if not missing:
        reasons += _functions(variant.name, versions.get(DISTRIBUTION, ""))
    for tool in variant.toolkit:
        if _find(tool) is None:
            reasons.append(Reason("toolkit", need=tool, have="not found", fix=_TOOLS.get(tool, f"install {tool}")))
    reasons += _hardware(variant, platform)
    quoted = " ".join(f"'{text}'" for text in missing)
    return Availability(not reasons, tuple(reasons), versions, needs=f"pip install {quoted}" if missing else "")


def _functions(variant: str, version: str) -> list[Reason]:
    found = []
    for entry in ENTRIES[variant]:
        text = _source(entry.module, version)
        signature = None if text is None else signature_in_source(text, entry.name)
        problems = ["missing"] if signature is None else misfits(signature, entry)
        if problems:
            have = f"{DISTRIBUTION} {version}: {'; '.join(' '.join(p.split()) for p in problems)}"
            fix = f"pip install --upgrade {DISTRIBUTION}"
            found.append(
                Reason("library", need=f"{entry.module}.{entry.name} with known arguments", have=have, fix=fix)
            )
    return found


@lru_cache(maxsize=8)
def _source(module: str, version: str) -> str | None:
    """Source text of an installed module; `version` keeps the memory honest when another release is installed."""
    entry = next(entry for entries in ENTRIES.values() for entry in entries if entry.module == module)
    return source_of(entry)


def _hardware(variant: Variant, platform: Platform) -> list[Reason]:
    """The architectures of the variant's own rows against the platform: a CPU-only machine is told what it lacks."""
    archs = sorted({arch for row in variant.allow for arch in row.when.get("arch", ())})
    if not archs or platform.arch in archs:
        return []
    return [Reason("device", need=f"an NVIDIA GPU ({', '.join(archs)})", have=str(platform))]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find(tool: str) -> str | None:
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [str(Path(root, "bin")) for root in roots if root] + ["/usr/local/cuda/bin"]
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *places]))
