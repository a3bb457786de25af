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

    @property
    def acceptance(self) -> float:
        """Accepted drafts over the levels that were offered."""
        return self.accepted / self.offered if self.offered else 0.0


@dataclass(frozen=True)
class Mismatch:
    """A token that is not plain decoding's choice behind the same prefix: the logits' distance to it, and top 1 to top 2."""

    row: int
    place: int
    token: int
    choice: int
    gap: float
    top2: float


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
    ) -> Outcome:
        """Greedy answers to all prompts at once; `tick` is told how many tokens a step gained."""
        before, start = _copied(self.router.stats()), time.perf_counter()
        replays = self._replays
        rows = self._rows(prompts, max_new_tokens)
        outcome = Outcome([])
        try:
            for row, token in zip(rows, self._prefill(rows), strict=True):
                row.gain([token], ends)
            tick(len(rows))
            self._drop_ended(rows)
            while live := [row for row in rows if not row.ended]:
                tick(self._step(live, ends, outcome))
                self._drop_ended(live)
        finally:
            for row in rows:
                self._drop(row)
        outcome.tokens = [row.output for row in rows]
        outcome.seconds = time.perf_counter() - start
        outcome.calls = _difference(self.router.stats(), before)
        outcome.replays = self._replays - replays
        return outcome

    @torch.no_grad()
    def check(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        tick: Callable[[int], None] = lambda gained: None,
    ) -> tuple[list[Mismatch], Outcome]:
        """Plain decoding, one token a step, led along `answers`: where it would have chosen another token.

        Without a mismatch the answers are, token for token, what plain greedy decoding gives. After one, the answer's token
        is followed, so that every later token is judged too.
        """
        before, start = _copied(self.router.stats()), time.perf_counter()
        rows = self._rows(prompts, max(map(len, answers), default=0))
        found: list[Mismatch] = []
        try:
            scores = self._prefill_logits(rows)
            live = rows
            while True:
                for row, line in zip(live, scores, strict=True):
                    place = len(row.tokens) - row.prompt
                    token = answers[row.number - rows[0].number][place]
                    found += _judge(row.number - rows[0].number, place, token, line)
                    row.tokens.append(token)
                    row.ended = place + 1 == len(answers[row.number - rows[0].number])
                tick(len(live))
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

    def _prefill(self, rows: Sequence[Row]) -> list[int]:
        chosen: list[int] = self._prefill_logits(rows).argmax(-1).tolist()
        return chosen

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

    def _step(self, rows: Sequence[Row], ends: Collection[int], outcome: Outcome) -> int:
        """Propose, verify, accept, keep. Returns how many tokens were gained."""
        proposals = self.drafter.propose([row.number for row in rows], [row.tokens for row in rows])
        prefixes = [row.request.length for row in rows]
        accepted = self._verify(rows, proposals)
        keep_accepted(self.target.kv, [row.request for row in rows], prefixes, [found.path for found in accepted])
        gained = 0
        for row, found in zip(rows, accepted, strict=True):
            taken = row.gain(found.tokens, ends)
            gained += taken
            outcome.offered += self.shape.steps
            outcome.accepted += min(taken, len(found.path) - 1)
            outcome.moved += any(node != depth for depth, node in enumerate(found.path))
        outcome.verify_steps += 1
        return gained

    def _verify(self, rows: Sequence[Row], proposals: Sequence[Proposal]) -> list[Accepted]:
        """One target step over all proposals; greedy acceptance on the host (the only wait of a step besides the drafter's)."""
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
        choices = logits.argmax(-1).view(len(rows), width).tolist()
        accepted = [accept(proposal, line) for proposal, line in zip(proposals, choices, strict=True)]
        if step is not None:  # keys need no hook, and recurrent states have no graph
            counts = torch.tensor([len(found.path) for found in accepted], dtype=torch.int32)
            self.router.commit(step, counts.to(self.target.device))
        return accepted

    def _drop_ended(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.ended:
                self._drop(row)

    def _drop(self, row: Row) -> None:
        if row.request is not None:
            self.drafter.drop(row.number)
            self.target.kv.free(row.request, discard=True)
            row.request = None  # type: ignore[assignment]


def _judge(row: int, place: int, token: int, logits: torch.Tensor) -> list[Mismatch]:
    best = logits.float().topk(2)
    choice = int(best.indices[0])
    if choice == token:
        return []
    gap, top2 = float(best.values[0] - logits[token]), float(best.values[0] - best.values[1])
    return [Mismatch(row, place, token, choice, gap, top2)]


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
