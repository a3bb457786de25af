"""Faults in formulas and masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_core.layers import Scale
from attn_core.testing.reference_backend import ReferenceBackend
from kit_faults._registry import fault

T = torch.Tensor
FP8 = {"dtypes": ("bf16", "fp8_e4m3", "bf16")}
FP4 = {"dtypes": ("bf16", "fp4", "bf16")}


@fault("window one key too wide", "window")
class WindowWide(ReferenceBackend):
    def first_key(self, position: T, geometry: Any) -> T:
        return super().first_key(position, geometry) - int(geometry.window is not None)


@fault("window one key too narrow", "window", "prefill")
class WindowNarrow(ReferenceBackend):
    def first_key(self, position: T, geometry: Any) -> T:
        return super().first_key(position, geometry) + int(geometry.window is not None and geometry.window > 1)


@fault("decode drops the oldest key of the window", "decode_equals_extend")
class WindowOldestDropped(ReferenceBackend):
    def visible(self, metadata: Any, keys: T, geometry: Any) -> T:
        seen = super().visible(metadata, keys, geometry)
        if metadata.phase == "decode" and geometry.window is not None:
            oldest = self.first_key(metadata.kv_lens.long()[metadata.row][:, None] - 1, geometry)
            seen &= keys > oldest
        return seen


@fault("window_right one key too short", "window_right", "prefill")
class RightShort(ReferenceBackend):
    def in_range(self, position: T, keys: T, geometry: Any) -> T:
        right = geometry.window_right
        return super().in_range(
            position, keys, geometry if right is None else replace(geometry, window_right=right - 1)
        )


@fault("LSE in base 2", "lse")
class LseBase2(ReferenceBackend):
    def finish_lse(self, lse: T, none: T) -> T:
        return super().finish_lse(lse / 0.6931471805599453, none)


@fault("LSE head-major", "lse")
class LseHeadMajor(ReferenceBackend):
    def softmax(self, *arguments: Any) -> Any:
        out, lse = super().softmax(*arguments)
        return out, None if lse is None else lse.T.contiguous()


@fault("LSE in bf16", "lse")
class LseNarrow(ReferenceBackend):
    def softmax(self, *arguments: Any) -> Any:
        out, lse = super().softmax(*arguments)
        return out, None if lse is None else lse.bfloat16()


@fault("LSE declared and not returned", "lse")
class LseMissing(ReferenceBackend):
    def softmax(self, *arguments: Any) -> Any:
        return super().softmax(*arguments)[0], None


@fault("LSE without the sink", "lse_with_sinks")
class LseSinkless(ReferenceBackend):
    def softmax(self, logits: Any, values: Any, layer: Any, metadata: Any, out: Any) -> Any:
        _, lse = super().softmax(logits, values, layer, replace(metadata, partial=True), None)
        return super().softmax(logits, values, layer, metadata, out)[0], lse


@fault("sinks dropped", "sinks")
class SinksDropped(ReferenceBackend):
    def sink_weight(self, sinks: T, top: T) -> T:
        return torch.zeros_like(top)


@fault("sinks in the numerator", "sink_by_hand")
class SinksInNumerator(ReferenceBackend):
    def softmax(self, logits: Any, values: Any, layer: Any, metadata: Any, out: Any) -> Any:
        if layer.sinks is not None:
            extra = layer.sinks.view(1, *logits[0].shape[1:3])
            first = torch.logaddexp(logits[0][..., 0], extra.expand(logits[0].shape[:3]))
            logits = [torch.cat([first[..., None], logits[0][..., 1:]], dim=-1), *logits[1:]]
        return super().softmax(logits, values, layer, metadata, out)


@fault("sinks as base-2 logits", "sinks")
class SinksBase2(ReferenceBackend):
    def sink_weight(self, sinks: T, top: T) -> T:
        return torch.exp2(sinks) * torch.exp(-top)


@fault("sinks kept in partial results", "partial")
class SinksInPartial(ReferenceBackend):
    def softmax(self, logits: Any, values: Any, layer: Any, metadata: Any, out: Any) -> Any:
        return super().softmax(logits, values, layer, replace(metadata, partial=False), out)


@fault("soft cap after the mask", "softcap", "prefill")
class CapAfterMask(ReferenceBackend):
    def logits(self, q: T, k: T, visible: T, geometry: Any) -> T:
        scores = super().logits(q, k, visible, replace(geometry, softcap=None))
        return scores if geometry.softcap is None else geometry.softcap * torch.tanh(scores / geometry.softcap)


@fault("soft cap before the scale", "softcap")
class CapBeforeScale(ReferenceBackend):
    def logits(self, q: T, k: T, visible: T, geometry: Any) -> T:
        if geometry.softcap is None:
            return super().logits(q, k, visible, geometry)
        raw = super().logits(q, k, visible, replace(geometry, softcap=None, scale=1.0))
        return geometry.scale * geometry.softcap * torch.tanh(raw / geometry.softcap)


@fault("soft cap ignored", "softcap")
class CapIgnored(ReferenceBackend):
    def logits(self, q: T, k: T, visible: T, geometry: Any) -> T:
        return super().logits(q, k, visible, replace(geometry, softcap=None))


@fault("causal mask aligned top-left", "attend_numbers", "prefill")
class TopLeft(ReferenceBackend):
    def visible(self, metadata: Any, keys: T, geometry: Any) -> T:
        return super().visible(metadata, keys, geometry) & (keys <= metadata.index[:, None])


@fault("bidirectional layers masked causally", "bidirectional", "prefill")
class AlwaysCausal(ReferenceBackend):
    def in_range(self, position: T, keys: T, geometry: Any) -> T:
        return super().in_range(position, keys, replace(geometry, causal=True))


@fault("cross attention masked causally", "cross", "prefill")
class CrossCausal(AlwaysCausal):
    pass


@fault("scale from the tensor width", "scale_is_given")
class WidthScale(ReferenceBackend):
    def scale(self, geometry: Any) -> float:
        return float(geometry.qk_dim) ** -0.5


@fault("GQA heads permuted", "attend_numbers", heads=(6, 2))
class HeadsPermuted(ReferenceBackend):
    def queries(self, q: T, layer: Any) -> T:
        geometry = layer.geometry
        order = torch.arange(geometry.q_heads).view(geometry.ratio, geometry.kv_heads).T.reshape(-1)
        return super().queries(q[:, order], layer)


@fault("wrong head of V where Dv differs from D", "attend_numbers", head_dims=(32, 16))
class ValueHeads(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        k, v = super().read(cache, layer, metadata, keys)
        heads, width = v.shape[-2:]
        flat = torch.cat([v.flatten(-2), torch.zeros_like(k).flatten(-2)], dim=-1)
        starts = torch.arange(heads)[:, None] * k.shape[-1] + torch.arange(width)
        return k, flat[..., starts]


@fault("k scale dropped", "attend_numbers", **FP8)
class KScaleDropped(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        return super().read(cache, _rescaled(layer, 1.0, None), metadata, keys)


@fault("v scale dropped", "attend_numbers", **FP8)
class VScaleDropped(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        return super().read(cache, _rescaled(layer, None, 1.0), metadata, keys)


@fault("v scale applied twice", "attend_numbers", **FP8)
class VScaleTwice(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        k, v = super().read(cache, layer, metadata, keys)
        return k, v * layer.v_scale.tensor


@fault("k scale used for v", "attend_numbers", **FP8)
class ScalesSwapped(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        k, v = layer.k_scale.tensor, layer.v_scale.tensor
        return super().read(cache, _rescaled(layer, float(v), float(k)), metadata, keys)


@fault("scales of the device only are taken as 1", "kv_scales", **FP8)
class HostScales(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        known = [1.0 if s.value is None else s.value for s in (layer.k_scale, layer.v_scale)]
        return super().read(cache, _rescaled(layer, *known), metadata, keys)


@fault("query cast to fp8 without its scale", "attend_numbers", dtypes=("fp8_e4m3", "fp8_e4m3", "bf16"))
class QueryUnscaled(ReferenceBackend):
    def queries(self, q: T, layer: Any) -> T:
        return super().queries(q.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(q.dtype), layer)


@fault("FP4 nibbles swapped", "attend_numbers", **FP4)
class NibblesSwapped(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        swapped = replace(cache, k=(cache.k << 4) | (cache.k >> 4), v=(cache.v << 4) | (cache.v >> 4))
        return super().read(swapped, layer, metadata, keys)


@fault("FP4 block scales of the first block used for all", "attend_numbers", **FP4)
class OneBlockScale(ReferenceBackend):
    def read(self, cache: Any, layer: Any, metadata: Any, keys: T) -> Any:
        blocks = cache.k_blocks.view(torch.uint8)
        first = blocks[..., :1].expand(blocks.shape).contiguous().view(cache.k_blocks.dtype)
        return super().read(replace(cache, k_blocks=first), layer, metadata, keys)


@fault("chunked-local attention by distance instead of by chunk", "chunked_local")
class ChunkDistance(ReferenceBackend):
    def in_range(self, position: T, keys: T, geometry: Any) -> T:
        if geometry.chunk is None:
            return super().in_range(position, keys, geometry)
        return super().in_range(position, keys, replace(geometry, chunk=None, window=geometry.chunk))


@fault("spans of another row applied", "spans", "prefill")
class SpansOfAll(ReferenceBackend):
    def in_span(self, metadata: Any, position: T, keys: T, geometry: Any) -> T:
        return super().in_span(replace(metadata, row=torch.zeros_like(metadata.row)), position, keys, geometry)


@fault("spans not clamped to the window", "spans_in_windows", "prefill")
class SpansUnclamped(ReferenceBackend):
    def in_span(self, metadata: Any, position: T, keys: T, geometry: Any) -> T:
        return super().in_span(metadata, position, keys, replace(geometry, window=None))


@fault("tree mask transposed", "verify_tree", "verify")
class TreeTransposed(ReferenceBackend):
    def tree_bit(self, tree: Any, row: T, me: T, other: T) -> T:
        words = tree.mask_bits.long()[row[:, None], other].gather(2, (me // 32)[:, None, None].expand(*other.shape, 1))
        return (words[..., 0] >> (me % 32)[:, None]) & 1 == 1


@fault("tree mask ignored, drafts causal", "verify_tree", "verify")
class TreeCausal(ReferenceBackend):
    def tree_bit(self, tree: Any, row: T, me: T, other: T) -> T:
        return other <= me[:, None]


@fault("second mask word not read", "wide_tree", "verify")
class OneWord(ReferenceBackend):
    def tree_bit(self, tree: Any, row: T, me: T, other: T) -> T:
        return super().tree_bit(
            replace(tree, mask_bits=tree.mask_bits[..., :1].expand(tree.mask_bits.shape)), row, me, other
        )


@fault("positions of tree drafts counted by index, not by depth", "tree_in_window", "verify")
class TreeIndexPositions(ReferenceBackend):
    def visible_in_tree(self, metadata: Any, tree: Any, *rest: Any) -> T:
        steps = torch.arange(tree.depth.shape[1], dtype=torch.int32).expand(tree.depth.shape)
        return super().visible_in_tree(metadata, replace(tree, depth=steps), *rest)


@fault("tree mask of the wrong row", "verify_tree", "verify")
class TreeRow(ReferenceBackend):
    def tree_bit(self, tree: Any, row: T, me: T, other: T) -> T:
        return super().tree_bit(tree, torch.zeros_like(row), me, other)


@fault("a row without keys gives NaN", "rows_without_keys", "prefill")
class EmptyNan(ReferenceBackend):
    def write(self, result: T, out: T | None) -> T:
        empty = (result == 0).all(-1, keepdim=True)
        return super().write(result.masked_fill(empty, float("nan")), out)


@fault("a part without keys gives a finite LSE", "chunked_prefix", "prefill")
class EmptyFinite(ReferenceBackend):
    def finish_lse(self, lse: T, none: T) -> T:
        return lse.masked_fill(none, 0.0)


@fault("decode rows of a mixed batch given prefill positions", "mixed", "prefill")
class MixedPositions(ReferenceBackend):
    def query_counts(self, metadata: Any) -> T:
        counts = super().query_counts(metadata)
        return counts.max().expand(counts.shape) if metadata.phase == "prefill" else counts


def _rescaled(layer: Any, k: float | None, v: float | None) -> Any:
    """The layer with other scales; None keeps one."""

    def scale(value: float | None, old: Any) -> Any:
        return old if value is None else Scale(torch.tensor([value]), value)

    return replace(layer, k_scale=scale(k, layer.k_scale), v_scale=scale(v, layer.v_scale))
