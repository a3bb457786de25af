"""This machine's backends on one shape, side by side in one run: what ``attn bench`` prints.

Each backend runs through the router as it would in a server, on random data, with the floor (bytes over the measured copy
bandwidth, or operations over the measured matrix rate) written down first. Ratios are the result; times are their unit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from attn_core.errors import AttnError, PlanError, UsageError
from attn_core.geometry import LayerGroup, MhaGeometry, Model

if TYPE_CHECKING:
    import torch

    from attn_core.batch import AttentionBatch
    from attn_core.discovery import Registry
    from attn_core.layers import MhaInputs
    from attn_core.platform import Platform


@dataclass(frozen=True)
class Shape:
    """One shape: `batch` rows with `kv_len` keys each; in prefill, the last `new` of them are new tokens."""

    phase: str
    batch: int
    kv_len: int
    new: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bf16"
    kv_dtype: str = "auto"

    def geometry(self) -> MhaGeometry:
        """The geometry of the one layer that is measured."""
        return MhaGeometry(self.q_heads, self.kv_heads, self.head_dim, self.head_dim, self.head_dim**-0.5)

    def bytes_read(self, kv_bits: int) -> int:
        """Bytes of K and V that have to be read once."""
        return 2 * self.batch * self.kv_len * self.kv_heads * self.head_dim * kv_bits // 8

    def operations(self) -> int:
        """Multiply-adds times two of both matrix products, visible keys only (causal, bottom-right)."""
        visible = self.batch * (self.new * self.kv_len - self.new * (self.new - 1) // 2)
        return 4 * visible * self.q_heads * self.head_dim


@dataclass(frozen=True)
class Row:
    """One backend's figures: median microseconds, what that is of the ceiling, and who ran."""

    backend: str
    variant: str
    package: str
    microseconds: float | None
    of_ceiling: float | None
    note: str = ""


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run: copy bandwidth in bytes/s (read + write), matrix product in operations/s."""

    copy: float
    matrix: float


def run(
    shape: Shape, registry: Registry, platform: Platform, device: str, rounds: int = 20, only: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Measure every installed ``mha`` backend on `shape`. The result is JSON-ready; rows are sorted by time."""
    from attn_core._device import Place

    mine = [manifest for manifest in registry.manifests if manifest.kind == "mha"]
    known = sorted(manifest.name for manifest in mine)
    planned = sorted(manifest.name for manifest in mine if manifest.status == "planned")
    for name in only:
        if name not in known:
            raise UsageError(f"no installed mha backend {name!r}", f"known    {', '.join(known)}")
    with Place(device).use():  # kernels are launched on the current device, so this one is it for the whole comparison
        ceilings = measure_ceilings(device, shape.dtype)
        rows = [
            _measure(name, shape, registry, platform, device, rounds, ceilings)
            for name in only or known
            if name not in planned
        ]
    rows.sort(key=lambda row: (row.microseconds is None, row.microseconds or 0.0, row.backend))
    return {
        "schema_version": 1,
        "shape": asdict(shape),
        "platform": str(platform),
        "device": device,
        "ceilings": asdict(ceilings),
        "rows": [asdict(row) for row in rows],
        "planned": planned,
    }


def measure_ceilings(device: torch.device | str, dtype: str) -> Ceilings:
    """Copy bandwidth and matrix rate of this device, on random data larger than its caches."""
    import torch

    from attn_core.formats import torch_dtype

    big = torch.device(device).type == "cuda"
    source = torch.randn(256 << 20 if big else 16 << 20, device=device)
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), device, 10)
    size = 8192 if big else 1024
    left, right = (torch.randn(size, size, device=device, dtype=torch_dtype(dtype)) for _ in range(2))
    product = median_seconds(lambda: left @ right, device, 10)
    return Ceilings(2 * source.numel() * 4 / copy, 2 * size**3 / product)


def median_seconds(call: Callable[[], Any], device: torch.device | str, rounds: int) -> float:
    """Median time of `call` on `device`, after two warm-up calls; the device is waited for around every call."""
    from attn_core._device import Place

    place, times = Place(device), []
    with place.use():
        for number in range(rounds + 2):
            place.wait()
            started = time.perf_counter()
            call()
            place.wait()
            if number >= 2:
                times.append(time.perf_counter() - started)
    return statistics.median(times)


