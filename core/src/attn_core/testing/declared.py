"""What a manifest declares, tried out value by value: the candidates for each axis, and the planner's own verdict on them.

Nothing here repeats a rule of the planner. A request is declared if :mod:`attn_core.planner` finds it eligible, so that the
kit runs exactly what a plan could choose and expects a refusal for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attn_core.availability import Availability
from attn_core.capabilities import PHASES
from attn_core.dtypes import BITS, default_format
from attn_core.geometry import LayerGroup
from attn_core.manifest import Manifest, Row, Variant
from attn_core.options import Options
from attn_core.planner._request import Request
from attn_core.planner._verdict import Candidate, Setting, Verdict, fit, judge
from attn_core.platform import Platform
from attn_core.reasons import Reason

_PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Tried where a row gives a range instead of a list; one is no power of two.
_PAGES_OF_A_RANGE = (1, 4, 12, 16, 64, 256)
_LARGEST_PAGE = 1024
_DIMS = (
    (16, 16), (32, 16), (64, 64), (80, 80), (128, 128), (192, 128), (128, 64), (64, 128), (96, 96), (256, 256),
    (40, 40), (72, 72), (512, 512), (576, 512),
)  # fmt: skip
_HEADS = ((4, 2), (3, 1), (6, 2), (2, 2), (8, 1), (16, 2), (16, 16), (32, 8), (64, 8), (64, 1), (128, 1), (128, 128))
_LATENT_DIMS = ((40, 32), (576, 512), (24, 16), (512, 512))
_STATE_HEADS = ((2, 4), (1, 3), (2, 2), (4, 8), (16, 32))
_STATE_DIMS = ((16, 8), (32, 32), (64, 128), (128, 128), (128, 64), (64, 64))
_QUERY_TYPES = ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class Ask:
    """One request to a variant: what the kit runs, or expects to be refused."""

    phase: str
    dtypes: tuple[str, str, str]
    page_size: int
    head_dims: tuple[int, int]
    heads: tuple[int, int]
    layout: str = "NHD"
    features: tuple[str, ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()
    role: str = "attend"


@dataclass(frozen=True)
class Hardware:
    """The platform a run takes place on, and what the plugin's probe says of the variant."""

    platform: Platform
    available: Availability | None = None

    def axes(self) -> dict[str, Any]:
        """Platform axes and library versions."""
        versions = self.available.versions if self.available else {}
        return {**self.platform.axes(), **{f"library.{name}": version for name, version in versions.items()}}


