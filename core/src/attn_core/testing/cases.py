"""``python -m attn_core.testing.cases FILE.json``: run the planner and ux entries of a case file.

One line an entry, ``N passed, N failed`` last, exit status 1 if one failed. The format is described beside such files; the
readings that were chosen where two are possible stand in ``cases_input``, ``cases_toys`` and ``cases_expect``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attn_core.errors import AttnError
from attn_core.geometry import Model
from attn_core.testing.cases_expect import check
from attn_core.testing.cases_input import Library, Row, options_of, platform_of, rows_of
from attn_core.testing.cases_outcome import Outcome, compare
from attn_core.testing.cases_toys import World, build_world
from attn_core.testing.cases_words import CaseError

MARKS = ("planner", "ux")
#: Characters of a failure that are printed.
_LONGEST = 1200


def run_file(path: Path) -> list[tuple[str, str, list[str]]]:
    """(id, title, failures) of every planner and ux entry of a file."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    library = Library.beside(path)
    return [(entry["id"], entry["title"], run_entry(entry, library)) for entry in entries if entry["mark"] in MARKS]


def run_entry(entry: Mapping[str, Any], library: Library) -> list[str]:
    """What fails of one entry; empty if it passes. Whatever goes wrong is a failure, never a traceback."""
    try:
        return list(_failures(entry["repro"], library))
    except (CaseError, AttnError) as error:
        return [str(error)]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _failures(repro: Mapping[str, Any], library: Library) -> Iterator[str]:
    if "plan_a" in repro or "plan_b" in repro:
        yield from _compared(repro, library)
        return
    rows = list(rows_of(repro))
    eligible: dict[Any, list[Any]] = {}
    outcomes = []
    for row in rows:
        outcome = outcome_of(row, library)
        outcomes.append(outcome)
        if isinstance(row.expect, Mapping) and "eligible_on" in row.expect:
            wanted = eligible.setdefault(json.dumps(row.expect["eligible_on"]), [row.expect["eligible_on"]])
            if outcome.found:
                wanted.append(row.platform.get("sm", row.platform.get("gfx", row.platform["device"])))
        for failure in check(outcome):
            yield f"{row.label}: {failure}" if row.label else failure
    for wanted, *found in eligible.values():
        if sorted(map(str, wanted)) != sorted(map(str, found)):
            yield f"eligible_on: expected {wanted}, found {found}"


def _compared(repro: Mapping[str, Any], library: Library) -> Iterator[str]:
    """Two plans, as two nodes would have them."""
    common = {key: value for key, value in repro.items() if key not in ("plan_a", "plan_b", "expect", "variant")}
    sides = [next(rows_of({**common, **repro[name]})) for name in ("plan_a", "plan_b")]
    first, second = (outcome_of(row, library) for row in sides)
    yield from compare(first, second, repro.get("expect", {}))
    if "variant" in repro:
        merged = {**repro, **repro["variant"]}
        merged.pop("variant", None)
        for failure in _compared(merged, library):
            yield f"variant: {failure}"


def outcome_of(row: Row, library: Library) -> Outcome:
    """The row with everything parsed; it is planned when a check asks for the plan."""
    model = library.model(row.model)
    draft = library.model(row.draft) if row.draft is not None else None
    world = _world(row, model, draft)
    if row.installed is not None:
        model = _about(model, world, row)
    return Outcome(row, model, draft, platform_of(row.platform), lambda: options_of(row.flags), world)


def _world(row: Row, model: Model, draft: Model | None) -> World:
    kinds = dict.fromkeys(group.backend_kind for group in (*model.groups, *(draft.groups if draft else ())))
    named = [name for name in row.flags.get("backend_options", {}) if name not in (row.installed or {})]
    if row.installed is None:
        shipped = shipped_manifests()
        extra = [name for name in named if name not in {manifest.name for manifest in shipped.manifests}]
        if not extra:
            return shipped
        # options of a backend that nobody ships: a toy that knows the options which the entry itself sets
        added = build_world({name: {} for name in extra}, kinds, row.flags, row.schemas)
        return World([*shipped.manifests, *added.manifests], added.availability, added.problems)
    return build_world(row.installed, kinds, row.flags, row.schemas)


def shipped_manifests() -> World:
    """Every manifest of the installed plugins; planned ones count (``--allow-planned``)."""
    from attn_core.discovery import discover

    registry = discover()
    return World(list(registry.manifests), {}, [str(problem) for problem in registry.problems])


def _about(model: Model, world: World, row: Row) -> Model:
    """The model without the groups that an entry with toys does not speak about: they are left to the server.

    Those are groups of a kind that no toy is of, and vision towers and encoders unless the entry mentions them.
    """
    said = json.dumps([row.expect, row.flags, row.installed])
    asked = {"mm": any(word in said for word in ("vision", "encoder", "mm_")), "gdn": "linear" in said}
    kept = [
        group
        for group in model.groups
        if group.backend_kind == "external"
        or asked.get(group.backend_kind, False)
        or (group.backend_kind in world.kinds and group.backend_kind != "mm")
    ]
    served = [group for group in kept if group.backend_kind != "external"]
    return replace(model, groups=tuple(kept)) if served else model


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    files = list(sys.argv[1:] if arguments is None else arguments)
    if not files or files[0] in ("-h", "--help"):
        print(__doc__)
        return 2
    passed = failed = 0
    for file in files:
        for name, title, failures in run_file(Path(file)):
            passed, failed = passed + (not failures), failed + bool(failures)
            print(
                f"{'FAIL' if failures else 'ok  '} {name} {title}"
                + "".join(f"\n       {_short(line)}" for line in failures)
            )
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
