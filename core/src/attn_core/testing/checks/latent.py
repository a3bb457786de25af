"""Latent attention (``mla``), absorbed form: numbers, scale, LSE, poison, padding, lanes and drafts."""

from __future__ import annotations

from typing import Any

from attn_core.binding import bind_backend
from attn_core.geometry import MlaGeometry
from attn_core.testing.bench import K_SCALE, Q_SCALE, Bench
from attn_core.testing.checks._registry import check
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.elements import torch_dtype
from attn_core.testing.guards import same_bits
from attn_core.testing.harness import Result, Session, result_of
from attn_core.testing.mla_cases import MlaCase, build_mla, latent_spec, mla_context
from attn_core.testing.oracle_mla import attend_absorbed
from attn_core.testing.spec import CaseSpec
from attn_core.testing.trees import TREES

_MLA = ("mla",)


def geometry_of(bench: Bench, factor: float = 1.0) -> MlaGeometry:
    """The cell's geometry; the scale is that of the expanded width, times an odd factor."""
    width, latent = bench.ask.head_dims
    wide = latent >= 512
    nope, v_dim = (128, 128) if wide else (latent // 2, latent // 2)
    scale = 1.3 * factor * float(nope + width - latent) ** -0.5
    if not wide:
        scale *= 0.7
    if bench.ask.dtypes[0].startswith("fp8"):
        scale /= Q_SCALE
    return MlaGeometry(bench.ask.heads[0], latent, width - latent, nope, v_dim, scale)


def _spec(bench: Bench, geometry: MlaGeometry, **fields: Any) -> CaseSpec:
    base = bench.spec(query_lens=(1,), kv_lens=(1,))
    lens = bench.lengths(bench.ask.phase, bench.ask.page_size)
    names = ("dtype", "kv_dtype", "out_dtype", "page_size", "device", "seed", "form", "unused", "host", "needs_lse")
    chosen: dict[str, Any] = {name: getattr(base, name) for name in names}
    chosen |= {"query_lens": lens[0], "kv_lens": lens[1]}
    if base.kv.startswith("fp8"):
        chosen["k_scale"] = K_SCALE
    return latent_spec(geometry, bench.ask.phase, **{**chosen, **fields})


def _open(bench: Bench, case: MlaCase) -> Session:
    manifest = bench.backend.manifest
    context = mla_context(case, manifest, bench.variant, bench.row)
    backend = bench.backend.create(manifest, bench.variant, context)
    return Session(bind_backend(backend, manifest, bench.variant, (case.spec.phase,)), context)


def _run(session: Session, case: MlaCase) -> Result:
    metadata = session.metadata(case.batch, case.spec.phase)
    session.in_graph(metadata)
    if case.inputs.store and not session.fuses_store(case.spec.phase):
        session.call("attn_store", case.inputs, case.layer, case.cache, case.batch.kv(case.pool_index))
    hook = "attn_decode" if case.spec.phase in ("decode", "draft") else "attn_extend"
    return result_of(hook, session.call(hook, case.inputs, case.layer, case.cache, metadata, case.out))


def _judge(bench: Bench, geometry: MlaGeometry, spec: CaseSpec, session: Session | None = None) -> list[str]:
    case = build_mla(geometry, spec)
    want = attend_absorbed(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
    result = _run(session or _open(bench, case), case)
    limits, tokens = tolerance(spec.dtype, spec.kv, spec.out), case.batch.num_tokens
    found = [compare_out(result.out, want, limits.out, tokens)]
    if spec.needs_lse:
        found.append(compare_lse(result.lse, want, limits.lse, tokens))
    problems = [str(item) for item in found if item is not None]
    if result.out.dtype != torch_dtype(spec.out):
        problems.append(f"out has type {result.out.dtype}, needs {torch_dtype(spec.out)}")
    if bench.row.padded_out == "zero" and bool((result.out[tokens:] != 0).any()):
        problems.append("padded_out is declared zero; padded tokens are not")
    return problems + case.problems()


def _require(bench: Bench, geometry: MlaGeometry, spec: CaseSpec) -> None:
    def judge(candidate: CaseSpec) -> list[str]:
        return _judge(bench, geometry, candidate)

    bench.require_none(judge(spec), spec, judge)


@check(role="absorbed", kinds=_MLA, spread="all")
def absorbed_numbers(bench: Bench) -> None:
    """Attention over latent rows equals the oracle for 1, p - 1, p, p + 1 and 3p + 5 keys, poison elsewhere (case C37)."""
    geometry = geometry_of(bench)
    _require(bench, geometry, _spec(bench, geometry, shared=bench.turn % 2))


@check(role="absorbed", kinds=_MLA)
def absorbed_scale(bench: Bench) -> None:
    """The scale is the model's, never one over the root of the latent width."""
    for factor in (3.0, 0.3):
        geometry = geometry_of(bench, factor)
        _require(bench, geometry, _spec(bench, geometry))


@check("lse", role="absorbed", kinds=_MLA, spread="all")
def absorbed_lse(bench: Bench) -> None:
    """The LSE is fp32 [T, H] in natural logarithms, whatever the page layout (case C69)."""
    geometry = geometry_of(bench)
    _require(bench, geometry, _spec(bench, geometry, needs_lse=True, form=("csr", "table")[bench.turn % 2]))


@check(role="absorbed", kinds=_MLA)
def latent_unused_slots(bench: Bench) -> None:
    """NaN, infinity or 1e30 in unused latent slots leave every bit of the result as it is with zeros (case C70)."""
    geometry = geometry_of(bench)
    outs = {}
    for poison in ("zero", "nan", "inf", "big"):
        case = build_mla(geometry, _spec(bench, geometry, unused=poison))
        outs[poison] = _run(_open(bench, case), case).out[: case.batch.num_tokens]
    wrong = [p for p in ("nan", "inf", "big") if not same_bits(outs[p].contiguous(), outs["zero"].contiguous())]
    bench.require_none([f"unused slots with {poison} change the result" for poison in wrong])


@check(role="absorbed", kinds=_MLA)
def latent_padding(bench: Bench) -> None:
    """Rows and tokens of padding write no slot and leave in the result what padded_out declares (case C76)."""
    geometry = geometry_of(bench)
    _require(bench, geometry, _spec(bench, geometry, pad_rows=3, pad_tokens=5))


@check("zero_rows", role="absorbed", kinds=_MLA, phases=("prefill", "draft_extend"))
def latent_zero_rows(bench: Bench) -> None:
    """Rows without queries leave the others alone."""
    geometry = geometry_of(bench)
    _require(bench, geometry, _spec(bench, geometry, query_lens=(0, 2, 0, 1), kv_lens=(3, 3, 1, 6)))


@check(role="absorbed", kinds=_MLA, spread="phase")
def latent_lanes(bench: Bench) -> None:
    """Two steps in flight, metadata first: all state of a step lives in its metadata and its lane."""
    geometry = geometry_of(bench)
    first = _spec(bench, geometry, lane=0)
    second = first.but(lane=1, seed=first.seed + 5, query_lens=first.query_lens[::-1], kv_lens=first.kv_lens[::-1])
    cases = [build_mla(geometry, spec) for spec in (first, second)]
    session = _open(bench, cases[0])
    hook = "attn_decode" if bench.ask.phase in ("decode", "draft") else "attn_extend"
    plans = [session.metadata(case.batch, bench.ask.phase) for case in cases]
    for case, metadata in zip(cases, plans, strict=True):
        session.in_graph(metadata)
        session.call("attn_store", case.inputs, case.layer, case.cache, case.batch.kv(case.pool_index))
    for case, metadata in zip(cases, plans, strict=True):
        out = session.call(hook, case.inputs, case.layer, case.cache, metadata, case.out)[0]
        want = attend_absorbed(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
        limit = tolerance(case.spec.dtype, case.spec.kv, case.spec.out).out
        found = compare_out(out, want, limit, case.batch.num_tokens)
        bench.require_none([] if found is None else [str(found)], case.spec)


@check("spec_topk1", role="absorbed", kinds=_MLA, phases=("verify",), spread="all")
def latent_verify_chain(bench: Bench) -> None:
    """A chain of drafts is causal among itself and sees the whole prefix."""
    geometry, page = geometry_of(bench), bench.ask.page_size
    _require(bench, geometry, _spec(bench, geometry, query_lens=(4,) * 3, kv_lens=(4, page + 4, 2 * page + 5)))


@check("spec_tree", role="absorbed", kinds=_MLA, phases=("verify",), spread="all")
def latent_verify_tree(bench: Bench) -> None:
    """A draft sees the prefix, its ancestors and itself; the trees of the rows differ."""
    geometry, page = geometry_of(bench), bench.ask.page_size
    parents = tuple(tuple(TREES[name](5)) for name in ("binary", "star", "forest"))
    spec = _spec(bench, geometry, query_lens=(5,) * 3, kv_lens=(page + 6, 5, 2 * page + 5), parents=parents)
    _require(bench, geometry, spec)
