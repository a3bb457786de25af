"""What a plan's reader should know besides the choice itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attn_core.geometry import Model
from attn_core.options import Options, named_backends, nearest
from attn_core.planner._build import Solved
from attn_core.planner._slots import FAMILY_ALIASES, Slot


def warnings_of(solved: Sequence[Solved], options: Options, draft: Model | None) -> Iterator[str]:
    """All warnings of a plan, each once."""
    found: dict[str, None] = {}
    for text in _all(solved, options, draft):
        found[text] = None
    yield from found


def _all(solved: Sequence[Solved], options: Options, draft: Model | None) -> Iterator[str]:
    situation = solved[0].situation
    yield from _aliases(options)
    yield from _unknown_names(solved, options)
    for group in situation.model.groups:
        if group.backend_kind == "external":
            yield f"layer group {group.name!r}: {len(group.layers)} {group.kind} layers are left to the server"
    if situation.kv_dtype.startswith("fp8") or situation.kv_dtype == "fp4":
        yield f"no calibrated KV scales are known for {situation.kv_dtype}: 1.0 is used unless the checkpoint brings them"
    if draft is not None and draft.name.endswith("(draft)"):
        yield "no draft model was given: planned as one with the target's attention geometry"
    if options.deterministic and any(group.backend_kind == "mm" for group in situation.model.groups):
        yield "--deterministic does not cover vision towers and encoders"
    for one in solved:
        yield from _choices(one)
    yield from situation.model.notes


def _aliases(options: Options) -> Iterator[str]:
    for flag, name in named_backends(options):
        for family, names in FAMILY_ALIASES.items():
            if name in names:
                yield f"{name} is a deprecated name of {family}; use {flag} {family}"


def _unknown_names(solved: Sequence[Solved], options: Options) -> Iterator[str]:
    """Names in lists of preferences that match no candidate: a preference may be idle, but not unnoticed."""
    candidates = [v.candidate for one in solved for slot in one.slots for v in slot.verdicts]
    known = {name for c in candidates for name in (c.manifest.name, c.manifest.id, c.name)}
    for flag in ("exclude_backends", "prefer_backends", "disable_variants"):
        for name in getattr(options, flag):
            if name not in known:
                near = nearest(name, sorted(known))
                hint = f"; {near}" if near.startswith("did you mean") else ""
                yield f"{options.flag_of(flag)}: {name!r} names no candidate for this model{hint}"


def _choices(solved: Solved) -> Iterator[str]:
    for choice in solved.solution.groups.values():
        for chosen in choice.choices.values():
            for part in (chosen, chosen.prefix):
                if part is not None and part.verdict.candidate.manifest.status == "planned":
                    yield f"{part.verdict.candidate.manifest.id} is planned: its kernels are not built yet"
    for slot in solved.slots:
        yield from _named(slot)


def _named(slot: Slot) -> Iterator[str]:
    """Deprecated names that the user gave to one backend."""
    if slot.pin is None:
        return
    for verdict in slot.verdicts:
        manifest = verdict.candidate.manifest
        if slot.pin.name in manifest.deprecated_aliases:
            yield f"{slot.pin.name} is a deprecated name of {manifest.name}; use {slot.pin.flag} {manifest.name}"
        elif manifest.deprecated and slot.pin.name == manifest.name:
            yield f"{manifest.name}: {manifest.deprecated}"
