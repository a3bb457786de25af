"""The oracle for ``gdn``: gated delta networks in float64, token by token, with states, convolution and roll-back.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), eq. 10, as Qwen3-Next and FLA compute it. For value head h,
whose key head is ``h // (Hv / Hk)``, with S[V, K]:

    conv    y[t] = act( sum_w weight[:, w] * x[t - W + 1 + w] + bias )       causal, depthwise, before the split into q | k | v
    g       = -exp(a_log) * softplus(a + dt_bias)                            log decay, <= 0
    beta    = sigmoid(b)
    q, k    = x / sqrt(sum x^2 + 1e-6) if l2norm;   q = q * K ** -0.5
    S       = exp(g) S;   u = beta (v - S k);   S = S + u k^T;   o = S q     o reads the state after the update

A state slot is ``conv[C, W - 1]`` (the last inputs) and ``state[Hv, V, K]``. A fresh row starts from zeros whatever its slot
holds. Verify leaves the slot alone and keeps the state after every draft; a draft of a tree starts from its parent's state.
``accepted[r]`` is one more than the index of the last accepted draft (of a chain: the number of accepted tokens), 0 for
none; commit moves the state after that draft into the slot. The result is o, before any output gate z or norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attn_core.batch import AttentionBatch
from attn_core.geometry import GdnGeometry
from attn_core.layers import GdnCache, GdnInputs, GdnLayer


@dataclass(slots=True)
class RowState:
    """The recurrent state of one row: conv f64[C, W - 1] and state f64[Hv, V, K]."""

    conv: torch.Tensor
    state: torch.Tensor


@dataclass(slots=True)
class GdnAnswer:
    """out f64[T, Hv, V]; ``steps[r][t]``: the state of row r after its token t (t counts from 0)."""

    out: torch.Tensor
    steps: list[list[RowState]]


def run(batch: AttentionBatch, layer: GdnLayer, cache: GdnCache, inputs: GdnInputs, *, pool: int = 0) -> GdnAnswer:
    """Output and states of every real row. Nothing is written: :func:`written` says what a backend must have written."""
    geometry, address = layer.geometry, batch.state(pool)
    out = torch.zeros(batch.padded_tokens, geometry.v_heads, geometry.v_dim, dtype=torch.float64)
    offsets = batch.query_offsets.tolist()
    steps: list[list[RowState]] = []
    for row in range(batch.num_rows):
        start = start_state(cache, geometry, int(address.read_slots[row]), bool(address.fresh[row]))
        if address.step_slots is not None and address.accepted is not None and not bool(address.fresh[row]):
            slot = int(address.step_slots[row, int(address.accepted[row])])
            start = start_state(cache, geometry, slot, False)
        parents = None if batch.tree is None else batch.tree.parents[row].tolist()
        states: list[RowState] = []
        for i, token in enumerate(range(offsets[row], offsets[row + 1])):
            parent = i - 1 if parents is None else parents[i]
            out[token], state = one_token(layer, inputs, token, start if parent < 0 else states[parent])
            states.append(state)
        steps.append(states)
    return GdnAnswer(out, steps)


def start_state(cache: GdnCache, geometry: GdnGeometry, slot: int, fresh: bool) -> RowState:
    """What a row starts from: its slot, or zeros."""
    if fresh or slot < 0:
        return RowState(
            torch.zeros(geometry.conv_dim, geometry.conv_width - 1, dtype=torch.float64),
            torch.zeros(geometry.v_heads, geometry.v_dim, geometry.k_dim, dtype=torch.float64),
        )
    return RowState(cache.conv[slot].double().cpu(), cache.state[slot].double().cpu())


def one_token(layer: GdnLayer, inputs: GdnInputs, token: int, before: RowState) -> tuple[torch.Tensor, RowState]:
    """o f64[Hv, V] of one token and the state after it."""
    geometry, conv = layer.geometry, before.conv
    if inputs.mixed_qkv is not None:
        x = inputs.mixed_qkv[token].double().cpu()
        mixed, conv = convolve(layer, x, conv)
        q, k, v = split(geometry, mixed)
    else:
        assert inputs.q is not None
        assert inputs.k is not None
        assert inputs.v is not None
        q, k, v = (t[token].double().cpu() for t in (inputs.q, inputs.k, inputs.v))
    g, beta = gates(layer, inputs.a[token], inputs.b[token])
    q, k = normalise(layer, q, k)
    out, state = recur(q, k, v, g, beta, before.state)
    return out, RowState(conv, state)


def convolve(layer: GdnLayer, x: torch.Tensor, conv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x f64[C] of one token through the short convolution: (y f64[C], the last W - 1 inputs f64[C, W - 1])."""
    assert layer.conv_weight is not None
    window = torch.cat([conv, x[:, None]], dim=1)
    y = (window * layer.conv_weight.double().cpu()).sum(dim=1)
    if layer.conv_bias is not None:
        y = y + layer.conv_bias.double().cpu()
    return F.silu(y) if layer.activation == "silu" else y, window[:, 1:]


