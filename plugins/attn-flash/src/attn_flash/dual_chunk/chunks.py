"""The sizes of dual chunk attention: from backend options, or from a model's ``dual_chunk_attention_config``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core.errors import BindError, UsageError
from attn_flash.rules import largest_part

NAME = "dual_chunk_flash_attn"
#: Keys of ``dual_chunk_attention_config`` that are backend options of the same name.
_OPTIONS = ("chunk_size", "local_size", "original_max_position_embeddings")
#: Keys that belong to the sparse prefill, which is not built.
_SPARSE = (
    "sparse_attention_enabled", "sparse_attention_config", "sparse_attention_threshold", "sparse_attention_last_q",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunks:
    """``chunk_size`` and ``local_size`` in tokens. ``stated``: the model's own numbers, not the defaults of its family.

    ``original`` (0: off) is the length the model was trained for, and ``scaling_length`` (0: the keys of the row in this
    step) the length whose logit scale is used. Raises :class:`BindError` for sizes that cannot be.
    """

    chunk_size: int = 8192
    local_size: int = 1024
    original: int = 0
    scaling_length: int = 0
    stated: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.local_size < self.chunk_size:
            raise BindError(
                f"{NAME}: chunk_size {self.chunk_size} with local_size {self.local_size}",
                "needed   0 <= local_size < chunk_size",
                fix="take both from the model's dual_chunk_attention_config",
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Chunks:
        """From validated backend options. Raises :class:`BindError` for the sparse prefill, which is not built."""
        if options.get("sparse_attention_enabled"):
            raise BindError(
                f"{NAME}: the sparse (vertical and slash) prefill is not built; attention here is dense",
                fix=f"--backend-option {NAME}.sparse_attention_enabled=false: all keys are read, which is slower and exact",
            )
        return cls(
            chunk_size=int(options.get("chunk_size", cls.__dataclass_fields__["chunk_size"].default)),
            local_size=int(options.get("local_size", cls.__dataclass_fields__["local_size"].default)),
            original=int(options.get("original_max_position_embeddings", 0)),
            scaling_length=int(options.get("scaling_length", 0)),
            stated="chunk_size" in options,
        )

    @property
    def length(self) -> int:
        """Tokens of a chunk: keys are rotated by their position modulo this."""
        return self.chunk_size - self.local_size

    def factor(self, kv_len: int) -> float:
        """What multiplies the logits of a row of `kv_len` keys: m^2 with m = max(1, 0.1 ln(length / original) + 1)."""
        length = self.scaling_length or kv_len
        if not self.original or length <= self.original:
            return 1.0
        return (0.1 * math.log(length / self.original) + 1.0) ** 2

    def part_of(self, page_size: int, largest: int) -> int:
        """The page in which a cache of `page_size` is read: divides it and the chunk, so that page tables are cut between pages."""
        return largest_part(math.gcd(page_size, self.length), largest)


def options_from_config(config: Mapping[str, Any] | Any, *, dense: bool = False) -> dict[str, Any]:
    """Backend options from a model's configuration (a mapping or an object with attributes); 8192 and 1024 where it is silent.

    Raises :class:`UsageError` if the model has no ``dual_chunk_attention_config``, if that has keys nobody knows, or if it
    asks for sparse prefill; with `dense` the sparse keys are left out on the caller's responsibility.
    """
    found = config.get("dual_chunk_attention_config") if isinstance(config, Mapping) else getattr(config, "dual_chunk_attention_config", None)  # fmt: skip
    if not found:
        raise UsageError(
            f"the model has no dual_chunk_attention_config: {NAME} does not apply",
            fix="leave the backend to the planner",
        )
    table = dict(found)
    unknown = sorted(set(table) - {*_OPTIONS, *_SPARSE})
    if unknown:
        raise UsageError(
            f"dual_chunk_attention_config has keys that {NAME} does not know: {', '.join(unknown)}",
            f"known    {', '.join((*_OPTIONS, *_SPARSE))}",
        )
    sparse = table.get("sparse_attention_enabled", bool(table.get("sparse_attention_config")))
    if sparse and not dense:
        raise UsageError(
            f"the model asks for sparse prefill, and {NAME} is dense",
            fix="options_from_config(config, dense=True) reads all keys: slower and exact",
        )
    stated = {name: int(table[name]) for name in _OPTIONS if table.get(name) is not None}
    return {"chunk_size": Chunks().chunk_size, "local_size": Chunks().local_size, **stated}
