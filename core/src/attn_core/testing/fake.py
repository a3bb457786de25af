"""Fakes for tests of discovery, planner, router, bridges and servers: distributions on disk, and a backend that records.

::

    make_distribution(tmp_path, "attn-vendor", "1.2.0", MODULE_SOURCE, manifest_text())
    sys.path.insert(0, str(tmp_path))       or PYTHONPATH for a subprocess

    backend = RecordingBackend()            answers every hook, computes nothing, remembers the calls
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.context import Context, GraphLimits, StepMetadata
from attn_core.hookspecs import hookimpl
from attn_core.manifest import Manifest, load_toml, parse_manifests

if TYPE_CHECKING:
    import torch

#: Entry-point group of plugins.
GROUP = "attn.backends"

#: A plugin module whose backends record and compute nothing.
MODULE_SOURCE = """
from attn_core.hookspecs import hookimpl
from attn_core.testing.fake import RecordingBackend


@hookimpl
def attn_create(manifest, variant, context):
    return RecordingBackend(context)
"""


def manifest_text(
    name: str = "fake",
    kind: str = "mha",
    *,
    features: Sequence[str] = (),
    phases: Sequence[str] = ("prefill", "decode"),
    vendor: Sequence[str] = ("cpu", "nvidia"),
    dtypes: Iterable[tuple[str, str]] = (("bf16", "bf16"), ("fp32", "fp32")),
    page_sizes: Sequence[int] = (1, 16, 64),
    head_dims: Iterable[tuple[int, int]] = ((64, 64), (128, 128)),
    variant: str = "default",
    rank: int | None = None,
    graph: str = "none",
    status: str = "implemented",
    api: str = "1.0",
    extra: str = "",
) -> str:
    """The TOML text of a plain manifest with one variant and one allow row. `extra` is appended as it is."""
    types = ", ".join(f'{{ q = "{q}", kv = "{kv}" }}' for q, kv in dtypes)
    lines = [
        f'api = "{api}"',
        "[[backend]]",
        f'kind = "{kind}"',
        f'name = "{name}"',
        f'status = "{status}"',
        "[[backend.variant]]",
        f'name = "{variant}"',
        "[[backend.variant.allow]]",
        f"features = {_quoted(features)}",
        f'graph = {{ level = "{graph}" }}',
        "[backend.variant.allow.when]",
        f"vendor = {_quoted(vendor)}",
        f"phase = {_quoted(phases)}",
        f"dtypes = [{types}]",
        f"page_size = {list(page_sizes)}",
        f"head_dims = {[list(pair) for pair in head_dims]}",
    ]
    if rank is not None:
        lines += ["[[backend.order]]", f"rank = {rank}"]
    return "\n".join([*lines, extra]) + "\n"


def _quoted(items: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{item}"' for item in items) + "]"


def make_distribution(
    site: str | Path,
    name: str,
    version: str = "1.0.0",
    module_source: str = MODULE_SOURCE,
    manifest_toml: str | None = None,
    *,
    entry_points: Mapping[str, str] | str | None = None,
    import_name: str | None = None,
    requires: Sequence[str] = ("attn-core",),
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write an installed distribution into the folder `site`, as pip would: package, METADATA, RECORD with hashes.

    `entry_points` maps names to values in the group ``attn.backends`` (default: one, for the package), or is the whole text
    of ``entry_points.txt``. Without `manifest_toml` the package has no ``attn_manifest.toml``. `files` are further files of
    the package, by relative path. Returns the folder of the package.
    """
    root = Path(site)
    package = import_name or name.replace("-", "_")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    contents = {f"{package}/__init__.py": module_source}
    if manifest_toml is not None:
        contents[f"{package}/attn_manifest.toml"] = manifest_toml
    contents |= {f"{package}/{path}": text for path, text in (files or {}).items()}
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    contents |= {
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: attn_core.testing.fake\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/INSTALLER": "attn_core.testing.fake\n",
        f"{info}/entry_points.txt": _entry_points(entry_points, name, package),
    }
    record = [f"{path},{_hash(text)},{len(text.encode())}" for path, text in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    for path, text in contents.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())
    return root / package


def _entry_points(given: Mapping[str, str] | str | None, name: str, package: str) -> str:
    if isinstance(given, str):
        return given
    points = {name.removeprefix("attn-"): package} if given is None else given
    return "\n".join([f"[{GROUP}]", *(f"{key} = {value}" for key, value in points.items())]) + "\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def make_manifest(package: str = "attn-fake", version: str = "1.0.0", **fields: Any) -> Manifest:
    """The manifest of :func:`manifest_text`, parsed, as if `package` had brought it."""
    return parse_manifests(load_toml(manifest_text(**fields)), package=package, version=version)[0]


