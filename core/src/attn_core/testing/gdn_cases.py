"""Cases for ``gdn``: one step of one gated-delta-network layer, with slots of which only some belong to the batch.

Slots that no row owns, and the slots of fresh rows (recycled ones), hold NaN: a state that leaks from them shows at once.
Slot numbers are a random permutation, rows may read one slot and write another (a fork of a snapshot), and rows of padding
have slot -1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_core.batch import AttentionBatch, Checkpoints, KvAddress, Segment, StateAddress
from attn_core.context import Context, GraphLimits
from attn_core.geometry import GdnGeometry, LayerGroup
from attn_core.layers import GdnCache, GdnInputs, GdnLayer
from attn_core.plan import PartPlan, PhasePlan, Pool
from attn_core.testing.elements import random_values, torch_dtype
from attn_core.testing.guards import Guarded, Watch, bytes_of, guarded
from attn_core.testing.oracle_gdn import RowState
from attn_core.testing.trees import build_tree


@dataclass(frozen=True)
class GdnSpec:
    """One step, described. ``fresh`` and ``forked`` are row numbers; ``checkpoints`` are (row, length) pairs."""

    geometry: GdnGeometry
    phase: str
    query_lens: tuple[int, ...]
    dtype: str = "fp32"
    seed: int = 0
    fresh: tuple[int, ...] = ()
    forked: tuple[int, ...] = ()
    checkpoints: tuple[tuple[int, int], ...] = ()
    parents: tuple[tuple[int, ...], ...] | None = None
    step_slots: bool = False
    external_conv: bool = False
    l2norm: bool = True
    strided: bool = False
    pad_rows: int = 0
    pad_tokens: int = 0
    lane: int = 0
    device: str = "cpu"

    def but(self, **changes: Any) -> GdnSpec:
        """This spec with some fields replaced."""
        return replace(self, **changes)


@dataclass(eq=False)
class GdnCase:
    """A case ready to run. ``slots`` are the slots that the step may write; ``watch`` remembers what nobody may change."""

    spec: GdnSpec
    group: LayerGroup
    pool: Pool
    batch: AttentionBatch
    layer: GdnLayer
    cache: GdnCache
    inputs: GdnInputs
    out: torch.Tensor
    before: GdnCache
    guards: list[Guarded] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def problems(self, written: dict[int, RowState]) -> list[str]:
        """Canaries, inputs and tables, and every slot that is not in `written`: its bits must be as they were."""
        found = [line for guard in self.guards for line in guard.problems()] + self.watch.problems()
        kept = torch.ones(len(self.cache.state), dtype=torch.bool)
        kept[[slot for slot in written if slot >= 0]] = False
        for name in ("conv", "state"):
            now, then = getattr(self.cache, name)[kept], getattr(self.before, name)[kept]
            changed = (bytes_of(now) != bytes_of(then)).any(dim=1).view(now.shape).flatten(1).any(dim=1)
            if bool(changed.any()):
                slots = kept.nonzero()[:, 0][changed.cpu()].tolist()
                found.append(f"{name} of slots {slots} changed, which the step does not own")
        return found


def build_gdn(spec: GdnSpec) -> GdnCase:
    """The case that `spec` describes."""
    device, rows = torch.device(spec.device), len(spec.query_lens)
    generator = torch.Generator().manual_seed(spec.seed)
    group = LayerGroup("target", "gdn", "linear_gdn", (0,), spec.geometry, {"state": "states"})
    order = (torch.randperm(6 * max(rows, 1) + 4, generator=generator) + 1).tolist()
    cache = _cache(spec, len(order) + 1, generator, device)
    batch = _batch(spec, order, device)
    _poison(spec, cache, batch)
    tokens = batch.padded_tokens
    out = guarded("out", (tokens, spec.geometry.v_heads, spec.geometry.v_dim), torch_dtype(spec.dtype), device)
    pool = Pool("states", "target", (0,), "state_vk", spec.geometry.state_dtype, "NHD", 1, 0, kind="state")
    pool = replace(pool, verify_state="slots" if spec.step_slots else "intermediate")
    before = GdnCache(cache.conv.clone(), cache.state.clone())
    inputs = _inputs(spec, tokens, generator, device)
    case = GdnCase(spec, group, pool, batch, _layer(spec, group, generator, device), cache, inputs, out.tensor, before, [out])  # fmt: skip
    _watch(case)
    return case


def context_for(case: GdnCase, manifest: Any, variant: str, row: Any, limits: GraphLimits | None = None) -> Context:
    """The context of a backend object for this case: the states are pool 1, a KV pool stands in front."""
    part = PartPlan("scan", manifest.name, variant, manifest.package, manifest.version, (), tuple(sorted(row.features)))
    plan = PhasePlan(manifest.name, variant, manifest.package, manifest.version, (part,), padded_out=row.padded_out)
    return Context(
        device=torch.device(case.spec.device),
        dtype=torch_dtype(case.spec.dtype),
        group=case.group,
        pools={"state": case.pool, "attend": case.pool},
        pool_index={"state": 1, "attend": 1},
        phases=dict.fromkeys(("prefill", "decode", "verify", "draft", "draft_extend"), plan),
        limits=limits,
        lanes=2,
    )


# --- parts --------------------------------------------------------------------------------------------------------------


def _cache(spec: GdnSpec, slots: int, generator: torch.Generator, device: torch.device) -> GdnCache:
    geometry, drafts = spec.geometry, max((1, *spec.query_lens))
    rows = len(spec.query_lens) + spec.pad_rows
    conv_shape = (geometry.conv_dim, geometry.conv_width - 1)
    state_shape = (geometry.v_heads, geometry.v_dim, geometry.k_dim)

    def random(name: str, *shape: int) -> torch.Tensor:
        return random_values(shape, name, generator).to(device)

    cache = GdnCache(random(geometry.conv_dtype, slots, *conv_shape), random(geometry.state_dtype, slots, *state_shape))
    if spec.phase == "verify" and not spec.step_slots:
        cache.step_state = torch.full(
            (rows, drafts, *state_shape), float("nan"), dtype=cache.state.dtype, device=device
        )
        cache.step_conv = torch.full((rows, drafts, *conv_shape), float("nan"), dtype=cache.conv.dtype, device=device)
    return cache


def _poison(spec: GdnSpec, cache: GdnCache, batch: AttentionBatch) -> None:
    """NaN in every slot that no continuing row reads: free slots, recycled slots, slot 0."""
    address = batch.state(1)
    read = [int(address.read_slots[row]) for row in range(batch.num_rows) if row not in spec.fresh]
    if address.step_slots is not None and address.accepted is not None:
        read = [int(address.step_slots[row, int(address.accepted[row])]) for row in range(batch.num_rows)]
    poisoned = torch.ones(len(cache.state), dtype=torch.bool)
    poisoned[read] = False
    cache.conv[poisoned.to(cache.conv.device)] = float("nan")
    cache.state[poisoned.to(cache.state.device)] = float("nan")


def _layer(spec: GdnSpec, group: LayerGroup, generator: torch.Generator, device: torch.device) -> GdnLayer:
    geometry = spec.geometry

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    weight, bias = random(geometry.conv_dim, geometry.conv_width) * 0.5, random(geometry.conv_dim) * 0.3
    dtype = torch_dtype(spec.dtype)
    return GdnLayer(
        0,
        group,
        a_log=random(geometry.v_heads) * 0.5,
        dt_bias=random(geometry.v_heads),
        conv_weight=None if spec.external_conv else weight.to(dtype),
        conv_bias=None if spec.external_conv else bias.to(dtype),
        l2norm=spec.l2norm,
    )


def _inputs(spec: GdnSpec, tokens: int, generator: torch.Generator, device: torch.device) -> GdnInputs:
    geometry = spec.geometry

    def random(*shape: int) -> torch.Tensor:
        values = random_values(shape, spec.dtype, generator)
        if spec.strided:
            values = torch.cat([values, values[..., :1].expand(*shape[:-1], 8)], dim=-1)[..., : shape[-1]]
        return values.to(device)

    a, b = random(tokens, geometry.v_heads), random(tokens, geometry.v_heads)
    if not spec.external_conv:
        return GdnInputs(random(tokens, geometry.conv_dim), a, b)
    q, k = (random(tokens, geometry.k_heads, geometry.k_dim) for _ in range(2))
    return GdnInputs(None, a, b, q, k, random(tokens, geometry.v_heads, geometry.v_dim))


def _batch(spec: GdnSpec, order: list[int], device: torch.device) -> AttentionBatch:
    rows, uniform = len(spec.query_lens), spec.phase in ("decode", "draft", "verify")
    padded_len = (spec.query_lens[0] if spec.query_lens else 1) if uniform else 0
    lens = [*spec.query_lens, *[padded_len] * spec.pad_rows]
    offsets = [0]
    for length in lens:
        offsets.append(offsets[-1] + length)
    real = sum(spec.query_lens)
    padded = offsets[-1] if uniform and spec.pad_rows else real + spec.pad_tokens
    query_len = spec.query_lens[0] if uniform and rows else None
    none = torch.full((padded,), -1, dtype=torch.int64, device=device)
    kv = KvAddress(4, torch.ones(len(lens), dtype=torch.int32, device=device), none, 1,
                   table=torch.zeros(len(lens), 1, dtype=torch.int32, device=device))  # fmt: skip
    return AttentionBatch(
        num_rows=rows,
        num_tokens=real,
        padded_rows=len(lens),
        padded_tokens=padded,
        segments=(Segment(spec.phase, slice(0, rows), slice(0, real), query_len),),
        query_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        query_offsets_cpu=torch.tensor(offsets, dtype=torch.int32),
        max_query_len=max((1, *lens)),
        addresses=(kv, _address(spec, order, device)),
        tree=None if spec.parents is None else build_tree(spec.parents, padded_rows=len(lens), device=device),
        lane=spec.lane,
    )


def _address(spec: GdnSpec, order: list[int], device: torch.device) -> StateAddress:
    rows, padding = len(spec.query_lens), [-1] * spec.pad_rows
    read = order[:rows]
    write = [order[rows + row] if row in spec.forked else read[row] for row in range(rows)]

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    address = StateAddress(
        int32(read + padding),
        int32(write + padding),
        torch.tensor([row in spec.fresh for row in range(rows)] + [False] * spec.pad_rows, device=device),
    )
    free = order[2 * rows :]
    if spec.checkpoints:
        own, lengths = zip(*spec.checkpoints, strict=True)
        address.checkpoints = Checkpoints(int32(own), int32(lengths), int32(free[: len(own)]))
    if spec.step_slots:
        drafts = spec.query_lens[0]
        table = [[read[row], *free[row * drafts : (row + 1) * drafts]] for row in range(rows)]
        address.step_slots = int32(table + [[-1] * (drafts + 1)] * spec.pad_rows)
        address.accepted = int32([row % (drafts + 1) for row in range(rows)] + [0] * spec.pad_rows)
    return address


def _watch(case: GdnCase) -> None:
    for name in ("mixed_qkv", "a", "b", "q", "k", "v"):
        case.watch.add(f"inputs.{name}", getattr(case.inputs, name))
    address = case.batch.state(1)
    for name in ("read_slots", "write_slots", "fresh", "step_slots", "accepted"):
        case.watch.add(f"state address.{name}", getattr(address, name))
    case.watch.add("batch.query_offsets", case.batch.query_offsets)
