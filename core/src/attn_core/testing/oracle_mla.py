"""The oracle for ``mla``: both forms of multi-head latent attention in float64, and the chunked prefix with its merge.

DeepSeek-V2 (arXiv 2405.04434), section 2.1, equations 9 to 19 and appendix C. A cached row is ``c_kv[latent] | k_pe[rope]``,
shared by all heads. For query t and visible key j:

* absorbed: ``s = scale * (q_latent[h] . c_kv[j] + q_pe[h] . k_pe[j])``, ``out_latent[h] = sum_j p_j c_kv[j]`` (width latent)
* ragged:   ``k_nope, v = expand(c_kv)``, ``s = scale * (q[h] . k_nope[j, h] + q_pe[h] . k_pe[j])``, ``out[h] = sum_j p_j v[j, h]``

With ``q_latent = q W_UK`` and ``k_nope = c_kv W_UK^T`` the logits are equal, and ``out = out_latent W_UV``. The scale is the
model's in both forms (1/sqrt(nope + rope) times rope scaling), never one over the root of a tensor's width. The chunked
prefix is SGLang's ``MHA_CHUNKED_KV``: new tokens causally, chunks of the prefix without a mask, merged by their LSEs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.geometry import MhaGeometry, MlaGeometry
from attn_core.layers import MlaCache, MlaInputs, MlaLayer
from attn_core.testing.elements import dequantise
from attn_core.testing.oracle_mha import Answer, as_index, attend_one, token_slots, visible_keys
from attn_core.testing.oracle_mm import merge

Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def attend_absorbed(
    batch: AttentionBatch, layer: MlaLayer, cache: MlaCache, inputs: MlaInputs, *, pool: int = 0
) -> Answer:
    """out_latent f64[T, H, latent] and lse f64[T, H]; the cache must hold the new rows already."""
    assert inputs.q_latent is not None
    query = torch.cat([_wide(inputs.q_latent), _wide(inputs.q_pe)], dim=-1)
    geometry = layer.geometry
    answer = _blank(batch, geometry.q_heads, geometry.latent_dim)
    for row, first, count in _rows(batch):
        c_kv, k_pe = read_latent(cache, batch.kv(pool), row, layer)
        keys = torch.cat([c_kv, k_pe], dim=-1)
        for i in range(count):
            seen = as_index(visible_keys(batch, causal_rules(geometry), row, i, count, len(keys)))
            seen_keys, seen_values = keys[seen], c_kv[seen]
            for head in range(geometry.q_heads):
                _put(answer, first + i, head, query[first + i, head], seen_keys, seen_values, geometry)
    return answer


def attend_ragged(
    batch: AttentionBatch, layer: MlaLayer, cache: MlaCache, inputs: MlaInputs, *, pool: int = 0
) -> Answer:
    """out f64[T, H, v_dim] and lse f64[T, H] over the expanded keys of the whole row, prefix included."""
    assert inputs.q is not None
    query = torch.cat([_wide(inputs.q), _wide(inputs.q_pe)], dim=-1)
    geometry = layer.geometry
    answer = _blank(batch, geometry.q_heads, geometry.v_dim)
    for row, first, count in _rows(batch):
        keys, values = expand_rows(layer, *read_latent(cache, batch.kv(pool), row, layer))
        for i in range(count):
            seen = as_index(visible_keys(batch, causal_rules(geometry), row, i, count, len(keys)))
            seen_keys, seen_values = keys[seen], values[seen]
            for head in range(geometry.q_heads):
                _put(
                    answer, first + i, head, query[first + i, head], seen_keys[:, head], seen_values[:, head], geometry
                )
    return answer


def attend_in_chunks(
    batch: AttentionBatch, layer: MlaLayer, cache: MlaCache, inputs: MlaInputs, chunk: int, *, pool: int = 0
) -> Answer:
    """The ragged form with the prefix cut into pieces of `chunk` keys, each a part of its own, all merged by LSE."""
    assert inputs.q is not None
    query = torch.cat([_wide(inputs.q), _wide(inputs.q_pe)], dim=-1)
    geometry = layer.geometry
    longest = max((int(n) for n in batch.kv(pool).kv_lens[: batch.num_rows]), default=0)
    parts = []
    for start in (-1, *range(0, longest, chunk)):
        part = _blank(batch, geometry.q_heads, geometry.v_dim)
        for row, first, count in _rows(batch):
            keys, values = expand_rows(layer, *read_latent(cache, batch.kv(pool), row, layer))
            prefix = len(keys) - count
            for i in range(count):
                seen = _part_keys(start, chunk, prefix, i)
                for head in range(geometry.q_heads):
                    _put(part, first + i, head, query[first + i, head], keys[seen, head], values[seen, head], geometry)
        parts.append(part)
    return merge(parts)


def _part_keys(start: int, chunk: int, prefix: int, i: int) -> list[int]:
    """Keys of one part: start -1 is the part of the new tokens, causal; others are prefix keys, all visible."""
    if start == -1:
        return list(range(prefix, prefix + i + 1))
    return list(range(min(start, prefix), min(start + chunk, prefix)))


def project(w_uk: torch.Tensor, w_uv: torch.Tensor) -> Expand:
    """The ``expand`` of a layer from W_UK[H, nope, latent] and W_UV[H, latent, v]: c_kv -> (k_nope[n, H, nope], v[n, H, v])."""

    def expand(c_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        uk, uv = w_uk.to(c_kv.dtype), w_uv.to(c_kv.dtype)
        return torch.einsum("nl,hdl->nhd", c_kv, uk), torch.einsum("nl,hlv->nhv", c_kv, uv)

    return expand


def expand_rows(layer: MlaLayer, c_kv: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys f64[n, H, nope + rope] and values f64[n, H, v] of latent rows, by the layer's own ``expand``."""
    assert layer.expand is not None
    k_nope, values = layer.expand(c_kv)
    rope = k_pe[:, None, :].expand(-1, layer.geometry.q_heads, -1)
    return torch.cat([k_nope.double(), rope], dim=-1), values.double()


