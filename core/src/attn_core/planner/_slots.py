"""What has to be decided: one slot for each (layer group, phase, part), with what the user pinned it to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from attn_core.availability import Availability
from attn_core.errors import PlanError, UsageError
from attn_core.geometry import LayerGroup
from attn_core.manifest import Manifest
from attn_core.options import BackendChoice, Options, nearest
from attn_core.planner._request import Request, Situation, base_axes, build_request
from attn_core.planner._verdict import Candidate, Verdict, judge

#: Probe answers by manifest id and variant name; an absent entry means: not probed (a described platform).
Availabilities = Mapping[str, Mapping[str, Availability]]

#: Which roles may serve a part, by backend kind and phase; the first phase entry that exists is used.
_ROLES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mha": {"*": ("attend",)},
    "mm": {"*": ("attend", "ragged")},
    "mla": {"prefill": ("absorbed", "ragged"), "*": ("absorbed",)},
    "gdn": {"*": ("scan",)},
    "dsa": {"*": ("sparse",)},
}


#: Kinds whose verify rows are single queries: they belong to decode, whatever the speculative attention mode.
VERIFIED_BY: Mapping[str, str] = {"dsa": "decode"}


@dataclass(frozen=True)
class Pin:
    """What the user named for a slot, and with which flag. ``companion_of``: the backend that brought this one in."""

    name: str
    variant: str | None
    flag: str
    companion_of: str = ""
    reason: str = ""

    def covers(self, candidate: Candidate) -> bool:
        """Whether the candidate is what was named (aliases included)."""
        manifest = candidate.manifest
        named = self.name in (manifest.name, *manifest.aliases, *manifest.deprecated_aliases)
        return named and self.variant in (None, candidate.variant.name)


@dataclass(frozen=True)
class Slot:
    """One decision. ``follows`` names the phase whose backend must serve here too (verify follows prefill or decode)."""

    group: LayerGroup
    phase: str
    part: str
    verdicts: tuple[Verdict, ...]
    pin: Pin | None = None
    follows: str | None = None

    @property
    def label(self) -> str:
        """How messages name this slot."""
        part = "" if self.part == "main" else f", {self.part}"
        return f"layer group {self.group.name!r} ({self.phase}{part})"

    @cached_property
    def eligible(self) -> tuple[Verdict, ...]:
        """Verdicts without reasons, inside what was pinned."""
        found = tuple(verdict for verdict in self.verdicts if verdict.eligible)
        if self.pin is not None:
            return tuple(verdict for verdict in found if self.pin.covers(verdict.candidate))
        return tuple(v for v in found if v.candidate.manifest.status != "experimental" or self._may_experiment(v))

    def in_order(self, key: Callable[[Verdict], Any]) -> Sequence[Verdict]:
        """The eligible verdicts, best first. Sorted once: the key of a slot does not change while it is solved."""
        found: Sequence[Verdict] | None = self.__dict__.get("_in_order")
        if found is None:
            found = self.__dict__["_in_order"] = tuple(sorted(self.eligible, key=key))
        return found

    def _may_experiment(self, verdict: Verdict) -> bool:
        return bool(verdict.request.axes.get("allow_experimental")) or verdict.preferred


def phases_of(group: LayerGroup, options: Options) -> tuple[str, ...]:
    """The phases a group takes part in."""
    if group.backend_kind == "mm":
        return ("prefill",)
    if group.model == "draft":
        return ("prefill", "draft", "draft_extend")
    return ("prefill", "decode", "verify") if options.topk else ("prefill", "decode")


def build_slots(situation: Situation, manifests: Sequence[Manifest], availability: Availabilities) -> tuple[Slot, ...]:
    """All slots of one model, with the verdict on every candidate."""
    base = base_axes(situation)
    base["allow_experimental"] = situation.options.allow_experimental
    slots: list[Slot] = []
    for group in situation.model.groups:
        if group.backend_kind == "external":
            continue
        mine = [manifest for manifest in manifests if manifest.kind == group.backend_kind]
        for phase in phases_of(group, situation.options):
            slots += _phase_slots(situation, group, phase, mine, availability, base)
    return tuple(slots)


def _phase_slots(
    situation: Situation,
    group: LayerGroup,
    phase: str,
    manifests: Sequence[Manifest],
    availability: Availabilities,
    base: Mapping[str, Any],
) -> list[Slot]:
    table = _ROLES[group.backend_kind]
    parts = {"main": table.get(phase, table["*"])}
    if group.backend_kind == "dsa":
        parts["index"] = ("index",)
    options = situation.options
    slots = []
    for part, roles in parts.items():
        pin = pin_of(group, phase, options) if part == "main" else None
        requests = {role: build_request(situation, group, phase, role, base) for role in roles}
        if part == "index":
            requests["index"] = _index_request(requests["index"], situation.dtype)
        verdicts = _judge_all(manifests, requests, availability, options)
        if pin is not None:
            pin = _resolve_pin(pin, group, phase, manifests, verdicts, options)
        follows = None
        if phase == "verify" and part == "main":
            follows = VERIFIED_BY.get(group.backend_kind, options.speculative_attention_mode)
        slots.append(Slot(group, phase, part, verdicts, pin, follows))
    return slots


def _index_request(request: Request, dtype: str) -> Request:
    """The indexer keeps its keys in fp8 pages of its own, whatever the dtype of the latent cache."""
    axes = {**request.axes, "format.default": "index_132_planar", "format.dtype": "fp8_e4m3"}
    return replace(request, axes=axes, q_dtypes=(dtype, "fp8_e4m3"))


def _judge_all(
    manifests: Iterable[Manifest], requests: Mapping[str, Request], availability: Availabilities, options: Options
) -> tuple[Verdict, ...]:
    verdicts = []
    for manifest in manifests:
        for variant in manifest.variants:
            for role, request in requests.items():
                if role in variant.roles:
                    probed = availability.get(manifest.id, {}).get(variant.name)
                    verdicts.append(judge(Candidate(manifest, variant, role, probed), request, options))
    return tuple(verdicts)


# --- pins ---------------------------------------------------------------------------------------------------------------


def pin_of(group: LayerGroup, phase: str, options: Options) -> Pin | None:
    """What the user named for (group, phase): phase flag, else the general flag of the group's kind, else nothing."""
    for name, _, chosen in choices_for(group, phase, options):
        backend, _, variant = chosen.partition(":")
        if backend == group.backend_kind or backend in FAMILY_ALIASES.get(group.backend_kind, ()):
            continue  # the family's own name: any member, chosen by the rules of its members
        return Pin(backend, variant or None, options.flag_of(name))
    return None


