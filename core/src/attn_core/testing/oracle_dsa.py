"""The oracle for ``dsa``: the lightning indexer, its top-k, and attention over the selected keys, in float64.

DeepSeek-V3.2-Exp, "Lightning indexer" (technical report, eq. 1 and 2), with SGLang's conventions:

* logits: ``I[t, j] = index_scale * sum_h w[t, h] * relu(q[t, h] . k[j])`` for visible j; relu is inside the head sum, w may be
  negative. The orthonormal Hadamard rotation of q and k keeps every product, so it does not appear here; fp8 rounding does
  not either, which is why :func:`topk_problems` takes a slack.
* top-k: the largest ``index_topk`` logits of a row, all keys if there are fewer; the rest of the row is -1.
* attention: softmax over ``scale * (q_latent . c_j + q_pe . k_pe_j)`` for the selected j, -1 left out; no further mask. A row
  without any index has out 0 and lse -inf.

Indices are positions in the row (index space ``token``) or slots of the pool (``slot``: page * page_size + offset).
"""

from __future__ import annotations

import math

import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.layers import DsaLayer, IndexCache, IndexInputs, MlaCache, MlaInputs, MlaLayer
from attn_core.testing.oracle_mha import Answer, attend_one, token_slots, visible_keys
from attn_core.testing.oracle_mla import _blank, _rows, _wide, causal_rules, read_latent_slots

#: Bytes of one index key: 128 e4m3 values and one fp32 scale.
KEY_BYTES = 132
_WIDTH = 128


def index_logits(
    batch: AttentionBatch, layer: DsaLayer, cache: IndexCache, inputs: IndexInputs, *, page_size: int, pool: int = 0
) -> list[torch.Tensor]:
    """For every real token: logits f64[kv_len of its row], -inf where the key is not visible."""
    q, weights = _wide(inputs.q), _wide(inputs.weights)
    answers = []
    for row, first, count in _rows(batch):
        keys = read_index_keys(cache, batch.kv(pool), row, page_size)
        for i in range(count):
            products = torch.relu(keys @ q[first + i].T) @ weights[first + i]
            logits = torch.full((len(keys),), -math.inf, dtype=torch.float64)
            seen = visible_keys(batch, causal_rules(layer.mla.geometry), row, i, count, len(keys))
            logits[seen] = layer.index_scale * products[seen]
            answers.append(logits)
    return answers


def read_index_keys(cache: IndexCache, address: KvAddress, row: int, page_size: int) -> torch.Tensor:
    """Index keys f64[kv_len, 128] of a row from planar pages: first P * 128 e4m3 bytes, then P fp32 scales."""
    slots = torch.tensor(token_slots(address, row), dtype=torch.int64)
    pages = cache.data.view(len(cache.data), page_size * KEY_BYTES).cpu()[slots // page_size]
    offset = slots % page_size
    place = offset[:, None] * _WIDTH + torch.arange(_WIDTH)
    codes = pages.gather(1, place).contiguous().view(torch.float8_e4m3fn).float().double()
    scale_place = page_size * _WIDTH + offset[:, None] * 4 + torch.arange(4)
    scales = pages.gather(1, scale_place).contiguous().view(torch.float32).double()
    return codes * scales


def write_index_key(cache: IndexCache, slot: int, key: torch.Tensor, page_size: int) -> None:
    """Quantise key[128] with its own scale (amax / 448) into its place; for building worlds, one key at a time."""
    scale = float(key.abs().max()) / 448.0 or 1.0
    page = cache.data.view(len(cache.data), page_size * KEY_BYTES)[slot // page_size]
    offset = slot % page_size
    codes = (key.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    page[offset * _WIDTH : (offset + 1) * _WIDTH] = codes
    start = page_size * _WIDTH + offset * 4
    page[start : start + 4] = torch.tensor([scale], dtype=torch.float32).view(torch.uint8)


def select(logits: torch.Tensor, topk: int) -> list[int]:
    """Positions of the `topk` largest visible logits, ties by position; all visible ones if there are fewer."""
    visible = [j for j in range(len(logits)) if logits[j] != -math.inf]
    return sorted(sorted(visible, key=lambda j: (-float(logits[j]), j))[:topk])


def topk_problems(indices: torch.Tensor, logits: list[torch.Tensor], topk: int, slack: float = 0.0) -> list[str]:
    """What is wrong with ``indices i32[T, topk]`` (index space ``token``): one line a token.

    A selected key may be `slack` times the row's spread below the k-th largest logit: quantised scores may swap near ties.
    """
    found = []
    for token, scores in enumerate(logits):
        chosen = [j for j in indices[token].tolist() if j != -1]
        visible = int((scores != -math.inf).sum())
        if len(set(chosen)) != len(chosen):
            found.append(f"token {token}: a key is selected twice")
        elif any(not 0 <= j < len(scores) or scores[j] == -math.inf for j in chosen):
            found.append(f"token {token}: selects a key it does not see")
        elif len(chosen) != min(topk, visible):
            found.append(f"token {token}: {len(chosen)} keys selected, {min(topk, visible)} needed")
        elif chosen:
            finite = scores[scores != -math.inf]
            least = float(finite.sort(descending=True).values[len(chosen) - 1])
            spread = float(finite.max() - finite.min())
            worst = min(chosen, key=lambda j: float(scores[j]))
            if float(scores[worst]) < least - slack * spread - 1e-9:
                found.append(
                    f"token {token}: key {worst} scores {float(scores[worst]):.4g}, the last of the top {least:.4g}"
                )
    return found


def attend_sparse(
    batch: AttentionBatch,
    layer: MlaLayer,
    cache: MlaCache,
    inputs: MlaInputs,
    *,
    index_space: str = "token",
    pool: int = 0,
    sinks: torch.Tensor | None = None,
) -> Answer:
    """out_latent f64[T, H, latent] and lse f64[T, H] over ``inputs.indices``."""
    assert inputs.q_latent is not None
    assert inputs.indices is not None
    geometry = layer.geometry
    query = torch.cat([_wide(inputs.q_latent), _wide(inputs.q_pe)], dim=-1)
    answer = _blank(batch, geometry.q_heads, geometry.latent_dim)
    for row, first, count in _rows(batch):
        slots = token_slots(batch.kv(pool), row)
        for token in range(first, first + count):
            chosen = [j for j in inputs.indices[token].tolist() if j >= 0]
            picked = [slots[j] for j in chosen] if index_space == "token" else chosen
            c_kv, k_pe = read_latent_slots(cache, torch.tensor(picked, dtype=torch.int64), layer)
            keys = torch.cat([c_kv, k_pe], dim=-1)
            for head in range(geometry.q_heads):
                sink = None if sinks is None else float(sinks[head])
                out, lse = attend_one(query[token, head], keys, c_kv, causal_rules(geometry), sink)
                answer.out[token, head], answer.lse[token, head] = out, lse
    return answer
