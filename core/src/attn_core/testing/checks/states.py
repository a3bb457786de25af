"""Recurrent states (``gdn``): outputs, the states a step leaves behind, and the slots it must not touch."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.binding import bind_backend
from attn_core.geometry import GdnGeometry
from attn_core.layers import GdnCache
from attn_core.testing.bench import Bench, NotHere
from attn_core.testing.checks._registry import check
from attn_core.testing.declared import accepted
from attn_core.testing.elements import torch_dtype
from attn_core.testing.gdn_cases import GdnCase, GdnSpec, build_gdn, context_for
from attn_core.testing.guards import same_bits
from attn_core.testing.harness import Session, result_of
from attn_core.testing.oracle_gdn import GdnAnswer, RowState, committed, run, written
from attn_core.testing.trees import TREES

_GDN = ("gdn",)
_EXTEND = ("prefill", "draft_extend")
_ORDINARY = ("prefill", "draft_extend", "decode")
#: Largest relative error of outputs and states: rounding of inputs and, for bf16 states, of every step's state.
_LIMITS = {"fp32": 2e-4, "fp16": 1e-2, "bf16": 3e-2}


def _spec(bench: Bench, **fields: Any) -> GdnSpec:
    k_dim, v_dim = bench.ask.head_dims
    k_heads, v_heads = bench.ask.heads
    geometry = GdnGeometry(
        k_heads, v_heads, k_dim, v_dim, conv_width=4, conv_dim=2 * k_heads * k_dim + v_heads * v_dim,
        state_dtype=bench.ask.dtypes[1], conv_dtype=bench.ask.dtypes[0],
    )  # fmt: skip
    chosen: dict[str, Any] = {"dtype": bench.ask.dtypes[0], "seed": bench.turn, "device": bench.device, **fields}
    if "query_lens" not in chosen:
        chosen["query_lens"] = (1, 1, 1) if bench.ask.phase == "decode" else (3, 1, 7)
    return GdnSpec(chosen.pop("geometry", geometry), chosen.pop("phase", bench.ask.phase), **chosen)


def _open(bench: Bench, case: GdnCase) -> Session:
    manifest = bench.backend.manifest
    context = context_for(case, manifest, bench.variant, bench.row)
    backend = bench.backend.create(manifest, bench.variant, context)
    return Session(bind_backend(backend, manifest, bench.variant, (case.spec.phase,)), context)


def _step(session: Session, case: GdnCase, give_out: bool = True) -> tuple[torch.Tensor, Any]:
    metadata = session.metadata(case.batch, case.spec.phase)
    session.in_graph(metadata)
    hook = "attn_decode" if case.spec.phase in ("decode", "draft") else "attn_extend"
    out = case.out if give_out else None
    return result_of(hook, session.call(hook, case.inputs, case.layer, case.cache, metadata, out)).out, metadata


def _error(have: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest magnitude; inf for anything that is not a number."""
    if want.numel() == 0:
        return 0.0
    difference = float((have.double().cpu() - want).abs().max())
    return difference / max(float(want.abs().max()), 1e-3) if difference == difference else float("inf")


def _compare(
    bench: Bench, case: GdnCase, out: torch.Tensor, answer: GdnAnswer, slots: dict[int, RowState]
) -> list[str]:
    """Outputs, states of `slots`, and everything else that must be unchanged."""
    limit = max(_LIMITS[case.spec.dtype], _LIMITS[case.spec.geometry.state_dtype])
    real, problems = case.batch.num_tokens, []
    if out.dtype != torch_dtype(case.spec.dtype):
        problems.append(f"out has type {out.dtype}, needs {torch_dtype(case.spec.dtype)}")
    if (error := _error(out[:real], answer.out[:real])) > limit:
        problems.append(f"out: error {error:.3g}, allowed {limit:.3g}")
    if bench.row.padded_out == "zero" and bool((out[real:] != 0).any()):
        problems.append("padded_out is declared zero; padded tokens are not")
    for slot, state in slots.items():
        for name, want in (("state", state.state), ("conv", state.conv)):
            if case.spec.external_conv and name == "conv":
                continue
            if (error := _error(getattr(case.cache, name)[slot], want)) > limit:
                problems.append(f"{name} of slot {slot}: error {error:.3g}, allowed {limit:.3g}")
    return [f"{line} [{_text(case.spec)}]" for line in problems + case.problems(slots)]


def _text(spec: GdnSpec) -> str:
    shown = {name: getattr(spec, name) for name in ("query_lens", "fresh", "forked", "checkpoints", "pad_rows")}
    return f"{spec.phase}, " + ", ".join(f"{name} {value}" for name, value in shown.items() if value)