def choices_for(group: LayerGroup, phase: str, options: Options) -> Iterator[tuple[str, str, str]]:
    """Everything that was named for (group, phase), what counts first: (option, key of a GROUP=NAME map or "", name)."""
    for name in _flags_for(group, phase):
        yield from ((name, key, chosen) for key, chosen in _for_group(getattr(options, name), group))
    for name in _mapping_flags(group, phase):
        choice = getattr(options, name)
        if isinstance(choice, Mapping):
            yield from ((name, key, chosen) for key, chosen in _for_group(choice, group))


#: Deprecated names of whole families (kinds), accepted with a warning.
FAMILY_ALIASES: Mapping[str, tuple[str, ...]] = {"dsa": ("nsa",)}


def _flags_for(group: LayerGroup, phase: str) -> tuple[str, ...]:
    kind = group.backend_kind
    if group.model == "draft":
        return ("draft_attention_backend",)
    if kind == "mm":
        return ("mm_attention_backend",)
    if kind == "gdn":
        side = "prefill" if phase == "prefill" else "decode"
        return (f"linear_attn_{side}_backend", "linear_attn_backend") if phase != "verify" else ()
    if phase == "verify":
        return ()  # follows prefill or decode
    own = (f"dsa_{phase}_backend",) if kind == "dsa" else ()
    return (*own, f"{phase}_attention_backend", "attention_backend")


def _for_group(choice: BackendChoice, group: LayerGroup) -> Iterator[tuple[str, str]]:
    """What a choice says of a group, as (key, name); the group's name counts before its kind, ``auto`` ends what it says."""
    items = [("", choice)]
    if isinstance(choice, Mapping):
        items = [(key, choice.get(key)) for key in dict.fromkeys((group.name, group.kind))]
    for key, name in items:
        if name == "auto":
            return  # of a group: not what is said of its kind either
        if isinstance(name, str) and name:
            yield key, name