def causal_rules(geometry: MlaGeometry) -> MhaGeometry:
    """The mask of MLA in terms of the MHA oracle: causal, nothing else."""
    return MhaGeometry(geometry.q_heads, 1, geometry.latent_dim, geometry.latent_dim, geometry.scale)


# --- reading the cache -------------------------------------------------------------------------------------------------


def read_latent(cache: MlaCache, address: KvAddress, row: int, layer: MlaLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """c_kv f64[kv_len, latent] and k_pe f64[kv_len, rope] of a row, dequantised. Formats: mla_plain, mla_plain_fp8,
    mla_split, flashmla_656. Raises ValueError for others."""
    return read_latent_slots(cache, torch.tensor(token_slots(address, row), dtype=torch.int64), layer)


def read_latent_slots(cache: MlaCache, slots: torch.Tensor, layer: MlaLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`read_latent`, for given token slots i64[n]."""
    latent = layer.geometry.latent_dim
    size = cache.data.shape[1]
    page, offset = slots // size, slots % size
    if cache.format == "mla_split":
        assert cache.c_kv is not None
        assert cache.k_pe is not None
        return _wide(_rows_of(cache.c_kv, page, offset)), _wide(_rows_of(cache.k_pe, page, offset))
    rows = _rows_of(cache.data, page, offset)
    if cache.format == "flashmla_656":
        return unpack_656(rows)
    if cache.format not in ("mla_plain", "mla_plain_fp8"):
        raise ValueError(f"the oracle does not read the format {cache.format!r}")
    scale = 1.0 if layer.k_scale is None else float(layer.k_scale.tensor)
    values = _wide(rows) * scale
    return values[:, :latent], values[:, latent:]


def unpack_656(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA's row of 656 bytes: 512 e4m3, 4 fp32 scales (one for 128 values), 64 bf16 (not scaled)."""
    data = rows.contiguous().view(torch.uint8).view(len(rows), 656)
    codes = data[:, :512].contiguous().view(torch.float8_e4m3fn).float().double()
    scales = data[:, 512:528].contiguous().view(torch.float32).double()
    rope = data[:, 528:].contiguous().view(torch.bfloat16).double()
    return codes * scales.repeat_interleave(128, dim=-1), rope


def _rows_of(pages: torch.Tensor, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    page, offset = page.to(pages.device), offset.to(pages.device)
    if pages.element_size() == 1 and pages.dtype != torch.uint8:
        return pages.view(torch.uint8)[page, offset].view(pages.dtype).cpu()
    return pages[page, offset].cpu()


# --- shared loops -------------------------------------------------------------------------------------------------------


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return dequantise(tensor).cpu()


def _blank(batch: AttentionBatch, heads: int, width: int) -> Answer:
    tokens = batch.padded_tokens
    return Answer(
        torch.zeros(tokens, heads, width, dtype=torch.float64),
        torch.full((tokens, heads), -math.inf, dtype=torch.float64),
    )


def _rows(batch: AttentionBatch) -> list[tuple[int, int, int]]:
    """(row, first token, number of tokens) of every real row."""
    offsets = batch.query_offsets.tolist()
    return [(row, offsets[row], offsets[row + 1] - offsets[row]) for row in range(batch.num_rows)]


def _put(
    answer: Answer,
    token: int,
    head: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    geometry: MlaGeometry,
) -> None:
    out, lse = attend_one(query, keys, values, causal_rules(geometry), None)
    answer.out[token, head], answer.lse[token, head] = out, lse
