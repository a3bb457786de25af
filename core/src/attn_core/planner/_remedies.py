"""What would make a plan possible: single changes of options, each tried out before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

from attn_core.options import Options
from attn_core.planner._slots import Slot

Solvable = Callable[[Options], bool]

#: Options that are tried, one at a time, to find what would make a plan possible.
_REMEDIES: Sequence[tuple[str, object, str]] = (
    ("page_size", None, "without --page-size"),
    ("kv_cache_dtype", "auto", "--kv-cache-dtype auto"),
    ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype fp8_e4m3"),
    ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype fp8_e5m2"),
    ("kv_cache_dtype", "bf16", "--kv-cache-dtype bfloat16"),
    ("dtype", "bf16", "--dtype bfloat16"),
    ("dtype", "fp16", "--dtype float16"),
    ("speculative_eagle_topk", 1, "--speculative-eagle-topk 1"),
    ("speculative_attention_mode", "decode", "--speculative-attention-mode decode"),
    ("deterministic", False, "without --deterministic"),
    ("disable_chunked_prefix_cache", True, "--disable-chunked-prefix-cache"),
    ("disable_prefix_cache", True, "--disable-prefix-cache"),
    ("shared_allocation", False, "without --shared-allocation"),
    ("forbid_jit", False, "without --forbid-jit"),
    ("dcp_size", 1, "--dcp-size 1"),
    ("hicache", False, "without --hicache"),
    ("host_lengths", "exact", "--host-lengths exact"),
    ("exclude_backends", (), "without --exclude-backends"),
    ("disable_variants", (), "without --disable-variants"),
    ("allow_planned", True, "--allow-planned (what-if: kernels are not built yet)"),
)
#: Tensor-parallel sizes that are tried where head counts are what is wrong.
_RANKS = (1, 2, 4, 8, 16, 32, 64)
_HEAD_CODES = frozenset({"q_heads", "kv_heads", "gqa_ratio"})
_MOST = 6


def suggest(options: Options, slots: Sequence[Slot], stuck: Sequence[Slot], solvable: Solvable) -> list[str]:
    """Single changes of options that would give a plan; the user's own choice of a backend is given up last."""
    found: list[str] = []
    for name, value, text in _REMEDIES:
        if name == "kv_cache_dtype" and str(value).startswith("fp8") and not options.kv_cache_dtype.startswith("fp8"):
            continue  # nobody who keeps full precision is told to give it up
        if getattr(options, name) != value and solvable(options.but(**{name: value})):
            found.append(text)
    found += _ranks(options, slots, solvable)
    found += _other_backends(options, stuck or slots, solvable)
    return list(dict.fromkeys(found))[:_MOST]


def _ranks(options: Options, slots: Sequence[Slot], solvable: Solvable) -> list[str]:
    """``--tp-size`` values that work, where a head count is among the reasons."""
    codes = {
        code
        for slot in slots
        for verdict in slot.verdicts
        for code in (reason.code for reason in verdict.reasons)
        if slot.pin is None or slot.pin.covers(verdict.candidate)
    }
    if not codes & _HEAD_CODES:
        return []
    sizes = working_ranks(options, solvable)
    return [f"--tp-size {' or '.join(map(str, sizes))}"] if sizes else []


def working_ranks(options: Options, solvable: Solvable) -> list[int]:
    """Tensor-parallel sizes that have a plan, the present one aside."""
    return [n for n in _RANKS if n != options.tp_size and solvable(options.but(tp_size=n))]


def _other_backends(options: Options, slots: Sequence[Slot], solvable: Solvable) -> Iterator[str]:
    names = {f.name for f in fields(options)}
    for slot in slots:
        name = slot.pin.flag.removeprefix("--").replace("-", "_") if slot.pin else ""
        if slot.pin is None or name not in names:
            continue
        others = dict.fromkeys(v.candidate.manifest.name for v in slot.verdicts if v.eligible)
        works = [other for other in others if solvable(options.but(**{name: other}))]
        yield from (f"{slot.pin.flag} {other}" for other in works[:3])
        if not works and solvable(options.but(**{name: None})):
            yield f"without {slot.pin.flag} (automatic choice works)"
