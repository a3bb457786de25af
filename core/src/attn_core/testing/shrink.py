"""From a failing spec to the smallest one that fails in some way, too: fewer rows, shorter rows, plainer choices."""

from __future__ import annotations

from collections.abc import Iterator

from attn_core.testing.batches import UNIFORM
from attn_core.testing.bench import Judge
from attn_core.testing.spec import CaseSpec

#: Plainer values of fields, tried one at a time.
_PLAIN = {
    "strides": "contiguous",
    "storage": "separate",
    "form": "table",
    "shared": 0,
    "pad_rows": 0,
    "pad_tokens": 0,
    "decoy_pool": False,
    "needs_lse": False,
    "spans": (),
    "host": "exact",
    "seed": 0,
    "unused": "nan",
    "origins": (),
}


def shrink(spec: CaseSpec, judge: Judge, budget: int = 60) -> CaseSpec:
    """The smallest failing spec found within `budget` trials. A spec that raises counts as failing, like one with problems."""
    left = budget
    changed = True
    while changed and left > 0:
        changed = False
        for candidate in _smaller(spec):
            left -= 1
            if _fails(candidate, judge):
                spec, changed = candidate, True
                break
            if left <= 0:
                break
    return spec


def _fails(spec: CaseSpec, judge: Judge) -> bool:
    try:
        return bool(judge(spec))
    except ValueError:  # not a possible case, such as more queries than keys
        return False
    except Exception:
        return True


def _smaller(spec: CaseSpec) -> Iterator[CaseSpec]:
    rows = len(spec.query_lens)
    if rows > 1 and not spec.decode_rows:
        yield from (_rows(spec, [row]) for row in range(rows))
        yield from (_rows(spec, [r for r in range(rows) if r != row]) for row in range(rows))
    for row in range(rows):
        for queries, keys in _shorter(spec, row):
            lens, kv_lens = list(spec.query_lens), list(spec.kv_lens)
            lens[row], kv_lens[row] = queries, keys
            yield _trimmed(spec.but(query_lens=tuple(lens), kv_lens=tuple(kv_lens)))
    for name, plain in _PLAIN.items():
        if getattr(spec, name) != plain and not (name == "storage" and spec.storage == "hnd"):
            yield spec.but(**{name: plain})


def _rows(spec: CaseSpec, kept: list[int]) -> CaseSpec:
    """The spec with some of its rows."""
    spans = tuple((kept.index(row), start, end) for row, start, end in spec.spans if row in kept)
    return spec.but(
        query_lens=tuple(spec.query_lens[r] for r in kept),
        kv_lens=tuple(spec.kv_lens[r] for r in kept),
        parents=None if spec.parents is None else tuple(spec.parents[r] for r in kept),
        spans=spans,
        origins=tuple(spec.origins[r] for r in kept) if spec.origins else (),
    )


def _trimmed(spec: CaseSpec) -> CaseSpec:
    """The spec with origins no later than its lengths allow."""
    return spec.but(origins=tuple(min(origin, spec.latest_origin(row)) for row, origin in enumerate(spec.origins)))


def _shorter(spec: CaseSpec, row: int) -> Iterator[tuple[int, int]]:
    """Smaller (query_len, kv_len) of one row: half the prefix, one key less, one query less."""
    queries, keys = spec.query_lens[row], spec.kv_lens[row]
    prefix = keys - queries
    if prefix > 1:
        yield queries, queries + prefix // 2
    if prefix > 0:
        yield queries, keys - 1
    if queries > 1 and spec.phase not in UNIFORM:
        yield queries // 2, prefix + queries // 2
        yield queries - 1, keys - 1
