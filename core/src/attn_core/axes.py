"""The axes that manifest rows may speak about: one table, with meaning, value form and default.

An *allow* row that leaves out a required axis is refused: silence must not claim everything. A new axis of a later API
gets ``older_api``, the value that manifests written for an older API are understood to mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the predicate language.

    ``form`` is how values are compared: ``name`` (string), ``number``, ``version`` (dotted numbers), ``pair``
    (two numbers), ``dtypes`` (q/kv/out triple), ``flag`` (bool), ``set`` (all listed must be present),
    ``specifier`` (PEP 440 against an installed version). ``required_for`` are the kinds whose allow rows must state it.
    ``words`` and ``pattern`` are the only values it can have, where they are known: anything else is a typo.
    """

    name: str
    form: str
    meaning: str
    required_for: tuple[str, ...] = ()
    default: object = None
    since: str = "1.0"
    older_api: object = None
    words: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    pattern_means: str = ""


_KV = ("mha", "mla", "dsa")
_ALL = ("mha", "mla", "gdn", "dsa", "mm")
_ARCH_WORDS = ("a2", "a3", "a5", "310p", "xpu", "bmg", "pvc", "cpu", "amx")
_ARCH_FORM = re.compile(r"sm[1-9]\d{1,2}|gfx[0-9a-f]{3,4}")
_TRAITS = (
    "hybrid_linear", "mixed_head_dims", "shared_kv", "swa_pools", "encoder_decoder", "mla", "sinks", "mm_spans",
)  # fmt: skip


def _table(*axes: Axis) -> Mapping[str, Axis]:
    return {axis.name: axis for axis in axes}


AXES: Mapping[str, Axis] = _table(
    # platform
    Axis("vendor", "name", "nvidia, amd, ascend, intel or cpu", words=("nvidia", "amd", "ascend", "intel", "cpu")),
    Axis("arch", "name", "sm90, gfx942, a2, xpu, cpu, amx: a set, never a bound", words=_ARCH_WORDS, pattern=_ARCH_FORM,
         pattern_means="sm and two or three digits (sm90, sm103), gfx and its number (gfx942)"),
    Axis("cuda", "version", "CUDA toolkit version of the runtime"),
    Axis("rocm", "version", "ROCm version"),
    Axis("driver", "version", "driver version"),
    Axis("lds_bytes", "number", "shared memory (LDS) a block may use, bytes"),
    # request
    Axis("phase", "name", "prefill, decode, verify, draft, draft_extend", required_for=_ALL),
    Axis("role", "name", "attend, absorbed, ragged, index, sparse, scan"),
    Axis("form", "name", "MLA form: absorbed or ragged", words=("absorbed", "ragged")),
    Axis("dtypes", "dtypes", "q, kv and out element types; out defaults to q", required_for=("mha", "mla", "dsa", "mm")),
    Axis("format.name", "name", "cache format; absent: the published default of the dtype", default="default"),
    Axis("format.dtype", "name", "element type of the cache"),
    Axis("format.layout", "name", "NHD (token-major) or HND; absent: NHD only", default=("NHD",)),
    Axis("format.read", "name", "native or gather"),
    Axis("page_size", "number", "tokens in one page as the kernel reads it; 1 means slots", required_for=_KV),
    Axis("head_dims", "pair", "[qk, v] per head; MLA: [latent+rope, latent] absorbed, [nope+rope, v] ragged", required_for=("mha", "mla", "mm")),
    Axis("mla_dims", "name", "'nope,rope,v,latent' of an MLA geometry as one string, e.g. '128,64,128,512'"),
    Axis("q_heads", "number", "query heads on this rank"),
    Axis("kv_heads", "number", "KV heads on this rank"),
    Axis("gqa_ratio", "number", "query heads per KV head"),
    Axis("query_len", "number", "query tokens a row (verify width)"),
    Axis("topk", "number", "speculative topk; 0 without speculation"),
    Axis("draft_tokens", "number", "draft tokens verified per row"),
    Axis("window", "number", "window incl. self; 0 without"),
    Axis("chunk", "number", "chunked-local size; 0 without"),
    Axis("state_dtype", "name", "dtype of the recurrent state", required_for=("gdn",)),
    Axis("state_dims", "pair", "[k, v] head dims of the recurrent state", required_for=("gdn",)),
    Axis("verify_state", "name", "intermediate or slots", words=("intermediate", "slots")),
    Axis("index_topk", "number", "keys selected by the indexer"),
    Axis("index_heads", "number", "indexer heads"),
    Axis("index_space", "name", "token or slot"),
    Axis("max_kv_len", "number", "longest context"),
    Axis("pool_elements", "number", "elements of the largest pool tensor; 0 unknown"),
    Axis("batch", "number", "rows of a step; 0 unknown"),
    Axis("interleave", "number", "context-parallel interleave"),
    Axis("alignment", "number", "byte alignment of pages"),
    # model
    Axis("traits", "set", "hybrid_linear, mixed_head_dims, shared_kv, swa_pools, encoder_decoder, mla, sinks, mm_spans", words=_TRAITS),
    # options
    Axis("chunked_prefill_size", "number", "tokens of a prefill chunk; 0 off"),
    Axis("prefix_cache", "flag", "prefix caching is on"),
    Axis("dynamic_chunking", "flag", "dynamic chunking is on"),
    Axis("page_major", "flag", "page-major KV layout is asked for"),
    Axis("hicache", "flag", "hierarchical cache is on"),
    Axis("deterministic", "flag", "deterministic inference is asked for"),
    Axis("async_schedule", "flag", "overlap scheduling is on"),
    Axis("pd_role", "name", "prefill, decode or both (disaggregation)", words=("prefill", "decode", "both")),
    Axis("lanes", "number", "batches in flight"),
)  # fmt: skip

#: Families of axes that are written as nested tables; the part after the dot is free.
OPEN_FAMILIES: Mapping[str, Axis] = {
    "library": Axis("library", "specifier", "installed version of a distribution, as a PEP 440 specifier"),
    "explicit": Axis(
        "explicit", "flag", "the user set this flag (prefill, decode, linear, page_size, kv_cache_dtype, …)"
    ),
    "peer": Axis("peer", "name", "backend that serves another phase of the same group"),
}

#: Axes that are settled by solving, after everything else is known.
SOLVED_AXES = ("page_size", "format.name", "format.layout", "pool_elements")


def find_axis(name: str) -> Axis | None:
    """The axis called `name` (``library.triton`` belongs to the open family ``library``), or None."""
    if name in AXES:
        return AXES[name]
    family, dot, rest = name.partition(".")
    return OPEN_FAMILIES.get(family) if dot and rest else None
