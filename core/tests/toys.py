"""Toy manifests and models for the planner's tests: everything allowed unless a test limits it."""

from __future__ import annotations

from typing import Any

from attn_core.geometry import GdnGeometry, LayerGroup, MhaGeometry, MlaGeometry, Model
from attn_core.manifest import Manifest, parse_manifest

PHASES = ["prefill", "decode", "verify", "draft", "draft_extend"]
MHA_FEATURES = [
    "sliding_window", "sinks", "softcap", "custom_mask", "spec_topk1", "spec_tree", "cross", "bidirectional", "chunked_local",
    "shared_kv", "lse", "mixed", "batch_invariant", "dcp_decode",
]  # fmt: skip
KV = ["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "fp4"]
DTYPES = [{"q": q, "kv": kv} for q in ("bf16", "fp16", "fp32") for kv in KV]


def toy(
    name: str,
    *,
    kind: str = "mha",
    features: list[str] | None = None,
    deny: Any = (),
    order: Any = (),
    prefer: Any = (),
    **when: Any,
) -> Manifest:
    """A backend that does everything except what `when`, `features` and `deny` limit."""
    base: dict[str, Any] = {"vendor": ["nvidia", "amd", "cpu", "intel", "ascend"], "phase": PHASES}
    if kind in ("mha", "mla", "mm"):
        base |= {"dtypes": DTYPES, "head_dims": {"min": 1}}
    if kind in ("mha", "mla"):
        base["page_size"] = {"min": 1}
    if kind == "gdn":
        base |= {"state_dtype": ["fp32", "bf16", "fp16"], "state_dims": {"min": 1}}
    base |= {key.replace("__", "."): value for key, value in when.items()}
    roles = {"mla": ["absorbed"], "gdn": ["scan"]}.get(kind, ["attend"])
    table: dict[str, Any] = {
        "api": "1.0", "kind": kind, "name": name, "package": f"attn-{name}", "version": "1.0",
        "variant": [{
            "name": "default", "roles": roles, "deny": list(deny), "prefer": list(prefer),
            "allow": [{"features": MHA_FEATURES if features is None else features, "graph": {"level": "uniform_query"}, "when": base}],
        }],
        "order": list(order),
    }  # fmt: skip
    return parse_manifest(table)


def mha_model(name: str = "toy", layers: int = 4, **geometry: Any) -> Model:
    """A model of one full-attention group."""
    values: dict[str, Any] = {"q_heads": 32, "kv_heads": 8, "qk_dim": 128, "v_dim": 128, "scale": 128**-0.5} | geometry
    group = LayerGroup("target", "full", "full", tuple(range(layers)), MhaGeometry(**values), {"attend": "kv"})
    return Model(name, "ToyForCausalLM", "toy", "bf16", (group,), layers, max_positions=4096)


def mixed_model() -> Model:
    """Full and sliding layers with different head dims, in two pools."""
    full = LayerGroup("target", "full", "full", (1, 3), MhaGeometry(16, 2, 512, 512, 1.0), {"attend": "kv"})
    sliding = LayerGroup(
        "target", "sliding", "sliding", (0, 2), MhaGeometry(16, 8, 256, 256, 1.0, window=1024), {"attend": "kv_sliding"}
    )
    return Model("mixed", "ToyForCausalLM", "toy", "bf16", (full, sliding), 4, frozenset({"mixed_head_dims"}), 4096)


def mla_model() -> Model:
    """An MLA model with DeepSeek's dims."""
    group = LayerGroup(
        "target", "mla", "mla", (0, 1), MlaGeometry(16, 512, 64, 128, 128, 192**-0.5), {"attend": "latent"}
    )
    return Model("latent", "ToyForCausalLM", "toy", "bf16", (group,), 2, frozenset({"mla"}), 4096)


def hybrid_model() -> Model:
    """Linear and full attention."""
    full = LayerGroup("target", "full", "full", (3,), MhaGeometry(24, 4, 256, 256, 1 / 16), {"attend": "kv"})
    linear = LayerGroup(
        "target", "linear", "linear_gdn", (0, 1, 2), GdnGeometry(16, 48, 128, 128, 4, 10240), {"state": "state"}
    )
    return Model("hybrid", "ToyForCausalLM", "toy", "bf16", (full, linear), 4, frozenset({"hybrid_linear"}), 4096)


def limited(name: str, kind: str = "mha", pads: list[str] | None = None, features: Any = None, **when: Any) -> Manifest:
    """The reference backend under another name and package, with a declaration of its own."""
    from attn_core.testing import reference_backend, reference_mla  # needs torch, which the other toys do not

    table = (reference_backend.load_manifest() if kind == "mha" else reference_mla.load_mla_manifest()).to_dict()
    table |= {"name": name, "package": f"attn-{name}", "status": "implemented", "kind": kind}
    for row in table["variant"][0]["allow"]:
        row["when"] |= {key.replace("__", "."): value for key, value in when.items()}
        row |= {"pads": pads} if pads else {}
        if features is not None:
            row["features"] = features(row["features"])
    return parse_manifest(table)