def _require(bench: Bench, spec: GdnSpec) -> None:
    case = build_gdn(spec)
    answer = run(case.batch, case.layer, case.cache, case.inputs, pool=1)
    out, _ = _step(_open(bench, case), case)
    bench.require_none(_compare(bench, case, out, answer, written(case.batch, answer, spec.phase, pool=1)))


@check(kinds=_GDN, phases=_ORDINARY, spread="all")
def scan_numbers(bench: Bench) -> None:
    """Outputs and last states of fresh and continuing rows equal the oracle; other slots keep their bits (case C87)."""
    _require(bench, _spec(bench, fresh=(0,)))
    _require(bench, _spec(bench, fresh=(), l2norm=bench.turn % 2 == 0))


@check(kinds=_GDN, phases=_ORDINARY)
def fresh_rows(bench: Bench) -> None:
    """A fresh row starts from zero, whatever its recycled slot holds (here NaN)."""
    _require(bench, _spec(bench, fresh=(0, 1, 2)))


@check(kinds=_GDN, phases=_ORDINARY)
def forked_rows(bench: Bench) -> None:
    """A row that reads one slot and writes another leaves the first as it was."""
    _require(bench, _spec(bench, forked=(0, 2)))


@check(kinds=_GDN, phases=_EXTEND)
def long_rows(bench: Bench) -> None:
    """Rows around the length of a chunk (64): 63, 64, 65 tokens."""
    _require(bench, _spec(bench, query_lens=(63, 65, 64), fresh=(1,)))


@check(kinds=_GDN, phases=("prefill",))
def split_prompt(bench: Bench) -> None:
    """A prompt in pieces leaves the states, and gives the outputs, of one step (case C88)."""
    whole = build_gdn(_spec(bench, query_lens=(19,), fresh=(0,)))
    want = run(whole.batch, whole.layer, whole.cache, whole.inputs, pool=1)
    session, cuts = _open(bench, whole), (0, 7, 16, 18, 19)
    for number, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
        part = build_gdn(whole.spec.but(query_lens=(stop - start,), fresh=(0,) if number == 0 else ()))
        part.layer, part.cache = whole.layer, whole.cache
        part.batch.addresses = (part.batch.addresses[0], *whole.batch.addresses[1:])
        part.batch.state(1).fresh = torch.tensor([number == 0], device=bench.device)
        part.inputs = whole.inputs._replace(
            mixed_qkv=whole.inputs.mixed_qkv[start:stop] if whole.inputs.mixed_qkv is not None else None,
            a=whole.inputs.a[start:stop],
            b=whole.inputs.b[start:stop],
        )
        out, _ = _step(session, part)
        state = {int(whole.batch.state(1).write_slots[0]): want.steps[0][stop - 1]}
        part.before, part.guards = whole.cache, []
        answer = GdnAnswer(want.out[start:stop], want.steps)
        bench.require_none([f"tokens {start}:{stop} of 19: {p}" for p in _compare(bench, part, out, answer, state)])


@check(kinds=_GDN, phases=_ORDINARY)
def state_padding(bench: Bench) -> None:
    """Rows of padding have slot -1 and write no slot, neither the dummy nor the last (cases C76, C128)."""
    _require(bench, _spec(bench, pad_rows=2, pad_tokens=3))


@check("zero_rows", kinds=_GDN, phases=_EXTEND)
def state_zero_rows(bench: Bench) -> None:
    """A row without tokens keeps its state."""
    _require(bench, _spec(bench, query_lens=(0, 4, 0)))


@check("checkpoints", kinds=_GDN, phases=("prefill",))
def checkpoints(bench: Bench) -> None:
    """States at given lengths, multiples of the state chunk, go to their own slots while prefilling."""
    _require(bench, _spec(bench, query_lens=(130, 64), checkpoints=((0, 64), (0, 128), (1, 64))))


@check("external_conv", kinds=_GDN, phases=_ORDINARY)
def external_conv(bench: Bench) -> None:
    """q, k and v after a convolution of the caller; the convolution state is left alone."""
    spec = _spec(bench, external_conv=True)
    case = build_gdn(spec)
    answer = run(case.batch, case.layer, case.cache, case.inputs, pool=1)
    out, _ = _step(_open(bench, case), case)
    bench.require_none(_compare(bench, case, out, answer, written(case.batch, answer, spec.phase, pool=1)))


@check("strided_q", kinds=_GDN, phases=_ORDINARY)
def state_strides(bench: Bench) -> None:
    """Inputs that are slices of wider buffers give what contiguous ones give."""
    _require(bench, _spec(bench, strided=True))


