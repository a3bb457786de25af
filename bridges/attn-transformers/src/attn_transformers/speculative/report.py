"""What ``attn speculate`` shows: the plan of target and draft, acceptance, what really ran, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attn_transformers.demo_report import Screen
from attn_transformers.ties import Distance, Mismatch, firsts, told

if TYPE_CHECKING:
    from attn_core.plan import Plan
    from attn_transformers.speculative.engine import Outcome
    from attn_transformers.speculative.trees import Shape


@dataclass(frozen=True)
class Control:
    """Plain decoding with every row `copies` times in the batch, as many tokens a step as verify has, led along the same answers.

    ``from_plain``: how far its logits are from plain decoding's; ``from_run``: from those behind which the answers were chosen.
    """

    copies: int
    mismatches: tuple[Mismatch, ...]
    from_plain: Distance
    from_run: Distance

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "copies": self.copies,
            "mismatches": [vars(one) for one in self.mismatches],
            "from_plain": self.from_plain.to_dict(),
            "from_run": self.from_run.to_dict(),
        }


@dataclass(frozen=True)
class SpeculativeReport:
    """What a run found. ``ok``: every token is plain decoding's choice, or a tie with it."""

    draft: str
    shape: Shape
    plan: Plan
    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    run: Outcome
    plain: Outcome
    mismatches: tuple[Mismatch, ...]
    tie: float
    captured: tuple[int, ...] = field(default=())
    apart: Distance = Distance(0.0, 0.0)  #: the logits of the run and of plain decoding, behind the same tokens
    control: Control | None = None

    @property
    def tokens(self) -> int:
        """Tokens generated, over all prompts."""
        return sum(map(len, self.run.tokens))

    @property
    def identical(self) -> int:
        """Tokens that plain decoding chooses, too."""
        return self.tokens - len(self.mismatches)

    @property
    def ties(self) -> int:
        """Mismatches within the tolerance."""
        return sum(one.tie(self.tie) for one in self.mismatches)

    @property
    def ok(self) -> bool:
        """No mismatch but ties."""
        return self.ties == len(self.mismatches)

    @property
    def mode(self) -> str:
        """Which phase's backend verifies."""
        return str(self.plan.options.get("speculative_attention_mode", "prefill"))

    @property
    def gained(self) -> float:
        """Tokens that a row gained in one verify step, on average."""
        rows = self.run.offered // self.shape.steps
        return (self.tokens - len(self.prompts)) / rows if rows else 0.0

    @property
    def replayed_calls(self) -> dict[str, dict[str, int]]:
        """Calls inside replayed graphs, which no Python sees: one per layer and replay."""
        found: dict[str, dict[str, int]] = {}
        for group, phase, chosen in self.plan.phase_plans():
            if phase == "verify" and self.run.replays:
                counts = found.setdefault(chosen.backend, {"verify": 0})
                counts["verify"] += self.run.replays * len(group.group.layers)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema_version": 1,
            "ok": self.ok,
            "draft": self.draft,
            "topk": self.shape.topk,
            "steps": self.shape.steps,
            "draft_tokens": self.shape.width,
            "speculative_attention_mode": self.mode,
            "prompts": list(self.prompts),
            "texts": list(self.texts),
            "tokens": self.tokens,
            "identical": self.identical,
            "ties": self.ties,
            "tie_tolerance": self.tie,
            "mismatches": [vars(one) for one in self.mismatches],
            "first_differences": [one and vars(one) for one in firsts(self.mismatches, len(self.prompts))],
            "logits_apart": self.apart.to_dict(),
            "control": self.control and self.control.to_dict(),
            "verify_steps": self.run.verify_steps,
            "accepted": self.run.accepted,
            "offered": self.run.offered,
            "acceptance": round(self.run.acceptance, 4),
            "tokens_per_verify": round(self.gained, 3),
            "moved_paths": self.run.moved,
            "graph_replays": self.run.replays,
            "captured_rows": list(self.captured),
            "replayed_calls": self.replayed_calls,
            "calls": self.run.calls,
            "plain_calls": self.plain.calls,
            "seconds": round(self.run.seconds, 3),
            "plain_seconds": round(self.plain.seconds, 3),
            "plan": self.plan.to_dict(),
        }


class SpeculativeScreen(Screen):
    """Prints with rich, progress on stderr; quiet prints nothing."""

    def plan(self, plan: Plan) -> None:
        """Who serves which phase of which model, and what planning changed."""
        self.out.print("[bold]plan[/bold]")
        self.out.print(f"  {plan.model} on {plan.platform}, {plan.dtype}; page size {plan.page_size}")
        for group, phase, chosen in plan.phase_plans():
            who = f"{group.group.model}/{group.group.name} ({len(group.group.layers)} layers)"
            served = f"{chosen.backend}:{chosen.variant} ({chosen.package} {chosen.version})"
            self.out.print(f"  {who:<26} {phase:<12} {served}")
        for change in plan.adjustments:
            self.out.print(f"  changed {change.field}: {change.before} -> {change.after} ({change.reason})")
        self.out.print()

    def result(self, report: SpeculativeReport) -> None:
        """The texts, what ran, and the verdict."""
        from rich.markup import escape

        for prompt, text in zip(report.prompts, report.texts, strict=True):
            self.out.print(f"[bold]> {escape(prompt)}[/bold]")
            self.out.print(f"{escape(text)}\n")
        run, shape = report.run, report.shape
        form = "chain" if shape.chain else f"tree, topk {shape.topk}"
        self.out.print(
            f"drafts: {report.draft}, {form}, {shape.steps} steps, {shape.width} tokens verified a row; "
            f"verify follows {report.mode}"
        )
        self.out.print(
            f"acceptance: {run.accepted} of {run.offered} levels ({run.acceptance:.1%}); {report.gained:.2f} tokens a row "
            f"and verify; {run.verify_steps} verify steps; {run.moved} accepted paths moved in the cache"
        )
        _calls(self, "speculative", run.calls)
        if report.captured:
            rows = ", ".join(map(str, report.captured))
            self.out.print(f"graphs: verify captured for {rows} rows, replayed {run.replays} times")
            _calls(self, "replayed", report.replayed_calls)
        _calls(self, "plain", report.plain.calls)
        self.out.print(
            f"{report.tokens} tokens in {run.seconds:.1f} s: {report.tokens / run.seconds:.1f} tokens/s "
            f"(plain decoding: {report.tokens / report.plain.seconds:.1f})"
        )
        for one in report.mismatches:
            self.out.print(told(one, report.tie))
        self.out.print(
            f"logits of verify and plain decoding: {report.apart.median:.1e} apart (median of the tokens' largest), "
            f"{report.apart.largest:.1e} at most"
        )
        if (control := report.control) is not None:
            self.out.print(
                f"control, plain decoding with {control.copies} of each row: {len(control.mismatches)} tokens differ from the "
                f"answers; logits {control.from_plain.median:.1e} from plain decoding, {control.from_run.median:.1e} from verify"
            )
        ties = f", {report.ties} ties" if report.mismatches else ""
        self.out.print(f"[bold]identical tokens: {report.identical}/{report.tokens}[/bold] vs plain decoding{ties}")


def _calls(screen: Screen, what: str, calls: Mapping[str, Mapping[str, int]]) -> None:
    for backend, phases in sorted(calls.items()):
        counted = ", ".join(f"{count} {phase}" for phase, count in phases.items())
        screen.out.print(f"calls, {what}: {backend}: {counted}")


def decoded(tokenizer: Any, answers: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The answers as text."""
    return tuple(tokenizer.decode(list(tokens), skip_special_tokens=True).strip() for tokens in answers)
