"""Adversarial cases: :func:`make_case` builds one step of one layer in which every mistake shows.

Pages are permuted, tables have more rows and columns than the batch, their idle entries point to poisoned pages, and every
slot that no row may read (the tail of last pages and all of page 0 included) holds NaN, infinity or 1e30. Another pool's
address stands in front of the real one. Keys and values of quantised caches are values that the format holds exactly, so
that reading new tokens from the cache and from ``k``/``v`` gives one answer.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core.batch import AttentionBatch, Segment
from attn_core.geometry import LayerGroup, MhaGeometry
from attn_core.layers import MhaCache, MhaInputs, MhaLayer, Scale
from attn_core.plan import Pool
from attn_core.testing.elements import dequantise, fill_poison, random_fp4, random_values, torch_dtype
from attn_core.testing.guards import Watch, guarded
from attn_core.testing.oracle_mha import scaled
from attn_core.testing.paging_world import PageWorld, address_of, decoy_of, lay_out
from attn_core.testing.spec import Case, CaseSpec
from attn_core.testing.trees import build_tree, depths

#: Phases in which all rows have one number of query tokens.
UNIFORM = ("decode", "draft", "verify")


def make_case(geometry: MhaGeometry, phase: str, **fields: Any) -> Case:
    """A case from the fields of :class:`~attn_core.testing.spec.CaseSpec`; ``query_lens`` default to 1 a row.

    >>> from attn_core.geometry import MhaGeometry
    >>> case = make_case(MhaGeometry(4, 2, 16, 8, 0.3), "decode", kv_lens=(1, 7))
    >>> case.inputs.q.shape, case.out.shape
    (torch.Size([2, 4, 16]), torch.Size([2, 4, 8]))
    """
    fields.setdefault("query_lens", (1,) * len(fields["kv_lens"]))
    return build(CaseSpec(geometry, phase, **fields))


def build(spec: CaseSpec) -> Case:
    """The case that `spec` describes. The same spec gives the same numbers on every machine."""
    device = torch.device(spec.device)
    group = group_of(spec)
    world = lay_out(spec)
    layer = _layer(spec, group, device)
    expected = _cache(spec, world, device)
    inputs, batch = _inputs(spec, expected, layer, world, device), _batch(spec, world, device)
    cache = _without_new(spec, expected, world)
    out = guarded(
        "out", (batch.padded_tokens, spec.geometry.q_heads, spec.geometry.v_dim), torch_dtype(spec.out), device
    )
    pool = pool_of(spec, group)
    case = Case(spec, group, pool, int(spec.decoy_pool), batch, layer, cache, expected, inputs, out.tensor, [out])
    watch(case)
    return case


def group_of(spec: CaseSpec) -> LayerGroup:
    """A layer group of the spec's geometry and number of layers."""
    geometry = spec.geometry
    kind = "full"
    if geometry.chunk:
        kind = "chunked_local"
    elif geometry.window:
        kind = "sliding"
    elif not geometry.causal and spec.spans == () and spec.kv_lens != spec.query_lens:
        kind = "cross"
    features = frozenset() if spec.give_kv else frozenset({"shared_kv"})
    return LayerGroup("target", kind, kind, tuple(range(spec.layers)), geometry, {"attend": "main"}, features=features)


def pool_of(spec: CaseSpec, group: LayerGroup) -> Pool:
    """The pool that the spec's layers read."""
    geometry = spec.geometry
    width = geometry.kv_heads * (geometry.qk_dim + geometry.v_dim)
    nbytes = width * spec.page_size * torch_dtype(spec.kv).itemsize
    return Pool(
        name="main",
        model="target",
        layers=group.layers,
        format="fp4_block16" if spec.kv == "fp4" else "plain",
        dtype=spec.kv,
        layout="HND" if spec.storage == "hnd" else "NHD",
        page_size=spec.page_size,
        bytes_per_page=nbytes // 2 + nbytes // 16 if spec.kv == "fp4" else nbytes,
    )


# --- layers and caches -------------------------------------------------------------------------------------------------


