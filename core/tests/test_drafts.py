"""Draft steps by core's default: chains and trees, dense and CSR, eager and captured, against float64 attention by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from attn_core.batch import AttentionBatch, DraftSteps, KvAddress, StateAddress
from attn_core.context import GraphLimits
from attn_core.discovery import Registry
from attn_core.errors import BatchError, GraphError
from attn_core.layers import MhaCache, MhaInputs, MhaLayer
from attn_core.options import Options
from attn_core.paging import DraftStates, PoolRows, branch_batch, build_batch, step_batches
from attn_core.planner import solve_plan
from attn_core.platform import parse_platform
from attn_core.router import Router, RouterGraphState, Step
from attn_core.testing import reference_backend
from toys import mha_model

STEPS = 3
PAGES = 96
LIMITS = GraphLimits(rows=(2, 3), max_tokens=6, max_query_len=1, max_kv_len=48, max_pages=PAGES)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


@dataclass
class Drafter:
    """A draft layer with a cache, and rows whose prefixes lie in pages of their own."""

    page: int
    topk: int
    device: str = "cpu"
    free: int = 1
    keys: list[list[torch.Tensor]] = field(default_factory=list)  #: by branch: k and v [n, Hk, D] so far
    values: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = mha_model(layers=1, q_heads=4, kv_heads=2, qk_dim=16, v_dim=8, scale=0.25)
        manifest = reference_backend.load_manifest()
        options = Options.of(
            page_size=self.page, dtype="float32", allow_experimental=True, speculative_algorithm="EAGLE",
            speculative_eagle_topk=self.topk,
        )  # fmt: skip
        plan = solve_plan(model, parse_platform("cuda:sm90"), options, [manifest], tie_order={})
        registry = Registry.with_manifests([manifest], modules={manifest.package: reference_backend})
        self.router = Router(plan, registry, device=self.device)
        (group,) = [item.group for item in plan.groups if item.group.model == "draft"]
        self.layer = MhaLayer(0, group)
        shape = PAGES, self.page, 2
        self.cache = MhaCache(
            torch.full((*shape, 16), torch.nan, device=self.device),
            torch.full((*shape, 8), torch.nan, device=self.device),
        )
        self.cache.k[0], self.cache.v[0] = 0.0, 0.0
        self.router.bind([self.layer], [self.cache])

    def pages_for(self, count: int) -> list[int]:
        found = list(range(self.free, self.free + count))
        self.free += count
        return found

    def start(self, lens: list[int], form: str = "table", padded: int = 0) -> tuple[AttentionBatch, DraftSteps]:
        """New rows with `lens` random keys each; the batch of their prefixes and the slots of the drafts."""
        self.free, self.keys, self.values = 1, [], []
        pages, slots = [], []
        for length in lens:
            line = self.pages_for(-(-length // self.page))
            k, v = torch.randn(length, 2, 16, device=self.device), torch.randn(length, 2, 8, device=self.device)
            for position in range(length):
                place = line[position // self.page], position % self.page
                self.cache.k[place], self.cache.v[place] = k[position], v[position]
            branches = [self._branch(line, length) for _ in range(self.topk)]
            slots.append(
                [
                    [branch[p // self.page] * self.page + p % self.page for p in range(length, length + STEPS)]
                    for branch in branches
                ]
            )
            self.keys += [[k.clone()] for _ in branches]
            self.values += [[v.clone()] for _ in branches]
            # a chain's dense table reaches the last draft; a CSR has the pages of its keys only
            pages.append(branches[0] if self.topk == 1 and form == "table" else line)
        reach = STEPS if self.topk == 1 and form == "table" else 0
        rows = PoolRows(self.page, pages, write=False)
        batch = build_batch(
            [1] * len(lens), [n + reach for n in lens], rows, "draft", form=form, device=self.device,  # type: ignore[arg-type]
            padded_rows=padded or None,
        )  # fmt: skip
        prefix = torch.tensor([*lens, *[0] * (batch.padded_rows - len(lens))], dtype=torch.int32)
        address = replace(batch.kv(0), kv_lens=prefix.to(self.device), kv_lens_cpu=prefix, max_kv_len=max(lens))
        batch.addresses = (address, address)
        batch.positions = prefix.to(device=self.device, dtype=torch.int64)
        missing = [[[-1] * STEPS] * self.topk] * (batch.padded_rows - len(lens))
        return batch, DraftSteps(STEPS, self.topk, torch.tensor([*slots, *missing], device=self.device))

    def _branch(self, line: list[int], length: int) -> list[int]:
        """The pages of a branch: whole ones of the prefix, then its own, the first with the prefix's tokens of that page."""
        whole, begun = divmod(length, self.page)
        end = -(-(length + STEPS) // self.page)
        if self.topk == 1:
            return line + self.pages_for(end - len(line))
        own = self.pages_for(end - whole)
        if begun:
            self.cache.k[own[0], :begun] = self.cache.k[line[whole], :begun]
            self.cache.v[own[0], :begun] = self.cache.v[line[whole], :begun]
        return line[:whole] + own

    def attend(self, step: Step, rows: int) -> None:
        """One draft step with random inputs, compared branch by branch."""
        q, k, v = self.inputs(rows)
        self.check(step.attend(self.layer, MhaInputs(q, k, v)), q, k, v)

    def inputs(self, rows: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(rows, heads, width, device=self.device) for heads, width in ((4, 16), (2, 16), (2, 8)))

    def check(self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for branch, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys.append(k[branch : branch + 1].clone())
            values.append(v[branch : branch + 1].clone())
            every, each = (torch.cat(x).double().repeat_interleave(2, 1) for x in (keys, values))
            weights = (torch.einsum("hd,nhd->hn", q[branch].double(), every) * 0.25).softmax(-1)
            torch.testing.assert_close(
                out[branch].double(), torch.einsum("hn,nhd->hd", weights, each), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("lens", [[5, 17], [16, 32], [1, 33]])
@pytest.mark.parametrize("form", ["table", "csr"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("topk", [1, 3])
def test_every_branch_sees_its_prefix_and_its_own_drafts(topk: int, page: int, form: str, lens: list[int]) -> None:
    drafter = Drafter(page, topk)
    batch, draft = drafter.start(lens, form)
    steps = drafter.router.begin_draft(batch, draft)
    assert len(steps) == STEPS
    for step in steps:
        assert step.batch.num_tokens == len(lens) * topk
        drafter.attend(step, len(lens) * topk)
    assert drafter.router.stats() == {"reference": {"draft": STEPS}}


def test_a_chain_reads_the_server_s_own_table_without_a_copy() -> None:
    batch, draft = Drafter(16, 1).start([5, 17])
    for step in step_batches(batch, draft):
        assert step.kv(0).table is batch.kv(0).table


def test_rows_of_a_shared_table_are_found_in_a_tree() -> None:
    drafter = Drafter(16, 2)
    batch, draft = drafter.start([20, 9])
    table = batch.kv(0).table
    assert table is not None
    shared = replace(batch.kv(0), table=table.flip(0).contiguous(), table_rows=torch.tensor([1, 0], dtype=torch.int32))
    batch.addresses = (shared, shared)
    for step in drafter.router.begin_draft(batch, draft):
        drafter.attend(step, 4)


def test_padded_rows_stay_behind_the_branches() -> None:
    drafter = Drafter(16, 2)
    batch, draft = drafter.start([20, 9], padded=3)
    wide = branch_batch(batch, draft)
    assert (wide.num_rows, wide.padded_rows, wide.padded_tokens) == (4, 6, 6)
    assert wide.query_offsets.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert wide.positions is not None
    assert wide.positions.tolist() == [20, 20, 9, 9, 0, 0]
    for step in drafter.router.begin_draft(batch, draft):
        drafter.attend(step, 6)


def test_trimmed_pools_count_from_their_origin() -> None:
    address = KvAddress(
        4, torch.tensor([11], dtype=torch.int32), torch.tensor([-1]), 11,
        table=torch.tensor([[7, 9]], dtype=torch.int32), origin=torch.tensor([4], dtype=torch.int32),
    )  # fmt: skip
    batch = AttentionBatch(
        1, 1, (), torch.tensor([0, 1], dtype=torch.int32), 1, (address,), query_offsets_cpu=torch.tensor([0, 1])
    )
    slots = torch.tensor([[[9 * 4 + 3, 20, 21], [13 * 4 + 3, 24, 25]]])
    made = branch_batch(batch, DraftSteps(3, 2, slots)).kv(0)
    assert made.table is not None
    assert made.table[:, :3].tolist() == [[7, 9, 5], [7, 13, 6]]
    assert made.origin is not None
    assert made.origin.tolist() == [4, 4]


# --- under a graph ------------------------------------------------------------------------------------------------------------


class Captured:
    """All draft steps in one graph, as a server records them; on a CPU the recorded calls run again."""

    def __init__(self, drafter: Drafter, state: RouterGraphState, batch: AttentionBatch, draft: DraftSteps) -> None:
        self.drafter, rows = drafter, batch.padded_rows * draft.topk
        self.inputs = [drafter.inputs(rows) for _ in range(draft.steps)]
        self.steps = drafter.router.begin_draft(batch, draft, state)
        self.outs = self.work()
        self.graph: Any = None
        if drafter.device == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outs = self.work()

    def work(self) -> list[torch.Tensor]:
        outs = []
        for step, inputs in zip(self.steps, self.inputs, strict=True):
            self.drafter.router.in_graph(step)
            outs.append(step.attend(self.drafter.layer, MhaInputs(*inputs)))
        return outs

    def replay(self) -> None:
        for tensors in self.inputs:
            for mine, theirs in zip(tensors, self.drafter.inputs(len(tensors[0])), strict=True):
                mine.copy_(theirs)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.outs = self.work()
        for out, inputs in zip(self.outs, self.inputs, strict=True):
            self.drafter.check(out, *inputs)


@pytest.mark.parametrize("form", ["table", "csr"])
@pytest.mark.parametrize("topk", [1, 2])
def test_all_steps_are_captured_once_and_replayed_with_other_lengths(topk: int, form: str, device: str) -> None:
    drafter = Drafter(16, topk, device)
    state = drafter.router.graph_state(replace(LIMITS, draft=(STEPS, topk)))
    captured = Captured(drafter, state, *drafter.start([3, 4, 5], form))
    made = [run.metadata for step in captured.steps for run in step.runs()]
    assert len({id(one) for one in made}) == STEPS, "every step has metadata of its own"
    for lens, padded in (([5, 17, 33], 0), ([40, 2, 16], 0), ([31, 1], 3)):
        batch, draft = drafter.start(lens, form, padded)
        again = drafter.router.begin_draft(batch, draft, state)
        assert [run.metadata for step in again for run in step.runs()] == made
        captured.replay()


def test_nothing_moves_between_replays() -> None:
    drafter = Drafter(16, 2)
    state = drafter.router.graph_state(replace(LIMITS, draft=(STEPS, 2)))

    def places(lens: list[int]) -> list[int]:
        found = []
        for step in drafter.router.begin_draft(*drafter.start(lens), state):
            (run,) = step.runs()
            address = run.address
            assert address is not None
            assert address.table is not None
            found += [
                x.data_ptr() for x in (address.table, address.kv_lens, address.new_slots, run.batch.query_offsets)
            ]
        return found

    assert places([5, 17]) == places([40, 2])


def test_the_state_counts_the_buffers_of_every_step() -> None:
    drafter = Drafter(16, 2)
    plain = drafter.router.graph_state(LIMITS)
    drafted = drafter.router.graph_state(replace(LIMITS, draft=(STEPS, 2)))
    assert not plain.drafts
    (states,) = drafted.drafts.values()
    assert len(states.states) == STEPS
    assert states.limits.rows == (4, 6)
    assert drafted.nbytes == plain.nbytes + states.nbytes
    assert drafted.pad_kv_len == max(plain.pad_kv_len, states.pad_kv_len)


def test_draft_steps_without_limits_of_their_own_are_refused() -> None:
    drafter = Drafter(16, 1)
    with pytest.raises(GraphError, match="no draft steps") as caught:
        drafter.router.begin_draft(*drafter.start([5]), drafter.router.graph_state(LIMITS))
    assert "draft=(steps, topk)" in str(caught.value)


@pytest.mark.parametrize("limits", [(STEPS - 1, 1), (STEPS, 2)])
def test_more_steps_or_another_breadth_than_the_limits_are_refused(limits: tuple[int, int]) -> None:
    drafter = Drafter(16, 1)
    state = drafter.router.graph_state(replace(LIMITS, draft=limits))
    with pytest.raises(GraphError, match="do not fit the graph"):
        drafter.router.begin_draft(*drafter.start([5]), state)


# --- what cannot be expressed ------------------------------------------------------------------------------------------------


def test_rows_of_several_tokens_are_no_draft_steps() -> None:
    drafter = Drafter(16, 1)
    _, draft = drafter.start([5, 17])
    batch = build_batch([2, 1], [7, 18], PoolRows(16, [[1], [2, 3]], write=False), "draft")
    with pytest.raises(BatchError, match="one token a row"):
        branch_batch(batch, draft)


def test_slots_of_another_shape_are_refused() -> None:
    batch, draft = Drafter(16, 1).start([5, 17])
    for wrong in (replace(draft, topk=2), replace(draft, steps=2), DraftSteps(STEPS, 1, draft.slots[:1])):
        with pytest.raises(BatchError, match="needed is"):
            branch_batch(batch, wrong)


def test_a_rank_s_share_of_the_keys_is_refused() -> None:
    batch, draft = Drafter(16, 1).start([5, 17])
    batch.addresses = (replace(batch.kv(0), local_lens=batch.kv(0).kv_lens),)
    with pytest.raises(BatchError, match="one rank's share"):
        branch_batch(batch, draft)


def test_states_have_no_branches() -> None:
    """Those of a hybrid target stay in a batch of its draft model; a draft model that reads them cannot draft a tree."""
    drafter = Drafter(16, 2)
    batch, draft = drafter.start([5, 17])
    slots = torch.tensor([1, 2], dtype=torch.int32)
    states = StateAddress(slots, slots, torch.tensor([False, False]))
    mixed = replace(batch, addresses=(batch.kv(0), states), _views={})
    chain = DraftSteps(STEPS, 1, draft.slots[:, :1])
    for steps in (draft, chain):
        assert [step.addresses[1] for step in step_batches(mixed, steps)] == [states] * STEPS
    (group,) = [g for g in drafter.router._groups if g.plan.group.model == "draft"]
    group.keeps_keys = False
    with pytest.raises(BatchError, match="each branch needs a state of its own"):
        drafter.router.begin_draft(batch, draft)


def test_exact_lengths_are_asked_for_where_the_plan_needs_them() -> None:
    drafter = Drafter(16, 1)
    batch, draft = drafter.start([5, 17])
    (group,) = [g for g in drafter.router._groups if g.plan.group.model == "draft"]
    phases = {name: replace(phase, host_lengths="exact") for name, phase in group.plan.phases.items()}
    group.plan = replace(group.plan, phases=phases)
    batch.cpu_exact = False
    with pytest.raises(BatchError, match="exact lengths on the host"):
        drafter.router.begin_draft(batch, draft)


def test_a_graph_state_of_drafts_serves_the_hook_s_default_alone() -> None:
    """The hook of a bound backend takes the states that the router makes."""
    drafter = Drafter(16, 1)
    state = drafter.router.graph_state(replace(LIMITS, draft=(STEPS, 1)))
    ((_, states),) = state.drafts.items()
    assert isinstance(states, DraftStates)
    (group,) = [g for g in drafter.router._groups if g.plan.group.model == "draft"]
    (bound,) = group.backends.values()
    batch, draft = drafter.start([5, 17])
    first = bound.attn_draft_metadata(batch, group.plan.group, draft, states)
    assert bound.attn_draft_metadata(*drafter.start([9, 1])[:1], group.plan.group, draft, states) == first
