"""Cases for ``mla``: one step of one layer over a latent cache, in the absorbed form.

The pages, tables and poison are those of the MHA cases (:mod:`attn_core.testing.batches`): a latent case takes its batch from a
case with one KV head and puts ``c_kv | k_pe`` rows into the same slots. Formats: ``mla_plain``, ``mla_plain_fp8``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attn_core.batch import AttentionBatch
from attn_core.context import Context, GraphLimits
from attn_core.geometry import LayerGroup, MhaGeometry, MlaGeometry
from attn_core.layers import MlaCache, MlaInputs, MlaLayer
from attn_core.manifest import Manifest, Row
from attn_core.plan import GraphPlan, PartPlan, PhasePlan, Pool
from attn_core.testing.batches import build
from attn_core.testing.elements import random_values, torch_dtype
from attn_core.testing.guards import Guarded, Watch, guarded
from attn_core.testing.oracle_mla import project
from attn_core.testing.spec import CaseSpec


@dataclass(eq=False)
class MlaCase:
    """A case ready to run; ``expected`` is the cache once the new rows are stored."""

    spec: CaseSpec
    geometry: MlaGeometry
    group: LayerGroup
    pool: Pool
    batch: AttentionBatch
    layer: MlaLayer
    cache: MlaCache
    expected: MlaCache
    inputs: MlaInputs
    out: torch.Tensor
    pool_index: int
    w_uv: torch.Tensor
    guards: list[Guarded] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def problems(self) -> list[str]:
        """Canaries, inputs, tables, and cache slots other than the new ones."""
        found = [line for guard in self.guards for line in guard.problems()] + self.watch.problems()
        want, have = Watch(), self.cache.data
        want.add("cache.data", self.expected.data)
        want.seen = [(name, have, before) for name, _, before in want.seen]
        return found + want.problems()


def latent_spec(geometry: MlaGeometry, phase: str, **fields: object) -> CaseSpec:
    """The spec of the pages and lengths of an MLA case: one KV head as wide as a latent row."""
    width = geometry.latent_dim + geometry.rope_dim
    plain = MhaGeometry(geometry.q_heads, 1, width, width, geometry.scale)
    return CaseSpec(plain, phase, **{"storage": "separate", **fields})  # type: ignore[arg-type]


def build_mla(geometry: MlaGeometry, spec: CaseSpec) -> MlaCase:
    """The case of a spec from :func:`latent_spec`. The k of its MHA twin becomes the latent row."""
    twin = build(spec)
    device = torch.device(spec.device)
    group = LayerGroup("target", "mla", "mla", (0,), geometry, {"attend": "main"})
    fp8 = spec.kv.startswith("fp8")
    scale = twin.layer.k_scale if fp8 else None
    name = "mla_plain_fp8" if fp8 else "mla_plain"
    cache, expected = (_latent(source.k, geometry, name) for source in (twin.cache, twin.expected))
    generator = torch.Generator().manual_seed(spec.seed + 11)
    w_uk = torch.randn(
        geometry.q_heads, geometry.nope_dim, geometry.latent_dim, generator=generator, dtype=torch.float64
    )
    w_uv = torch.randn(geometry.q_heads, geometry.latent_dim, geometry.v_dim, generator=generator, dtype=torch.float64)
    layer = MlaLayer(0, group, scale, expand=project(w_uk.to(device), w_uv.to(device)))
    out = guarded(
        "out", (twin.batch.padded_tokens, geometry.q_heads, geometry.latent_dim), torch_dtype(spec.out), device
    )
    nbytes = spec.page_size * twin.cache.k[0, 0].nbytes
    pool = Pool("main", "target", (0,), name, spec.kv, "NHD", spec.page_size, nbytes, kind="latent")
    inputs = _inputs(geometry, spec, twin.inputs.k, twin.batch.padded_tokens, device)
    case = MlaCase(
        spec,
        geometry,
        group,
        pool,
        twin.batch,
        layer,
        cache,
        expected,
        inputs,
        out.tensor,
        twin.pool_index,
        w_uv,
        [out],
    )
    case.watch.seen = [item for item in twin.watch.seen if not item[0].startswith("inputs")]
    for label in ("q_latent", "q_pe", "c_kv", "k_pe"):
        case.watch.add(f"inputs.{label}", getattr(inputs, label))
    return case


def _latent(k: torch.Tensor, geometry: MlaGeometry, name: str) -> MlaCache:
    data = k[:, :, 0]
    return MlaCache(data, data[..., : geometry.latent_dim], data[..., geometry.latent_dim :], name)


def _inputs(
    geometry: MlaGeometry, spec: CaseSpec, rows: torch.Tensor | None, tokens: int, device: torch.device
) -> MlaInputs:
    generator = torch.Generator().manual_seed(spec.seed + 12)

    def random(width: int) -> torch.Tensor:
        return random_values((tokens, geometry.q_heads, width), spec.out, generator).to(device)

    new = None if rows is None else rows[:, 0]
    latent = geometry.latent_dim
    return MlaInputs(
        None,
        random(latent),
        random(geometry.rope_dim),
        None if new is None else new[:, :latent],
        None if new is None else new[:, latent:],
        store=spec.store,
    )


def mla_context(
    case: MlaCase, manifest: Manifest, variant: str, row: Row, limits: GraphLimits | None = None
) -> Context:
    """The context of a backend object for this case."""
    part = PartPlan(
        "absorbed", manifest.name, variant, manifest.package, manifest.version,
        tuple(sorted(row.fuses)), tuple(sorted(row.features)),
    )  # fmt: skip
    graph = (
        GraphPlan()
        if limits is None
        else GraphPlan(row.graph, limits.max_rows, limits.max_query_len, limits.max_kv_len)
    )
    plan = PhasePlan(
        manifest.name, variant, manifest.package, manifest.version, (part,), kernel_page_size=case.spec.page_size,
        form="absorbed", graph=graph, needs_lse=case.spec.needs_lse, padded_out=row.padded_out, q_dtype=case.spec.dtype,
    )  # fmt: skip
    return Context(
        device=torch.device(case.spec.device),
        dtype=torch_dtype(case.spec.out),
        group=case.group,
        pools={"attend": case.pool},
        pool_index={"attend": case.pool_index},
        phases=dict.fromkeys(("prefill", "decode", "verify", "draft", "draft_extend"), plan),
        limits=limits,
        lanes=2,
    )
