"""The default probe: are the distributions and tools that a variant names in its manifest there?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import importlib_metadata

from attn_core.availability import Availability
from attn_core.manifest import Variant
from attn_core.reasons import Reason

#: Environment variables that hold the root of a toolkit; tools lie in its ``bin``.
_TOOLKIT_ROOTS = ("CUDA_HOME", "CUDA_PATH", "ROCM_PATH")


def default_availability(variant: Variant) -> Availability:
    """Checks ``requires`` against installed distributions and ``toolkit`` against PATH; names the pip command."""
    reasons: list[Reason] = []
    versions: dict[str, str] = {}
    missing: list[str] = []
    for text in variant.requires:
        reason = _check_requirement(text, versions)
        if reason is not None:
            reasons.append(reason)
            missing.append(f"'{text}'")
    needs = f"pip install {' '.join(missing)}" if missing else ""
    reasons = [Reason(r.code, r.need, r.have, fix=needs) for r in reasons]
    for tool in variant.toolkit:
        if find_tool(tool) is None:
            fix = f"install the toolkit that holds {tool}, or put it on PATH"
            reasons.append(Reason("toolkit", need=tool, have="not on PATH", fix=fix))
    return Availability(not reasons, tuple(reasons), versions, needs=needs)


def find_tool(tool: str) -> str | None:
    """The path of an executable on PATH or in the ``bin`` of a toolkit root, or None."""
    roots = [str(Path(os.environ[name], "bin")) for name in _TOOLKIT_ROOTS if os.environ.get(name)]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *roots])
    return shutil.which(tool, path=path)


def _check_requirement(text: str, versions: dict[str, str]) -> Reason | None:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return Reason("library", need=text, have="not a requirement such as 'vendor-kernels>=2.1'")
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None  # for another Python or system
    try:
        version = importlib_metadata.version(requirement.name)
    except importlib_metadata.PackageNotFoundError:
        return Reason("library", need=text, have="not installed")
    versions[requirement.name] = version
    if not requirement.specifier.contains(version, prereleases=True):
        return Reason("library", need=text, have=version)
    return None
