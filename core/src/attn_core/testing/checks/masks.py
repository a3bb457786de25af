"""Masks: windows, chunks, spans, cross attention and draft trees; every boundary from both sides."""

from __future__ import annotations

import torch

from attn_core.errors import BatchError
from attn_core.testing.batches import build, watch
from attn_core.testing.bench import Bench, NotHere
from attn_core.testing.checks._registry import check
from attn_core.testing.declared import accepted
from attn_core.testing.spec import Case, CaseSpec
from attn_core.testing.trees import TREES

_EXTEND = ("prefill", "draft_extend")


def _windows(bench: Bench) -> list[int]:
    """Windows to try that the row allows: the smallest, and around a page; cells take turns."""
    page = bench.ask.page_size
    found = accepted(bench.row, "window", dict.fromkeys((1, page) if bench.turn % 2 else (2, 5, page + 1)))
    return found or accepted(bench.row, "window", (64, 128, 256, 512, 1024, 4096))[:1]


@check("sliding_window", spread="all")
def window(bench: Bench) -> None:
    """A window counts the query's own position: neither one key more nor one less (case C80)."""
    windows = _windows(bench)
    if not windows:
        raise NotHere("no window size that the row allows is known to the kit")
    page = bench.ask.page_size
    for size in windows:
        queries, lens = bench.lengths(bench.ask.phase, page)
        edges = tuple(max(size + q + more, q) for q, more in zip(queries[:3], (-1, 0, 1), strict=True))
        bench.require(bench.spec(bench.geometry(window=size), query_lens=queries[:3] + queries[-1:], kv_lens=edges + lens[-1:]))  # fmt: skip


@check("sliding_window", phases=("prefill", "decode"))
def trimmed(bench: Bench) -> None:
    """Columns of a trimmed pool start at the row's origin, lengths and positions do not: rows with and without one, mixed.

    Reading ``origin`` is part of every address. A backend may refuse such a batch with BatchError at its metadata.
    """
    if not _windows(bench):
        raise NotHere("no window size that the row allows is known to the kit")
    refusals = []
    for number, (window, (page, kernel_page)) in enumerate(
        (window, pages) for window in dict.fromkeys(_windows(bench)[::-2]) for pages in _pool_pages(bench)
    ):
        form = ("table", "csr")[(bench.turn + number) % 2]
        spec = _trimmed_spec(bench, window, page).but(kernel_page=kernel_page, form=form)
        refusal = _refusal(bench, spec)
        if refusal:
            refusals.append(f"{form}, pages of {page} read as {kernel_page}: {refusal}")
        else:
            bench.require(spec)
    if refusals:
        raise NotHere(f"the backend refuses trimmed pools: {'; '.join(refusals)}")


def _pool_pages(bench: Bench) -> list[tuple[int, int]]:
    """(pool's page, kernel's page): as declared, and a page that the row does not take split into slots, as a plan does."""
    page = bench.ask.page_size
    exact = any(c.axis == "page_size" and c.exact for c in bench.row.conditions)
    slots = not exact and bench.ask.layout == "NHD" and accepted(bench.row, "page_size", (1,))
    foreign = [p for p in (16, 4, 64, 256, 12) if not accepted(bench.row, "page_size", (p,))]
    return [(page, page), (foreign[0], 1)] if slots and foreign else [(page, page)]


def _trimmed_spec(bench: Bench, window: int, page: int) -> CaseSpec:
    """First visible keys on a page boundary, before it and after it; one row is trimmed by less than it could be, two not at all."""
    queries = (1,) * 6 if bench.ask.phase == "decode" else (3, 1, 2, 5, 1, 4)
    first = (0, 2 * page, 3 * page - 1, page + 1, 3 * page, 2 * page + 1)
    lens = tuple(max(key + window - 1, 0) + q for key, q in zip(first, queries, strict=True))
    spec = bench.spec(
        bench.geometry(window=window), query_lens=queries, kv_lens=lens, page_size=page, unused="nan", pad_tokens=2
    )
    latest = [spec.latest_origin(row) for row in range(len(lens))]
    latest[4] -= page
    return spec.but(origins=(*latest[:5], 0))


def _refusal(bench: Bench, spec: CaseSpec) -> str:
    """The BatchError with which a backend refuses this batch and would not refuse it untrimmed; empty if it takes it."""
    case, plain = build(spec), build(spec.but(origins=()))
    session = bench.open(case)
    try:
        session.metadata(case.batch, case.phase)
    except BatchError as error:
        bench.open(plain).metadata(plain.batch, plain.phase)
        return str(error).partition("\n")[0]
    return ""


@check("window_right", phases=_EXTEND)
def window_right(bench: Bench) -> None:
    """A query sees window_right keys after its own position."""
    for right in (0, 1, 3):
        geometry = bench.geometry(causal=False, window=4, window_right=right)
        bench.require(bench.spec(geometry, query_lens=(5, 1, 7), kv_lens=(9, 3, 7)))


