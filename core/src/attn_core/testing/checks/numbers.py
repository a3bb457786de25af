"""Numbers: what every backend must get right, and the features that change a formula but not a mask."""

from __future__ import annotations

import math

import torch

from attn_core.testing.batches import build
from attn_core.testing.bench import Bench
from attn_core.testing.checks._registry import check
from attn_core.testing.oracle_mha import attend
from attn_core.testing.spec import Case


@check(spread="all")
def attend_numbers(bench: Bench) -> None:
    """Attention equals the oracle for 1, p - 1, p, p + 1 and 3p + 5 keys on permuted pages, poison elsewhere (case C37)."""
    bench.require(bench.spec(shared=bench.turn % 2))


@check(spread="types")
def scale_is_given(bench: Bench) -> None:
    """The softmax scale is the layer's, whatever the head dims: three times and a third of the usual one."""
    for factor in (3.0, 0.3):
        geometry = bench.geometry()
        bench.require(bench.spec(bench.geometry(scale=geometry.scale * factor)))


@check(spread="types")
def kv_scales(bench: Bench) -> None:
    """Scales of a quantised cache are applied once each, to old and new tokens alike, from host or device (cases C63, C64)."""
    if not bench.ask.dtypes[1].startswith(("fp8", "fp4")):
        return
    for k_scale, v_scale in ((0.125, 1.0), (1.0, 8.0), (8.0, 0.1)):
        scale = bench.geometry().scale / max(k_scale, 1.0)
        spec = bench.spec(bench.geometry(scale=scale), k_scale=k_scale, v_scale=v_scale)
        bench.require(spec)
        bench.require(spec, _device_only)


def _device_only(case: Case) -> None:
    """Scales whose value the host does not know."""
    for scale in (case.layer.k_scale, case.layer.v_scale):
        if scale is not None:
            scale.value = None


@check("sinks", spread="all")
def sinks(bench: Bench) -> None:
    """exp(sink) is in the denominator of its head and nowhere else, in natural logarithms."""
    heads = bench.ask.heads[0]
    values = tuple(((7 * h) % 5 - 2) * 0.8 for h in range(heads))
    bench.require(bench.spec(bench.geometry(sinks=True), sinks=values))


@check("sinks", phases=("decode",), spread="types")
def sink_by_hand(bench: Bench) -> None:
    """One key with logit 0: sinks of 0, -inf and ln 3 leave 1/2, 1 and 1/4 of the value (case C18)."""
    heads = bench.ask.heads[0]
    for value, share in ((0.0, 0.5), (-math.inf, 1.0), (math.log(3.0), 0.25)):
        geometry = bench.geometry(sinks=True)
        spec = bench.spec(geometry, kv_lens=(1,), sinks=(value,) * heads, needs_lse=False)
        case = build(spec)
        case.inputs.q.zero_()
        want = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)
        alone = attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index, partial=True)
        torch.testing.assert_close(want.out, share * alone.out, rtol=1e-6, atol=1e-6)
        bench.require_none(bench.compare(case, bench.open(case).run(case), want), spec)


@check("softcap", spread="all")
def softcap(bench: Bench) -> None:
    """Logits become cap * tanh(logits / cap) after the scale and before the mask."""
    bench.require(bench.spec(bench.geometry(softcap=(0.6, 30.0)[bench.turn % 2])))


@check("lse", spread="all")
def lse(bench: Bench) -> None:
    """The LSE is fp32 [T, H] in natural logarithms, of long and short rows alike (case C69)."""
    bench.require(bench.spec(needs_lse=True))


@check("lse", "sinks")
def lse_with_sinks(bench: Bench) -> None:
    """The LSE includes the sink."""
    heads = bench.ask.heads[0]
    spec = bench.spec(bench.geometry(sinks=True), sinks=tuple(0.5 * h - 1.0 for h in range(heads)), needs_lse=True)
    bench.require(spec)


@check("partial")
def partial(bench: Bench) -> None:
    """A partial result leaves the sinks out of the weights and of the LSE."""
    heads = bench.ask.heads[0]
    geometry = bench.geometry(sinks="sinks" in bench.row.features)
    sinks_ = tuple(0.5 * h - 1.0 for h in range(heads)) if geometry.sinks else None
    bench.require(bench.spec(geometry, sinks=sinks_, needs_lse="lse" in bench.row.features, partial=True))


@check("shared_kv", spread="types")
def shared_kv(bench: Bench) -> None:
    """A layer without k and v attends to the cache of another layer and writes nothing."""
    bench.require(bench.spec(give_kv=False, store=False))


@check("zero_rows", phases=("prefill", "draft_extend"))
def zero_rows(bench: Bench) -> None:
    """Rows without queries have no tokens; rows without keys give 0 and -inf; both may stand anywhere (case C75)."""
    page = bench.ask.page_size
    bench.require(bench.spec(query_lens=(0, 2, 0, 1), kv_lens=(page, 3, 0, page + 1)))
    bench.require(bench.spec(query_lens=(0, 0), kv_lens=(3, 1)))


@check("zero_rows", "lse", "cross", phases=("prefill",))
def rows_without_keys(bench: Bench) -> None:
    """Queries whose row has no key give exactly 0 and an LSE of exactly -inf."""
    spec = bench.spec(
        bench.geometry(causal=False), query_lens=(2, 1, 3), kv_lens=(0, 4, 0), store=False, needs_lse=True
    )
    bench.require(spec)


@check("mixed", phases=("prefill",), spread="all")
def mixed(bench: Bench) -> None:
    """One call serves decode rows and prefill rows together."""
    page = bench.ask.page_size
    spec = bench.spec(query_lens=(1, 1, 4, 2), kv_lens=(page + 1, 1, 4, 2 * page + 3), decode_rows=2)
    bench.require(spec)
