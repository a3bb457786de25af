"""The contract between core and plugins: two pluggy spec classes.

``PluginSpec`` is implemented by the plugin's module (three hooks, for planning). ``BackendSpec`` is implemented by the
object that ``attn_create`` returns; the router binds its methods once (:mod:`attn_core.binding`) and calls them directly.
An implementation may take a subset of a hook's arguments, so that the contract can grow without breaking old plugins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch

    from attn_core.availability import Availability
    from attn_core.batch import AttentionBatch, DraftSteps, KvAddress, Part
    from attn_core.context import Context, GraphLimits, GraphState, Metadata
    from attn_core.geometry import LayerGroup
    from attn_core.layers import Cache, Layer
    from attn_core.manifest import Manifest
    from attn_core.platform import Platform

PROJECT = "attn"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class PluginSpec:
    """Hooks of a plugin module. Core asks the owning plugin only, under a time limit, and isolates every failure."""

    @hookspec(firstresult=True)
    def attn_capabilities(self) -> Iterable[Manifest | Mapping[str, Any]]:
        """Manifests of this plugin, when they are computed; the default is the package's ``attn_manifest.toml``."""
        raise NotImplementedError  # pragma: no cover - a specification has no body

    @hookspec(firstresult=True)
    def attn_probe(self, manifest: Manifest, platform: Platform) -> Mapping[str, Availability] | Availability:
        """Whether each variant can run here: libraries, versions, compiled architectures. Creates no device context."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_create(self, manifest: Manifest, variant: str, context: Context) -> object:
        """A backend object for one (model, layer group, variant). Kernels are imported here, not at module level."""
        raise NotImplementedError  # pragma: no cover


class BackendSpec:
    """Hooks of a backend object. Required ones depend on the kind (:data:`REQUIRED`); the others have defaults in core."""

    @hookspec(firstresult=True)
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: GraphState | None, capture: bool
    ) -> Metadata:
        """Metadata of one step for one group, outside a graph. ``state`` None is eager; with a state the same object
        comes back for the same key and only contents are rewritten."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_metadata_in_graph(self, metadata: Metadata) -> None:
        """Device work of the metadata that is recorded into the graph (and run once in an eager step)."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_graph_state(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits, lane: int) -> GraphState:
        """Static buffers at the maximum. Required if any row declares a graph level."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_draft_metadata(
        self, batch: AttentionBatch, group: LayerGroup, draft: DraftSteps, state: GraphState | None
    ) -> tuple[Metadata, ...]:
        """Metadata of all draft steps at once, a row for each branch. Default: one attn_metadata a step, under graphs too."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_extend(
        self, inputs: Any, layer: Layer, cache: Cache, metadata: Metadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """prefill, draft_extend and verify. Returns (out[T, H, Dv], lse f32[T, H] or None)."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_decode(
        self, inputs: Any, layer: Layer, cache: Cache, metadata: Metadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """decode and draft. Returns (out[T, H, Dv], lse f32[T, H] or None)."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_ragged(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, metadata: Metadata, part: Part | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Packed attention without a cache: vision, encoders, chunks of a prefix."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_store(self, inputs: Any, layer: Layer, cache: Cache, address: KvAddress) -> None:
        """Write k and v to ``address.new_slots``. Default: scatter and quantise for the published formats."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_gather(
        self, cache: Cache, address: KvAddress, part: Part | None, layer: Layer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a part of the cache back as plain tensors, the layer's scales applied. Default: dequantising gather for the published formats."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_index(
        self, inputs: Any, layer: Layer, cache: Cache, metadata: Metadata, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Sparse attention: logits and top-k. Returns i32[T, topk], -1 where there is no key."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_commit(
        self,
        batch: AttentionBatch,
        group: LayerGroup,
        caches: Sequence[Cache],
        metadata: Metadata,
        accepted: torch.Tensor,
    ) -> None:
        """After acceptance, once a step for all layers: recurrent states move to the accepted token. KV: nothing to do."""
        raise NotImplementedError  # pragma: no cover

    @hookspec(firstresult=True)
    def attn_warmup(self, group: LayerGroup, phases: Sequence[str], limits: GraphLimits) -> None:
        """Compile and tune before capture."""
        raise NotImplementedError  # pragma: no cover


#: Names of all hooks, read off the classes: the router's completeness test walks these.
PLUGIN_HOOKS = tuple(name for name in vars(PluginSpec) if name.startswith("attn_"))
BACKEND_HOOKS = tuple(name for name in vars(BackendSpec) if name.startswith("attn_"))

#: Required hooks per kind; a tuple entry means "one of". attn_extend/attn_decode as the declared phases say.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "mha": ("attn_metadata",),
    "mm": ("attn_metadata", "attn_ragged"),
    "mla": ("attn_metadata",),
    "gdn": ("attn_metadata",),
    "dsa": ("attn_metadata",),
}

#: Which hook serves a phase unless the manifest says otherwise.
PHASE_HOOK: Mapping[str, str] = {
    "prefill": "attn_extend",
    "draft_extend": "attn_extend",
    "verify": "attn_extend",
    "decode": "attn_decode",
    "draft": "attn_decode",
}
