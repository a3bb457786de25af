"""What the user asked for that this plan has no use for: a backend is refused, a setting is noted; nothing is passed over.

A backend that was named for layers or phases which the plan does not have is an explicit choice that cannot be kept. A setting
that describes something the model lacks changes nothing, and the plan says so in its warnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from attn_core.errors import PlanError
from attn_core.geometry import GdnGeometry, LayerGroup, MhaGeometry, Model
from attn_core.options import Options
from attn_core.planner._slots import VERIFIED_BY, choices_for, phases_of

#: What a flag that names a backend needs in the plan; the rest serve attention layers of the target.
_NEEDS: Mapping[str, str] = {
    "mm_attention_backend": "a vision tower or an encoder (mm)",
    "linear_attn_backend": "linear-attention layers (gdn)",
    "linear_attn_prefill_backend": "linear-attention layers (gdn)",
    "linear_attn_decode_backend": "linear-attention layers (gdn)",
    "dsa_prefill_backend": "sparse-attention layers (dsa)",
    "dsa_decode_backend": "sparse-attention layers (dsa)",
    "draft_attention_backend": "a draft model",
}
_ATTENTION = "attention layers (mha, mla, dsa)"
_PAGED = frozenset({"mha", "mla", "dsa"})
#: Kinds whose layers decode, so that there is something to draft and to verify.
DECODING = _PAGED | {"gdn"}


@dataclass
class Use:
    """What became of one named backend: whether it pins a slot, and which flags came before it where it does not."""

    pins: bool = False
    behind: dict[str, None] = field(default_factory=dict)


Uses = Mapping[tuple[str, str], Use]


def uses_of(groups: Iterable[LayerGroup], options: Options) -> Uses:
    """The use of every (option, key of a GROUP=NAME map or "") that speaks of one of `groups`."""
    found: dict[tuple[str, str], Use] = {}
    for group in groups:
        if group.backend_kind == "external":
            continue
        for phase in phases_of(group, options):
            first = ""
            for name, key, _ in choices_for(group, phase, options):
                use = found.setdefault((name, key), Use())
                if first and first != name:
                    use.behind[options.flag_of(first)] = None
                elif not first:
                    use.pins, first = True, name
    return found


def _named(options: Options) -> Iterator[tuple[str, str, str]]:
    """Every backend that was named: (option, key of a map or "", name)."""
    for f in fields(options):
        value = getattr(options, f.name)
        if f.name.endswith("_backend") and value:
            items = value.items() if isinstance(value, Mapping) else [("", value)]
            yield from ((f.name, key, name) for key, name in items if name and name != "auto")


def _asked(options: Options, name: str, key: str, backend: str) -> str:
    return f"{options.flag_of(name)} {f'{key}={backend}' if key else backend}"


# --- refused ------------------------------------------------------------------------------------------------------------


def refuse_idle_backends(model: Model, drafts: Model | None, draft_given: bool, options: Options) -> Uses:
    """The uses of all named backends. Raises :class:`PlanError` for those that name nothing in this plan, and for a draft model
    that nothing drafts with."""
    groups = [*model.groups, *(drafts.groups if drafts is not None else ())]
    uses = uses_of(groups, options)
    idle = [item for item in _named(options) if item[:2] not in uses]
    if draft_given and drafts is None:
        raise _no_drafting("a draft model was given, and this plan does not draft", "--draft-model", options)
    if not idle:
        return uses
    name = idle[0][0]
    flag = options.flag_of(name)
    if name == "draft_attention_backend" and drafts is None:
        raise _no_drafting(f"{flag} names the backend of a draft model, and none is planned", flag, options, idle)
    facts = [f"asked    {_asked(options, *item)}" for item in idle]
    facts += dict.fromkeys(
        f"needs    {_NEEDS.get(item[0], _ATTENTION)}   ({options.flag_of(item[0])})" for item in idle
    )
    facts.append(f"found    {_described(groups)}   (model {model.name})")
    raise PlanError(
        f"{flag} names a backend for what this plan does not have",
        *facts,
        suggestions=[f"without {flag}", *_elsewhere(name, idle[0][2], groups, options)],
    )


def _no_drafting(message: str, flag: str, options: Options, idle: Sequence[tuple[str, str, str]] = ()) -> PlanError:
    algorithm = options.speculative_algorithm
    found = "no speculation"
    if algorithm:
        alone = algorithm.upper() == "NGRAM"
        why = "which drafts without a model" if alone else "and no layer of this model decodes"
        found = f"--speculative-algorithm {algorithm}, {why}"
    asked = [_asked(options, *item) for item in idle] or [flag]
    return PlanError(
        message,
        *(f"asked    {text}" for text in asked),
        "needs    --speculative-algorithm with a draft model: EAGLE, EAGLE3, NEXTN, STANDALONE, …",
        f"found    {found}",
        suggestions=[f"without {flag}", "--speculative-algorithm EAGLE"],
    )


def _described(groups: Sequence[LayerGroup]) -> str:
    """``full (mha), linear (left to the server)``."""
    words = []
    for group in groups:
        served = "left to the server" if group.backend_kind == "external" else group.backend_kind
        words.append(f"{'draft ' if group.model == 'draft' else ''}{group.name} ({served})")
    return ", ".join(dict.fromkeys(words)) or "no layer groups"


def _elsewhere(name: str, backend: str, groups: Sequence[LayerGroup], options: Options) -> Iterator[str]:
    """The flag that speaks of the layers which the model does have."""
    for f in fields(options):
        if f.name.endswith("_backend") and f.name != name:
            probe = Options().but(**{f.name: backend, "speculative_algorithm": options.speculative_algorithm})
            if uses_of(groups, probe):
                yield f"{options.flag_of(f.name)} {backend}"
                return


# --- noted --------------------------------------------------------------------------------------------------------------


def idle_notes(
    groups: Sequence[LayerGroup], uses: Uses, chosen: frozenset[str], graphs: Mapping[str, Any], options: Options
) -> Iterator[str]:
    """One sentence for each thing that was asked for and changes nothing. `chosen` are the names of the backends that serve."""
    for name, key, backend in _named(options):
        use = uses[name, key]
        if not use.pins:
            before = " and ".join(use.behind) or "the name of the group"
            yield f"{_asked(options, name, key, backend)} serves nothing here, behind {before}"
    for name in sorted(set(options.backend_options) - chosen):
        yield f"--backend-option {name}.… changes nothing here: {name} does not serve in this plan"
    defaults = {f.name: f.default for f in fields(options) if f.default is not MISSING}
    for name, why in _settings(groups, options):
        value = getattr(options, name)
        if value != defaults[name]:
            shown = options.flag_of(name) if value is True else f"{options.flag_of(name)} {value}"
            yield f"{shown} changes nothing here: {why}"
    wanted = options.cuda_graph
    if wanted not in ("auto", "off", graphs["mode"]):
        why = f": {graphs['reason']}" if graphs["reason"] else ""
        yield f"--cuda-graph {wanted} becomes {graphs['mode']}{why}"


def _settings(groups: Sequence[LayerGroup], options: Options) -> Iterator[tuple[str, str]]:
    """(option, why it has no effect) for every setting that speaks of something the plan does not have."""
    kinds = {group.backend_kind for group in groups}
    if not kinds & _PAGED:
        for name in ("page_size", "num_pages", "kv_cache_dtype", "kv_layout", "dcp_size"):
            yield name, "no layer keeps keys and values in pages"
    if "gdn" not in kinds:
        yield "mamba_ssm_dtype", "no recurrent state is planned here"
    states = any(isinstance(group.geometry, GdnGeometry) for group in groups)
    if not (states and any(isinstance(g.geometry, MhaGeometry) and g.backend_kind == "mha" for g in groups)):
        yield "shared_allocation", "it needs recurrent states beside pages of keys and values"
    yield from _prefix_settings(kinds, options)
    yield from _speculation_settings(groups, options)
    if (options.chunked_prefill_size or 0) > 0:
        yield "max_prefill_tokens", f"--chunked-prefill-size {options.chunked_prefill_size} bounds a prefill step"


def _prefix_settings(kinds: set[str], options: Options) -> Iterator[tuple[str, str]]:
    if "mla" not in kinds:
        yield "disable_chunked_prefix_cache", "only latent attention (mla) attends to a cached prefix in chunks"
    elif options.disable_prefix_cache:
        yield "disable_chunked_prefix_cache", "--disable-prefix-cache leaves no cached prefix"


def _speculation_settings(groups: Sequence[LayerGroup], options: Options) -> Iterator[tuple[str, str]]:
    kinds = {group.backend_kind for group in groups}
    names = ("eagle_topk", "num_draft_tokens", "num_steps", "attention_mode")
    if not options.speculative_algorithm:
        for name in names:
            yield f"speculative_{name}", "there is no --speculative-algorithm"
        return
    if not kinds & DECODING:
        yield "speculative_algorithm", "no layer of this model decodes"
    verifying = {group.backend_kind for group in groups if "verify" in phases_of(group, options)} - {"external"}
    if verifying and verifying <= VERIFIED_BY.keys():
        served = ", ".join(sorted({VERIFIED_BY[kind] for kind in verifying}))
        yield "speculative_attention_mode", f"verify of {', '.join(sorted(verifying))} is always served by {served}"
