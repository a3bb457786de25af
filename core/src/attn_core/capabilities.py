"""The features a backend may declare: each one object with a name, a precise definition and the tests that check it.

A feature is off when a row does not list it. The planner refuses a request that needs an undeclared feature, and the
router refuses it again at bind time. ``tests`` names the conformance checks: the positive ones run where the feature is
declared, the negative one proves that the feature is refused where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capability:
    """One feature: its name, the sentence that defines it, since which API version, and who tests it."""

    name: str
    definition: str
    since: str = "1.0"
    default: bool = False
    phases: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


def _table(*capabilities: Capability) -> Mapping[str, Capability]:
    return {capability.name: capability for capability in capabilities}


FEATURES: Mapping[str, Capability] = _table(
    Capability(
        "sliding_window",
        "A query at absolute position p sees the keys p-window+1 … p; the window counts the query's own position.",
        tests=("window", "trimmed"),
    ),
    Capability("window_right", "A query sees up to window_right keys after its own position.", tests=("window_right",)),
    Capability(
        "sinks",
        "exp(sink_h) is added to the softmax denominator of head h and to nothing else; sinks are fp32 natural-log logits [q_heads].",
        tests=("sinks",),
    ),
    Capability("softcap", "logits become cap*tanh(logits/cap) after scaling and before masking.", tests=("softcap",)),
    Capability("custom_mask", "The mask of Tree.mask_bits decides visibility among draft tokens.", tests=("tree",)),
    Capability(
        "spec_topk1",
        "Serves draft decoding and target verify of a chain of draft tokens (topk 1), causal among the drafts.",
        phases=("verify", "draft", "draft_extend"),
        tests=("verify_chain",),
    ),
    Capability(
        "spec_tree",
        "Serves draft decoding and target verify of a token tree (topk > 1) by Tree.mask_bits; positions are those of the tree.",
        phases=("verify", "draft", "draft_extend"),
        tests=("verify_tree",),
    ),
    Capability(
        "chunked_prefix",
        "A cached prefix may be attended in chunks whose parts are merged by LSE.",
        tests=("chunked_prefix",),
    ),
    Capability("ragged", "attn_ragged computes packed attention without a cache.", tests=("ragged",)),
    Capability(
        "cross",
        "Keys come from another sequence (encoder): not causal, key lengths independent of query lengths.",
        tests=("cross",),
    ),
    Capability("bidirectional", "Every query of a row sees every key of that row.", tests=("bidirectional",)),
    Capability(
        "chunked_local",
        "A query at position p sees the keys of its own chunk only: floor(j/chunk) = floor(p/chunk).",
        tests=("chunked_local",),
    ),
    Capability(
        "dual_chunk",
        "Keys of the query's own chunk, of the one before and of earlier ones meet three rotations of it (q[T, Hq, 5, Dk]); the sizes are options named as in dual_chunk_attention_config.",
        phases=("prefill", "decode"),
        tests=("dual_chunk", "dual_chunk_rope"),
    ),
    Capability(
        "mm_spans",
        "Spans of the batch (images) attend to themselves in both directions, clamped to the window.",
        tests=("spans",),
    ),
    Capability(
        "shared_kv",
        "A layer may attend to the cache of another layer and store nothing (k and v are None).",
        tests=("shared_kv",),
    ),
    Capability(
        "lse",
        "Returns the log-sum-exp: fp32, natural log, [T, H], -inf (and out 0) for a row without keys.",
        tests=("lse",),
    ),
    Capability(
        "partial", "Metadata.partial leaves sinks out, so that results of parts can be merged.", tests=("partial",)
    ),
    Capability(
        "batch_invariant",
        "A row's output is bit-identical whatever else is in the batch and however the batch is padded.",
        tests=("batch_invariance",),
    ),
    Capability(
        "dcp_decode",
        "Decode over this rank's share of the keys (local_lens), merged over ranks by LSE.",
        tests=("dcp",),
    ),
    Capability("dcp_multi_query", "dcp_decode with more than one query a row.", tests=("dcp",)),
    Capability("mixed", "One call serves a batch whose rows are in prefill and decode at once.", tests=("mixed",)),
    Capability(
        "external_conv", "The short convolution of a linear layer may be done by the caller.", tests=("external_conv",)
    ),
    Capability("checkpoints", "Writes recurrent states at given lengths while prefilling.", tests=("checkpoints",)),
    Capability("gather", "attn_gather reads this backend's cache format back as plain tensors.", tests=("gather",)),
    Capability("store", "attn_store writes this backend's own cache format.", tests=("store",)),
    Capability("writes_out", "Writes into the `out` tensor it is given and returns it.", tests=("writes_out",)),
    Capability("strided_q", "q, k and v may be strided views whose last dimension is contiguous.", tests=("strides",)),
    Capability(
        "zero_rows", "Rows without queries and rows without keys are served (out 0, lse -inf).", tests=("zero_rows",)
    ),
)

#: Graph levels, weakest first. A plan's level is the minimum over what its backends declare.
GRAPH_LEVELS: Mapping[str, str] = {
    "none": "may not be captured",
    "uniform_decode": "captures batches with one query token a row",
    "uniform_query": "captures batches with the same number of query tokens in every row",
    "ragged_query": "captures batches with different query lengths, up to a token bound",
    "full": "captures anything, mixed prefill and decode included",
}

#: How much a backend must know about lengths on the host.
HOST_LENGTHS = ("none", "bound", "exact")
#: What a backend leaves in the rows of padding: zeros, what was there, or anything.
PADDED_OUT = ("zero", "untouched", "garbage")
STATUSES = ("implemented", "experimental", "planned")
ROLES = ("attend", "absorbed", "ragged", "index", "sparse", "scan")
PHASES = ("prefill", "decode", "verify", "draft", "draft_extend")


def graph_rank(level: str) -> int:
    """Position of a graph level, weakest is 0."""
    return list(GRAPH_LEVELS).index(level)
