"""Dual chunk attention in core: the oracle against arithmetic by hand and the plain oracle, the model's note, the refusal."""

from __future__ import annotations

import math

import pytest
import torch

from attn_core.errors import PlanError
from attn_core.geometry import LayerGroup, MhaGeometry, Model
from attn_core.model import parse_model
from attn_core.options import Options
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.testing import oracle_mha
from attn_core.testing.batches import build
from attn_core.testing.fake import make_manifest
from attn_core.testing.oracle_dual_chunk import ChunkSizes, attend_plain, attend_rotated, turn
from attn_core.testing.spec import CaseSpec

GEOMETRY = MhaGeometry(2, 1, 4, 4, 0.5)
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064, "max_position_embeddings": 1010000,
}  # fmt: skip


def test_angles_by_hand() -> None:
    sizes = ChunkSizes(12, 4)
    assert sizes.length == 8
    assert [sizes.version(17, key) for key in (17, 16, 15, 8, 7, 0)] == [0, 0, 1, 1, 2, 2]
    assert [sizes.query_angle(17, version) for version in (0, 1, 2)] == [1, 9, 12]
    assert sizes.query_angle(15, 1) == 12  # 15 without the clamp
    assert ChunkSizes(64, 60).query_angle(3, 2) == 7
    assert ChunkSizes(12, 4, 16).factor(16) == 1.0
    assert ChunkSizes(12, 4, 16).factor(32) == pytest.approx((1 + 0.1 * math.log(2)) ** 2)


def test_the_same_query_in_every_version_is_plain_attention() -> None:
    case = build(CaseSpec(GEOMETRY, "prefill", (3, 5), (21, 5)))
    q = case.inputs.q[:, :, None].expand(-1, -1, 3, -1)
    want = oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    have = attend_rotated(case.batch, case.layer, case.expected, q, ChunkSizes(12, 4), pool=case.pool_index)
    torch.testing.assert_close(have.out, want.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(have.lse, want.lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_both_forms_of_the_oracle_agree(interleaved: bool) -> None:
    sizes, frequencies = ChunkSizes(6, 2, 5), torch.tensor([1.0, 0.1], dtype=torch.float64)
    case = build(CaseSpec(GEOMETRY, "prefill", (7,), (15,), form="table"))
    address = case.batch.kv(case.pool_index)
    keys, values = oracle_mha.read_row(case.expected, address, 0, case.layer)
    want = attend_plain(
        case.batch, case.layer, [keys], [values], case.inputs.q, frequencies, sizes,
        interleaved=interleaved, pool=case.pool_index,
    )  # fmt: skip
    slots = torch.tensor(oracle_mha.token_slots(address, 0))
    rotated = turn(keys[:, 0], torch.arange(15) % sizes.length, frequencies, interleaved)
    case.expected.k = case.expected.k.double()
    case.expected.k[slots // 4, slots % 4, 0] = rotated
    positions = range(8, 15)
    q = torch.stack(
        [
            torch.stack(
                [turn(case.inputs.q[:, h].double(), torch.tensor([sizes.query_angle(p, v) for p in positions]), frequencies, interleaved) for v in range(3)],
                dim=1,
            )
            for h in range(2)
        ],
        dim=1,
    )  # fmt: skip
    have = attend_rotated(case.batch, case.layer, case.expected, q, sizes, pool=case.pool_index)
    torch.testing.assert_close(have.out, want.out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(have.lse, want.lse, rtol=1e-10, atol=1e-10)


def test_a_model_with_dual_chunks_says_what_the_plan_leaves_out() -> None:
    sizes = {"chunk_size": 262144, "local_size": 8192}
    notes = parse_model({**QWEN, "dual_chunk_attention_config": sizes}).notes
    assert any("dual_chunk_attention_config" in note for note in notes)
    assert not any("dual_chunk" in note for note in parse_model(QWEN).notes)


def test_a_group_that_needs_dual_chunks_is_refused_by_other_backends() -> None:
    group = LayerGroup("target", "full", "full", (0,), MhaGeometry(4, 2, 64, 64, 0.125), {"attend": "kv"}, features=frozenset({"dual_chunk"}))  # fmt: skip
    model = Model("qwen", "Qwen2ForCausalLM", "qwen2", "fp32", (group,), 1)
    manifest = make_manifest(page_sizes=(4,), head_dims=((64, 64),), dtypes=(("fp32", "fp32"),), phases=("prefill", "decode"))  # fmt: skip
    with pytest.raises(PlanError, match="dual_chunk is not declared"):
        solve_plan(model, parse_platform("cpu"), Options.of({"dtype": "fp32"}), (manifest,))
    served = make_manifest(page_sizes=(4,), head_dims=((64, 64),), dtypes=(("fp32", "fp32"),), phases=("prefill", "decode"), features=("dual_chunk",))  # fmt: skip
    plan = solve_plan(
        model, parse_platform("cpu"), Options.of({"dtype": "fp32", "allow_experimental": True}), (served,)
    )
    assert "dual_chunk" in plan.groups[0].phases["decode"].parts[0].features