@check(kinds=_GDN, phases=_ORDINARY, spread="phase")
def steps_of_two_lanes(bench: Bench) -> None:
    """Two steps in flight, metadata first: nothing of a step lives outside its metadata."""
    cases = [build_gdn(_spec(bench, lane=lane, seed=bench.turn + lane, fresh=(lane,))) for lane in (0, 1)]
    answers = [run(case.batch, case.layer, case.cache, case.inputs, pool=1) for case in cases]
    session = _open(bench, cases[0])
    plans = [session.metadata(case.batch, case.spec.phase) for case in cases]
    hook = "attn_decode" if bench.ask.phase == "decode" else "attn_extend"
    for case, answer, metadata in zip(cases, answers, plans, strict=True):
        session.in_graph(metadata)
        out = session.call(hook, case.inputs, case.layer, case.cache, metadata, case.out)[0]
        slots = written(case.batch, answer, case.spec.phase, pool=1)
        bench.require_none(_compare(bench, case, out, answer, slots))


@check("batch_invariant", kinds=_GDN, phases=_EXTEND)
def state_batch_invariance(bench: Bench) -> None:
    """A row's bits do not depend on how the batch is padded."""
    padded, plain = build_gdn(_spec(bench, pad_tokens=3)), build_gdn(_spec(bench))
    tokens = plain.batch.padded_tokens
    cut = {n: t[:tokens] for n in ("mixed_qkv", "a", "b") if (t := getattr(padded.inputs, n)) is not None}
    plain.inputs, plain.layer = padded.inputs._replace(**cut), padded.layer
    plain.cache = GdnCache(padded.cache.conv.clone(), padded.cache.state.clone())
    outs = [_step(_open(bench, case), case)[0][:tokens].clone() for case in (padded, plain)]
    bench.require_none([] if same_bits(*outs) else ["padding changes the bits of real rows"])


# --- verify ---------------------------------------------------------------------------------------------------------------


def _verify(bench: Bench, spec: GdnSpec, accepted_counts: list[int]) -> None:
    """Verify, look at the slots, commit, look again."""
    case = build_gdn(spec)
    answer = run(case.batch, case.layer, case.cache, case.inputs, pool=1)
    session = _open(bench, case)
    out, metadata = _step(session, case)
    slots = written(case.batch, answer, "verify", pool=1)
    bench.require_none([f"after verify: {p}" for p in _compare(bench, case, out, answer, slots)])
    counts = accepted_counts + [0] * spec.pad_rows
    tensor = torch.tensor(counts, dtype=torch.int32, device=bench.device)
    session.call("attn_commit", case.batch, case.group, (case.cache,), metadata, tensor)
    if case.batch.state(1).step_slots is None:
        slots = committed(case.batch, answer, accepted_counts, pool=1)
    problems = _compare(bench, case, out, answer, slots)
    bench.require_none([f"after commit of {accepted_counts}: {p}" for p in problems])


def _verify_kinds(bench: Bench) -> list[str]:
    return accepted(bench.row, "verify_state", ("intermediate", "slots"))


@check("spec_topk1", kinds=_GDN, phases=("verify",))
def verify_and_commit(bench: Bench) -> None:
    """Verify leaves the slot alone; commit moves it to the last accepted draft, rejected drafts leave no trace."""
    if "intermediate" not in _verify_kinds(bench):
        raise NotHere("verify_state intermediate is not declared")
    spec = _spec(bench, query_lens=(4, 4, 4), pad_rows=1)
    _verify(bench, spec, [1, 4, 0])
    _verify(bench, spec.but(fresh=(1,)), [3, 2, 1])


@check("spec_topk1", kinds=_GDN, phases=("verify",))
def verify_in_slots(bench: Bench) -> None:
    """States after every draft go to slots of their own; the next verify resumes after the last accepted draft."""
    if not any(c.axis == "verify_state" for c in bench.row.conditions) and bench.backend.manifest.name != "reference":
        raise NotHere("verify_state is not declared")
    if "slots" not in _verify_kinds(bench):
        raise NotHere("verify_state slots is not declared")
    _verify(bench, _spec(bench, query_lens=(3, 3, 3, 3), step_slots=True), [1, 0, 2, 3])


@check("spec_tree", kinds=_GDN, phases=("verify",))
def verify_tree_states(bench: Bench) -> None:
    """A draft of a tree starts from its parent's state; commit takes the state of the last accepted draft."""
    if "intermediate" not in _verify_kinds(bench):
        raise NotHere("verify_state intermediate is not declared")
    parents = tuple(tuple(TREES[name](5)) for name in ("binary", "star", "forest"))
    _verify(bench, _spec(bench, query_lens=(5, 5, 5), parents=parents), [5, 2, 4])
