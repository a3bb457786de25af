"""FlashAttention 4 compiled for a GPU that is not there: the adapter's own calls under fake tensors, one process an architecture.

    python plugins/attn-flash/tests/compile_fa4.py sm_90a|sm_100a

Prints one JSON object: name of a case -> shapes of (out, lse), or the error. Numbers are not computed; all argument checks and
the whole compilation to machine code are real.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any


def environment(arch: str) -> None:
    """What the library reads when it is imported."""
    os.environ |= {
        "FLASH_ATTENTION_ARCH": arch,
        "CUTE_DSL_ARCH": arch,
        "FLASH_ATTENTION_NUM_SMS": "132" if arch == "sm_90a" else "148",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
    }


class Hardware:
    """What the compiler asks the driver, for a machine without one."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        pass

    def get_max_active_clusters(self, *arguments: Any, **more: Any) -> int:
        return 66

    def get_device_multiprocessor_count(self, *arguments: Any, **more: Any) -> int:
        return 148


CASES: dict[str, dict[str, Any]] = {
    "decode, page 128": {"queries": 1},
    "prefill, page 64": {"page": 64},
    "prefill, slots": {"page": 1},
    "window, sinks": {"geometry": {"window": 5, "sinks": True}, "page": 64},
    "soft cap": {"geometry": {"softcap": 30.0}},
    "fp16, dims 64": {"geometry": {"qk_dim": 64, "v_dim": 64}, "dtype": "float16"},
    "dims 192/128": {"geometry": {"qk_dim": 192, "v_dim": 128}},
    "dims 256": {"geometry": {"qk_dim": 256, "v_dim": 256}, "page": 128},
    "cross": {"geometry": {"causal": False}},
    "tree": {"page": 1, "drafts": 6},
    "tree of two words in a window": {"page": 1, "drafts": 36, "geometry": {"window": 4}},
    "packed": {"packed": True},
    "tower, dims 72": {"packed": True, "geometry": {"qk_dim": 72, "v_dim": 72, "kv_heads": 32, "causal": False}},
}


def run(case: dict[str, Any]) -> list[Any]:
    """One case through the adapter."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from attn_core.batch import AttentionBatch, KvAddress, Segment, Tree
    from attn_core.context import Context
    from attn_core.geometry import LayerGroup, MhaGeometry
    from attn_core.layers import MhaCache, MhaInputs, MhaLayer
    from attn_core.plan import PartPlan, PhasePlan, Pool
    from attn_flash.fa4 import Fa4Backend

    values = {"q_heads": 32, "kv_heads": 8, "qk_dim": 128, "v_dim": 128, "scale": 0.1, **case.get("geometry", {})}
    geometry, dtype = MhaGeometry(**values), getattr(torch, case.get("dtype", "bfloat16"))
    page, drafts, rows = case.get("page", 128), case.get("drafts"), 4
    queries = drafts or case.get("queries", 2)
    phase = "verify" if drafts else "decode" if queries == 1 else "prefill"
    group = LayerGroup("target", "full", "full", (0,), geometry, {"attend": "main"})
    pool = Pool("main", "target", (0,), "plain", "bf16", "NHD", page, 1)
    part = PartPlan("attend", "fa4", "hopper", "attn-flash", "0", features=("spec_tree",) if drafts else ())
    plan = PhasePlan("fa4", "hopper", "attn-flash", "0", (part,), kernel_page_size=page, needs_lse=True)
    with FakeTensorMode():
        device = torch.device("cuda")
        context = Context(
            device, dtype, group, {"attend": pool}, {"attend": 0}, {phase: plan}, options={"finite_pool": True}
        )

        def i32(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=device)

        def full(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        backend = Fa4Backend(context)
        g, tokens = geometry, rows * queries
        address = KvAddress(
            page,
            i32(rows),
            torch.empty(tokens, dtype=torch.int64, device=device),
            256,
            table=i32(rows, -(-256 // page)),
        )
        tree = (
            None if drafts is None else Tree(i32(rows, drafts), i32(rows, drafts), i32(rows, drafts, -(-drafts // 32)))
        )
        packed = case.get("packed", False)
        batch = AttentionBatch(
            rows, tokens, (Segment(phase, slice(0, rows), slice(0, tokens), queries),), i32(rows + 1), queries, (address,),
            tree=tree, needs_lse=True, key_offsets=i32(rows + 1) if packed else None, max_key_len=20,
        )  # fmt: skip
        metadata = backend.attn_metadata(batch, group, phase, None, False)
        layer = MhaLayer(0, group, sinks=torch.empty(g.q_heads, device=device) if g.sinks else None)
        q = full(tokens, g.q_heads, g.qk_dim)
        if packed:
            out, lse = backend.attn_ragged(
                q, full(50, g.kv_heads, g.qk_dim), full(50, g.kv_heads, g.v_dim), layer, metadata, None
            )
        else:
            cache = MhaCache(full(9, page, g.kv_heads, g.qk_dim), full(9, page, g.kv_heads, g.v_dim))
            given = full(tokens, g.q_heads, g.v_dim)
            out, lse = backend.attend(MhaInputs(q, store=False), layer, cache, metadata, given)
        return [list(out.shape), list(lse.shape)]


def main(arch: str, only: list[str]) -> None:
    environment(arch)
    warnings.simplefilter("ignore")
    import cutlass

    cutlass.utils.HardwareInfo = Hardware
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        if only and name not in only:
            continue
        try:
            found[name] = run(case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
