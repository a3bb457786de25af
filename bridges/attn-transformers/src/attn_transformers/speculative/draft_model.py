"""A draft model: its first tokens come from draft_extend (prefill at the start), every further level from one draft step.

Branches of a tree are rows of their own in the draft's batch. They share the full pages of the row's prefix and own the page
that the prefix ends in (a copy) and those behind it, so that any page size works. When a branch continues another one, it
takes over that branch's keys.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_core.batch import AttentionBatch, DraftSteps, KvAddress
from attn_core.cache import Request
from attn_core.errors import UsageError
from attn_core.paging import PoolRows, build_batch
from attn_transformers.speculative.served import ServedModel
from attn_transformers.speculative.slots import copy_pages, last_tokens, move_slots
from attn_transformers.speculative.trees import Proposal, Shape


def truncated(model: Any, layers: int) -> Any:
    """A model of the first `layers` layers of `model`, with the same weights (no copy), embeddings, norm and head.

    Raises :class:`UsageError` for a number of layers that the model does not have.
    """
    have = model.config.num_hidden_layers
    if not 1 <= layers <= have:
        raise UsageError(f"{layers} draft layers: the model has {have}", fix=f"--draft-layers 1 to {have}")
    shared = {id(parameter): parameter for parameter in model.parameters()}
    draft = copy.deepcopy(model, shared)
    decoder = draft.get_decoder()
    decoder.layers = decoder.layers[:layers]
    draft.config.num_hidden_layers = layers
    if getattr(draft.config, "layer_types", None):
        draft.config.layer_types = list(draft.config.layer_types[:layers])
    return draft


@dataclass(slots=True)
class _Known:
    """A row as the draft knows it: its prefix, and the pages that its branches write to."""

    request: Request
    branches: list[Request]


@dataclass(slots=True)
class _Level:
    """The candidates of one level: tokens and their log-probabilities [R, n], and the branch [R, n] that each continues."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    chosen: torch.Tensor  #: i64[R, topk]: which candidates become the branches of the next level