def _layer(spec: CaseSpec, group: LayerGroup, device: torch.device) -> MhaLayer:
    def scale(value: float | tuple[float, ...] | None) -> Scale | None:
        if value is None:
            return None
        values = value if isinstance(value, tuple) else (value,)
        tensor = torch.tensor(values, dtype=torch.float32, device=device)
        return Scale(tensor, values[0] if len(values) == 1 else None)

    sinks = None if spec.sinks is None else torch.tensor(spec.sinks, dtype=torch.float32, device=device)
    return MhaLayer(
        index=spec.layer,
        group=group,
        sinks=sinks,
        k_scale=scale(spec.k_scale),
        v_scale=scale(spec.v_scale),
        q_scale=scale(spec.q_scale),
    )


def _cache(spec: CaseSpec, world: PageWorld, device: torch.device) -> MhaCache:
    """Random values in every slot that a row owns, poison in all others."""
    generator = torch.Generator().manual_seed(spec.content_seed)
    geometry = spec.geometry
    k, k_blocks = _plane(spec, world, geometry.qk_dim, generator)
    v, v_blocks = _plane(spec, world, geometry.v_dim, generator)
    k, v = _place(spec, k, v, device)
    blocks = [None if b is None else b.to(device) for b in (k_blocks, v_blocks)]
    return MhaCache(k, v, blocks[0], blocks[1], "fp4_block16" if spec.kv == "fp4" else "plain")


