"""Eligibility: one candidate against one request, with every reason; auto and explicit go through the same test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attn_core.availability import Availability
from attn_core.axes import find_axis
from attn_core.dtypes import LONG_NAMES, canonical
from attn_core.manifest import DEFAULT_RANK, Manifest, Row, Variant
from attn_core.options import Options
from attn_core.planner._padding import padded, pads_of
from attn_core.planner._request import Request
from attn_core.predicate import Condition
from attn_core.reasons import Reason


@dataclass(frozen=True)
class Candidate:
    """One way to serve a request: a backend's variant in a role. ``available`` None means: a described platform, not probed."""

    manifest: Manifest
    variant: Variant
    role: str
    available: Availability | None = None

    @property
    def name(self) -> str:
        """``backend:variant``."""
        return f"{self.manifest.name}:{self.variant.name}"


@dataclass(frozen=True)
class LiveRow:
    """An allow row whose settled conditions all hold; what is left depends on the pool's settings and on other phases.

    ``pads`` says what an adapter pads for it: axis -> (from, to).
    """

    row: Row
    q_dtype: str
    pads: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    deny: tuple[Row, ...] = ()  #: rows that may refuse the padded shapes under a setting

    @property
    def page(self) -> tuple[Condition, ...]:
        """Conditions on the kernel's page size."""
        return self.row.later.get("page_size", ())

    @property
    def format(self) -> tuple[Condition, ...]:
        """Conditions on the cache format."""
        return self.row.later.get("format.name", ())

    @property
    def layout(self) -> tuple[Condition, ...]:
        """Conditions on the cache layout."""
        return self.row.later.get("format.layout", ())


@dataclass(frozen=True)
class Verdict:
    """What the eligibility test found. No ``reasons`` means eligible under the settings that :meth:`fit` accepts.

    ``rank_reason`` is what the order row that gave the rank says.
    """

    candidate: Candidate
    request: Request
    rank: int
    live: tuple[LiveRow, ...] = ()
    deny: tuple[Row, ...] = ()
    reasons: tuple[Reason, ...] = ()
    preferred: bool = False
    rank_reason: str = ""

    @property
    def eligible(self) -> bool:
        """Whether some settings may suit this candidate."""
        return not self.reasons

    def pages(self) -> list[str]:
        """The page sizes its live rows name, as text."""
        return sorted({condition.need for live in self.live for condition in live.page})


@dataclass(frozen=True)
class Setting:
    """Settings of one pool under trial. ``blocks``: the pool's page is a block of memory that kernels may read in parts."""

    page_size: int
    format: str
    layout: str
    blocks: bool = False


@dataclass(frozen=True)
class Fit:
    """How a candidate serves a request under a setting: with which kernel page size, by which row."""

    kernel_page: int
    live: LiveRow


def judge(candidate: Candidate, request: Request, options: Options) -> Verdict:
    """The verdict on one candidate."""
    axes = request.axes
    if candidate.available is not None and candidate.available.versions:
        axes = {**axes, **{f"library.{name}": version for name, version in candidate.available.versions.items()}}
    live, misses = _match_rows(candidate.variant, request, axes)
    denied, pending = _match_deny(candidate.variant.deny, axes, request)
    reasons = [*_policy(candidate, options), *_availability(candidate, axes), *denied]
    if not live:
        reasons += _explain(misses)
    elif not denied:
        live, refused = _deny_padded(candidate.variant.deny, live, axes, request)
        reasons += [] if live else refused
    rank, preferred, why = _rank(candidate.manifest, axes, options)
    return Verdict(candidate, request, rank, tuple(live), tuple(pending), tuple(reasons), preferred, why)


