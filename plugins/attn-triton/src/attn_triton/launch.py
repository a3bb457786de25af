"""Launch data: tile sizes, warps and pipeline stages per architecture. One table, measured where a measurement exists.

A row is looked up by (shared memory of the architecture, kernel, bits of a stored key, head dim). The ``large`` rows for 16,
8 and 4 bits up to head dim 256 were swept on an H200; all others are derived from them by shared memory and
known to compile.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """BLOCK_M is an upper bound for queries (prefill); decode tiles take what the GQA ratio needs."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    resident: int = 4  #: decode: programs that one multiprocessor runs at once; keys are cut into as many shares
    ahead: bool = False  #: page numbers are read one block ahead of their keys


#: Fewest keys of one share.
SHARE_FLOOR = 256
#: Keys of one share when results may not depend on the rest of the batch.
INVARIANT_SHARE = 1024

_SPLIT = {
    # (row, bits of a stored key): {largest head dim: launch}
    ("large", 16): {64: Launch(128, 64, 2, 5, 6), 128: Launch(128, 64, 4, 2, 4), 192: Launch(64, 32, 4, 3, 3, True), 256: Launch(64, 16, 2, 5, 3), 512: Launch(64, 16, 4, 3, 2)},
    ("large", 8): {64: Launch(128, 64, 2, 7, 6), 128: Launch(128, 64, 2, 5, 4), 256: Launch(64, 32, 4, 4, 3), 512: Launch(64, 32, 4, 3, 2)},
    ("large", 4): {256: Launch(128, 64, 2, 3, 4, True)},
    ("large", 32): {64: Launch(64, 64, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(32, 16, 4, 2), 512: Launch(16, 16, 4, 2, 2)},
    ("small", 16): {64: Launch(64, 64, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(32, 16, 4, 2, 2)},
    ("small", 8): {64: Launch(64, 64, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(32, 32, 4, 2, 2)},
    ("small", 32): {64: Launch(32, 32, 4, 2), 128: Launch(32, 16, 4, 2), 256: Launch(16, 16, 4, 1, 2)},
}  # fmt: skip

_TILE = {
    ("large", 16): {64: Launch(128, 128, 8, 3), 128: Launch(128, 128, 8, 3), 256: Launch(128, 64, 8, 2), 512: Launch(64, 32, 8, 2)},
    ("large", 8): {64: Launch(128, 128, 8, 3), 128: Launch(128, 64, 8, 3), 256: Launch(128, 32, 8, 2), 512: Launch(64, 32, 8, 2)},
    ("large", 32): {64: Launch(64, 32, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(32, 16, 4, 2), 512: Launch(16, 16, 4, 2)},
    ("small", 16): {64: Launch(128, 64, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(64, 32, 4, 1)},
    ("small", 8): {64: Launch(128, 64, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(64, 32, 4, 1)},
    ("small", 32): {64: Launch(32, 32, 4, 2), 128: Launch(32, 16, 4, 1), 256: Launch(16, 16, 4, 1)},
}  # fmt: skip

#: Architectures with at least 160 KiB of shared memory a block; all others have 64 to 100 KiB.
_LARGE = frozenset({"sm80", "sm87", "sm90", "sm100", "sm103", "sm110", "gfx950"})

#: Keys of a block and stages of the warp-specialised prefill kernel. On an H200, 64 keys with 3 or 4 stages reach 0.9 of it.
HOPPER_BLOCK, HOPPER_STAGES = 128, 2


def table_row(arch: str) -> str:
    """The row of the launch tables that serves `arch`."""
    return "large" if arch in _LARGE else "small"


def find_launch(arch: str, split: bool, bits: int, dim: int) -> Launch:
    """The launch of one kernel: ``split`` for decode and short queries, else prefill tiles; bits of a stored key: 4, 8, 16, 32.

    Keys of 4 bits have rows of their own where they were measured, and else those of 8 bits.
    """
    table, where = _SPLIT if split else _TILE, table_row(arch)
    row = table.get((where, bits)) or table[where, max(bits, 8)]
    return row[min((limit for limit in row if limit >= dim), default=max(row))]