# --- a backend that records -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """One call of a hook: its name and arguments by name."""

    hook: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class RecordingState:
    """Graph state of a backend that needs none."""

    limits: GraphLimits
    lane: int
    pad_kv_len: int = 0
    nbytes: int = 0
    metadata: dict[tuple[str, int, int], StepMetadata] = field(default_factory=dict)


class RecordingBackend:
    """Answers every hook with zeros of the right shape and remembers the calls, in order."""

    def __init__(self, context: Context | None = None) -> None:
        self.context = context
        self.calls: list[Call] = []

    def hooks(self) -> list[str]:
        """Names of the hooks called so far, in order."""
        return [call.hook for call in self.calls]

    def _note(self, hook: str, **arguments: Any) -> None:
        self.calls.append(Call(hook, arguments))

    @hookimpl
    def attn_metadata(self, batch: Any, group: Any, phase: str, state: Any, capture: bool) -> StepMetadata:
        """The same object for the same key under a state."""
        self._note("attn_metadata", batch=batch, group=group, phase=phase, state=state, capture=capture)
        fresh = StepMetadata(phase, batch.num_tokens, batch.needs_lse, batch.partial)
        if state is None:
            return fresh
        kept: StepMetadata = state.metadata.setdefault((phase, batch.padded_rows, batch.padded_tokens), fresh)
        kept.num_tokens = batch.num_tokens
        return kept

    @hookimpl
    def attn_metadata_in_graph(self, metadata: Any) -> None:
        """Nothing."""
        self._note("attn_metadata_in_graph", metadata=metadata)

    @hookimpl
    def attn_graph_state(self, group: Any, phases: Any, limits: GraphLimits, lane: int) -> RecordingState:
        """An empty state."""
        self._note("attn_graph_state", group=group, phases=phases, limits=limits, lane=lane)
        return RecordingState(limits, lane)

    @hookimpl
    def attn_draft_metadata(self, batch: Any, group: Any, draft: Any, state: Any) -> tuple[StepMetadata, ...]:
        """One a step."""
        self._note("attn_draft_metadata", batch=batch, group=group, draft=draft, state=state)
        return tuple(StepMetadata("draft", batch.num_tokens) for _ in range(draft.steps))

    @hookimpl
    def attn_extend(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        """Zeros."""
        self._note("attn_extend", inputs=inputs, layer=layer, cache=cache, metadata=metadata, out=out)
        return self._zeros(inputs, layer, metadata, out)

    @hookimpl
    def attn_decode(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        """Zeros."""
        self._note("attn_decode", inputs=inputs, layer=layer, cache=cache, metadata=metadata, out=out)
        return self._zeros(inputs, layer, metadata, out)

    @hookimpl
    def attn_ragged(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any, part: Any) -> Any:
        """Zeros."""
        self._note("attn_ragged", q=q, k=k, v=v, layer=layer, metadata=metadata, part=part)
        return q.new_zeros((q.shape[0], q.shape[1], v.shape[-1])), q.new_zeros(q.shape[:2]).float()

    @hookimpl
    def attn_store(self, inputs: Any, layer: Any, cache: Any, address: Any) -> None:
        """Nothing."""
        self._note("attn_store", inputs=inputs, layer=layer, cache=cache, address=address)

    @hookimpl
    def attn_gather(self, cache: Any, address: Any, part: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """No keys."""
        self._note("attn_gather", cache=cache, address=address, part=part, layer=layer)
        return cache.k.new_zeros((0, *cache.k.shape[2:])), cache.v.new_zeros((0, *cache.v.shape[2:]))

    @hookimpl
    def attn_index(self, inputs: Any, layer: Any, cache: Any, metadata: Any, out: Any) -> Any:
        """No keys."""
        import torch

        self._note("attn_index", inputs=inputs, layer=layer, cache=cache, metadata=metadata, out=out)
        shape = (inputs.q.shape[0], layer.group.geometry.index_topk)
        return torch.full(shape, -1, dtype=torch.int32, device=inputs.q.device)

    @hookimpl
    def attn_commit(self, batch: Any, group: Any, caches: Any, metadata: Any, accepted: Any) -> None:
        """Nothing."""
        self._note("attn_commit", batch=batch, group=group, caches=caches, metadata=metadata, accepted=accepted)

    @hookimpl
    def attn_warmup(self, group: Any, phases: Any, limits: Any) -> None:
        """Nothing."""
        self._note("attn_warmup", group=group, phases=phases, limits=limits)

    def _zeros(self, inputs: Any, layer: Any, metadata: Any, out: Any) -> Any:
        import torch

        q = next(t for t in (inputs.q, getattr(inputs, "q_latent", None), getattr(inputs, "a", None)) if t is not None)
        if out is None:
            geometry = layer.group.geometry
            width = getattr(geometry, "v_dim", None) or q.shape[-1]
            out = q.new_zeros((q.shape[0], q.shape[1], width))
        lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device) if metadata.needs_lse else None
        return out.zero_(), lse