def _plane(
    spec: CaseSpec, world: PageWorld, dim: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (world.count * spec.page_size, spec.geometry.kv_heads, dim)
    unused = torch.ones(shape[0], dtype=torch.bool)
    unused[world.used_slots] = False
    if spec.kv == "fp4":
        values, blocks = random_fp4(shape, generator)
        _poison(blocks, unused, "fp8_e4m3", spec.unused)
    else:
        values, blocks = random_values(shape, spec.kv, generator), None
    _poison(values, unused, spec.kv, spec.unused)
    pages = (world.count, spec.page_size)
    return values.view(*pages, *values.shape[1:]), None if blocks is None else blocks.view(*pages, *blocks.shape[1:])


def _poison(values: torch.Tensor, where: torch.Tensor, name: str, poison: str) -> None:
    """Poison the slots `where` (bool, first axis), by way of bytes for 8-bit floats."""
    filler = torch.empty_like(values[:1])
    fill_poison(filler, name, poison)
    if values.element_size() == 1:
        values.view(torch.uint8)[where] = filler.view(torch.uint8)
    else:
        values[where] = filler


def _place(spec: CaseSpec, k: torch.Tensor, v: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values in the storage that the spec asks for: logical shape [pages, P, Hk, D], various strides."""
    if spec.storage == "joint":
        both = torch.cat([_bytes(k), _bytes(v)], dim=-1).to(device)
        width = k.shape[-1] * k.element_size()
        return both[..., :width].view(k.dtype), both[..., width:].view(v.dtype)
    if spec.storage == "hnd":
        turned = [t.transpose(1, 2).contiguous().to(device).transpose(1, 2) for t in (k, v)]
        return turned[0], turned[1]
    return k.to(device), v.to(device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _without_new(spec: CaseSpec, expected: MhaCache, world: PageWorld) -> MhaCache:
    """The cache before the step: a copy with the same strides, poison where the new tokens will go."""
    fresh = torch.zeros(world.count * spec.page_size, dtype=torch.bool, device=expected.k.device)
    fresh[[slot for slot in world.new_slots if slot >= 0]] = True
    copies: list[torch.Tensor | None] = []
    storage: dict[int, torch.Tensor] = {}
    for name, tensor in (("k", expected.k), ("v", expected.v), ("kb", expected.k_blocks), ("vb", expected.v_blocks)):
        if tensor is None:
            copies.append(None)
            continue
        copy = _same_strides(tensor, storage)
        element = "fp8_e4m3" if name.endswith("b") else spec.kv
        filler = torch.empty(1, *copy.shape[2:], dtype=copy.dtype, device=copy.device)
        fill_poison(filler, element, spec.unused)
        where = fresh.view(copy.shape[:2]).nonzero(as_tuple=True)
        if copy.element_size() == 1:
            copy.view(torch.uint8)[where] = filler.view(torch.uint8)
        else:
            copy[where] = filler
        copies.append(copy)
    assert copies[0] is not None
    assert copies[1] is not None
    return MhaCache(copies[0], copies[1], copies[2], copies[3], expected.format)


def _same_strides(tensor: torch.Tensor, storage: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy with the strides of `tensor`; tensors that share storage share it in the copy, too."""
    key = tensor.untyped_storage().data_ptr()
    if key not in storage:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        storage[key] = whole.set_(tensor.untyped_storage().clone())  # type: ignore[call-overload, no-untyped-call]
    view = storage[key].view(tensor.dtype)
    return view.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


# --- inputs and batch --------------------------------------------------------------------------------------------------


def _inputs(spec: CaseSpec, expected: MhaCache, layer: MhaLayer, world: PageWorld, device: torch.device) -> MhaInputs:
    geometry, tokens = spec.geometry, padded_tokens(spec)
    new = spec.out if spec.dtype.startswith("fp8") else spec.dtype
    q = _query(spec, (tokens, geometry.q_heads, geometry.qk_dim), layer, new)
    if not spec.give_kv:
        return MhaInputs(_strided(spec, [q], device)[0], None, None, None, False)
    # keys and values of padding are ordinary numbers: written anywhere, they would not pass for poison
    k = torch.full((tokens, geometry.kv_heads, geometry.qk_dim), 3.0, dtype=torch_dtype(new))
    v = torch.full((tokens, geometry.kv_heads, geometry.v_dim), 3.0, dtype=torch_dtype(new))
    real = sum(spec.query_lens)
    slots = torch.tensor(_slots_of_new(spec, world), dtype=torch.int64)
    for target, pages, blocks, factor in (
        (k, expected.k, expected.k_blocks, layer.k_scale),
        (v, expected.v, expected.v_blocks, layer.v_scale),
    ):
        values = scaled(dequantise(pages.cpu(), None if blocks is None else blocks.cpu()).flatten(0, 1)[slots], factor)
        target[:real] = values.to(target.dtype)
    if q.dtype != k.dtype or spec.strides != "fused":
        q, k, v = _strided(spec, [q, k, v], device)
        return MhaInputs(q, k, v, None, spec.store)
    whole = torch.cat([t.flatten(1) for t in (q, k, v)], dim=1).to(device)
    views, start = [], 0
    for tensor in (q, k, v):
        width = tensor.shape[1] * tensor.shape[2]
        views.append(whole[:, start : start + width].view(tensor.shape))
        start += width
    return MhaInputs(views[0], views[1], views[2], None, spec.store)


def _query(spec: CaseSpec, shape: tuple[int, ...], layer: MhaLayer, model_dtype: str) -> torch.Tensor:
    """Random queries; values of an fp8 query are exact in the model's type once multiplied with q_scale."""
    q = random_values(shape, spec.dtype, torch.Generator().manual_seed(spec.content_seed + 3))
    if spec.dtype.startswith("fp8") and spec.q_given == "model":
        q = scaled(dequantise(q), layer.q_scale).to(torch_dtype(model_dtype))
    return q


def _slots_of_new(spec: CaseSpec, world: PageWorld) -> list[int]:
    """The slots of the rows' last query_len keys, in token order (cross attention has none: slot 0 stands in)."""
    slots = []
    for row, (query_len, kv_len) in enumerate(zip(spec.query_lens, spec.kv_lens, strict=True)):
        for i in range(query_len):
            j = kv_len - query_len + i
            slots.append(world.slot(row, j, spec.page_size) if j >= 0 else 0)
    return slots


def _strided(spec: CaseSpec, tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    if spec.strides == "transposed":
        return [t.transpose(0, 1).contiguous().to(device).transpose(0, 1) for t in tensors]
    if spec.strides == "fused":  # differing dtypes: each is a slice of a wider buffer of its own
        wide = [torch.cat([t, t[..., :1].expand(*t.shape[:-1], 8)], dim=-1).to(device) for t in tensors]
        return [w[..., : t.shape[-1]] for w, t in zip(wide, tensors, strict=True)]
    return [t.to(device) for t in tensors]


def padded_tokens(spec: CaseSpec) -> int:
    """What the token axis holds: every padded row of a uniform phase has its query tokens, too."""
    real = sum(spec.query_lens)
    if spec.phase in UNIFORM and spec.pad_rows and not spec.decode_rows:
        return real + spec.pad_rows * (spec.query_lens[0] if spec.query_lens else 1)
    return real + spec.pad_tokens


def _batch(spec: CaseSpec, world: PageWorld, device: torch.device) -> AttentionBatch:
    address = address_of(spec, world, device)
    tokens = padded_tokens(spec)
    missing = tokens - len(world.new_slots)
    if missing:
        filler = torch.full((missing,), -1, dtype=torch.int64, device=device)
        address.new_slots = torch.cat([address.new_slots, filler])
    uniform = spec.phase in UNIFORM and spec.pad_rows and not spec.decode_rows
    padding = (spec.query_lens[0] if spec.query_lens else 1) if uniform else 0
    offsets = [0]
    for query_len in (*spec.query_lens, *[padding] * spec.pad_rows):
        offsets.append(offsets[-1] + query_len)
    rows = len(spec.query_lens)
    return AttentionBatch(
        num_rows=rows,
        num_tokens=sum(spec.query_lens),
        padded_rows=rows + spec.pad_rows,
        padded_tokens=tokens,
        segments=_segments(spec),
        query_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        query_offsets_cpu=None if spec.host == "none" else torch.tensor(offsets, dtype=torch.int32),
        cpu_exact=spec.host == "exact",
        max_query_len=max([1, *spec.query_lens]) + (0 if spec.host == "exact" or spec.phase in UNIFORM else 3),
        positions=_positions(spec, tokens, device),
        addresses=(decoy_of(spec, address), address) if spec.decoy_pool else (address,),
        tree=None
        if spec.parents is None
        else build_tree(spec.parents, padded_rows=rows + spec.pad_rows, device=device),
        spans=torch.tensor(spec.spans, dtype=torch.int32, device=device) if spec.spans else None,
        lane=spec.lane,
        needs_lse=spec.needs_lse,
        partial=spec.partial,
    )


def _segments(spec: CaseSpec) -> tuple[Segment, ...]:
    rows, tokens, first = len(spec.query_lens), sum(spec.query_lens), spec.decode_rows
    segments = []
    if first:
        segments.append(Segment("decode", slice(0, first), slice(0, sum(spec.query_lens[:first])), 1))
    lens = set(spec.query_lens[first:])
    query_len = lens.pop() if len(lens) == 1 and spec.phase in UNIFORM else None
    segments.append(Segment(spec.phase, slice(first, rows), slice(sum(spec.query_lens[:first]), tokens), query_len))
    return tuple(segments)


def _positions(spec: CaseSpec, tokens: int, device: torch.device) -> torch.Tensor:
    values: list[int] = []
    for row, (query_len, kv_len) in enumerate(zip(spec.query_lens, spec.kv_lens, strict=True)):
        steps = list(range(query_len)) if spec.parents is None else depths(spec.parents[row])
        values += [max(kv_len - query_len, 0) + step for step in steps]
    values += [0] * (tokens - len(values))
    return torch.tensor(values, dtype=torch.int64, device=device)


def watch(case: Case) -> None:
    """Remember every tensor that a backend may read but not change."""
    seen = case.watch = Watch()
    for name in ("q", "k", "v"):
        seen.add(f"inputs.{name}", getattr(case.inputs, name))
    batch = case.batch
    for name in ("query_offsets", "positions", "spans"):
        seen.add(f"batch.{name}", getattr(batch, name))
    for index, address in enumerate(batch.addresses):
        for name in ("table", "table_rows", "indices", "indptr", "kv_lens", "new_slots", "origin"):
            seen.add(f"addresses[{index}].{name}", getattr(address, name, None))
    if batch.tree is not None:
        for name in ("parents", "depth", "mask_bits"):
            seen.add(f"tree.{name}", getattr(batch.tree, name))
    seen.add("layer.sinks", case.layer.sinks)