def _policy(candidate: Candidate, options: Options) -> list[Reason]:
    manifest, reasons = candidate.manifest, []
    if manifest.status == "planned" and not options.allow_planned:
        reasons.append(Reason("planned", "kernels are not built yet", fix="--allow-planned for a what-if plan"))
    if manifest.name in options.exclude_backends or manifest.id in options.exclude_backends:
        reasons.append(Reason("excluded", "excluded by the user", asked_by="--exclude-backends"))
    if candidate.name in options.disable_variants or f"{manifest.kind}/{candidate.name}" in options.disable_variants:
        reasons.append(Reason("disabled", "variant disabled by the user", asked_by="--disable-variants"))
    if options.forbid_jit and candidate.variant.jit:
        reasons.append(Reason("jit", "compiles at first use", asked_by="--forbid-jit"))
    return reasons


def _availability(candidate: Candidate, axes: Mapping[str, Any]) -> list[Reason]:
    available = candidate.available
    if available is None:
        return []
    if not available.ok:
        return list(available.reasons) or [Reason("unavailable", "not available here", fix=available.needs)]
    arch = axes.get("arch")
    if available.archs and arch is not None and arch not in available.archs:
        text = ", ".join(available.archs)
        return [Reason("binary", f"its binary has code for {text} only", f"{arch}", fix=available.needs)]
    return []


def _match_rows(
    variant: Variant, request: Request, axes: Mapping[str, Any]
) -> tuple[list[LiveRow], list[list[Reason]]]:
    live: list[LiveRow] = []
    misses: list[list[Reason]] = []
    for row in variant.allow:
        lacking = [_feature_reason(name, asked) for name, asked in request.features.items() if name not in row.features]
        lacking += _unknown_lengths(row.host_lengths or variant.host_lengths, request, axes)
        nearest: list[Condition] | None = None
        for q_dtype in request.q_dtypes or ("",):
            failed = _failed(row.settled, axes, _triple(request, axes, q_dtype))
            if not failed and not lacking:
                live.append(LiveRow(row, q_dtype))
                break
            pads = pads_of(row, request) if failed and not lacking else frozenset[str]()
            found = padded(row, axes, failed, pads) if pads else None
            if found is not None:
                live.append(LiveRow(row, q_dtype, found))
                break
            nearest = failed if nearest is None or len(failed) < len(nearest) else nearest
        else:
            triple = _triple(request, axes, request.q_dtypes[0] if request.q_dtypes else "")
            miss = [_reason(condition, axes, triple, request) for condition in nearest or ()]
            misses.append(miss + lacking)
    return live, misses


def _unknown_lengths(needed: str, request: Request, axes: Mapping[str, Any]) -> list[Reason]:
    """What is missing where a row needs exact lengths on the host and the server has bounds. Towers are packed on the host."""
    if needed != "exact" or axes.get("host_lengths") != "bound" or request.group.backend_kind == "mm":
        return []
    return [Reason("host_lengths", "exact lengths on the host", "upper bounds only", asked_by="--host-lengths")]


def _triple(request: Request, axes: Mapping[str, Any], q_dtype: str) -> tuple[str, str, str] | None:
    """The (q, kv, out) element types of a request when its queries are `q_dtype`."""
    if not q_dtype:
        return axes.get("dtypes")
    return q_dtype, axes.get("format.dtype", request.q_dtypes[0]), request.q_dtypes[0]


def _failed(
    conditions: Iterable[Condition], axes: Mapping[str, Any], triple: tuple[str, str, str] | None
) -> list[Condition]:
    """The conditions that do not hold; an axis that is not known counts as holding."""
    failed = []
    for condition in conditions:
        have = triple if condition.axis == "dtypes" else axes.get(condition.axis)
        if have is not None and not condition.accepts(have):
            failed.append(condition)
    return failed


def _feature_reason(name: str, asked: str) -> Reason:
    return Reason(name, f"{name} is not declared", asked_by=asked)