def verdict_of(manifest: Manifest, variant: Variant, ask: Ask, hardware: Hardware) -> Verdict:
    """The planner's verdict on one variant for one request."""
    q, kv, _ = ask.dtypes
    kind = manifest.kind
    axes: dict[str, Any] = {
        **hardware.axes(),
        "phase": ask.phase,
        "role": ask.role,
        "head_dims": ask.head_dims,
        "q_heads": ask.heads[0],
        "kv_heads": ask.heads[1],
        "gqa_ratio": max(ask.heads[0] // ask.heads[1], 1),
        "format.dtype": kv,
        "traits": frozenset(),
        "window": 0,
        "chunk": 0,
        "topk": 0,
        "draft_tokens": 0,
        "max_kv_len": 4096,
        "lanes": 1,
        "interleave": 1,
        "deterministic": False,
        **_switched_off(),
        **dict(ask.extra),
    }
    if kind == "mla":
        axes |= {"form": "ragged" if ask.role == "ragged" else "absorbed"}
    if kind == "gdn":
        axes |= {"state_dtype": kv, "state_dims": ask.head_dims, "verify_state": dict(ask.extra).get("verify_state")}
    if kind != "mm":
        axes["format.default"] = default_format(kv, kind)
    group = LayerGroup("target", "kit", "full", (0,), None)
    features = dict.fromkeys(ask.features, "conformance kit")
    request = Request(group, ask.phase, ask.role, axes, features, {}, _query_types(ask))
    experimental = Options.of({"allow_experimental": True})
    return judge(Candidate(manifest, variant, ask.role, None), _with_dtypes(request, ask), experimental)


def _query_types(ask: Ask) -> tuple[str, ...]:
    return (ask.dtypes[0],)


def _with_dtypes(request: Request, ask: Ask) -> Request:
    """The planner derives ``dtypes`` from the model's type; the kit asks for one triple (of states: by ``state_dtype``)."""
    if "state_dtype" in request.axes:
        return replace(request, q_dtypes=())
    return replace(request, axes={**request.axes, "dtypes": ask.dtypes}, q_dtypes=())


def _switched_off() -> dict[str, Any]:
    names = ("prefix_cache", "dynamic_chunking", "page_major", "hicache", "async_schedule")
    explicit = ("prefill", "decode", "attention", "linear", "linear_base", "page_size", "kv_cache_dtype", "mm")
    return {
        **dict.fromkeys(names, False),
        "chunked_prefill_size": 0,
        "pd_role": "both",
        "batch": 0,
        **{f"explicit.{name}": False for name in explicit},
    }


def refusal(manifest: Manifest, variant: Variant, ask: Ask, hardware: Hardware) -> tuple[Reason, ...]:
    """Why the planner would not give `ask` to this variant; empty if it would."""
    verdict = verdict_of(manifest, variant, ask, hardware)
    if not verdict.eligible:
        return verdict.reasons or (Reason("declaration", "no allow row"),)
    setting = Setting(ask.page_size, default_format(ask.dtypes[1], manifest.kind), ask.layout)
    found = fit(verdict, setting, {})
    if found is None:
        return (Reason("setting", need=f"pages {', '.join(verdict.pages())}", have=f"{setting}"),)
    if found.kernel_page != ask.page_size and manifest.kind != "mm":
        return (Reason("page_size", need=str(found.kernel_page), have=str(ask.page_size)),)
    return ()


def only(variant: Variant, row: Row) -> Variant:
    """The variant with one of its allow rows alone."""
    return replace(variant, allow=(row,))


# --- candidate values ---------------------------------------------------------------------------------------------------


def accepted(row: Row, axis: str, values: Iterable[Any]) -> list[Any]:
    """The values that the row's conditions on one axis accept, in their order; all of them without a condition."""
    conditions = [condition for condition in row.conditions if condition.axis == axis]
    return [value for value in values if all(condition.accepts(value) for condition in conditions)]


def _named(row: Row, axis: str) -> list[Any]:
    """Values that the row writes out itself: scalars, lists, and the bounds of a table."""
    found: list[Any] = []
    for condition in row.conditions:
        if condition.axis == axis:
            value = condition.value
            items = value if isinstance(value, tuple) else (value,)
            for item in items:
                bound = isinstance(item, tuple) and len(item) == 2 and item[0] in ("min", "max", "multiple", "exactly")
                found.append(item[1] if bound else item)
    return found


def page_sizes(row: Row) -> list[int]:
    """Page sizes to try: all that the row lists; of a range its bounds and some between."""
    named = [p for p in _named(row, "page_size") if isinstance(p, int) and not isinstance(p, bool)]
    listed = any(not isinstance(condition.value, tuple) or isinstance(condition.value[0], int) for condition in row.conditions if condition.axis == "page_size")  # fmt: skip
    usual = _PAGES if listed else _PAGES_OF_A_RANGE
    return accepted(row, "page_size", sorted({*usual, *(p for p in named if 1 <= p <= _LARGEST_PAGE)}))


def head_dims(row: Row, most: int = 6) -> list[tuple[int, int]]:
    """Head dims to try: all that the row lists, else up to `most` usual ones, unequal and odd pairs among them."""
    named = [tuple(pair) for pair in _named(row, "head_dims") if isinstance(pair, tuple) and len(pair) == 2]
    listed = accepted(row, "head_dims", [pair for pair in named if all(isinstance(n, int) for n in pair)])
    return list(dict.fromkeys(listed)) or accepted(row, "head_dims", _DIMS)[:most]


def head_counts(row: Row, states: bool = False, most: int = 3) -> list[tuple[int, int]]:
    """(query heads, KV heads) to try: small ones first, ratios 1, 2, 3 and more; of states (key heads, value heads)."""
    found = [
        (q, kv)
        for q, kv in (_STATE_HEADS if states else _HEADS)
        if accepted(row, "q_heads", [q])
        and accepted(row, "kv_heads", [kv])
        and accepted(row, "gqa_ratio", [max(q // kv, 1)])
    ]
    return found[:most]


def latent_dims(row: Row, role: str) -> list[tuple[int, int]]:
    """[latent + rope, latent] to try for the absorbed form, [nope + rope, v] for the ragged one."""
    listed = [pair for pair in head_dims(row) if pair not in _DIMS or pair in _LATENT_DIMS]
    usual = accepted(row, "head_dims", _LATENT_DIMS if role == "absorbed" else ((192, 128), (24, 16)))
    return list(dict.fromkeys([*listed, *usual]))[:4]


def state_dims(row: Row, most: int = 4) -> list[tuple[int, int]]:
    """(k, v) dims of recurrent states to try: those the row lists, else usual ones, unequal pairs among them."""
    named = [tuple(pair) for pair in _named(row, "state_dims") if isinstance(pair, tuple) and len(pair) == 2]
    listed = accepted(row, "state_dims", [pair for pair in named if all(isinstance(n, int) for n in pair)])
    return list(dict.fromkeys(listed)) or accepted(row, "state_dims", _STATE_DIMS)[:most]


def state_types(row: Row) -> list[tuple[str, str, str]]:
    """(model, state, model) types to try: the model is bf16 or fp32 unless the row says which."""
    named = any(condition.axis == "dtypes" for condition in row.conditions)
    models = ("fp32", "bf16", "fp16") if named else ("fp32", "bf16")
    return [
        (model, state, model)
        for model in models
        for state in accepted(row, "state_dtype", ("fp32", "bf16", "fp16"))
        if accepted(row, "dtypes", [(model, model, model)])
    ]


def dtype_triples(row: Row) -> list[tuple[str, str, str]]:
    """(q, kv, out) to try; out is q's type, or a 16-bit one for an fp8 query."""
    found = []
    for q in _QUERY_TYPES:
        for kv in BITS:
            for out in ("bf16", "fp16") if q.startswith("fp8") else (q,):
                found += accepted(row, "dtypes", [(q, kv, out)])
    return [triple for triple in found if accepted(row, "format.dtype", [triple[1]])]


def phases(row: Row) -> list[str]:
    """The phases of the row; speculative ones only if it declares a form of speculation."""
    speculative = {"spec_topk1", "spec_tree"} & row.features
    return [p for p in accepted(row, "phase", PHASES) if p in ("prefill", "decode") or speculative]


def layouts(row: Row) -> list[str]:
    """Cache layouts of the row: token-major alone unless it says more."""
    if not any(condition.axis == "format.layout" for condition in row.conditions):
        return ["NHD"]
    return accepted(row, "format.layout", ("NHD", "HND"))


def asks(manifest: Manifest, variant: Variant, row: Row, hardware: Hardware) -> Iterator[Ask]:
    """Every phase x dtypes x page size of one row; head dims, head counts and layouts take turns over them.

    Combinations that a deny row refuses are left out (the kit checks them as refusals).
    """
    turns = 0
    kind, alone = manifest.kind, only(variant, row)
    for role in _roles(kind, variant):
        pages: Sequence[int] = page_sizes(row) if kind not in ("mm", "gdn") and role != "ragged" else (1,)
        dims, heads, places = _shapes(kind, row, role, variant.jit)
        for phase in phases(row) if dims and heads else ():
            for triple in (state_types if kind == "gdn" else dtype_triples)(row):
                for page in pages:
                    for shift in range(len(dims)):  # the next head dims that go with this combination
                        pair, count = dims[(turns + shift) % len(dims)], heads[turns % len(heads)]
                        ask = Ask(phase, triple, page, pair, count, places[turns % len(places)], (), (), role)
                        if not refusal(manifest, alone, ask, hardware) and _fits_format(ask):
                            turns += 1
                            yield ask
                            break


def _roles(kind: str, variant: Variant) -> tuple[str, ...]:
    """The roles that the kit runs for a kind: the main one, and for MLA the ragged form, too."""
    if kind == "mla":
        return tuple(role for role in variant.roles if role in ("absorbed", "ragged"))
    return ("attend",) if "attend" in variant.roles or kind == "mm" else variant.roles[:1]


def _shapes(
    kind: str, row: Row, role: str, compiled: bool
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[str]]:
    """Head dims, head counts and layouts that take turns. Of compiled variants few: each new shape takes seconds, or minutes."""
    dims, heads = (state_dims if kind == "gdn" else head_dims)(row), head_counts(row, kind == "gdn")
    if kind == "mla":
        counts = accepted(row, "q_heads", (16, 128, 8, 64, 3, 1))[:2]
        dims, heads = latent_dims(row, role), [(n, 1 if role == "absorbed" else n) for n in counts]
    return (dims[:2], heads[:1], layouts(row)) if compiled else (dims, heads, layouts(row))


def _fits_format(ask: Ask) -> bool:
    """fp4 blocks hold 16 values of one head."""
    return ask.dtypes[1] != "fp4" or all(dim % 16 == 0 for dim in ask.head_dims)


def speculation(ask: Ask, tree: bool) -> Mapping[str, Any]:
    """Axis values of a speculative request."""
    return {"topk": 2 if tree else 1, "draft_tokens": 4, "query_len": 4 if ask.phase == "verify" else 1}
