"""Pages for a case: which slots each row owns, in a random order, with shared prefixes and poisonous neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_core.batch import KvAddress
from attn_core.testing.spec import CaseSpec


@dataclass(slots=True)
class PageWorld:
    """``pages[r]``: page numbers of real row r from ``origins[r]`` on; ``count``: pages of the pool, never-read ones included."""

    pages: list[list[int]]
    count: int
    spare: list[int]
    new_slots: list[int]
    used_slots: list[int]
    origins: list[int]

    def slot(self, row: int, position: int, size: int) -> int:
        """The slot of one key of a row."""
        place = position - self.origins[row]
        return self.pages[row][place // size] * size + place % size


def lay_out(spec: CaseSpec) -> PageWorld:
    """Assign permuted pages to the rows of `spec`. Shared pages are whole pages of prefix, those of row 0."""
    size, generator = spec.page_size, torch.Generator().manual_seed(spec.seed + 1)
    prefixes = [kv - q for q, kv in zip(spec.query_lens, spec.kv_lens, strict=True)]
    if any(prefix < 0 for prefix in prefixes) and spec.geometry.causal:
        raise ValueError(f"a row has more queries than keys: {spec.query_lens} of {spec.kv_lens}")
    origins = _origins(spec)
    needs = [-(-(length - first) // size) for length, first in zip(spec.kv_lens, origins, strict=True)]
    whole = [max(prefix, 0) // size for prefix in prefixes]  # pages of prefix that a row can share
    shared = [0 if r == 0 else min(spec.shared, whole[0], whole[r]) for r in range(len(needs))]
    total = sum(need - kept for need, kept in zip(needs, shared, strict=True))
    count = 1 + total + spec.spare_pages
    order = (torch.randperm(count - 1, generator=generator) + 1).tolist()
    pages: list[list[int]] = []
    for need, kept in zip(needs, shared, strict=True):
        own = [order.pop() for _ in range(need - kept)]
        pages.append((pages[0][:kept] if kept else []) + own)
    world = PageWorld(pages, count, order or [0], [], [], origins)
    slots = [[world.slot(r, j, size) for j in range(origins[r], spec.kv_lens[r])] for r in range(len(needs))]
    world.used_slots = sorted({slot for line in slots for slot in line})
    if spec.give_kv and spec.store:
        world.new_slots = [s for r, line in enumerate(slots) for s in line[max(prefixes[r], 0) - origins[r] :]]
    else:
        world.new_slots = [-1] * sum(spec.query_lens)
    return world


def _origins(spec: CaseSpec) -> list[int]:
    """Where each row's pages start. Raises ValueError if a key before it would be seen, or for other impossible ones."""
    if not spec.origins:
        return [0] * len(spec.kv_lens)
    for row, (origin, _) in enumerate(zip(spec.origins, spec.kv_lens, strict=True)):
        if origin % spec.page_size or not 0 <= origin <= spec.latest_origin(row):
            raise ValueError(f"row {row} cannot start at {origin}: pages of {spec.page_size}, {spec}")
    if spec.shared:
        raise ValueError("rows of a trimmed pool share no pages here")
    return list(spec.origins)


def address_of(spec: CaseSpec, world: PageWorld, device: torch.device) -> KvAddress:
    """The pool's address in the form of `spec`; entries that nobody may follow point to poisoned pages."""
    rows = len(spec.kv_lens) + spec.pad_rows
    lens = list(spec.kv_lens) + [spec.pad_kv_len] * spec.pad_rows
    longest = max(lens, default=0)
    bound = longest if spec.host == "exact" else longest + 5
    common = {
        "page_size": spec.page_size,
        "kv_lens": _int32(lens, device),
        "new_slots": torch.tensor(world.new_slots, dtype=torch.int64, device=device),
        "max_kv_len": bound,
        "kv_lens_cpu": None if spec.host == "none" else _int32([n + bound - longest for n in lens], "cpu"),
        "origin": _int32(world.origins + [0] * spec.pad_rows, device) if spec.origins else None,
    }
    lines = world.pages + [[0] * -(-spec.pad_kv_len // spec.page_size)] * spec.pad_rows
    if spec.form == "csr":
        indptr = [0]
        for line in lines:
            indptr.append(indptr[-1] + len(line))
        beyond = 3 + max(world.origins, default=0) // spec.page_size  # who ignores the origin finds poison, not a fault
        flat = [page for line in lines for page in line] + [world.spare[0]] * beyond
        return KvAddress(**common, indices=_int32(flat, device), indptr=_int32(indptr, device))  # type: ignore[arg-type]
    width = -(-bound // spec.page_size) + 2
    padded = [line + [world.spare[i % len(world.spare)] for i in range(width - len(line))] for line in lines]
    generator = torch.Generator().manual_seed(spec.seed + 2)
    places = torch.randperm(rows + 2, generator=generator)[:rows]
    table = torch.full((rows + 2, width), world.spare[0], dtype=torch.int32)
    if rows:
        table[places] = torch.tensor(padded, dtype=torch.int32)
    return KvAddress(**common, table=table.to(device), table_rows=places.to(torch.int32).to(device))  # type: ignore[arg-type]


def decoy_of(spec: CaseSpec, address: KvAddress) -> KvAddress:
    """The address of another pool of the same step: other pages, another page size, other slots."""
    rows = address.kv_lens.shape[0]
    device = address.kv_lens.device
    width = address.max_kv_len // (2 * spec.page_size) + 2
    return KvAddress(
        page_size=2 * spec.page_size,
        kv_lens=address.kv_lens.clone().fill_(0),
        new_slots=torch.full_like(address.new_slots, -1),
        max_kv_len=address.max_kv_len,
        table=torch.zeros(rows, width, dtype=torch.int32, device=device),
    )


def _int32(values: list[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