@check("bidirectional", phases=_EXTEND, spread="all")
def bidirectional(bench: Bench) -> None:
    """Every query of a row sees every key of that row."""
    bench.require(bench.spec(bench.geometry(causal=False), query_lens=(3, 1, 6), kv_lens=(7, 1, 6)))


@check("cross", phases=("prefill", "decode"), spread="all")
def cross(bench: Bench) -> None:
    """Keys of another sequence: not causal, longer or shorter than the queries, nothing is stored."""
    geometry, page = bench.geometry(causal=False), bench.ask.page_size
    queries = (1, 1, 1) if bench.ask.phase == "decode" else (5, 1, 3)
    bench.require(bench.spec(geometry, query_lens=queries, kv_lens=(2, page + 1, 7), store=False))


@check("chunked_local", spread="all")
def chunked_local(bench: Bench) -> None:
    """A query sees the keys of its own chunk only: floor(j / chunk) = floor(p / chunk)."""
    for chunk in accepted(bench.row, "chunk", (4, 7)) or accepted(bench.row, "chunk", (64, 8192))[:1]:
        lens = (chunk, chunk + 1, 2 * chunk, 2 * chunk + 3)
        queries = (1,) * 4 if bench.ask.phase in ("decode", "draft") else (3,) * 4
        bench.require(bench.spec(bench.geometry(chunk=chunk), query_lens=queries, kv_lens=lens))


@check("mm_spans", phases=("prefill",), spread="all")
def spans(bench: Bench) -> None:
    """Tokens of one span see each other in both directions; spans of other rows and other tokens do not."""
    spec = bench.spec(query_lens=(8, 5, 3), kv_lens=(10, 5, 9), spans=((0, 3, 8), (1, 0, 2), (1, 3, 5)))
    bench.require(spec)


@check("mm_spans", "sliding_window", phases=("prefill",))
def spans_in_windows(bench: Bench) -> None:
    """Within a span a key is seen only if it is nearer than the window, in either direction."""
    for size in accepted(bench.row, "window", (2, 3)):
        geometry = bench.geometry(window=size)
        bench.require(bench.spec(geometry, query_lens=(8, 5), kv_lens=(10, 5), spans=((0, 3, 9), (1, 0, 4))))


# --- drafts ---------------------------------------------------------------------------------------------------------------


@check("spec_topk1", phases=("verify",), spread="all")
def verify_chain(bench: Bench) -> None:
    """A chain of drafts is causal among itself and sees the whole prefix."""
    page = bench.ask.page_size
    for width in accepted(bench.row, "draft_tokens", (4,)) or [1]:
        spec = bench.spec(query_lens=(width,) * 3, kv_lens=(width, page + width, 2 * page + 1 + width))
        bench.require(spec)


@check("spec_tree", phases=("verify",), spread="all")
def verify_tree(bench: Bench) -> None:
    """A draft sees the prefix, its ancestors and itself; the trees of the rows differ."""
    page = bench.ask.page_size
    parents = tuple(tuple(TREES[name](6)) for name in ("binary", "star", "forest"))
    bench.require(bench.spec(query_lens=(6,) * 3, kv_lens=(page + 7, 6, 2 * page + 6), parents=parents))


@check("spec_tree", phases=("verify",))
def wide_tree(bench: Bench) -> None:
    """More than 32 drafts need a second mask word, the sign bit of the first included."""
    parents = (tuple(TREES["binary"](36)), tuple(TREES["chain"](36)))
    if not accepted(bench.row, "draft_tokens", (36,)) or not accepted(bench.row, "query_len", (36,)):
        raise NotHere("36 drafts a row are not declared")
    bench.require(bench.spec(query_lens=(36, 36), kv_lens=(40, 36), parents=parents))


@check("spec_tree", "sliding_window", phases=("verify",))
def tree_in_window(bench: Bench) -> None:
    """Windows of a tree count positions, prefix + depth: prefix 10, window 4, tree [root, a, b, a1] (case C43)."""
    for size in accepted(bench.row, "window", (4,)):
        spec = bench.spec(bench.geometry(window=size), query_lens=(4,), kv_lens=(14,), parents=((-1, 0, 0, 1),))
        bench.require(spec)


@check("custom_mask", phases=("verify",))
def tree(bench: Bench) -> None:
    """The bits alone decide among drafts: a mask that is no tree's."""

    def scramble(case: Case) -> None:
        assert case.batch.tree is not None
        generator = torch.Generator().manual_seed(bench.turn)
        drafts = case.batch.tree.depth.shape[1]
        bits = torch.randint(0, 1 << drafts, case.batch.tree.mask_bits.shape[:2], generator=generator)
        bits |= 1 << torch.arange(drafts)
        case.batch.tree.mask_bits.copy_(bits[..., None])
        watch(case)

    parents = (tuple(TREES["chain"](5)),) * 2
    bench.require(bench.spec(query_lens=(5, 5), kv_lens=(9, 5), parents=parents), scramble)
