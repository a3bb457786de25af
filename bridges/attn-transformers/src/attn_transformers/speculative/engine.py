"""The speculative loop: prefill, then propose, verify, accept, keep; and the plain loop that it is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attn_core.cache import Request
from attn_core.context import GraphLimits
from attn_core.graphs import GraphRunner, Recorder
from attn_core.router import Step
from attn_transformers.speculative.drafts import Drafter
from attn_transformers.speculative.served import ServedModel
from attn_transformers.speculative.slots import keep_accepted, last_tokens
from attn_transformers.speculative.trees import Accepted, Proposal, Shape, accept, pack
from attn_transformers.ties import Best, Mismatch, judge, kept_best

Calls = dict[str, dict[str, int]]


@dataclass(slots=True)
class Row:
    """One sequence: all tokens known so far. The last one has no keys in the target's cache yet."""

    number: int
    tokens: list[int]
    prompt: int
    request: Request
    most: int
    ended: bool = False
    best: list[Best] = field(default_factory=list)  #: the best logits of every token of the output, where asked for

    @property
    def output(self) -> list[int]:
        """What was generated."""
        return self.tokens[self.prompt :]

    def gain(self, tokens: Sequence[int], ends: Collection[int]) -> int:
        """Take tokens up to the first that ends the answer, or to the most that may be generated. Returns how many."""
        taken = 0
        for token in tokens:
            if self.ended:
                break
            self.tokens.append(token)
            taken += 1
            self.ended = token in ends or len(self.tokens) - self.prompt == self.most
        return taken


@dataclass
class Outcome:
    """What a run generated and did. ``accepted`` drafts of at most ``offered`` (levels a row and step could have gained)."""

    tokens: list[list[int]]
    verify_steps: int = 0
    offered: int = 0
    accepted: int = 0
    moved: int = 0  #: rows whose accepted path had to be moved behind the prefix
    seconds: float = 0.0
    calls: Calls = field(default_factory=dict)
    replays: int = 0  #: verify steps that a graph replayed; ``calls`` cannot see those
    best: list[Best] = field(default_factory=list)  #: an answer's best logits, one line a token, where asked for

    @property
    def acceptance(self) -> float:
        """Accepted drafts over the levels that were offered."""
        return self.accepted / self.offered if self.offered else 0.0


