"""Lazy public names: ``attn_core.X`` imports the module of X when it is first used, so that importing core stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

#: Public names by the module they live in.
MODULES: Mapping[str, tuple[str, ...]] = {
    "availability": ("Availability",),
    "batch": (
        "AttentionBatch",
        "Checkpoints",
        "DraftSteps",
        "KvAddress",
        "Part",
        "Segment",
        "StateAddress",
        "Tree",
    ),
    "binding": ("BoundBackend", "bind_backend"),
    "context": ("Context", "GraphKey", "GraphLimits", "GraphState", "Metadata", "StepMetadata"),
    "discovery": ("PluginInfo", "PluginProblem", "Registry", "check_workers", "discover", "verify_plan"),
    "errors": (
        "AttnError",
        "BatchError",
        "BindError",
        "CacheError",
        "GraphError",
        "JitError",
        "ManifestError",
        "ModelError",
        "OutOfPages",
        "PlanError",
        "PlatformError",
        "PluginError",
        "UsageError",
        "WorkerMismatch",
    ),
    "geometry": ("DsaGeometry", "GdnGeometry", "LayerGroup", "MhaGeometry", "MlaGeometry"),
    "hookspecs": ("hookimpl",),
    "jit_cache": ("JitCache", "cache_directory"),
    "layers": (
        "DsaCache",
        "DsaLayer",
        "GdnCache",
        "GdnInputs",
        "GdnLayer",
        "IndexCache",
        "IndexInputs",
        "MhaCache",
        "MhaInputs",
        "MhaLayer",
        "MlaCache",
        "MlaInputs",
        "MlaLayer",
        "MmInputs",
        "Rope",
        "Scale",
    ),
    "manifest": ("Manifest", "Row", "Variant", "parse_manifest", "parse_manifests"),
    "model": ("parse_model",),
    "options": ("Options",),
    "plan": ("Adjustment", "Difference", "GroupPlan", "PhasePlan", "Plan", "Pool", "Rejection", "load_plan"),
    "platform": ("Platform", "detect_platform", "parse_platform"),
    "reasons": ("Reason",),
    "router": ("Router", "Step"),
}

NAMES: Mapping[str, str] = {name: module for module, names in MODULES.items() for name in names}


def find(package: str, name: str) -> Any:
    """The public object called `name`. Raises AttributeError for a name that is not public."""
    if name == "plan":  # the module, which can be called: see callable_module
        return importlib.import_module(f"{package}.plan")
    if name not in NAMES:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{package}.{NAMES[name]}"), name)


def callable_module(name: str, target: str, function: str) -> None:
    """Let the module `name` be called as `function` of the module `target`.

    ``attn_core.plan`` is a module of records, and ``attn_core.plan(...)`` makes a plan: importing the submodule sets that
    attribute of the package, so the name cannot be the function in one process and the module in another.
    """

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(target), function)(*args, **kwargs)

    sys.modules[name].__class__ = CallableModule
