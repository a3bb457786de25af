"""The planner: ``plan(model, platform, options, manifests, availability) -> Plan``, a pure function of data.

The pipeline reads top to bottom: model and options -> slots with verdicts (:mod:`._slots`, :mod:`._verdict`) -> one solution
for all of them (:mod:`._solve`) -> plan (:mod:`._build`), or an error with every reason (:mod:`._errors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.availability import Availability
from attn_core.errors import ModelError, PlanError, UsageError
from attn_core.geometry import LayerGroup, MhaGeometry, Model
from attn_core.manifest import Manifest, load_toml
from attn_core.options import Options, named_backends, nearest
from attn_core.plan import Plan
from attn_core.planner._build import Solved, build_groups
from attn_core.planner._choice import Ties
from attn_core.planner._errors import no_plan, no_shard
from attn_core.planner._graphs import resolve_graphs
from attn_core.planner._idle import DECODING, Uses, idle_notes, refuse_idle_backends
from attn_core.planner._losers import adjustments, rejections
from attn_core.planner._pools import build_pools, shared_block, workspaces
from attn_core.planner._request import Situation
from attn_core.planner._slots import Availabilities, build_slots, check_group_names, check_known
from attn_core.planner._solve import Wishes, solve
from attn_core.planner._warnings import warnings_of

if TYPE_CHECKING:
    from attn_core.discovery import Registry
    from attn_core.platform import Platform

__all__ = ["plan", "plan_for", "solve_plan"]


def plan(
    model: Any,
    *,
    platform: Platform | Mapping[str, Any] | str | None = None,
    options: Mapping[str, Any] | Options | None = None,
    draft: Any = None,
    registry: Registry | None = None,
    **flags: Any,
) -> Plan:
    """Plan `model` (a config.json, folder, dict, ``PretrainedConfig`` or :class:`Model`) with the installed plugins.

    ``platform`` None is this machine, and its backends are probed; a described one (``"cuda:sm90"``) is a what-if in which
    libraries count as present. ``flags`` are options by keyword: ``plan(config, page_size=16)``.

    Raises :class:`PlanError` with every candidate's reasons when nothing fits, :class:`UsageError` for unknown options.

    >>> plan("config.json", platform="cuda:sm90", attention_backend="triton").fingerprint   # doctest: +SKIP
    """
    from attn_core.discovery import discover
    from attn_core.model import parse_model
    from attn_core.platform import Platform, detect_platform, parse_platform

    parsed = model if isinstance(model, Model) else parse_model(model)
    parsed_draft = draft if draft is None or isinstance(draft, Model) else parse_model(draft)
    registry = registry or discover()
    chosen = Options.of(options, **flags)
    availability: Availabilities | None = None if platform is None else {}
    if platform is None:
        found = detect_platform()
    else:
        found = platform if isinstance(platform, Platform) else parse_platform(platform)
    return plan_for(parsed, found, chosen, registry, draft=parsed_draft, availability=availability)


def plan_for(
    model: Model,
    platform: Platform,
    options: Options,
    registry: Registry,
    *,
    draft: Model | None = None,
    availability: Availabilities | None = None,
) -> Plan:
    """:func:`plan` with everything parsed. ``availability`` None: probe every backend of the model's kinds here."""
    kinds = {group.backend_kind for group in (*model.groups, *(draft.groups if draft else ()))}
    manifests = [manifest for manifest in registry.manifests if manifest.kind in kinds]
    if availability is None:
        availability = {m.id: registry.probe(m, platform) for m in manifests if m.status != "planned"}
    try:
        return solve_plan(model, platform, options, manifests, availability, draft=draft)
    except PlanError as error:
        _quote_problems(error, options, registry)
        raise


def _quote_problems(error: PlanError, options: Options, registry: Registry) -> None:
    """A broken plugin that explains why a named backend is missing belongs into the error."""
    for _, name in named_backends(options):
        problem = registry.problem_for(name)
        if problem is not None and str(problem) not in error.facts:
            error.facts = (*error.facts, str(problem))