def _measure(
    name: str, shape: Shape, registry: Registry, platform: Platform, device: str, rounds: int, ceilings: Ceilings
) -> Row:
    try:
        call, phase, kv_bits = _prepare(name, shape, registry, platform, device)
    except PlanError as error:
        return Row(name, "", "", None, None, _first_reason(error, name))
    except Exception as error:  # one backend that fails must not end the comparison
        text = error.message if isinstance(error, AttnError) else f"{type(error).__name__}: {error}"
        return Row(name, "", "", None, None, text)
    try:
        seconds = median_seconds(call, device, rounds)
    except Exception as error:  # one backend that fails must not end the comparison
        return Row(name, phase.variant, phase.package, None, None, f"{type(error).__name__}: {error}")
    floor = shape.operations() / ceilings.matrix
    if shape.phase == "decode":
        floor = max(floor, shape.bytes_read(kv_bits) / ceilings.copy)
    return Row(phase.backend, phase.variant, phase.package, seconds * 1e6, floor / seconds, "")


def _first_reason(error: PlanError, name: str) -> str:
    for rejection in error.rejected:
        if rejection.backend == name:
            return f"{rejection.variant}: {rejection.reasons[0]}"
    return error.message


def _prepare(
    name: str, shape: Shape, registry: Registry, platform: Platform, device: str
) -> tuple[Callable[[], Any], Any, int]:
    """A call that runs one layer through the router, the phase plan behind it, and the bits of a cache element."""
    from attn_core.dtypes import BITS
    from attn_core.layers import MhaLayer
    from attn_core.options import Options
    from attn_core.planner import plan_for
    from attn_core.router import Router

    group = LayerGroup("target", "full", "full", (0,), shape.geometry(), {"attend": "kv"})
    model = Model("bench", "bench", "bench", shape.dtype, (group,), 1, max_positions=shape.kv_len)
    options = Options.of(
        attention_backend=name,
        page_size=shape.page_size,
        dtype=shape.dtype,
        kv_cache_dtype=shape.kv_dtype,
        allow_experimental=True,
    )
    plan = plan_for(model, platform, options, registry)
    router = Router(plan, registry, device=device)
    pages, batch = _world(shape, device)
    cache = _random_cache(plan, shape, pages, device, router.dtype)
    layer = MhaLayer(0, plan.groups[0].group)
    router.bind([layer], [cache])
    inputs = _inputs(shape, device, router.dtype)
    step = router.begin(batch)
    step.attend(layer, inputs)  # stores the new tokens; compiles what compiles at first use
    inputs = inputs._replace(store=False)
    return (lambda: step.attend(layer, inputs)), plan.groups[0].phases[shape.phase], BITS[plan.kv_cache_dtype]


def _world(shape: Shape, device: str) -> tuple[int, AttentionBatch]:
    """Permuted pages for every row, and the batch that points to them."""
    import torch

    from attn_core.paging import PoolRows, build_batch

    per_row = -(-shape.kv_len // shape.page_size)
    order = (torch.randperm(shape.batch * per_row) + 1).tolist()
    rows = [order[row * per_row : (row + 1) * per_row] for row in range(shape.batch)]
    new = 1 if shape.phase == "decode" else shape.new
    batch = build_batch(
        [new] * shape.batch, [shape.kv_len] * shape.batch, PoolRows(shape.page_size, rows), shape.phase, device=device
    )
    return shape.batch * per_row + 1, batch


def _random_cache(plan: Any, shape: Shape, pages: int, device: str, dtype: torch.dtype) -> Any:
    import torch

    from attn_core.formats import quantize
    from attn_core.layers import MhaCache

    def plane() -> tuple[torch.Tensor, torch.Tensor | None]:
        values = torch.randn(pages, shape.page_size, shape.kv_heads, shape.head_dim, device=device, dtype=dtype)
        return quantize(values, plan.kv_cache_dtype, None)

    (k, k_blocks), (v, v_blocks) = plane(), plane()
    return MhaCache(k, v, k_blocks, v_blocks, plan.pools[0].format)


def _inputs(shape: Shape, device: str, dtype: torch.dtype) -> MhaInputs:
    import torch

    from attn_core.layers import MhaInputs

    tokens = shape.batch * (1 if shape.phase == "decode" else shape.new)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, shape.head_dim, device=device, dtype=dtype)

    return MhaInputs(random(shape.q_heads), random(shape.kv_heads), random(shape.kv_heads))