class ModelDrafter:
    """Drafts with a model of its own, through the phases prefill, draft_extend and draft of the plan's draft groups."""

    def __init__(self, served: ServedModel, shape: Shape) -> None:
        """Raises :class:`UsageError` for a draft with several pools: draft steps carry one list of slots."""
        if len(served.kv.pools) != 1:
            raise UsageError(
                "a draft model whose layers need several pools cannot be used for drafting",
                f"pools    {', '.join(pool.name for pool in served.kv.pools)}",
                fix="a draft whose layers all have one geometry, or --draft ngram",
            )
        self.served, self.shape = served, shape
        self.pool = served.kv.pools[0]
        self._caches = [served.kv.layer(index, served.role) for index in served.layers]
        self._known: dict[int, _Known] = {}

    @staticmethod
    def room(shape: Shape, page_size: int) -> int:
        """Tokens that the branches of one row may need, in whole pages."""
        return int(shape.topk * -(-(page_size - 1 + shape.steps) // page_size) * page_size)

    def propose(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Proposal]:
        """One proposal per row: the best ``width - 1`` of all candidates, by the sum of their log-probabilities."""
        logits = self._catch_up(rows, tokens)
        levels = [self._first_level(logits)]
        if self.shape.steps > 1:
            self._further_levels([self._known[row] for row in rows], levels)
        return self._proposals([row[-1] for row in tokens], levels)

    def drop(self, row: int) -> None:
        """Free the row's pages."""
        known = self._known.pop(row, None)
        for request in () if known is None else (known.request, *known.branches):
            self.served.kv.free(request, discard=True)

    # --- the prefix -------------------------------------------------------------------------------------------------------

    def _catch_up(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute what was accepted since the last time: logits [R, V] behind each row's last token.

        New rows are prefilled, others extended; the two phases are two steps, in the order of the rows.
        """
        fresh = [row not in self._known for row in rows]
        found: torch.Tensor | None = None
        for new in dict.fromkeys(fresh):
            places = [place for place, is_new in enumerate(fresh) if is_new == new]
            part = self._extend([rows[p] for p in places], [tokens[p] for p in places], new)
            if found is None:
                found = part.new_empty((len(rows), part.shape[-1]))
            found[torch.tensor(places, device=found.device)] = part
        assert found is not None
        return found

    def _extend(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], new: bool) -> torch.Tensor:
        kv = self.served.kv
        ids: list[int] = []
        for row, line in zip(rows, tokens, strict=True):
            if new:
                self._known[row] = _Known(kv.new_request(), self._branches())
            request = self._known[row].request
            ids += line[request.length :]
            kv.extend(request, len(line) - request.length)
        batch = kv.batch([self._known[row].request for row in rows], "prefill" if new else "draft_extend")
        assert batch.positions is not None
        step = self.served.begin(batch)
        return self.served.logits(step, ids, batch.positions, last_tokens(batch))

    def _branches(self) -> list[Request]:
        """Pages for each branch of a row: what the prefix leaves of its last page is not known, so all of one more."""
        kv, count = self.served.kv, self.pool.page_size - 1 + self.shape.steps
        found = [kv.new_request() for _ in range(self.shape.topk if self.shape.steps > 1 else 0)]
        for request in found:
            kv.extend(request, count)
        return found

    # --- levels -----------------------------------------------------------------------------------------------------------

    def _first_level(self, logits: torch.Tensor) -> _Level:
        scores, tokens = logits.float().log_softmax(-1).topk(self.shape.topk)
        whole = torch.arange(self.shape.topk, device=tokens.device).expand_as(tokens)
        return _Level(tokens, scores, torch.full_like(tokens, -1), whole)

    def _further_levels(self, known: Sequence[_Known], levels: list[_Level]) -> None:
        """One draft step per level; nothing waits for the device."""
        rows, topk, steps = len(known), self.shape.topk, self.shape.steps - 1
        batch, slots = self._draft_batch(known, steps)
        draft = DraftSteps(steps, 1, slots)
        assert self.served.router is not None
        started = self.served.router.begin_draft(self.served.addressed(batch), draft, model=self.served.role)
        first = batch.positions
        assert first is not None
        for number, step in enumerate(started):
            level = levels[-1]
            if number and topk > 1:
                self._take_over(slots, level.parents.gather(1, level.chosen), number)
            ids = level.tokens.gather(1, level.chosen)
            logits = self.served.logits(step, ids.reshape(-1), first + number)
            scores, tokens = logits.float().log_softmax(-1).topk(topk)
            scores = scores.view(rows, topk, topk) + level.scores.gather(1, level.chosen)[:, :, None]
            scores, tokens = scores.reshape(rows, -1), tokens.reshape(rows, -1)
            branch = torch.arange(topk, device=tokens.device).repeat_interleave(topk).expand_as(tokens)
            levels.append(_Level(tokens, scores, branch, scores.topk(topk).indices))

    def _draft_batch(self, known: Sequence[_Known], steps: int) -> tuple[AttentionBatch, torch.Tensor]:
        """A row per branch, whose keys are the prefix; and the slots i64[R * topk, 1, steps] of the drafts behind it."""
        size = self.pool.page_size
        pages, lengths, source, target = [], [], list[int](), list[int]()
        for row in known:
            full, begun = divmod(row.request.length, size)
            for branch in row.branches:
                pages.append(row.request.pages[0][:full] + branch.pages[0])
                lengths.append(row.request.length)
                if begun:
                    source.append(row.request.pages[0][full])
                    target.append(branch.pages[0][0])
        device = self.served.device
        if source:
            places = torch.tensor([source, target]).to(device)
            copy_pages(self._caches, places[0], places[1])
        # the table must reach the last draft, while the lengths are those of the prefix
        reach = [length + steps for length in lengths]
        rows = PoolRows(size, pages, write=False)
        batch = build_batch([1] * len(pages), reach, rows, "draft", device=device)
        prefix = torch.tensor(lengths, dtype=torch.int32)
        address = batch.addresses[0]
        assert isinstance(address, KvAddress)
        batch.addresses = (replace(address, kv_lens=prefix.to(device), kv_lens_cpu=prefix, max_kv_len=max(lengths)),)
        batch.positions = prefix.to(device=device, dtype=torch.int64)
        slots = [
            [line[position // size] * size + position % size for position in range(length, length + steps)]
            for line, length in zip(pages, lengths, strict=True)
        ]
        return batch, torch.tensor(slots).to(device)[:, None, :]

    def _take_over(self, slots: torch.Tensor, parents: torch.Tensor, count: int) -> None:
        """Branch b continues branch ``parents[r, b]``: the first `count` drafts of that one become its own."""
        rows, topk = parents.shape
        own = slots[:, 0, :count].reshape(rows, topk, count)
        other = own.gather(1, parents[:, :, None].expand(-1, -1, count))
        move_slots(self._caches, self.pool.page_size, other.reshape(-1), own.reshape(-1))

    # --- the tree ---------------------------------------------------------------------------------------------------------

    def _proposals(self, last: Sequence[int], levels: Sequence[_Level]) -> list[Proposal]:
        """The best candidates of every row with their ancestors, parents first. One copy to the host."""
        tokens = torch.cat([level.tokens for level in levels], 1)
        scores = torch.cat([level.scores for level in levels], 1)
        # the node of a candidate's parent: the candidate of the level before that its branch was made of
        above, offset, parents = None, 0, []
        for level in levels:
            parents.append(torch.full_like(level.tokens, -1) if above is None else above.gather(1, level.parents))
            above = level.chosen + offset
            offset += level.tokens.shape[1]
        packed = torch.stack([tokens.double(), scores.double(), torch.cat(parents, 1).double()]).tolist()
        return [self._proposal(root, *row) for root, row in zip(last, zip(*packed, strict=True), strict=True)]

    def _proposal(
        self, last: int, tokens: Sequence[float], scores: Sequence[float], parents: Sequence[float]
    ) -> Proposal:
        best = sorted(range(len(tokens)), key=lambda node: (-scores[node], node))[: self.shape.width - 1]
        place = {-1: 0}
        made_tokens, made_parents = [last], [-1]
        for node in sorted(best):  # a parent stands in an earlier level
            place[node] = len(made_tokens)
            made_tokens.append(int(tokens[node]))
            made_parents.append(place[int(parents[node])])
        return Proposal(tuple(made_tokens), tuple(made_parents))
