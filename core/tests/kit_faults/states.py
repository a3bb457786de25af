"""Faults in recurrent states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from attn_core.testing.reference_gdn import GdnReference
from kit_faults._registry import fault

T = torch.Tensor
GDN = {"kind": "gdn", "head_dims": (16, 8), "heads": (2, 4), "page_size": 1}


@fault("state leaked to a recycled slot", "fresh_rows", "prefill", **GDN)
class StateLeaks(GdnReference):
    def is_fresh(self, address: Any, row: int) -> bool:
        return False


@fault("state taken as [K, V]", "scan_numbers", "decode", **{**GDN, "head_dims": (16, 16)})
class KeyFirst(GdnReference):
    def load(self, state: T) -> T:
        return super().load(state).transpose(-1, -2)


@fault("linear gate for a logarithmic one", "scan_numbers", "prefill", **GDN)
class LinearGate(GdnReference):
    def gates(self, layer: Any, a: T, b: T) -> tuple[T, T]:
        decay, beta = super().gates(layer, a, b)
        return torch.log(decay), beta


@fault("beta without sigmoid", "scan_numbers", "decode", **GDN)
class BetaRaw(GdnReference):
    def gates(self, layer: Any, a: T, b: T) -> tuple[T, T]:
        return super().gates(layer, a, b)[0], b


@fault("dt_bias dropped", "scan_numbers", "decode", **GDN)
class NoBias(GdnReference):
    def gates(self, layer: Any, a: T, b: T) -> tuple[T, T]:
        return super().gates(replace(layer, dt_bias=torch.zeros_like(layer.dt_bias)), a, b)


@fault("rejected draft kept", "verify_and_commit", "verify", **GDN)
class RejectedKept(GdnReference):
    def kept(self, count: int) -> int:
        return -1


@fault("state after one draft too many", "verify_and_commit", "verify", **GDN)
class OneTooMany(GdnReference):
    def kept(self, count: int) -> int:
        return min(count, 3)


@fault("verify writes the slot before acceptance", "verify_and_commit", "verify", **GDN)
class VerifyWrites(GdnReference):
    def finish(self, cache: Any, metadata: Any, row: int, states: Any) -> None:
        super().finish(cache, metadata, row, states)
        self.write(cache, self.write_slot(metadata.address, row), states[-1])


@fault("verify resumes from the wrong slot", "verify_in_slots", "verify", **GDN)
class WrongResume(GdnReference):
    def start(self, cache: Any, metadata: Any, row: int) -> Any:
        address = metadata.address
        if address.accepted is not None:
            metadata = replace(metadata, address=replace(address, accepted=(address.accepted - 1).clamp(min=0)))
        return super().start(cache, metadata, row)


@fault("drafts of a tree follow each other", "verify_tree_states", "verify", **GDN)
class TreeAsChain(GdnReference):
    def parent(self, metadata: Any, row: int, i: int, start: Any, states: Any) -> Any:
        return super().parent(replace(metadata, tree=None), row, i, start, states)


@fault("packed rows share a state", "scan_numbers", "prefill", **GDN)
class PackedLeak(GdnReference):
    last: Any = None

    def parent(self, metadata: Any, row: int, i: int, start: Any, states: Any) -> Any:
        if i == 0 and row > 0 and self.last is not None:
            return self.last
        return super().parent(metadata, row, i, start, states)

    def finish(self, cache: Any, metadata: Any, row: int, states: Any) -> None:
        self.last = states[-1] if states else self.last
        super().finish(cache, metadata, row, states)


@fault("state dropped when a prompt goes on", "split_prompt", "prefill", **GDN)
class StateDropped(GdnReference):
    def is_fresh(self, address: Any, row: int) -> bool:
        return True


@fault("convolution state not updated", "split_prompt", "prefill", **GDN)
class ConvStale(GdnReference):
    def write(self, cache: Any, slot: int, state: Any) -> None:
        super().write(cache, slot, (cache.conv[slot], state[1]))


@fault("convolution state one input late", "scan_numbers", "decode", **GDN)
class ConvLate(GdnReference):
    def convolve(self, layer: Any, x: T, conv: T) -> Any:
        y, _ = super().convolve(layer, x, conv)
        return y, conv


@fault("activation of the convolution dropped", "scan_numbers", "decode", **GDN)
class NoActivation(GdnReference):
    def convolve(self, layer: Any, x: T, conv: T) -> Any:
        return super().convolve(replace(layer, activation="none"), x, conv)


@fault("convolution weights reversed", "scan_numbers", "prefill", **GDN)
class WeightsReversed(GdnReference):
    def convolve(self, layer: Any, x: T, conv: T) -> Any:
        return super().convolve(replace(layer, conv_weight=layer.conv_weight.flip(1)), x, conv)


@fault("value head mapped to key head h % Hk", "scan_numbers", "decode", **GDN)
class HeadsInterleaved(GdnReference):
    def spread_heads(self, x: T, geometry: Any) -> T:
        return x.repeat(geometry.v_heads // geometry.k_heads, 1)


@fault("q and k not normalised", "scan_numbers", "decode", **GDN)
class NotNormalised(GdnReference):
    def normalise(self, x: T) -> T:
        return x


@fault("softmax in place of L2 norm", "scan_numbers", "decode", **GDN)
class WrongNorm(GdnReference):
    def normalise(self, x: T) -> T:
        return F.softmax(x, dim=-1)


@fault("a fork writes its read slot", "forked_rows", "decode", **GDN)
class ForkWritesBack(GdnReference):
    def write_slot(self, address: Any, row: int) -> int:
        return int(address.read_slots[row])


@fault("padding writes the last slot (index -1)", "state_padding", "decode", **GDN)
class PaddingWrites(GdnReference):
    def finish(self, cache: Any, metadata: Any, row: int, states: Any) -> None:
        super().finish(cache, metadata, row, states)
        if row == metadata.rows - 1:
            self.write(cache, -1, states[-1])


@fault("checkpoints one token early", "checkpoints", "prefill", **GDN)
class CheckpointEarly(GdnReference):
    def finish(self, cache: Any, metadata: Any, row: int, states: Any) -> None:
        marks = metadata.address.checkpoints
        early = replace(marks, length=marks.length - 1)
        super().finish(cache, replace(metadata, address=replace(metadata.address, checkpoints=early)), row, states)


@fault("checkpoint of another row", "checkpoints", "prefill", **GDN)
class CheckpointRow(GdnReference):
    def finish(self, cache: Any, metadata: Any, row: int, states: Any) -> None:
        marks = metadata.address.checkpoints
        other = replace(marks, row=torch.zeros_like(marks.row))
        super().finish(cache, replace(metadata, address=replace(metadata.address, checkpoints=other)), row, states)


@fault("external convolution convolved again", "external_conv", "decode", **GDN)
class ConvolvedAgain(GdnReference):
    def token(self, inputs: Any, layer: Any, token: int, before: Any) -> Any:
        if inputs.q is not None:
            inputs = inputs._replace(q=F.silu(inputs.q))
        return super().token(inputs, layer, token, before)
