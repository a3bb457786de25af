"""A drafter that knows the answers, so that what is accepted and moved does not depend on luck."""

from __future__ import annotations

from tiny_models import PROMPTS

from attn_transformers.speculative.trees import Proposal, Shape


class Oracle:
    """Knows the answers: proposes the true continuation, beside and behind wrong tokens.

    In a tree every true token is the second child of its parent, so that an accepted path never lies in one piece. Every
    third proposal is wrong from its second token on.
    """

    def __init__(self, shape, answers):
        self.shape, self.answers, self.turn, self.dropped = shape, answers, 0, []

    def propose(self, rows, tokens):
        self.turn += 1
        return [self._one(row % len(PROMPTS), list(line)) for row, line in zip(rows, tokens, strict=True)]

    def drop(self, row):
        self.dropped.append(row)

    def _one(self, row, line):
        done = len(line) - len(PROMPTS[row])
        future = (self.answers[row][done:] + [7] * self.shape.steps)[: self.shape.steps]
        if self.turn % 3 == 0:
            future[1:] = [(token + 1) % 200 for token in future[1:]]
        made, parents, node = [line[-1]], [-1], 0
        for token in future:
            if not self.shape.chain:
                made.append((token + 5) % 200)
                parents.append(node)
            made.append(token)
            parents.append(node)
            node = len(made) - 1
        return Proposal(tuple(made), tuple(parents))


def oracle_shape(topk):
    return Shape.of(1, 3) if topk == 1 else Shape.of(2, 3, 7)