class Speculator:
    """Speculative greedy decoding of a target on a plan. Not thread-safe; all rows of a call start together."""

    def __init__(self, target: ServedModel, drafter: Drafter, shape: Shape) -> None:
        self.target, self.drafter, self.shape = target, drafter, shape
        assert target.router is not None
        self.router = target.router
        self._graphs: GraphRunner | None = None
        self._next = 0

    @torch.no_grad()
    def capture_verify(self, rows: int, max_kv_len: int, recorder: Recorder | None = None) -> list[int]:
        """Capture verify steps for up to `rows` rows, one graph per power of two. Returns the buckets.

        Raises :class:`GraphError` where the planned backend of verify may not be captured.
        """
        buckets = tuple(sorted({*(1 << n for n in range(rows.bit_length()) if 1 << n < rows), rows}))
        width = self.shape.width
        pages = 1 + rows * max(-(-max_kv_len // pool.page_size) for pool in self.target.kv.pools)
        limits = GraphLimits(buckets, rows * width, width, max_kv_len, pages)
        example = {"ids": torch.zeros(1, dtype=torch.int64, device=self.target.device)}

        def forward(step: Step, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            assert step.batch.positions is not None
            return self.target.logits(step, inputs["ids"], step.batch.positions)

        self._graphs = GraphRunner(self.router, forward, limits, example, recorder=recorder)
        return self._graphs.capture("verify", width)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        ends: Collection[int] = (),
        tick: Callable[[int], None] = lambda gained: None,
        keep_best: bool = False,
    ) -> Outcome:
        """Greedy answers to all prompts at once; `tick` is told how many tokens a step gained.

        With `keep_best` the outcome holds the best logits behind which every token was chosen.
        """
        before, start = _copied(self.router.stats()), time.perf_counter()
        replays = self._replays
        rows = self._rows(prompts, max_new_tokens)
        outcome = Outcome([])
        try:
            scores = self._prefill_logits(rows)
            for row, token, line in zip(rows, scores.argmax(-1).tolist(), scores, strict=True):
                row.gain([token], ends)
                row.best += [kept_best(line[None])] if keep_best else []
            tick(len(rows))
            self._drop_ended(rows)
            while live := [row for row in rows if not row.ended]:
                tick(self._step(live, ends, outcome, keep_best))
                self._drop_ended(live)
        finally:
            for row in rows:
                self._drop(row)
        outcome.tokens = [row.output for row in rows]
        outcome.seconds = time.perf_counter() - start
        outcome.best = [_joined(row.best) for row in rows] if keep_best else []
        outcome.calls = _difference(self.router.stats(), before)
        outcome.replays = self._replays - replays
        return outcome

    @torch.no_grad()
    def check(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        tick: Callable[[int], None] = lambda gained: None,
        own: Sequence[Best] | None = None,
        copies: int = 1,
    ) -> tuple[list[Mismatch], Outcome]:
        """Plain decoding, one token a step, led along `answers`: where it would have chosen another token.

        Without a mismatch the answers are, token for token, what plain greedy decoding gives. After one, the answer's token
        is followed, so that every later token is judged too.

        `own` are the answers' own best logits: mismatches then tell both sides, and the outcome's ``best`` holds plain
        decoding's logits of the same tokens. With `copies` every row is decoded that many times in one batch, of which the
        first is judged: matrix products of another size, the same attention.
        """
        before, start = _copied(self.router.stats()), time.perf_counter()
        most = max(map(len, answers), default=0)
        batches = [self._rows(prompts, most) for _ in range(copies)]
        rows = live = [row for batch in batches for row in batch]
        found: list[Mismatch] = []
        try:
            scores = torch.cat([self._prefill_logits(batch) for batch in batches])
            while True:
                found += _followed(live, rows[0].number, answers, scores, own)
                tick(sum(row.number - rows[0].number < len(prompts) for row in live))
                self._drop_ended(live)
                live = [row for row in live if not row.ended]
                if not live:
                    break
                scores = self._decode_logits(live)
        finally:
            for row in rows:
                self._drop(row)
        outcome = Outcome([list(answer) for answer in answers])
        outcome.seconds = time.perf_counter() - start
        outcome.best = [] if own is None else [_joined(row.best) for row in rows[: len(prompts)]]
        outcome.calls = _difference(self.router.stats(), before)
        return found, outcome

    @property
    def _replays(self) -> int:
        return 0 if self._graphs is None else self._graphs.replays

    # --- steps ------------------------------------------------------------------------------------------------------------

    def _rows(self, prompts: Sequence[Sequence[int]], most: int) -> list[Row]:
        first, self._next = self._next, self._next + len(prompts)
        kv = self.target.kv
        return [
            Row(first + place, list(prompt), len(prompt), kv.new_request(), most)
            for place, prompt in enumerate(prompts)
        ]

    def _prefill_logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [R, V] behind every prompt."""
        for row in rows:
            self.target.kv.extend(row.request, row.prompt)
        batch = self.target.kv.batch([row.request for row in rows], "prefill")
        assert batch.positions is not None
        ids = [token for row in rows for token in row.tokens]
        return self.target.logits(self.target.begin(batch), ids, batch.positions, last_tokens(batch))

    def _decode_logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [R, V] behind each row's last token, which is computed here."""
        for row in rows:
            self.target.kv.extend(row.request, 1)
        batch = self.target.kv.batch([row.request for row in rows], "decode")
        assert batch.positions is not None
        return self.target.logits(self.target.begin(batch), [row.tokens[-1] for row in rows], batch.positions)

    def _step(self, rows: Sequence[Row], ends: Collection[int], outcome: Outcome, keep_best: bool) -> int:
        """Propose, verify, accept, keep. Returns how many tokens were gained."""
        proposals = self.drafter.propose([row.number for row in rows], [row.tokens for row in rows])
        prefixes = [row.request.length for row in rows]
        accepted, logits = self._verify(rows, proposals)
        keep_accepted(self.target.kv, [row.request for row in rows], prefixes, [found.path for found in accepted])
        gained = 0
        for number, (row, found) in enumerate(zip(rows, accepted, strict=True)):
            taken = row.gain(found.tokens, ends)
            gained += taken
            if keep_best:
                row.best.append(kept_best(logits[number, torch.tensor(found.path[:taken], device=logits.device)]))
            outcome.offered += self.shape.steps
            outcome.accepted += min(taken, len(found.path) - 1)
            outcome.moved += any(node != depth for depth, node in enumerate(found.path))
        outcome.verify_steps += 1
        return gained

    def _verify(self, rows: Sequence[Row], proposals: Sequence[Proposal]) -> tuple[list[Accepted], torch.Tensor]:
        """One target step over all proposals; greedy acceptance on the host (the only wait of a step besides the drafter's).

        The logits [R, width, V] are valid until the next step.
        """
        kv, width = self.target.kv, self.shape.width
        for row in rows:
            kv.extend(row.request, width)
        batch = kv.batch([row.request for row in rows], "verify")
        if not self.shape.chain or self._graphs is not None:  # captured batches always have a mask
            batch.tree = pack(proposals, self.target.device)
            prefix = batch.addresses[0].kv_lens - width  # type: ignore[union-attr]
            batch.positions = (prefix[:, None] + batch.tree.depth).reshape(-1).long()
        assert batch.positions is not None
        ids = [token for proposal in proposals for token in proposal.tokens]
        step = None
        if self._graphs is not None:
            logits = self._graphs.run(batch, {"ids": torch.tensor(ids).to(self.target.device)})
        else:
            step = self.target.begin(batch)
            logits = self.target.logits(step, ids, batch.positions)
        logits = logits.reshape(len(rows), width, -1)
        choices = logits.argmax(-1).tolist()
        accepted = [accept(proposal, line) for proposal, line in zip(proposals, choices, strict=True)]
        if step is not None:  # keys need no hook, and recurrent states have no graph
            counts = torch.tensor([len(found.path) for found in accepted], dtype=torch.int32)
            self.router.commit(step, counts.to(self.target.device))
        return accepted, logits

    def _drop_ended(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.ended:
                self._drop(row)

    def _drop(self, row: Row) -> None:
        if row.request is not None:
            self.drafter.drop(row.number)
            self.target.kv.free(row.request, discard=True)
            row.request = None  # type: ignore[assignment]


def _followed(
    live: Sequence[Row], first: int, answers: Sequence[Sequence[int]], scores: torch.Tensor, own: Sequence[Best] | None
) -> list[Mismatch]:
    """Every row takes its answer's next token; those of the first copy, numbered from `first`, are judged by the logits [R, V]."""
    found: list[Mismatch] = []
    choices: list[int] = scores.argmax(-1).tolist()
    for row, choice, line in zip(live, choices, scores, strict=True):
        number = row.number - first
        answer = answers[number % len(answers)]
        if number < len(answers):
            found += _judged(row, number, choice, answer, line, own)
        row.tokens.append(answer[len(row.output)])
        row.ended = len(row.output) == len(answer)
    return found


def _judged(
    row: Row, number: int, choice: int, answer: Sequence[int], logits: torch.Tensor, own: Sequence[Best] | None
) -> list[Mismatch]:
    """Compare plain decoding's choice with the answer's next token, and keep its logits of the answer's own best tokens."""
    place = len(row.output)
    if own is not None:
        wanted = own[number].tokens[place]
        row.best.append(Best(logits[wanted].float()[None], wanted[None]))
    if choice == answer[place]:
        return []
    one = judge(number, place, answer[place], logits, None if own is None else own[number])
    return [] if one is None else [one]


def _joined(parts: Sequence[Best]) -> Best:
    return Best(torch.cat([part.values for part in parts]), torch.cat([part.tokens for part in parts]))


def _copied(stats: Mapping[str, Mapping[str, int]]) -> Calls:
    return {backend: dict(phases) for backend, phases in stats.items()}


def _difference(after: Mapping[str, Mapping[str, int]], before: Mapping[str, Mapping[str, int]]) -> Calls:
    found: Calls = {}
    for backend, phases in after.items():
        counts = {phase: count - before.get(backend, {}).get(phase, 0) for phase, count in phases.items()}
        if any(counts.values()):
            found[backend] = {phase: count for phase, count in counts.items() if count}
    return found


__all__ = ["Mismatch", "Outcome", "Row", "Speculator"]