def _reason(
    condition: Condition, axes: Mapping[str, Any], triple: tuple[str, str, str] | None, request: Request
) -> Reason:
    axis = condition.axis
    have = triple if axis == "dtypes" else axes.get(axis)
    text = str(axes["platform.label"]) if axis == "arch" and "platform.label" in axes else show(axis, have)
    return Reason(axis, condition.need, text, request.asked_by.get(axis, ""))


def show(axis: str, have: Any) -> str:
    """An axis value as people read it."""
    found = find_axis(axis)
    if found is not None and found.form == "dtypes" and isinstance(have, tuple):
        return f"q {LONG_NAMES.get(have[0], have[0])}/kv {LONG_NAMES.get(have[1], have[1])}"
    if axis == "lds_bytes" and have is not None:
        return f"{have} bytes ({int(have) // 1024} KiB) of shared memory a block"
    if isinstance(have, frozenset):
        return ", ".join(sorted(have)) or "none"
    if isinstance(have, tuple):
        return "/".join(map(str, have))
    return str(have).lower() if isinstance(have, bool) else str(have)


def _explain(misses: Sequence[list[Reason]]) -> list[Reason]:
    """One list of reasons for all rows: what every row misses with the union of needs, else the nearest row's misses."""
    if not misses:
        return [Reason("declaration", "no allow row")]
    common = set.intersection(*({reason.code for reason in miss} for miss in misses))
    if not common:  # rows miss different things: what the nearest rows miss, one of which would do
        fewest = min(map(len, misses))
        nearest = {r.code: r for miss in reversed(misses) if len(miss) == fewest for r in miss}
        return [replace(r, need=_shorter(r, r.need)) for r in reversed(nearest.values())]
    joined: list[Reason] = []
    for reason in misses[0]:
        if reason.code in common and reason.code not in {item.code for item in joined}:
            separator = " or " if reason.code == "dtypes" else ", "
            listed = [item.need for miss in misses for item in miss if item.code == reason.code]
            needs = dict.fromkeys(part for need in listed for part in need.split(separator))
            joined.append(replace(reason, need=_shorter(reason, separator.join(needs))))
    return joined


def _shorter(reason: Reason, need: str) -> str:
    """Element types: only those with the query type that was asked for, where there are any."""
    if reason.code != "dtypes":
        return need
    query = canonical(reason.have.partition("/")[0].removeprefix("q "))
    mine = [part for part in need.split(" or ") if part.startswith(f"q {query}/")]
    return " or ".join(mine) or need


def _match_deny(rows: Iterable[Row], axes: Mapping[str, Any], request: Request) -> tuple[list[Reason], list[Row]]:
    """Reasons of the rows that hold, and the rows that depend on what is still to be solved."""
    denied: list[Reason] = []
    pending: list[Row] = []
    triple = _triple(request, axes, request.q_dtypes[0] if request.q_dtypes else "")
    for row in rows:
        for condition in row.settled:
            have = triple if condition.axis == "dtypes" else axes.get(condition.axis)
            if have is None or not condition.accepts(have):
                break
        else:
            if row.later:
                pending.append(row)
            else:
                denied.append(deny_reason(row, request))
    return denied, pending


def _deny_padded(
    rows: Sequence[Row], live: Iterable[LiveRow], axes: Mapping[str, Any], request: Request
) -> tuple[list[LiveRow], list[Reason]]:
    """The live rows whose padded shapes no deny row refuses, and the reasons against the others: kernels see those shapes."""
    kept: list[LiveRow] = []
    refused: list[Reason] = []
    for row in live:
        if row.pads:
            seen = {**axes, **{axis: change[1] for axis, change in row.pads.items()}}
            denied, pending = _match_deny(rows, seen, request)
            refused += [reason for reason in denied if reason not in refused]
            if denied:
                continue
            row = replace(row, deny=tuple(pending))
        kept.append(row)
    return kept, refused


def deny_reason(row: Row, request: Request) -> Reason:
    """The reason a deny row gives, with the flag behind its conditions."""
    asked = [request.asked_by[c.axis] for c in row.conditions if c.axis in request.asked_by]
    return Reason(row.code, row.reason, asked_by=", ".join(dict.fromkeys(asked)), fix=row.fix, link=row.link)


