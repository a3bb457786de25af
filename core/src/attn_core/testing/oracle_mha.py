"""The oracle for ``mha``: float64, one (row, query, head) at a time, nothing clever.

For query i of a row with q_len queries and kv_len keys (the new ones included) at absolute position p::

    p          = kv_len - q_len + i                       causal masks are aligned bottom-right
    p          = kv_len - S + depth[i]                    verify with a tree of S drafts (S = q_len)
    s_j        = scale * (q_i . k_j)                      Vaswani et al. 2017, eq. 1; scale is the layer's
    s_j        = cap * tanh(s_j / cap)                    Gemma 2: after the scale, before the mask
    visible    = what :func:`visible_keys` says
    lse        = ln( sum_visible exp(s_j) + exp(sink_h) ) gpt-oss: the sink is in the denominator only
    out        = sum_visible exp(s_j - lse) v_j

A row without keys has out 0 and lse -inf. Stored values of a quantised cache are multiplied with k_scale and v_scale
(and fp4 with its block scales) before anything else, an fp8 query with q_scale. Window, chunk and span rules follow Hugging Face ``masking_utils``
(``sliding_window`` counts the query itself) and the definitions in :mod:`attn_core.capabilities`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attn_core.batch import AttentionBatch, KvAddress, Tree
from attn_core.geometry import MhaGeometry
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, Scale
from attn_core.testing.elements import dequantise


class Answer(NamedTuple):
    """What an oracle says: out f64[T, H, Dv] and lse f64[T, H] (natural log); rows of padding are 0 and -inf."""

    out: torch.Tensor
    lse: torch.Tensor


def attend(
    batch: AttentionBatch,
    layer: MhaLayer,
    cache: MhaCache,
    inputs: MhaInputs,
    *,
    pool: int = 0,
    partial: bool | None = None,
) -> Answer:
    """Attention of every real token over the cache, which must already hold the new keys. Reads below kv_len only.

    `partial` leaves the sinks out (default: what the batch says). Raises BatchError for a missing pool.
    """
    geometry, address = layer.geometry, batch.kv(pool)
    partial = batch.partial if partial is None else partial
    sinks = None if partial or layer.sinks is None else layer.sinks.double().cpu()
    q = scaled(dequantise(inputs.q).cpu(), layer.q_scale if inputs.q.element_size() == 1 else None)
    out = torch.zeros(batch.padded_tokens, geometry.q_heads, geometry.v_dim, dtype=torch.float64)
    lse = torch.full((batch.padded_tokens, geometry.q_heads), -math.inf, dtype=torch.float64)
    offsets, kv_lens = batch.query_offsets.tolist(), address.kv_lens.tolist()
    for row in range(batch.num_rows):
        keys, values = read_row(cache, address, row, layer)
        query_len = offsets[row + 1] - offsets[row]
        for i in range(query_len):
            visible = as_index(visible_keys(batch, geometry, row, i, query_len, kv_lens[row]))
            seen_keys, seen_values, token = keys[visible], values[visible], offsets[row] + i
            for head in range(geometry.q_heads):
                kv_head = head // geometry.ratio
                sink = None if sinks is None else float(sinks[head])
                out[token, head], lse[token, head] = attend_one(
                    q[token, head], seen_keys[:, kv_head], seen_values[:, kv_head], geometry, sink
                )
    return Answer(out, lse)


def attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, geometry: MhaGeometry, sink: float | None
) -> tuple[torch.Tensor, float]:
    """One query and head: q[Dk], the visible keys[n, Dk] and values[n, Dv], all f64. Returns (out[Dv], lse)."""
    if len(keys) == 0:
        return torch.zeros(values.shape[-1], dtype=torch.float64), -math.inf
    logits = geometry.scale * (keys @ q)
    if geometry.softcap is not None:
        logits = geometry.softcap * torch.tanh(logits / geometry.softcap)
    everything = logits if sink is None else torch.cat([logits, torch.tensor([sink], dtype=torch.float64)])
    lse = torch.logsumexp(everything, dim=0)
    return torch.exp(logits - lse) @ values, float(lse)


def as_index(positions: list[int]) -> slice | list[int]:
    """Positions as a slice where they are contiguous, which copies nothing."""
    if positions and positions[-1] - positions[0] + 1 == len(positions):
        return slice(positions[0], positions[-1] + 1)
    return positions


def visible_keys(
    batch: AttentionBatch, geometry: MhaGeometry, row: int, i: int, query_len: int, kv_len: int
) -> list[int]:
    """Positions of the keys that query `i` of `row` sees, in order."""
    prefix = kv_len - query_len
    if batch.tree is not None:
        return _visible_in_tree(batch.tree, geometry, row, i, prefix, query_len)
    position = prefix + i
    spans = _spans_of(batch, row)
    if not spans:
        return [j for j in range(kv_len) if _sees(geometry, position, j)]
    return [j for j in range(kv_len) if _sees(geometry, position, j) or _same_span(geometry, spans, position, j)]


def _sees(geometry: MhaGeometry, position: int, key: int) -> bool:
    """The rules that need positions only: causal or right window, left window, chunk."""
    if geometry.window_right is not None:
        if key > position + geometry.window_right:
            return False
    elif geometry.causal and key > position:
        return False
    if geometry.window is not None and key <= position - geometry.window:
        return False
    return geometry.chunk is None or key // geometry.chunk == position // geometry.chunk


def _spans_of(batch: AttentionBatch, row: int) -> list[tuple[int, int]]:
    if batch.spans is None:
        return []
    return [(start, end) for owner, start, end in batch.spans.tolist() if owner == row]


def _same_span(geometry: MhaGeometry, spans: list[tuple[int, int]], position: int, key: int) -> bool:
    """Both inside one span, in either direction, and nearer than the window: |p - j| < window."""
    near = geometry.window is None or abs(position - key) < geometry.window
    return near and any(start <= position < end and start <= key < end for start, end in spans)


def _visible_in_tree(tree: Tree, geometry: MhaGeometry, row: int, i: int, prefix: int, drafts: int) -> list[int]:
    """The prefix and the drafts whose bit is set; windows and chunks count tree positions (prefix + depth)."""
    depth = tree.depth[row].tolist()
    words = [word & 0xFFFFFFFF for word in tree.mask_bits[row, i].tolist()]
    position = prefix + depth[i]
    visible = [j for j in range(prefix) if _sees(geometry, position, j)]
    for draft in range(drafts):
        if words[draft // 32] >> (draft % 32) & 1 and _sees(geometry, position, prefix + depth[draft]):
            visible.append(prefix + draft)
    return visible


# --- reading the cache -------------------------------------------------------------------------------------------------


def token_slots(address: KvAddress, row: int) -> list[int]:
    """Slot (page * page_size + offset) of each key of `row`, position 0 first; -1 before the origin of a trimmed pool."""
    kv_len = int(address.kv_lens[row])
    origin = 0 if address.origin is None else int(address.origin[row])
    if address.table is not None:
        line = row if address.table_rows is None else int(address.table_rows[row])
        entries = address.table[line].tolist()
    else:
        assert address.indices is not None
        assert address.indptr is not None
        entries = address.indices[int(address.indptr[row]) : int(address.indptr[row + 1])].tolist()
    size = address.page_size
    return [-1 if j < origin else entries[(j - origin) // size] * size + (j - origin) % size for j in range(kv_len)]


def read_row(cache: MhaCache, address: KvAddress, row: int, layer: MhaLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys f64[kv_len, Hk, Dk] and values f64[kv_len, Hk, Dv] of a row, dequantised, on the CPU. Trimmed keys are NaN."""
    slots = torch.tensor(token_slots(address, row), dtype=torch.int64, device=cache.k.device)
    keys = scaled(_read(cache.k, cache.k_blocks, slots), layer.k_scale)
    values = scaled(_read(cache.v, cache.v_blocks, slots), layer.v_scale)
    return keys, values


def _read(pages: torch.Tensor, blocks: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    size = pages.shape[1]
    kept = slots.clamp(min=0)
    picked = _take(pages, kept // size, kept % size)
    picked_blocks = None if blocks is None else _take(blocks, kept // size, kept % size)
    values = dequantise(picked, picked_blocks)
    values[slots < 0] = math.nan
    return values.cpu()


def _take(pages: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """``pages[page, offset]``; by way of bytes for 8-bit floats, which not every torch can index."""
    if pages.element_size() == 1 and pages.dtype != torch.uint8:
        return pages.view(torch.uint8)[page, offset].view(pages.dtype)
    return pages[page, offset]


def scaled(values: torch.Tensor, scale: Scale | None) -> torch.Tensor:
    """``values[n, H, D]`` times a scale f32[1] or f32[H]."""
    if scale is None:
        return values
    factor = scale.tensor.double().cpu()
    return values * (factor if factor.numel() == 1 else factor[:, None])
