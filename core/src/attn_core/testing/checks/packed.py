"""Packed attention without a cache: the ragged feature of ``mha``, chunks of a prefix, and the whole of ``mm``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_core.batch import AttentionBatch, Part, Segment
from attn_core.geometry import MhaGeometry, MlaGeometry
from attn_core.layers import MhaLayer, MlaLayer
from attn_core.merge import merge_many
from attn_core.testing.batches import group_of
from attn_core.testing.bench import Bench
from attn_core.testing.checks._registry import check
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.elements import random_values
from attn_core.testing.guards import Watch
from attn_core.testing.harness import Result, Session, result_of
from attn_core.testing.oracle_mm import attend_packed

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _offsets(lens: Sequence[int]) -> list[int]:
    found = [0]
    for length in lens:
        found.append(found[-1] + length)
    return found


def _tensors(bench: Bench, geometry: MhaGeometry, tokens: int, keys: int) -> Tensors:
    generator = torch.Generator().manual_seed(bench.turn)
    shapes = ((tokens, geometry.q_heads, geometry.qk_dim), (keys, geometry.kv_heads, geometry.qk_dim), (keys, geometry.kv_heads, geometry.v_dim))  # fmt: skip
    q, k, v = (random_values(shape, bench.ask.dtypes[2], generator).to(bench.device) for shape in shapes)
    return q, k, v


def _batch(bench: Bench, q_lens: Sequence[int], k_lens: Sequence[int], padded: int, lse: bool) -> AttentionBatch:
    device = bench.device

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tokens = sum(q_lens)
    return AttentionBatch(
        num_rows=len(q_lens),
        num_tokens=tokens,
        padded_tokens=tokens + padded,
        segments=(Segment("prefill", slice(0, len(q_lens)), slice(0, tokens)),),
        query_offsets=int32(_offsets(q_lens)),
        query_offsets_cpu=torch.tensor(_offsets(q_lens), dtype=torch.int32),
        key_offsets=int32(_offsets(k_lens)),
        max_query_len=max([1, *q_lens]),
        max_key_len=max([1, *k_lens]),
        needs_lse=lse,
    )


def _session(bench: Bench, geometry: MhaGeometry) -> tuple[Session, MhaLayer | MlaLayer]:
    spec = bench.spec(geometry, query_lens=(1,), kv_lens=(1,), phase="prefill")
    group, kind = group_of(spec), bench.backend.manifest.kind
    if kind == "mm":
        group = replace(group, model="vision", kind="vit_full", pools={})
    if kind == "mla":
        nope = min(geometry.v_dim, geometry.qk_dim)
        latent = MlaGeometry(geometry.q_heads, 4 * nope, geometry.qk_dim - nope, nope, geometry.v_dim, geometry.scale)
        group = replace(group, kind="mla", geometry=latent)
        return bench.open(spec, group=group, form="ragged"), MlaLayer(0, group)
    return bench.open(spec, group=group), MhaLayer(0, group)


def _ragged(
    session: Session, layer: MhaLayer | MlaLayer, batch: AttentionBatch, tensors: Tensors, part: Part | None
) -> Result:
    metadata = session.metadata(batch, "prefill")
    session.in_graph(metadata)
    return result_of("attn_ragged", session.call("attn_ragged", *tensors, layer, metadata, part))


def _judge(
    bench: Bench, geometry: MhaGeometry, q_lens: Sequence[int], k_lens: Sequence[int], padded: int = 0, **more: Any
) -> None:
    lse = "lse" in bench.row.features
    tensors = _tensors(bench, geometry, sum(q_lens) + padded, sum(k_lens))
    if more.get("strided"):
        tensors = tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors)  # type: ignore[assignment]
    watch = Watch()
    for name, tensor in zip("qkv", tensors, strict=True):
        watch.add(f"inputs.{name}", tensor)
    session, layer = _session(bench, geometry)
    batch = _batch(bench, q_lens, k_lens, padded, lse)
    result = _ragged(session, layer, batch, tensors, None if bench.backend.manifest.kind != "mla" else _new_part(batch))
    want = attend_packed(*tensors, geometry, _offsets(q_lens), _offsets(k_lens))
    limits = tolerance(*[bench.ask.dtypes[2]] * 3)  # packed tensors are of the model's type, whatever the cache's
    found = [compare_out(result.out, want, limits.out, batch.num_tokens)]
    if lse:
        found.append(compare_lse(result.lse, want, limits.lse, batch.num_tokens))
    problems = [str(item) for item in found if item is not None] + watch.problems()
    text = f"query_lens {tuple(q_lens)}, key_lens {tuple(k_lens)}, {geometry}"
    bench.require_none([f"{problem} [{text}]" for problem in problems])


def _new_part(batch: AttentionBatch) -> Part:
    """All keys as the part of the new tokens, which is causal."""
    assert batch.key_offsets is not None
    start = torch.zeros_like(batch.key_offsets[1:])
    return Part(0, batch.key_offsets, start, batch.max_key_len, False, True)


@check("ragged", phases=("prefill",), kinds=("mha",))
def ragged(bench: Bench) -> None:
    """Packed causal attention without a cache, aligned bottom-right where there are more keys than queries."""
    _judge(bench, bench.geometry(), (5, 1, 9), (5, 1, 9))
    _judge(bench, bench.geometry(), (2, 3), (7, 3))


@check(phases=("prefill",), kinds=("mla",), role="ragged")
def expanded_numbers(bench: Bench) -> None:
    """The ragged form: plain causal attention over expanded keys [nope + rope] and values [v], one KV head a query head."""
    _judge(bench, bench.geometry(), (5, 1, 9), (5, 1, 9))
    _judge(bench, bench.geometry(), (2, 3), (7, 3))


@check("chunked_prefix", "lse", phases=("prefill",), kinds=("mla",), role="ragged")
def expanded_chunks(bench: Bench) -> None:
    """Chunks of an expanded prefix, attended without a mask, merge with the new tokens to the whole (cases C125, C126)."""
    _chunks(bench)


@check("ragged", "chunked_prefix", "lse", phases=("prefill",))
def chunked_prefix(bench: Bench) -> None:
    """Parts of a prefix, attended without a mask, merge with the causal new part to the whole (cases C125, C126)."""
    _chunks(bench)


def _chunks(bench: Bench) -> None:
    """Three parts of the prefix and one of new tokens, a row without prefix among them."""
    geometry, prefix, new = bench.geometry(), (11, 0, 5), (3, 4, 1)
    whole = tuple(p + n for p, n in zip(prefix, new, strict=True))
    q, k, v = _tensors(bench, geometry, sum(new), sum(whole))
    want = attend_packed(q, k, v, geometry, _offsets(new), _offsets(whole))
    session, layer = _session(bench, geometry)
    starts = _offsets(whole)
    states = []
    for index, (start, stop, causal) in enumerate(((0, 4, False), (4, 8, False), (8, 12, False), (-1, -1, True))):
        spans = [(p, w) if causal else (min(start, p), min(stop, p)) for p, w in zip(prefix, whole, strict=True)]
        keys = [starts[row] + j for row, (a, b) in enumerate(spans) for j in range(a, b)]
        lens = [b - a for a, b in spans]
        device = q.device
        part = Part(
            index=index,
            offsets=torch.tensor(_offsets(lens), dtype=torch.int32, device=device),
            start=torch.tensor([a for a, _ in spans], dtype=torch.int32, device=device),
            max_len=max([1, *lens]),
            has_empty=0 in lens,
            causal=causal,
        )
        batch = _batch(bench, new, lens, 0, True)
        result = _ragged(session, layer, batch, (q, k[keys], v[keys]), part)
        assert result.lse is not None
        empty = [row for row, length in enumerate(lens) if length == 0]
        for row in empty:
            rows = slice(_offsets(new)[row], _offsets(new)[row + 1])
            if bool(result.out[rows].any()) or bool((result.lse[rows] != -float("inf")).any()):
                bench.require_none([f"part {index}: row {row} has no key there, but out is not 0 or lse not -inf"])
        states.append((result.out, result.lse))
    out, lse = merge_many(states)
    limits = tolerance(*[bench.ask.dtypes[2]] * 3)
    found = [compare_out(out, want, limits.out, sum(new)), compare_lse(lse, want, limits.lse, sum(new))]
    bench.require_none([f"merged parts: {item}" for item in found if item is not None])


@check(kinds=("mm",), spread="all", phases=("prefill",))
def packed_numbers(bench: Bench) -> None:
    """Packed bidirectional attention equals the oracle: images of one, few and many patches."""
    _judge(bench, bench.geometry(causal=False), (1, 7, 33, 16), (1, 7, 33, 16))


@check(kinds=("mm",), phases=("prefill",))
def packed_cross_lengths(bench: Bench) -> None:
    """Queries and keys of one sequence may differ in number."""
    if "cross" in bench.row.features:
        _judge(bench, bench.geometry(causal=False), (3, 1), (5, 8))


@check("zero_rows", kinds=("mm",), phases=("prefill",))
def packed_zero_rows(bench: Bench) -> None:
    """Empty sequences anywhere leave the others alone."""
    _judge(bench, bench.geometry(causal=False), (0, 4, 0, 2), (0, 4, 0, 2))


@check(kinds=("mm",), phases=("prefill",))
def packed_padding(bench: Bench) -> None:
    """Tokens after the last sequence do not change the others."""
    _judge(bench, bench.geometry(causal=False), (4, 5), (4, 5), padded=3)


@check("strided_q", kinds=("mm",), phases=("prefill",))
def packed_strides(bench: Bench) -> None:
    """Transposed views give what contiguous tensors give."""
    _judge(bench, bench.geometry(causal=False), (4, 5), (4, 5), strided=True)


@check("sliding_window", kinds=("mm",), phases=("prefill",))
def packed_window(bench: Bench) -> None:
    """Bidirectional windows: window - 1 keys before, window_right after."""
    right = 2 if "window_right" in bench.row.features else None
    _judge(bench, bench.geometry(causal=False, window=3, window_right=right), (9, 4), (9, 4))