def split(geometry: GdnGeometry, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixed[C] as q[Hk, K] | k[Hk, K] | v[Hv, V]."""
    keys = geometry.k_heads * geometry.k_dim
    q, k, v = mixed.split([keys, keys, geometry.v_heads * geometry.v_dim])  # type: ignore[no-untyped-call]
    return (
        q.view(geometry.k_heads, geometry.k_dim),
        k.view(geometry.k_heads, geometry.k_dim),
        v.view(geometry.v_heads, geometry.v_dim),
    )


def gates(layer: GdnLayer, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay g f64[Hv] (<= 0) and beta f64[Hv] of one token."""
    a, b = a.double().cpu(), b.double().cpu()
    g = -torch.exp(layer.a_log.double().cpu()) * F.softplus(a + layer.dt_bias.double().cpu())
    return g, torch.sigmoid(b)


def normalise(layer: GdnLayer, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L2 norm where the layer asks for it, and the scale K^-0.5 of q."""
    if layer.l2norm:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q * layer.geometry.k_dim**-0.5, k


def recur(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step: q, k f64[Hk, K], v f64[Hv, V], g, beta f64[Hv], state f64[Hv, V, K]. Returns (o[Hv, V], new state)."""
    out, after = torch.zeros_like(v), torch.zeros_like(state)
    ratio = len(v) // len(k)
    for h in range(len(v)):
        key, query = k[h // ratio], q[h // ratio]
        decayed = torch.exp(g[h]) * state[h]
        update = beta[h] * (v[h] - decayed @ key)
        after[h] = decayed + torch.outer(update, key)
        out[h] = after[h] @ query
    return out, after


def recur_in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for q, k f64[T, Hk, K], v f64[T, Hv, V], g, beta f64[T, Hv] in chunk form (the paper's section 3.3).

    Inside a chunk, with G the cumulative decay: (I + tril(diag(beta) (K K^T * exp(G_i - G_j)), -1)) U = diag(beta) (V - exp(G) S k).
    """
    out, ratio = torch.zeros_like(v), v.shape[1] // k.shape[1]
    state = state.clone()
    for start in range(0, len(v), chunk):
        part = slice(start, min(start + chunk, len(v)))
        for h in range(v.shape[1]):
            keys, queries, values = k[part, h // ratio], q[part, h // ratio], v[part, h]
            total = g[part, h].cumsum(0)
            decay = torch.exp(total[:, None] - total[None]).tril()
            b = beta[part, h][:, None]
            system = torch.eye(len(keys), dtype=v.dtype) + (b * (keys @ keys.T) * decay).tril(-1)
            right = b * (values - torch.exp(total)[:, None] * (keys @ state[h].T))
            updates = torch.linalg.solve(system, right)
            attention = (queries @ keys.T) * decay
            out[part, h] = torch.exp(total)[:, None] * (queries @ state[h].T) + attention @ updates
            state[h] = torch.exp(total[-1]) * state[h] + (updates * torch.exp(total[-1] - total)[:, None]).T @ keys
    return out, state


# --- what a backend must have written -------------------------------------------------------------------------------------


def written(batch: AttentionBatch, answer: GdnAnswer, phase: str, *, pool: int = 0) -> dict[int, RowState]:
    """Slot -> state after an ordinary step: the last state of each row at its write slot, and the checkpoints.

    Verify writes no slot (unless states go to ``step_slots``, where entry t + 1 holds the state after draft t).
    """
    address, found = batch.state(pool), dict[int, RowState]()
    for row, states in enumerate(answer.steps):
        if phase != "verify":
            if states:
                found[int(address.write_slots[row])] = states[-1]
        elif address.step_slots is not None:
            for t, state in enumerate(states):
                found[int(address.step_slots[row, t + 1])] = state
    if address.checkpoints is not None and phase != "verify":
        marks = address.checkpoints
        for row, length, slot in zip(marks.row.tolist(), marks.length.tolist(), marks.slot.tolist(), strict=True):
            found[slot] = answer.steps[row][length - 1]
    return found


def committed(batch: AttentionBatch, answer: GdnAnswer, accepted: list[int], *, pool: int = 0) -> dict[int, RowState]:
    """Slot -> state after ``attn_commit``: the state after the last accepted draft; rows with 0 stay as they were."""
    slots = batch.state(pool).write_slots.tolist()
    return {slots[row]: answer.steps[row][count - 1] for row, count in enumerate(accepted) if count > 0}
