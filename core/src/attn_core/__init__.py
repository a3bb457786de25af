"""attn-core: attention backends as pip packages. Importing this package loads no torch and no plugin.

::

    import attn_core

    plan = attn_core.plan("config.json")                # or platform="cuda:sm90" for another machine
    router = attn_core.Router(plan)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_core.availability import Availability as Availability
    from attn_core.batch import AttentionBatch as AttentionBatch
    from attn_core.batch import Checkpoints as Checkpoints
    from attn_core.batch import DraftSteps as DraftSteps
    from attn_core.batch import KvAddress as KvAddress
    from attn_core.batch import Part as Part
    from attn_core.batch import Segment as Segment
    from attn_core.batch import StateAddress as StateAddress
    from attn_core.batch import Tree as Tree
    from attn_core.binding import BoundBackend as BoundBackend
    from attn_core.binding import bind_backend as bind_backend
    from attn_core.context import Context as Context
    from attn_core.context import GraphKey as GraphKey
    from attn_core.context import GraphLimits as GraphLimits
    from attn_core.context import GraphState as GraphState
    from attn_core.context import Metadata as Metadata
    from attn_core.context import StepMetadata as StepMetadata
    from attn_core.discovery import PluginInfo as PluginInfo
    from attn_core.discovery import PluginProblem as PluginProblem
    from attn_core.discovery import Registry as Registry
    from attn_core.discovery import check_workers as check_workers
    from attn_core.discovery import discover as discover
    from attn_core.discovery import verify_plan as verify_plan
    from attn_core.errors import AttnError as AttnError
    from attn_core.errors import BatchError as BatchError
    from attn_core.errors import BindError as BindError
    from attn_core.errors import CacheError as CacheError
    from attn_core.errors import GraphError as GraphError
    from attn_core.errors import JitError as JitError
    from attn_core.errors import ManifestError as ManifestError
    from attn_core.errors import ModelError as ModelError
    from attn_core.errors import OutOfPages as OutOfPages
    from attn_core.errors import PlanError as PlanError
    from attn_core.errors import PlatformError as PlatformError
    from attn_core.errors import PluginError as PluginError
    from attn_core.errors import UsageError as UsageError
    from attn_core.errors import WorkerMismatch as WorkerMismatch
    from attn_core.geometry import DsaGeometry as DsaGeometry
    from attn_core.geometry import GdnGeometry as GdnGeometry
    from attn_core.geometry import LayerGroup as LayerGroup
    from attn_core.geometry import MhaGeometry as MhaGeometry
    from attn_core.geometry import MlaGeometry as MlaGeometry
    from attn_core.hookspecs import hookimpl as hookimpl
    from attn_core.jit_cache import JitCache as JitCache
    from attn_core.jit_cache import cache_directory as cache_directory
    from attn_core.layers import DsaCache as DsaCache
    from attn_core.layers import DsaLayer as DsaLayer
    from attn_core.layers import GdnCache as GdnCache
    from attn_core.layers import GdnInputs as GdnInputs
    from attn_core.layers import GdnLayer as GdnLayer
    from attn_core.layers import IndexCache as IndexCache
    from attn_core.layers import IndexInputs as IndexInputs
    from attn_core.layers import MhaCache as MhaCache
    from attn_core.layers import MhaInputs as MhaInputs
    from attn_core.layers import MhaLayer as MhaLayer
    from attn_core.layers import MlaCache as MlaCache
    from attn_core.layers import MlaInputs as MlaInputs
    from attn_core.layers import MlaLayer as MlaLayer
    from attn_core.layers import MmInputs as MmInputs
    from attn_core.layers import Rope as Rope
    from attn_core.layers import Scale as Scale
    from attn_core.manifest import Manifest as Manifest
    from attn_core.manifest import Row as Row
    from attn_core.manifest import Variant as Variant
    from attn_core.manifest import parse_manifest as parse_manifest
    from attn_core.manifest import parse_manifests as parse_manifests
    from attn_core.model import parse_model as parse_model
    from attn_core.options import Options as Options
    from attn_core.plan import Adjustment as Adjustment
    from attn_core.plan import Difference as Difference
    from attn_core.plan import GroupPlan as GroupPlan
    from attn_core.plan import PhasePlan as PhasePlan
    from attn_core.plan import Plan as Plan
    from attn_core.plan import Pool as Pool
    from attn_core.plan import Rejection as Rejection
    from attn_core.plan import load_plan as load_plan
    from attn_core.planner import plan as plan
    from attn_core.platform import Platform as Platform
    from attn_core.platform import detect_platform as detect_platform
    from attn_core.platform import parse_platform as parse_platform
    from attn_core.reasons import Reason as Reason
    from attn_core.router import Router as Router
    from attn_core.router import Step as Step

#: Version of the contract between core and plugins, ``major.minor``. See docs/vendor-guide.md for the policy.
API_VERSION = "1.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from attn_core._lazy import find

    value = globals()[name] = find(__name__, name)
    return value


def __dir__() -> list[str]:
    from attn_core._lazy import NAMES

    return sorted({*globals(), *NAMES, "plan"})
