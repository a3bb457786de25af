"""What the demo shows: backends, plan, progress, texts, speed, and how many tokens are identical."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_transformers.ties import Distance, Mismatch, firsts, told

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from attn_core.plan import Plan


@dataclass(frozen=True)
class PromptResult:
    """One prompt: its length, the answer, and the comparison. ``gap`` is the reference's logit difference at the first mismatch."""

    prompt: str
    prompt_tokens: int
    text: str
    tokens: int
    identical: int
    mismatch: int | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Peer:
    """The same prompts through another backend. ``mismatches``: where it would have chosen another token behind our tokens.

    ``tie`` is None where keys and values are quantised, so that nothing is judged. ``same_texts``: whether its own answers,
    freely generated, are ours token for token.
    """

    backend: str
    plan: Plan
    calls: Mapping[str, Mapping[str, int]]
    texts: tuple[str, ...]
    same_texts: tuple[bool, ...]
    tokens: int
    mismatches: tuple[Mismatch, ...]
    tie: float | None
    apart: Distance

    @property
    def identical(self) -> int:
        """Tokens that the other backend chooses, too."""
        return self.tokens - len(self.mismatches)

    @property
    def ties(self) -> int:
        """Mismatches within the tolerance."""
        return sum(self.tie is not None and one.tie(self.tie) for one in self.mismatches)

    @property
    def ok(self) -> bool:
        """No mismatch but ties, or nothing to judge."""
        return self.tie is None or self.ties == len(self.mismatches)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        served = {
            f"{group.group.name} {phase}": f"{who.backend}:{who.variant}"
            for group, phase, who in self.plan.phase_plans()
        }
        return {
            "backend": self.backend,
            "ok": self.ok,
            "plan": {"fingerprint": self.plan.fingerprint, "page_size": self.plan.page_size, "phases": served},
            "calls": self.calls,
            "texts": list(self.texts),
            "same_texts": list(self.same_texts),
            "tokens": self.tokens,
            "identical": self.identical,
            "ties": self.ties,
            "tie_tolerance": self.tie,
            "first_differences": [one and vars(one) for one in firsts(self.mismatches, len(self.texts))],
            "mismatches": [vars(one) for one in self.mismatches],
            "logits_apart": self.apart.to_dict(),
        }


@dataclass(frozen=True)
class DemoReport:
    """What a run found. ``ok`` is False where full precision was asked for and a token differs, or the peer's verdict is."""

    prompts: tuple[PromptResult, ...]
    seconds: float
    reference_seconds: float
    calls: Mapping[str, Mapping[str, int]]
    plan: Plan
    must_agree: bool
    peer: Peer | None = None

    @property
    def tokens(self) -> int:
        """Tokens compared, over all prompts."""
        return sum(result.tokens for result in self.prompts)

    @property
    def identical(self) -> int:
        """Tokens that are equal, position by position."""
        return sum(result.identical for result in self.prompts)

    @property
    def plans(self) -> list[Plan]:
        """The plan that was run, and the peer's."""
        return [self.plan, *([] if self.peer is None else [self.peer.plan])]

    @property
    def ok(self) -> bool:
        """Whether the run is what it should be."""
        return (not self.must_agree or self.identical == self.tokens) and (self.peer is None or self.peer.ok)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema_version": 1,
            "ok": self.ok,
            "prompts": [vars(result) for result in self.prompts],
            "tokens": self.tokens,
            "identical": self.identical,
            "seconds": round(self.seconds, 3),
            "reference_seconds": round(self.reference_seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "calls": self.calls,
            "compared": self.peer and self.peer.to_dict(),
            "plan": self.plan.to_dict(),
        }


def compare(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], logits: Sequence[Any]
) -> Iterator[tuple[int, int, int | None, float | None]]:
    """For each answer: (tokens, identical, first mismatch, logit gap there). The longer answer counts.

    The gap is the reference's best logit minus its logit of our token: what a tie-break would have had to overcome.
    """
    for mine, reference, scores in zip(ours, theirs, logits, strict=True):
        pairs = list(zip(mine, reference, strict=False))
        equal = sum(a == b for a, b in pairs)
        total = max(len(mine), len(reference))
        if equal == total:
            yield total, equal, None, None
            continue
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        gap = None
        if place < min(len(mine), len(scores)):
            gap = float(scores[place].max() - scores[place][mine[place]])
        yield total, equal, place, gap