def _mapping_flags(group: LayerGroup, phase: str) -> tuple[str, ...]:
    """Flags whose GROUP=NAME maps may speak of a group whose kind has flags of its own (linear layers, towers)."""
    if group.backend_kind not in ("gdn", "mm") or group.model == "draft" or phase not in ("prefill", "decode"):
        return ()
    return (f"{phase}_attention_backend", "attention_backend")


def check_group_names(options: Options, groups: Iterable[LayerGroup], drafts: Iterable[LayerGroup] = ()) -> None:
    """Every key of a GROUP=NAME map must name a group or a kind of its model. Raises :class:`UsageError`."""
    target = {name for group in groups for name in (group.name, group.kind)}
    draft = {name for group in drafts for name in (group.name, group.kind)}
    flags = ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "mm_attention_backend")
    for flag, known in (*((flag, target) for flag in flags), ("draft_attention_backend", draft)):
        choice = getattr(options, flag)
        for name in choice if isinstance(choice, Mapping) and known else ():
            if name not in known:
                raise UsageError(f"{options.flag_of(flag)}: no layer group {name!r}", fix=nearest(name, sorted(known)))


def _resolve_pin(
    pin: Pin,
    group: LayerGroup,
    phase: str,
    manifests: Sequence[Manifest],
    verdicts: Sequence[Verdict],
    options: Options,
) -> Pin:
    """The pin, or the companion that the pinned backend names for a phase it leaves open."""
    mine = [verdict for verdict in verdicts if pin.covers(verdict.candidate)]
    if any(verdict.eligible for verdict in mine):
        return pin
    for manifest in manifests:
        if pin.name not in (manifest.name, *manifest.aliases, *manifest.deprecated_aliases):
            continue
        for row in manifest.companions:
            axes = mine[0].request.axes if mine else {**(verdicts[0].request.axes if verdicts else {})}
            if row.phase == phase and all(c.holds(axes, unknown=False) for c in row.conditions):
                why = row.reason or f"{manifest.name} does not serve {phase}; its manifest names {row.backend} for it"
                return Pin(row.backend, None, pin.flag, companion_of=manifest.name, reason=why)
    return pin


def check_known(
    situation: Situation, manifests: Sequence[Manifest], slots: Sequence[Slot], hints: Mapping[str, str]
) -> None:
    """A pinned name that no manifest of its kind has. Raises :class:`PlanError` with what to install or the near names."""
    for slot in slots:
        pin = slot.pin
        if pin is None or any(pin.covers(verdict.candidate) for verdict in slot.verdicts):
            continue
        kind = slot.group.backend_kind
        elsewhere = sorted({m.kind for m in manifests if pin.name in (m.name, *m.aliases, *m.deprecated_aliases)})
        if kind in elsewhere:
            known = sorted({f"{m.name}:{v.name}" for m in manifests if m.name == pin.name for v in m.variants})
            what = (
                f"{pin.name} has no variant {pin.variant!r} for this part"
                if pin.variant
                else f"{pin.name} has no {slot.part} part"
            )
            raise PlanError(what, f"asked    {pin.flag} {pin.name}", f"known    {', '.join(known)}")
        if elsewhere:
            raise PlanError(
                f"{pin.name} does not serve {slot.label}",
                f"asked    {pin.flag} {pin.name}",
                f"needs    a backend of kind {kind}; {pin.name} is of kind {', '.join(elsewhere)}",
                suggestions=[f"{pin.flag} {name}" for name in sorted({m.name for m in manifests if m.kind == kind})][
                    :3
                ],
            )
        names = sorted({m.name for m in manifests if m.kind == kind})
        hint = hints.get(pin.name)
        fix = (
            f"pip install {hint}" if hint else nearest(pin.name, names) if names else "install a plugin that serves it"
        )
        raise PlanError(
            f"{pin.name} is not installed",
            f"asked    {pin.flag} {pin.name}",
            f"installed for {kind}: {', '.join(names) or 'nothing'}",
            fix=fix,
            suggestions=[fix],
        )
