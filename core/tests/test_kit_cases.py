"""Faults that users reported, with their own numbers: each kernel and graph case run on every installed CPU backend.

The checks of the kit cover the same ground with small batches; here the reproductions are taken as they were given. A test's
name ends with the case it belongs to.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_core.batch import AttentionBatch, Part, Segment
from attn_core.errors import AttnError
from attn_core.geometry import MhaGeometry
from attn_core.layers import MhaLayer
from attn_core.merge import merge_many
from attn_core.testing import oracle_mha, oracle_mm
from attn_core.testing.batches import build, make_case
from attn_core.testing.bench import Bench
from attn_core.testing.checks.graphs import _replay_all
from attn_core.testing.checks.memory import PoisonedContext
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.declared import Ask
from attn_core.testing.gdn_cases import GdnSpec, build_gdn, context_for
from attn_core.testing.guards import same_bits
from attn_core.testing.harness import BackendUnderTest, Session
from attn_core.testing.pieces import answer_of, piece
from attn_core.testing.reference_backend import ReferenceBackend
from attn_core.testing.reference_gdn import GdnReference, load_gdn_manifest
from attn_core.testing.spec import Case
from kit_faults.numbers import LseBase2, QueryUnscaled

H8 = MhaGeometry(8, 2, 128, 128, 128**-0.5)


def installed() -> list[tuple[str, str]]:
    names = [("reference", "torch")]
    for name, variant in (("torch_native", "sdpa"), ("flex_attention", "eager")):
        try:
            BackendUnderTest.installed("mha", name).manifest.variant(variant)
        except AttnError:
            continue
        names.append((name, variant))
    return names


@pytest.fixture(params=installed(), ids=lambda pair: pair[0])
def subject(request: pytest.FixtureRequest) -> tuple[BackendUnderTest, str]:
    name, variant = request.param
    return BackendUnderTest.installed("mha", name), variant


def open_for(subject: tuple[BackendUnderTest, str], case: Case, **more: Any) -> Session:
    backend, variant = subject
    return backend.open(case, variant, **more)


def check(case: Case, result: Any, want: oracle_mha.Answer | None = None, limit: float | None = None) -> None:
    want = want or oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    limits = tolerance(case.spec.dtype, case.spec.kv, case.spec.out)
    assert compare_out(result.out, want, limit or limits.out, case.batch.num_tokens) is None
    if case.spec.needs_lse:
        assert compare_lse(result.lse, want, limits.lse, case.batch.num_tokens) is None
    assert case.problems() == []


def run(subject: tuple[BackendUnderTest, str], geometry: MhaGeometry, phase: str, **fields: Any) -> Case:
    case = make_case(geometry, phase, **fields)
    check(case, open_for(subject, case).run(case))
    return case


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128, 256])
def test_page_sizes_equal_dense_attention_c37(subject: Any, page: int) -> None:
    lens = (1, max(page - 1, 1), page, page + 1, 3 * page + 5)
    run(subject, H8, "decode", kv_lens=lens, page_size=page, dtype="bf16")


def test_tree_with_window_c43(subject: Any) -> None:
    geometry = replace(H8, window=4)
    run(subject, geometry, "verify", query_lens=(4,), kv_lens=(14,), parents=((-1, 0, 0, 1),))


def test_query_scale_of_fp8_c63() -> None:
    geometry = replace(H8, scale=0.02)
    fields = {"dtype": "fp8_e4m3", "k_scale": 0.02, "v_scale": 0.5, "q_scale": 100.0 / 3.2, "kv_lens": (300,)}
    case = make_case(geometry, "decode", **fields)
    assert 60 < float(case.inputs.q.abs().max()) < 200
    want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)

    def error(cls: type) -> Any:
        again = make_case(geometry, "decode", **fields)
        backend = BackendUnderTest.installed("mha", "reference")
        backend.create = lambda manifest, variant, context: cls(context)
        return compare_out(backend.open(again).run(again).out, want, 0.05, 1)

    assert error(ReferenceBackend) is None
    loud = make_case(geometry, "decode", **{**fields, "q_scale": 1536.0})  # far beyond 448: the cast must not be silent
    backend = BackendUnderTest.installed("mha", "reference")
    backend.create = lambda manifest, variant, context: QueryUnscaled(context)
    right = oracle_mha.attend(loud.batch, loud.layer, loud.expected, loud.inputs, pool=loud.pool_index)
    assert compare_out(backend.open(loud).run(loud).out, right, 0.05, 1) is not None


@pytest.mark.parametrize("k_scale", [0.1, 1.0, 8.0])
def test_scales_of_prefix_and_new_tokens_c64(subject: Any, k_scale: float) -> None:
    geometry = replace(H8, scale=H8.scale / max(k_scale, 1.0))
    fields = {"dtype": "bf16", "kv_dtype": "fp8_e4m3", "k_scale": k_scale, "v_scale": 0.5}
    run(subject, geometry, "prefill", query_lens=(16,), kv_lens=(80,), page_size=16, **fields)


def test_lse_is_natural_for_every_form_c69(subject: Any) -> None:
    case = run(subject, H8, "decode", kv_lens=(256, 256, 31, 1), page_size=16, needs_lse=True)
    for form in ("table", "csr"):
        run(subject, H8, "decode", kv_lens=(256, 7), page_size=16, needs_lse=True, form=form)
    keys, _ = oracle_mha.read_row(case.expected, case.batch.kv(case.pool_index), 0, case.layer)
    logits = H8.scale * torch.einsum("hd,jhd->hj", case.inputs.q[0].double(), keys.repeat_interleave(4, 1))
    result = open_for(subject, case).run(case)
    torch.testing.assert_close(result.lse[0].double(), torch.logsumexp(logits, -1), rtol=1e-5, atol=1e-5)


def test_base_2_numbers_merge_to_something_else_c68() -> None:
    geometry = MhaGeometry(1, 1, 16, 16, 1.0)
    parts: dict[type, list[tuple[torch.Tensor, torch.Tensor]]] = {ReferenceBackend: [], LseBase2: []}
    for cls, found in parts.items():
        backend = BackendUnderTest.installed("mha", "reference")
        backend.create = lambda manifest, variant, context, cls=cls: cls(context)
        for logit, value in ((0.0, 0.0), (2.0, 1.0)):
            case = make_case(geometry, "decode", kv_lens=(1,), needs_lse=True, store=False)
            case.inputs.q.fill_(1.0)
            slot = int(oracle_mha.token_slots(case.batch.kv(1), 0)[0])
            case.cache.k[slot // 4, slot % 4] = logit / 16
            case.cache.v[slot // 4, slot % 4] = value
            found.append(backend.open(case).run(case, give_out=False))
    assert float(merge_many(parts[ReferenceBackend])[0][0, 0, 0]) == pytest.approx(0.8807971, abs=1e-6)
    assert float(merge_many(parts[LseBase2])[0][0, 0, 0]) == pytest.approx(0.947, abs=1e-3)


def test_unused_slots_never_reach_the_result_c70(subject: Any) -> None:
    results = {}
    for poison in ("zero", "nan", "inf", "big"):
        case = run(subject, H8, "decode", kv_lens=(13,), page_size=4, unused=poison)
        results[poison] = open_for(subject, case).run(case).out
        assert results[poison].isfinite().all()
        assert same_bits(results[poison], results["zero"])


def test_views_as_inputs_c74(subject: Any) -> None:
    outs = []
    for strides in ("contiguous", "fused", "transposed"):
        case = run(subject, H8, "prefill", query_lens=(7, 33), kv_lens=(7, 33), page_size=16, strides=strides)
        outs.append(open_for(subject, case).run(case).out)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outs[2], outs[0], rtol=1e-5, atol=1e-5)


def test_empty_rows_c75(subject: Any) -> None:
    cross = replace(H8, causal=False)
    case = run(subject, cross, "prefill", query_lens=(0, 3, 1), kv_lens=(5, 0, 4), store=False, needs_lse=True)
    result = open_for(subject, case).run(case)
    assert not result.out[:3].any()
    assert (result.lse[:3] == -math.inf).all()
    empty = make_case(H8, "decode", kv_lens=(), pad_rows=1)
    assert open_for(subject, empty).run(empty).out.shape[0] == 1


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_idle_and_padded_ranks_c76(subject: Any, phase: str) -> None:
    idle = make_case(H8, phase, query_lens=(), kv_lens=(), pad_rows=2, pad_tokens=8)
    result = open_for(subject, idle).run(idle)
    assert idle.problems() == []
    assert not result.out.any()
    if phase == "prefill":
        case = run(subject, H8, phase, query_lens=(3,), kv_lens=(3,), pad_tokens=5)
        assert case.batch.padded_tokens == 8


def test_chunks_of_a_prompt_equal_one_step_c77(subject: Any) -> None:
    geometry = replace(H8, q_heads=2, kv_heads=1, qk_dim=32, v_dim=32)
    case = make_case(geometry, "prefill", query_lens=(700,), kv_lens=(700,), page_size=16)
    want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    session, start = open_for(subject, case), 0
    for size in (1, 63, 64, 65, 255, 252):
        ranges = [(start, start + size)]
        part = piece(case, ranges)
        result = session.run(part)
        assert compare_out(result.out, answer_of(want, case, ranges), 2e-5, size) is None
        assert part.batch.kv(1).kv_lens.tolist() == [start + size]
        start += size
    assert case.problems() == []


def test_decode_keeps_the_oldest_key_of_the_window_c80(subject: Any) -> None:
    small = replace(H8, q_heads=2, kv_heads=1, qk_dim=16, v_dim=16, window=4096)
    run(subject, small, "decode", kv_lens=(5000, 4094, 4095, 4096, 4097), page_size=16)
    run(subject, replace(small, window=4), "decode", kv_lens=(2, 3, 4, 5, 17))
    run(subject, replace(small, window=4), "prefill", query_lens=(2, 3, 4, 5, 17), kv_lens=(2, 3, 4, 5, 17))


# --- packed: chunks of a prefix -----------------------------------------------------------------------------------------


def packed_batch(new: tuple[int, ...], keys: list[int]) -> AttentionBatch:
    def offsets(lens: Any) -> torch.Tensor:
        return torch.tensor([0, *torch.tensor(list(lens)).cumsum(0).tolist()], dtype=torch.int32)

    segment = Segment("prefill", slice(0, len(new)), slice(0, sum(new)))
    return AttentionBatch(
        len(new), sum(new), (segment,), offsets(new), max(new), query_offsets_cpu=offsets(new),
        key_offsets=offsets(keys), max_key_len=max(keys), needs_lse=True,
    )  # fmt: skip


def ragged_parts(session: Session, layer: MhaLayer, tensors: Any, prefix: Any, new: Any, chunks: int) -> Any:
    q, k, v = tensors
    whole = [p + n for p, n in zip(prefix, new, strict=True)]
    starts = [0, *torch.tensor(whole).cumsum(0).tolist()]
    length = -(-max(prefix) // chunks)
    states = []
    for index in range(chunks + 1):
        last = index == chunks
        pairs = [
            (p, w) if last else (min(index * length, p), min((index + 1) * length, p))
            for p, w in zip(prefix, whole, strict=True)
        ]
        own = [starts[row] + j for row, (a, b) in enumerate(pairs) for j in range(a, b)]
        lens = [b - a for a, b in pairs]
        batch = packed_batch(new, lens)
        part = Part(
            index, batch.key_offsets, torch.tensor([a for a, _ in pairs], dtype=torch.int32), max(lens), 0 in lens, last
        )
        metadata = session.metadata(batch, "prefill")
        session.in_graph(metadata)
        out, lse = session.call("attn_ragged", q, k[own], v[own], layer, metadata, part)
        states.append((out, lse))
    return states


@pytest.fixture
def packed(subject: Any) -> Any:
    if "ragged" not in subject[0].manifest.variant(subject[1]).roles:
        pytest.skip("declares no ragged role")
    geometry = MhaGeometry(2, 2, 192, 128, 192**-0.5)
    case = make_case(geometry, "prefill", query_lens=(1,), kv_lens=(1,))
    return geometry, open_for(subject, case), case.layer


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_prefix_in_chunks_equals_one_pass_c125(packed: Any, chunks: int) -> None:
    geometry, session, layer = packed
    prefix, new = (4096, 0, 37), (5, 9, 1)
    generator = torch.Generator().manual_seed(0)
    total = sum(prefix) + sum(new)
    tensors = [torch.randn(n, 2, d, generator=generator) for n, d in ((sum(new), 192), (total, 192), (total, 128))]
    out, lse = merge_many(ragged_parts(session, layer, tensors, prefix, new, chunks))
    starts = [0, *torch.tensor([p + n for p, n in zip(prefix, new, strict=True)]).cumsum(0).tolist()]
    want = oracle_mm.attend_packed(*tensors, geometry, [0, 5, 14, 15], starts)
    assert compare_out(out, want, 2e-5, 15) is None
    assert compare_lse(lse, want, 2e-5, 15) is None


def test_part_without_keys_is_empty_c126(packed: Any) -> None:
    _, session, layer = packed
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n, 2, d, generator=generator) for n, d in ((16, 192), (1296, 192), (1296, 128))]
    first = ragged_parts(session, layer, tensors, (1280, 0), (8, 8), 1)[0]
    assert not first[0][8:].any()
    assert (first[1][8:] == -math.inf).all()
    assert first[1][:8].isfinite().all()


# --- graphs, on a CPU acted out -------------------------------------------------------------------------------------------


def graph_bench(phase: str) -> Bench:
    backend = BackendUnderTest.installed("mha", "reference")
    row = backend.manifest.variants[0].allow[0]
    return Bench(backend, "torch", row, Ask(phase, ("fp32", "fp32", "fp32"), 16, (32, 16), (4, 2)), turn=3)


def test_encoder_length_changes_between_replays_c59() -> None:
    bench = graph_bench("decode")
    cross = bench.geometry(causal=False)
    specs = [
        bench.spec(
            cross, query_lens=(1,) * 4, kv_lens=lens, store=False, form="table", storage="separate", host="exact"
        )
        for lens in ((120, 120, 1, 1), (70, 33, 120, 1), (0, 1, 2, 120))
    ]
    _replay_all(bench, specs)


def test_replay_of_a_bucket_with_fewer_rows_c94() -> None:
    bench = graph_bench("draft_extend")
    specs = [
        bench.spec(
            query_lens=(4,) * real, kv_lens=tuple(9 + 7 * r for r in range(real)), pad_rows=4 - real,
            pad_tokens=16 - 4 * real, form="table", storage="separate", strides="contiguous", seed=real,
        )
        for real in (4, 3, 1)
    ]  # fmt: skip
    _replay_all(bench, specs)


def test_padded_prefill_bucket_c128(subject: Any) -> None:
    geometry = replace(H8, q_heads=2, kv_heads=1, qk_dim=32, v_dim=32)
    case = make_case(geometry, "prefill", query_lens=(200, 142), kv_lens=(200, 142), pad_tokens=10, page_size=16)
    assert (case.batch.num_tokens, case.batch.padded_tokens) == (342, 352)
    result = open_for(subject, case).run(case)
    check(case, result)
    assert not result.out[342:].any()


def test_padded_prefill_of_states_c128() -> None:
    from attn_core.geometry import GdnGeometry
    from attn_core.testing.oracle_gdn import run as oracle
    from attn_core.testing.oracle_gdn import written

    spec = GdnSpec(GdnGeometry(1, 2, 8, 4, 4, 24), "prefill", (200, 142), pad_tokens=10, fresh=(0,))
    case = build_gdn(spec)
    answer = oracle(case.batch, case.layer, case.cache, case.inputs, pool=1)
    manifest = load_gdn_manifest()
    backend = GdnReference(context_for(case, manifest, "torch", manifest.variants[0].allow[0]))
    metadata = backend.attn_metadata(case.batch, case.group, "prefill", None, False)
    out, _ = backend.attn_extend(case.inputs, case.layer, case.cache, metadata, case.out)
    assert not out[342:].any()
    slots = written(case.batch, answer, "prefill", pool=1)
    assert case.problems(slots) == []
    for slot, state in slots.items():
        torch.testing.assert_close(case.cache.state[slot].double(), state.state, rtol=1e-4, atol=1e-5)


def test_poisoned_workspace_after_a_larger_step_c129(subject: Any) -> None:
    large = make_case(H8, "prefill", query_lens=(40, 17), kv_lens=(70, 17), page_size=16)
    small = make_case(H8, "prefill", query_lens=(2,), kv_lens=(5,), page_size=16, seed=1)
    session = open_for(subject, large, context_class=PoisonedContext)
    for case in (large, small, build(large.spec)):
        session.context.poison()
        check(case, session.run(case))


@pytest.mark.parametrize(("sink", "share"), [(0.0, 0.5), (-math.inf, 1.0), (1.0986123, 0.25)])
def test_sink_by_its_numbers_c18(subject: Any, sink: float, share: float) -> None:
    geometry = MhaGeometry(1, 1, 64, 64, 0.125, sinks=True)
    case = make_case(geometry, "decode", kv_lens=(1,), sinks=(sink,), store=False)
    case.inputs.q.zero_()
    for cache in (case.cache, case.expected):
        cache.v.fill_(1.0)
    result = open_for(subject, case).run(case)
    torch.testing.assert_close(result.out, torch.full((1, 1, 64), share), rtol=1e-6, atol=1e-6)