def solve_plan(
    model: Model,
    platform: Platform,
    options: Options,
    manifests: Sequence[Manifest],
    availability: Mapping[str, Mapping[str, Availability]] | None = None,
    *,
    draft: Model | None = None,
    tie_order: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """The pure function: the same data gives the same plan, whatever the order of `manifests`."""
    directory = load_directory()
    ordered = tuple(sorted(manifests, key=lambda manifest: (manifest.kind, manifest.name)))
    ties = Ties(tie_order if tie_order is not None else directory["order"])
    world = _World(ordered, availability or {}, ties, directory["hints"])
    whole = model
    model = _sharded(whole, options, world, platform)
    drafts = _draft_model(model, draft, options)
    check_group_names(options, model.groups, drafts.groups if drafts is not None else ())
    _refuse_unsupported(model)
    _refuse_branching_states(drafts, options)
    uses = refuse_idle_backends(model, drafts, draft is not None, options)
    _check_backend_options(options, ordered)
    target = _solve_model(Situation.of(model, platform, options), world, None, whole)
    solved = [target]
    if drafts is not None:
        situation = Situation.of(drafts, platform, options, is_draft=True)
        solved.append(_solve_draft(situation, world, target))
    return _assemble(solved, options, drafts, uses)


@dataclass(frozen=True)
class _World:
    """What may serve: manifests in a fixed order, probe answers, ties, and hints for messages."""

    manifests: tuple[Manifest, ...]
    availability: Availabilities
    ties: Ties
    hints: Mapping[str, str]


def _sharded(model: Model, options: Options, world: _World, platform: Platform) -> Model:
    try:
        return model.shard(options.tp_size)
    except ModelError as error:
        raise no_shard(error, model, options, lambda other: _solvable(model, platform, other, world)) from error


def _solvable(model: Model, platform: Platform, options: Options, world: _World, is_draft: bool = False) -> bool:
    """Whether other options (another tensor-parallel size included) would have a plan."""
    try:
        sharded = model if is_draft else model.shard(options.tp_size)
        situation = Situation.of(sharded, platform, options, is_draft)
        wishes = Wishes(None, shared_block(sharded, situation))
    except (ModelError, PlanError):
        return False
    slots = build_slots(situation, world.manifests, world.availability)
    return solve(slots, options, world.ties, wishes) is not None


@lru_cache(maxsize=1)
def load_directory() -> dict[str, Any]:
    """``directory.toml``: hints (backend name -> distribution) and the published order for ties. Never used to decide eligibility."""
    path = Path(__file__).parent.parent / "directory.toml"
    table = load_toml(path.read_text(encoding="utf-8"), "directory.toml") if path.exists() else {}
    backends = table.get("backends", {})
    hints = {
        name: entry.get("distribution", "") if isinstance(entry, Mapping) else str(entry)
        for name, entry in backends.items()
    }
    return {"hints": hints, "order": table.get("order", {})}


def _refuse_unsupported(model: Model) -> None:
    for group in model.groups:
        if group.unsupported:
            raise PlanError(
                f"layer group {group.name!r} needs what this contract cannot express: {', '.join(group.unsupported)}",
                f"model    {model.name} ({model.architecture})",
                fix="serve this model with the engine's own attention",
            )


def _refuse_branching_states(drafts: Model | None, options: Options) -> None:
    """A tree of drafts has rows that part; a recurrent state cannot be read by two of them and written by each."""
    states = [group.name for group in drafts.groups if group.backend_kind == "gdn"] if drafts is not None else []
    if states and options.topk > 1:
        raise PlanError(
            "a tree cannot be drafted by layers with a recurrent state: each branch needs a state of its own",
            f"asked    --speculative-eagle-topk {options.topk}",
            f"found    layer group {', '.join(map(repr, states))} of the draft model",
            suggestions=["--speculative-eagle-topk 1"],
        )


def _check_backend_options(options: Options, manifests: Sequence[Manifest]) -> None:
    for name, values in options.backend_options.items():
        mine = [manifest for manifest in manifests if manifest.name == name]
        if not mine:
            known = sorted({manifest.name for manifest in manifests})
            raise UsageError(f"--backend-option {name}.…: no installed backend of that name", fix=nearest(name, known))
        for manifest in mine:
            _validate_options(manifest, values)


def _validate_options(manifest: Manifest, values: Mapping[str, Any]) -> None:
    """Check options against the backend's own JSON schema; keys it does not name are refused."""
    from jsonschema import Draft202012Validator

    schema = {"additionalProperties": False, **manifest.options_schema, "type": "object"}
    known = sorted(schema.get("properties", {}))
    for error in Draft202012Validator(schema).iter_errors(dict(values)):
        where = ".".join([manifest.name, *map(str, error.absolute_path)])
        raise UsageError(
            f"--backend-option {where}: {error.message}",
            fix=f"{manifest.name} knows {', '.join(known) or 'no options'}",
        )


def _solve_model(situation: Situation, world: _World, wished_page: int | None, whole: Model) -> Solved:
    slots = build_slots(situation, world.manifests, world.availability)
    check_known(situation, world.manifests, slots, world.hints)
    wishes = Wishes(wished_page, shared_block(situation.model, situation))
    solution = solve(slots, situation.options, world.ties, wishes)
    if solution is not None:
        return Solved(situation, slots, solution)

    def solvable(options: Options) -> bool:
        return _solvable(whole, situation.platform, options, world, situation.is_draft)

    raise no_plan(situation, slots, world.ties, wishes, solvable)


def _solve_draft(situation: Situation, world: _World, target: Solved) -> Solved:
    """The draft model has pools of its own: it takes the target's page size where it can, and its own where not."""
    own = replace(situation, options=replace(situation.options, page_size=None, shared_allocation=False))
    return _solve_model(own, world, target.solution.page_size, situation.model)


def _draft_model(model: Model, draft: Model | None, options: Options) -> Model | None:
    """The draft that is planned as a model of its own; without a config: one layer of the target's main attention."""
    if not options.speculative_algorithm or options.speculative_algorithm.upper() == "NGRAM":
        return None
    if not any(group.backend_kind in DECODING for group in model.groups):
        return None
    if draft is not None:
        sharded = draft.shard(options.tp_size) if draft.tp == 1 else draft
        served = [group for group in sharded.groups if group.backend_kind != "mm"]
        return replace(sharded, groups=tuple(_as_draft(group) for group in served))
    main = main_group(model.groups)
    layers = tuple(range(max(model.mtp_layers, 1)))
    group = _as_draft(replace(main, layers=layers, kv_from={}, facts={}))
    return replace(model, name=f"{model.name} (draft)", groups=(group,), layers_counted=len(layers))


def _as_draft(group: LayerGroup) -> LayerGroup:
    return replace(group, model="draft", pools={role: f"draft_{name}" for role, name in group.pools.items()})


def main_group(groups: Iterable[LayerGroup]) -> LayerGroup:
    """The group that names the main pool: the first decoder group that keeps keys for every position."""
    listed = [group for group in groups if group.backend_kind in ("mha", "mla", "dsa")] or list(groups)
    whole = [g for g in listed if not (isinstance(g.geometry, MhaGeometry) and (g.geometry.window or g.geometry.chunk))]
    return (whole or listed)[0]


def _assemble(solved: Sequence[Solved], options: Options, draft: Model | None, uses: Uses) -> Plan:
    target = solved[0]
    situation = target.situation
    groups = [plan for one in solved for plan in build_groups(one)]
    pools = [pool for one in solved for pool in build_pools(one)]
    main = main_group(situation.model.groups)
    choice = target.solution.groups.get(main.name)
    prefill = next((g.phases["prefill"] for g in groups if g.group == main and "prefill" in g.phases), None)
    block = shared_block(situation.model, situation)
    blocks = [block, *[None for _ in solved[1:]]]
    limits = _limits(situation)
    scratch = workspaces(solved, limits)
    graphs = resolve_graphs(groups, options, situation.platform.device)
    serving = frozenset(part.backend for plan in groups for phase in plan.phases.values() for part in phase.parts)
    notes = idle_notes([plan.group for plan in groups], uses, serving, graphs, options)
    return Plan(
        model=situation.model.name,
        platform=str(situation.platform),
        page_size=choice.setting.page_size if choice else 1,
        kv_cache_dtype=situation.kv_dtype,
        kv_layout=choice.setting.layout if choice else "NHD",
        dtype=situation.dtype,
        groups=tuple(groups),
        pools=tuple(pools),
        cuda_graph=graphs,
        options=options.changed(),
        adjustments=tuple(
            item for one, of in zip(solved, blocks, strict=True) for item in adjustments(one, one.situation.options, of)
        ),
        rejected=tuple(item for one in solved for item in rejections(one.slots, one.solution)),
        warnings=tuple(dict.fromkeys((*warnings_of(solved, options, draft), *notes))),
        lanes=options.lanes,
        batch_invariant=options.deterministic,
        async_schedule=options.async_schedule,
        tp=options.tp_size,
        limits={**limits, "workspace_bytes": sum(item["bytes"] for item in scratch), "workspaces": scratch},
        mixed_batch=prefill.backend if prefill else "",
    )


def _limits(situation: Situation) -> dict[str, Any]:
    """Sizes that buffers must be ready for: longest context, most tokens of one extend, capture maximum over all groups."""
    options, model = situation.options, situation.model
    context = options.context_length or model.max_positions or 0
    chunk = options.chunked_prefill_size or 0
    extend = chunk if chunk > 0 else max(context, options.max_prefill_tokens or 0)
    longest = max([context, *(group.kv_len or 0 for group in model.groups)])
    return {"max_context": context, "max_tokens_per_extend": extend, "capture_max_kv": longest}