def _rank(manifest: Manifest, axes: Mapping[str, Any], options: Options) -> tuple[int, bool, str]:
    for position, name in enumerate(options.prefer_backends):
        if name in (manifest.name, manifest.id):
            return position - len(options.prefer_backends), True, "--prefer-backends"
    rank, why = DEFAULT_RANK, ""
    matched = False
    for row in manifest.order:
        if (not matched or row.rank < rank) and all(c.holds(axes, unknown=False) for c in row.conditions):
            rank, why, matched = row.rank, row.reason, True
    return rank, False, why


# --- under a setting ----------------------------------------------------------------------------------------------------


def fit(verdict: Verdict, setting: Setting, peers: Mapping[str, str]) -> Fit | None:
    """How the candidate serves under `setting` when other phases are served by `peers`; None if it cannot.

    The largest kernel page wins. A kernel that reads slots (page 1) serves larger pages by splitting, which needs a
    token-major layout; other pages are fixed, unless the pool's page is only a block of a shared allocation. A token
    tree is never served by splitting: its branches need slots of their own, or a kernel that reads pages itself.
    """
    request = verdict.request
    cacheless = request.cacheless
    for kernel_page in _kernel_pages(setting, request):
        for live in verdict.live:
            fits = cacheless or _row_fits(live, setting, kernel_page, request)
            if not fits or (peers and not _peers_hold(live.row, peers)):
                continue
            if denied_by(verdict, setting, kernel_page, peers, live) is None:
                return Fit(kernel_page, live)
    return None


def _kernel_pages(setting: Setting, request: Request) -> tuple[int, ...]:
    page = setting.page_size
    if page == 1 or setting.layout != "NHD" or request.cacheless or request.tree:
        return (page,)
    if setting.blocks:
        return tuple(page // n for n in range(1, page + 1) if page % n == 0)
    return page, 1


def _row_fits(live: LiveRow, setting: Setting, kernel_page: int, request: Request) -> bool:
    pages, formats, layouts, sizes = live.row.pool
    for condition in pages:
        if not condition.accepts(kernel_page) or (kernel_page != setting.page_size and condition.exact):
            return False
    if formats:
        if not all(condition.accepts(setting.format) for condition in formats):
            return False
    elif setting.format != request.axes.get("format.default", setting.format):
        return False
    if layouts:
        if not all(condition.accepts(setting.layout) for condition in layouts):
            return False
    elif setting.layout != "NHD":
        return False
    if sizes and request.elements_per_slot is not None:
        elements = request.elements_per_slot * setting.page_size
        return all(condition.accepts(elements) for condition in sizes)
    return True


def _peers_hold(row: Row, peers: Mapping[str, str]) -> bool:
    for condition in row.later.get("peer", ()):
        name = peers.get(condition.axis.removeprefix("peer."))
        if name is not None and not condition.accepts(name):
            return False
    return True


def denied_by(
    verdict: Verdict, setting: Setting, kernel_page: int, peers: Mapping[str, str], live: LiveRow | None = None
) -> Row | None:
    """The deny row that refuses this setting, if any; with `live`, also those about its padded shapes."""
    rows = verdict.deny if live is None else (*verdict.deny, *live.deny)
    if not rows:
        return None
    slots = verdict.request.elements_per_slot
    values: dict[str, Any] = {
        "page_size": kernel_page,
        "format.name": setting.format,
        "format.layout": setting.layout,
        "pool_elements": None if slots is None else slots * setting.page_size,
        **{f"peer.{phase}": name for phase, name in peers.items()},
    }
    for row in rows:
        pending = (condition for conditions in row.later.values() for condition in conditions)
        if all(values.get(c.axis) is not None and c.accepts(values[c.axis]) for c in pending):
            return row
    return None
