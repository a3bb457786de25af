"""Dual chunk attention over FlashAttention 3 on Hopper, at the shapes of Qwen2.5-7B-Instruct-1M, against float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from attn_core.batch import AttentionBatch, KvAddress, Segment
from attn_core.geometry import MhaGeometry
from attn_core.layers import MhaCache, MhaInputs, Rope
from attn_core.manifest import load_toml, parse_manifests
from attn_core.testing.batches import build
from attn_core.testing.compare import compare_lse, compare_out
from attn_core.testing.elements import random_values
from attn_core.testing.harness import BackendUnderTest
from attn_core.testing.oracle_dual_chunk import ChunkSizes, attend_plain, attend_rotated
from attn_core.testing.oracle_mha import Answer, read_row
from attn_core.testing.spec import CaseSpec
from attn_flash.builds import any_probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.skipif(not any_probe().ok, reason="needs tokenspeed-fa3 or sglang-kernel"),
]
QWEN = MhaGeometry(28, 4, 128, 128, 128**-0.5)
MANIFEST = Path(__file__).parents[1] / "src" / "attn_flash" / "attn_manifest.toml"


def backend() -> BackendUnderTest:
    from attn_flash.dual_chunk import fa3

    found = next(
        m for m in parse_manifests(load_toml(MANIFEST.read_text("utf-8"))) if m.name == "dual_chunk_flash_attn"
    )
    return BackendUnderTest(found, lambda manifest, variant, context: fa3.create(context))


def options(sizes: ChunkSizes) -> dict[str, int]:
    return {
        "chunk_size": sizes.chunk_size,
        "local_size": sizes.local_size,
        "original_max_position_embeddings": sizes.original,
    }


def check(have, want: Answer, tokens: list[int], out_limit: float, lse_limit: float) -> None:
    picked = Answer(want.out[tokens], want.lse[tokens])
    problems = [
        compare_out(have.out[tokens], picked, out_limit, len(tokens)),
        compare_lse(have.lse[tokens], picked, lse_limit, len(tokens)),
    ]
    assert [str(problem) for problem in problems if problem is not None] == []


def test_sequences_without_keys_are_empty() -> None:
    from attn_flash.builds import any_build
    from attn_flash.dual_chunk.fa3 import over_fa3
    from attn_flash.dual_chunk.parts import RangeCall

    attend = over_fa3(any_build().load()[0])
    q = torch.randn(6, 28, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(8, 64, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def tensor(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    for longest, keys in ((64, (64, 0, 3)), (0, (0, 0, 0)), (128, (0, 128, 0))):
        call = RangeCall(1, False, tensor(0, 1, 4, 6), tensor(1, 2, 3, 4, 5, 6).view(3, 2), tensor(*keys), 3, longest)
        out, lse = attend(q, k, v, call, 0.1)
        for row, (start, stop) in enumerate(((0, 1), (1, 4), (4, 6))):
            empty = keys[row] == 0
            assert bool((lse[start:stop] == -math.inf).all()) is empty
            assert bool((out[start:stop] == 0).all()) is empty


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("original", [0, 2048])
def test_decode_at_boundaries(page: int, original: int) -> None:
    sizes = ChunkSizes(2048 + 256, 256, original)
    lens = (1, 2047, 2048, 2049, 4096, 4097, 6150)
    spec = CaseSpec(QWEN, "decode", (1,) * 7, lens, dtype="bf16", page_size=page, device="cuda", needs_lse=True)
    case = build(spec)
    versions = random_values((7, 28, 5, 128), "bf16", torch.Generator().manual_seed(3)).cuda()
    case.inputs = case.inputs._replace(q=versions)
    want = attend_rotated(case.batch, case.layer, case.expected, versions, sizes, pool=case.pool_index)
    result = backend().open(case, options=options(sizes)).run(case)
    check(result, want, list(range(7)), 3e-2, 3e-3 if not original else 2e-2)
    assert case.problems() == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_prefill_over_three_chunks_with_prefix_and_without(dtype: str) -> None:
    sizes = ChunkSizes(1984 + 64, 64)
    queries, keys = (900, 4100, 1), (3 * 1984 + 100, 4100, 2 * 1984 + 1)
    spec = CaseSpec(QWEN, "prefill", queries, keys, dtype=dtype, page_size=64, device="cuda", needs_lse=True)
    case = build(spec)
    tokens = sum(queries)
    versions = random_values((tokens, 28, 5, 128), dtype, torch.Generator().manual_seed(4)).cuda()
    case.inputs = case.inputs._replace(q=versions)
    some = [0, 798, 799, 800, 801, 899, 900, 901, 900 + 1983, 900 + 1984, 900 + 3967, 900 + 3968, 4999, 5000]
    want = attend_rotated(case.batch, case.layer, case.expected, versions, sizes, pool=case.pool_index, only=some)
    result = backend().open(case, options=options(sizes)).run(case)
    check(result, want, some, 3e-2 if dtype == "bf16" else 4e-3, 3e-3)
    assert case.problems() == []


def test_rope_from_raw_queries_and_keys() -> None:
    sizes = ChunkSizes(512 + 64, 64)
    spec = CaseSpec(
        QWEN, "prefill", (700, 1100), (1900, 1100), dtype="bf16", device="cuda", needs_lse=True, page_size=64
    )
    case = build(spec)
    frequencies = 1e7 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    theta = torch.arange(sizes.chunk_size + 1, dtype=torch.float64)[:, None] * frequencies
    table = torch.cat((theta.cos(), theta.sin()), dim=-1).float().cuda()
    address = case.batch.kv(case.pool_index)
    rows = [read_row(case.expected, address, row, case.layer) for row in range(2)]
    session = backend().open(case, options=options(sizes))
    from dataclasses import replace

    from attn_core.testing.oracle_mha import token_slots

    for row, (k, v) in enumerate(rows):
        slots = torch.tensor(token_slots(address, row), device="cuda")
        given = MhaInputs(
            case.inputs.q, k.to(torch.bfloat16).cuda(), v.to(torch.bfloat16).cuda(),
            Rope(table, torch.arange(len(k), device="cuda"), False),
        )  # fmt: skip
        session.call("attn_store", given, case.layer, case.cache, replace(address, new_slots=slots))
    case.inputs = case.inputs._replace(rope=Rope(table, case.batch.positions, False))
    some = [0, 335, 336, 699, 700, 700 + 511, 700 + 512, 700 + 1024, 1799]
    want = attend_plain(
        case.batch, case.layer, [k for k, _ in rows], [v for _, v in rows], case.inputs.q, frequencies, sizes,
        pool=case.pool_index, only=some,
    )  # fmt: skip
    check(session.run(case), want, some, 5e-2, 2e-2)


@pytest.mark.parametrize("kv_len", [253952, 253953, 507905, 700001])
def test_decode_at_the_published_sizes(kv_len: int) -> None:
    """Chunks of 262144 - 8192 tokens, one row of up to 700 thousand keys; the reference is made on the GPU, a head at a time."""
    sizes, page = ChunkSizes(262144, 8192, 262144), 64
    pages = -(-kv_len // page)
    generator = torch.Generator("cuda").manual_seed(kv_len)
    k, v = (
        torch.randn(pages + 1, page, 4, 128, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2)
    )
    q = torch.randn(1, 28, 5, 128, device="cuda", dtype=torch.bfloat16, generator=generator) * 2
    table = (torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1).to(torch.int32)[None].cuda()
    lens = torch.tensor([kv_len], dtype=torch.int32)
    address = KvAddress(page, lens.cuda(), torch.full((1,), -1).cuda(), kv_len, table=table, kv_lens_cpu=lens)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    batch = AttentionBatch(
        1, 1, (Segment("decode", slice(0, 1), slice(0, 1), 1),), offsets.cuda(), 1, (address,), needs_lse=True,
        query_offsets_cpu=offsets, positions=torch.tensor([kv_len - 1]).cuda(),
    )  # fmt: skip
    spec = CaseSpec(QWEN, "decode", (1,), (1,), dtype="bf16", page_size=page, device="cuda", decoy_pool=False)
    case = build(spec)
    session = backend().open(case, options=options(sizes))
    metadata = session.metadata(batch, "decode")
    out, lse = session.call(
        "attn_decode", MhaInputs(q, None, None, None, False), case.layer, MhaCache(k, v), metadata, None
    )
    order = table[0].long()
    keys, values = (x[order].flatten(0, 1)[:kv_len] for x in (k, v))
    at = torch.arange(kv_len, device="cuda")
    version = ((kv_len - 1) // sizes.length - at // sizes.length).clamp(max=2)
    for head in (0, 6, 7, 13, 27):
        logits = (
            (q[0, head].double()[version] * keys[:, head // 7].double()).sum(-1) * QWEN.scale * sizes.factor(kv_len)
        )
        total = torch.logsumexp(logits, 0)
        want = torch.exp(logits - total) @ values[:, head // 7].double()
        assert abs(float(lse[0, head]) - float(total)) < 2e-2
        error = float((out[0, head].double() - want).abs().max() / want.abs().max())
        assert error < 5e-2, (head, error)
