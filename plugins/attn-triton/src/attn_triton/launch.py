"""Launch data: tile sizes, warps and pipeline stages per architecture. One table, measured where a measurement exists.

A row is looked up by (architecture, kernel, element bits, padded head dim); missing architectures use the nearest of their
vendor with the same shared memory. ``sm90`` rows were swept on an H200 (``benchmarks/mha.py --tune``); the others are derived
from them by shared memory size and are only known to compile.
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


#: Fewest keys of one share.
SHARE_FLOOR = 256
#: Keys of one share when results may not depend on the rest of the batch.
INVARIANT_SHARE = 1024

_SPLIT = {
    # (architecture, bits): {padded head dim: launch}
    ("sm90", 16): {64: Launch(128, 128, 4, 3), 128: Launch(128, 64, 4, 3), 256: Launch(64, 32, 4, 3), 512: Launch(64, 16, 4, 3)},
    ("sm90", 8): {64: Launch(128, 128, 4, 4), 128: Launch(128, 128, 4, 3), 256: Launch(64, 64, 4, 3), 512: Launch(64, 32, 4, 3)},
    ("sm90", 32): {64: Launch(64, 64, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(32, 16, 4, 2), 512: Launch(16, 16, 4, 2)},
    ("small", 16): {64: Launch(64, 64, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(32, 32, 4, 2), 512: Launch(16, 16, 4, 2)},
    ("small", 8): {64: Launch(64, 64, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(32, 32, 4, 2), 512: Launch(16, 16, 4, 2)},
    ("small", 32): {64: Launch(32, 32, 4, 2), 128: Launch(32, 16, 4, 2), 256: Launch(16, 16, 4, 1), 512: Launch(16, 16, 4, 1)},
}  # fmt: skip

_TILE = {
    ("sm90", 16): {64: Launch(128, 128, 8, 3), 128: Launch(128, 128, 8, 3), 256: Launch(128, 64, 8, 2), 512: Launch(64, 32, 8, 2)},
    ("sm90", 8): {64: Launch(128, 128, 8, 3), 128: Launch(128, 64, 8, 3), 256: Launch(128, 32, 8, 2), 512: Launch(64, 32, 8, 2)},
    ("sm90", 32): {64: Launch(64, 32, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(32, 16, 4, 2), 512: Launch(16, 16, 4, 2)},
    ("small", 16): {64: Launch(128, 64, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(64, 32, 4, 1), 512: Launch(16, 16, 4, 1)},
    ("small", 8): {64: Launch(128, 64, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(64, 32, 4, 1), 512: Launch(16, 16, 4, 1)},
    ("small", 32): {64: Launch(32, 32, 4, 2), 128: Launch(32, 16, 4, 1), 256: Launch(16, 16, 4, 1), 512: Launch(16, 16, 4, 1)},
}  # fmt: skip

#: Architectures with at least 160 KiB of shared memory a block; all others have 64 to 100 KiB.
_LARGE = frozenset({"sm80", "sm87", "sm90", "sm100", "sm103", "sm110", "gfx950"})


def table_row(arch: str) -> str:
    """The row of the launch tables that serves `arch`."""
    return "sm90" if arch in _LARGE else "small"


def find_launch(arch: str, split: bool, bits: int, padded_dim: int) -> Launch:
    """The launch of one kernel: ``split`` for decode and short queries, else prefill tiles; bits of a stored key: 8, 16, 32."""
    row = (_SPLIT if split else _TILE)[table_row(arch), bits]
    return row[min(max(padded_dim, 64), 512)]