class Screen:
    """Prints with rich, progress on stderr; quiet prints nothing."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self.quiet = quiet
        self.out = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, quiet=quiet)

    def backends(self) -> None:
        """The backends that discovery found, one line each."""
        from attn_core.discovery import discover

        manifests = sorted(discover().manifests, key=lambda manifest: (manifest.kind, manifest.name))
        self.out.print("[bold]backends[/bold]")
        for manifest in manifests:
            if manifest.status != "planned":
                name = f"{manifest.kind}/{manifest.name}"
                self.out.print(f"  {name:<28} {manifest.package}: {_plain(manifest.summary)}")
        planned = ", ".join(f"{m.kind}/{m.name}" for m in manifests if m.status == "planned")
        if planned:
            self.out.print(f"  [dim]planned: {planned}[/dim]")

    def plan(self, plan: Plan) -> None:
        """Who serves what, and what planning changed."""
        self.out.print("\n[bold]plan[/bold]")
        self.out.print(
            f"  {plan.model} on {plan.platform}, {plan.dtype}; page size {plan.page_size}, KV {plan.kv_cache_dtype}"
        )
        for group, phase, chosen in plan.phase_plans():
            layers = len(group.group.layers)
            served = f"{chosen.backend}:{chosen.variant} ({chosen.package} {chosen.version})"
            self.out.print(f"  {group.group.name} ({layers} layers) {phase:<8} {served}")
        for change in plan.adjustments:
            self.out.print(f"  changed {change.field}: {change.before} -> {change.after} ({change.reason})")
        self.out.print()

    def waiting(self, text: str) -> AbstractContextManager[Any]:
        """A spinner on stderr."""
        if self.quiet:
            return nullcontext()
        return self.err.status(text)

    @contextmanager
    def progress(self, text: str, steps: int) -> Iterator[Callable[[], None]]:
        """A progress bar on stderr; yields the function that advances it."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.err, disable=self.quiet) as bar:
            task = bar.add_task(text, total=steps)
            yield lambda: bar.advance(task)
            bar.update(task, completed=steps)

    def report(self, report: DemoReport) -> None:
        """The texts and the verdict."""
        for result in report.prompts:
            self.out.print(f"[bold]> {_plain(result.prompt)}[/bold]  [dim]({result.prompt_tokens} tokens)[/dim]")
            self.out.print(f"{_plain(result.text)}\n")
        for backend, phases in sorted(report.calls.items()):
            counted = ", ".join(f"{count} {phase}" for phase, count in phases.items())
            self.out.print(f"calls: {backend}: {counted}")
        self.out.print(
            f"{report.tokens} tokens in {report.seconds:.1f} s: {report.tokens / report.seconds:.1f} tokens/s "
            f"(transformers' own attention: {report.tokens / report.reference_seconds:.1f})"
        )
        for number, result in enumerate(report.prompts, 1):
            if result.mismatch is not None:
                gap = "the answers end apart" if result.gap is None else f"logit gap {result.gap:.2e}"
                self.out.print(f"prompt {number}: first difference at token {result.mismatch} ({gap})")
        self.out.print(f"[bold]identical tokens: {report.identical}/{report.tokens}[/bold]")
        if report.peer is not None:
            self.peer(report.peer)

    def peer(self, peer: Peer) -> None:
        """What another backend says about our tokens."""
        self.out.print(
            f"\n{peer.backend}: {sum(peer.same_texts)} of {len(peer.texts)} answers the same, token for token; logits "
            f"{peer.apart.median:.1e} apart (median of the tokens' largest), {peer.apart.largest:.1e} at most"
        )
        for one in peer.mismatches:
            self.out.print(told(one, peer.tie))
        ties = f", {peer.ties} ties" if peer.mismatches and peer.tie is not None else ""
        self.out.print(
            f"[bold]{peer.backend} chooses {peer.identical}/{peer.tokens}[/bold] of our tokens, each behind our own{ties}"
        )


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
