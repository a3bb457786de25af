"""A plain ``gdn`` backend in fp32 torch: one token after another, every feature, easy to read.

The formulas are those of :mod:`attn_core.testing.oracle_gdn`; here they run over all heads at once. It needs exact lengths on
the host. Each small method is one thing that goes wrong in practice; the kit's planted faults override them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from attn_core.availability import Availability
from attn_core.batch import AttentionBatch, StateAddress, Tree
from attn_core.context import Context, StepMetadata
from attn_core.geometry import GdnGeometry, LayerGroup
from attn_core.hookspecs import hookimpl
from attn_core.layers import GdnCache, GdnInputs, GdnLayer
from attn_core.manifest import Manifest, load_toml, parse_manifests

State = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class GdnMetadata(StepMetadata):
    """The rows of a step as host numbers, and the batch's state address."""

    address: StateAddress | None = None
    offsets: tuple[int, ...] = ()
    rows: int = 0
    tree: Tree | None = None


class GdnReference:
    """The backend object."""

    def __init__(self, context: Context) -> None:
        self.context = context

    @hookimpl
    def attn_metadata(
        self, batch: AttentionBatch, group: LayerGroup, phase: str, state: Any, capture: bool
    ) -> GdnMetadata:
        """Offsets on the host; slots stay on the device."""
        metadata = GdnMetadata(phase, batch.num_tokens)
        metadata.address = batch.state(self.context.address_index("state"))
        metadata.offsets = tuple(batch.query_offsets.tolist())
        metadata.rows, metadata.tree = batch.num_rows, batch.tree
        return metadata

    @hookimpl
    def attn_extend(
        self, inputs: GdnInputs, layer: GdnLayer, cache: GdnCache, metadata: GdnMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """prefill, draft_extend, verify: row by row, token by token."""
        geometry = layer.geometry
        result = torch.zeros(len(inputs.a), geometry.v_heads, geometry.v_dim, device=inputs.a.device)
        for row in range(metadata.rows):
            start = self.start(cache, metadata, row)
            states: list[State] = []
            for i, token in enumerate(range(*metadata.offsets[row : row + 2])):
                result[token], after = self.token(inputs, layer, token, self.parent(metadata, row, i, start, states))
                states.append(after)
            self.finish(cache, metadata, row, states)
        if out is None:
            return result.to(self.context.dtype), None
        return out.copy_(result), None

    @hookimpl
    def attn_decode(
        self, inputs: GdnInputs, layer: GdnLayer, cache: GdnCache, metadata: GdnMetadata, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """decode and draft: the same with one token a row."""
        return self.attn_extend(inputs, layer, cache, metadata, out)

    @hookimpl
    def attn_commit(
        self,
        batch: AttentionBatch,
        group: LayerGroup,
        caches: Sequence[GdnCache],
        metadata: GdnMetadata,
        accepted: torch.Tensor,
    ) -> None:
        """Copy the state after the last accepted draft into the row's slot; 0 accepted drafts copy nothing."""
        assert metadata.address is not None
        if metadata.address.step_slots is not None:
            return  # states have slots already; the next step says where to resume
        for row, count in enumerate(accepted.tolist()[: metadata.rows]):
            slot = int(metadata.address.write_slots[row])
            for cache in caches if count > 0 else ():
                assert cache.step_state is not None
                assert cache.step_conv is not None
                cache.state[slot] = cache.step_state[row, self.kept(count)]
                cache.conv[slot] = cache.step_conv[row, self.kept(count)]

    # --- small steps ------------------------------------------------------------------------------------------------------

    def kept(self, count: int) -> int:
        """Index of the draft whose state is kept."""
        return count - 1

    def start(self, cache: GdnCache, metadata: GdnMetadata, row: int) -> State:
        """What a row starts from: zeros if it is fresh, its read slot, or the slot of the last accepted draft."""
        address = metadata.address
        assert address is not None
        slot = int(address.read_slots[row])
        if address.step_slots is not None and address.accepted is not None:
            slot = int(address.step_slots[row, int(address.accepted[row])])
        conv, state = cache.conv[slot].float(), self.load(cache.state[slot])
        if self.is_fresh(address, row):
            return torch.zeros_like(conv), torch.zeros_like(state)
        return conv, state

    def is_fresh(self, address: StateAddress, row: int) -> bool:
        """A recycled slot's contents do not count."""
        return bool(address.fresh[row])

    def load(self, state: torch.Tensor) -> torch.Tensor:
        """A stored state [Hv, V, K] as f32."""
        return state.float()

    def parent(self, metadata: GdnMetadata, row: int, i: int, start: State, states: list[State]) -> State:
        """The state before token i of a row: the token before it, or its parent in a tree."""
        before = i - 1 if metadata.tree is None else int(metadata.tree.parents[row, i])
        return start if before < 0 else states[before]

    def token(self, inputs: GdnInputs, layer: GdnLayer, token: int, before: State) -> tuple[torch.Tensor, State]:
        """o f32[Hv, V] and the state after one token."""
        conv, state = before
        geometry = layer.geometry
        if inputs.mixed_qkv is not None:
            mixed, conv = self.convolve(layer, inputs.mixed_qkv[token].float(), conv)
            q, k, v = self.split(geometry, mixed)
        else:
            assert inputs.q is not None
            assert inputs.k is not None
            assert inputs.v is not None
            q, k, v = inputs.q[token].float(), inputs.k[token].float(), inputs.v[token].float()
        decay, beta = self.gates(layer, inputs.a[token].float(), inputs.b[token].float())
        if layer.l2norm:
            q, k = self.normalise(q), self.normalise(k)
        q, k = (self.spread_heads(x, geometry) for x in (q * geometry.k_dim**-0.5, k))
        state = state * decay[:, None, None]
        update = beta[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
        state = state + torch.einsum("hv,hk->hvk", update, k)
        return torch.einsum("hvk,hk->hv", state, q), (conv, state)

    def convolve(self, layer: GdnLayer, x: torch.Tensor, conv: torch.Tensor) -> State:
        """The short convolution over the last inputs, and its new state."""
        assert layer.conv_weight is not None
        window = torch.cat([conv, x[:, None]], dim=1)
        y = (window * layer.conv_weight.float()).sum(1)
        if layer.conv_bias is not None:
            y = y + layer.conv_bias.float()
        return F.silu(y) if layer.activation == "silu" else y, window[:, 1:]

    def split(self, geometry: GdnGeometry, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q | k | v, heads of one kind together."""
        keys = geometry.k_heads * geometry.k_dim
        q, k, v = mixed[:keys], mixed[keys : 2 * keys], mixed[2 * keys :]
        heads = geometry.k_heads, geometry.k_dim
        return q.view(heads), k.view(heads), v.view(geometry.v_heads, geometry.v_dim)

    def gates(self, layer: GdnLayer, a: torch.Tensor, b: torch.Tensor) -> State:
        """The decay exp(g) of a logarithmic gate g, and beta."""
        g = -torch.exp(layer.a_log.float()) * F.softplus(a + layer.dt_bias.float())
        return torch.exp(g), torch.sigmoid(b)

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """L2 norm over the head dim."""
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    def spread_heads(self, x: torch.Tensor, geometry: GdnGeometry) -> torch.Tensor:
        """Value head h uses key head h // (Hv / Hk)."""
        return x.repeat_interleave(geometry.v_heads // geometry.k_heads, dim=0)

    def finish(self, cache: GdnCache, metadata: GdnMetadata, row: int, states: list[State]) -> None:
        """Write what the phase keeps: the last state and checkpoints, or the state after every draft."""
        address = metadata.address
        assert address is not None
        if metadata.phase == "verify":
            for t, state in enumerate(states):
                if address.step_slots is not None:
                    self.write(cache, int(address.step_slots[row, t + 1]), state)
                else:
                    assert cache.step_state is not None
                    assert cache.step_conv is not None
                    cache.step_conv[row, t], cache.step_state[row, t] = state[0], state[1]
            return
        if states:
            self.write(cache, self.write_slot(address, row), states[-1])
        marks = address.checkpoints
        if marks is not None:
            for own, length, slot in zip(marks.row.tolist(), marks.length.tolist(), marks.slot.tolist(), strict=True):
                if own == row and slot >= 0:
                    self.write(cache, slot, states[length - 1])

    def write_slot(self, address: StateAddress, row: int) -> int:
        """Where the last state of a row goes."""
        return int(address.write_slots[row])

    def write(self, cache: GdnCache, slot: int, state: State) -> None:
        """Store conv and state of one slot."""
        cache.conv[slot], cache.state[slot] = state[0], state[1]


def load_gdn_manifest() -> Manifest:
    """The manifest of the reference, parsed."""
    path = Path(__file__).with_name("reference_gdn_manifest.toml")
    return parse_manifests(load_toml(path.read_text("utf-8"), path.name), package="attn-core", version="0")[0]


@hookimpl
def attn_probe(manifest: Manifest, platform: Any) -> Mapping[str, Availability]:
    """It runs wherever torch does."""
    return {variant.name: Availability(True) for variant in manifest.variants}


@hookimpl
def attn_create(manifest: Manifest, variant: str, context: Context) -> GdnReference:
    """The backend object."""
    return GdnReference(context)
