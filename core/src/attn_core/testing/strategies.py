"""Hypothesis strategies over case specs: lengths at page boundaries, ragged and empty rows, padding, trees, strides.

::

    @given(case_specs())
    def test_my_kernel(spec): ...

Specs are small, so that a failing one shrinks to a row or two; ``build(spec)`` makes the case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from attn_core.geometry import MhaGeometry
from attn_core.testing.batches import UNIFORM
from attn_core.testing.spec import CaseSpec

PHASES = ("prefill", "decode", "verify", "draft_extend")


@st.composite
def geometries(draw: st.DrawFn, dims: Sequence[tuple[int, int]] = ((16, 16), (32, 16))) -> MhaGeometry:
    """Small geometries: GQA ratios 1 to 4, K as wide as V or not, optional window, chunk, soft cap, bidirectional."""
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    qk_dim, v_dim = draw(st.sampled_from(tuple(dims)))
    rule = draw(st.sampled_from(("causal", "window", "chunk", "softcap", "bidirectional", "right")))
    return MhaGeometry(
        q_heads=kv_heads * draw(st.sampled_from((1, 2, 4))),
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        scale=1.3 * float(qk_dim) ** -0.5,
        causal=rule not in ("bidirectional", "right"),
        window=draw(st.integers(1, 9)) if rule == "window" else None,
        window_right=draw(st.integers(0, 3)) if rule == "right" else None,
        chunk=draw(st.integers(1, 9)) if rule == "chunk" else None,
        softcap=draw(st.sampled_from((0.5, 2.0))) if rule == "softcap" else None,
    )


def lengths(page_size: int) -> st.SearchStrategy[int]:
    """Numbers of keys: 0, 1, a page more or less one, several pages, anything small."""
    edges = (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + 5)
    return st.one_of(st.sampled_from(edges), st.integers(0, 2 * page_size + 2))


def trees(drafts: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Parents of each draft of one row, -1 for a root."""
    return st.tuples(*(st.integers(-1, i - 1) for i in range(drafts)))


@st.composite
def case_specs(
    draw: st.DrawFn,
    phases: Sequence[str] = PHASES,
    dtypes: Sequence[tuple[str, str]] = (("fp32", "fp32"),),
    page_sizes: Sequence[int] = (1, 4, 16),
    trimmed: bool = False,
) -> CaseSpec:
    """A spec of up to four rows; every other field may be anything that goes with the phase.

    `trimmed`: windows may come with pools whose rows start at an origin, at the latest one that is possible or before.
    """
    phase, page_size = draw(st.sampled_from(tuple(phases))), draw(st.sampled_from(tuple(page_sizes)))
    dtype, kv_dtype = draw(st.sampled_from(tuple(dtypes)))
    geometry = draw(geometries())
    rows = draw(st.integers(0, 4))
    width = draw(st.integers(1, 5)) if phase == "verify" else 1
    prefixes = [draw(lengths(page_size)) for _ in range(rows)]
    queries = [width if phase in UNIFORM else draw(st.integers(0, 6)) for _ in range(rows)]
    fields: dict[str, Any] = {}
    if phase == "verify" and geometry.causal and draw(st.booleans()):
        fields["parents"] = (
            tuple(tuple(draw(st.integers(-1, i - 1)) for i in range(width)) for _ in range(rows)) or None
        )
    if kv_dtype.startswith(("fp8", "fp4")):
        fields["k_scale"], fields["v_scale"] = draw(st.sampled_from(((0.75, 2.5), (1.25, 0.375))))
    kv_lens = tuple(p + q for p, q in zip(prefixes, queries, strict=True))
    spec = CaseSpec(
        *(geometry, phase, tuple(queries), kv_lens),
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        seed=draw(st.integers(0, 3)),
        form=draw(st.sampled_from(("table", "csr"))),
        unused=draw(st.sampled_from(("nan", "big"))),
        strides=draw(st.sampled_from(("contiguous", "fused", "transposed"))),
        storage=draw(st.sampled_from(("separate", "joint", "hnd"))),
        shared=draw(st.integers(0, 2)),
        pad_rows=draw(st.integers(0, 2)),
        pad_tokens=draw(st.integers(0, 3)) if rows else 0,  # no rows at all is an idle rank: nothing is called
        host=draw(st.sampled_from(("exact", "bound", "none"))),
        needs_lse=draw(st.booleans()),
        **fields,
    )
    if trimmed and rows and geometry.window and draw(st.booleans()):
        pages = [draw(st.integers(0, 2)) for _ in range(rows)]  # pages kept before the latest origin
        origins = tuple(max(spec.latest_origin(row) - kept * page_size, 0) for row, kept in enumerate(pages))
        spec = spec.but(origins=origins, shared=0)
    return spec
