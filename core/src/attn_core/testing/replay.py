"""Capture and replay, for real on CUDA and acted out on a CPU.

A captured graph keeps the numbers that Python passed when it was captured, and the addresses of the tensors it read. On a CPU
the same is acted out: after each ``attn_metadata`` of a replay, every field of the metadata object is put back to what it was
at capture. Tensors are put back by identity, so what was rewritten in place is new, and what was re-made is stale, exactly as
under a real graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_core.batch import AttentionBatch, KvAddress
from attn_core.context import GraphLimits, GraphState, Metadata
from attn_core.layers import MhaCache, MhaInputs
from attn_core.paging import copy_batch
from attn_core.testing.harness import Result, Session
from attn_core.testing.spec import Case


def static_case(case: Case, columns: int, max_kv_len: int) -> Case:
    """A copy of `case` whose batch has room for `columns` pages a row and says `max_kv_len`: what a server captures with.

    It is a static batch: a backend may read the table, or CSR and slots as views of the size of the bounds.
    """
    batch = case.batch
    addresses = tuple(_widen(address, columns, max_kv_len) for address in kv_addresses(batch))
    static = replace(
        batch,
        addresses=addresses,
        query_offsets=batch.query_offsets.clone(),
        positions=None if batch.positions is None else batch.positions.clone(),
        tree=None
        if batch.tree is None
        else replace(batch.tree, **_clones(batch.tree, ("parents", "depth", "mask_bits"))),
        spans=None if batch.spans is None else batch.spans.clone(),
        static=True,
        _views={},
    )
    cloned = [None if t is None else t.clone() for t in (case.inputs.q, case.inputs.k, case.inputs.v)]
    assert cloned[0] is not None
    inputs = MhaInputs(cloned[0], cloned[1], cloned[2], None, case.inputs.store)
    return replace(case, batch=static, inputs=inputs, out=case.out.clone())


def kv_addresses(batch: AttentionBatch) -> list[KvAddress]:
    """The addresses of a batch without state pools."""
    return [address for address in batch.addresses if isinstance(address, KvAddress)]


def _clones(record: Any, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {name: getattr(record, name).clone() for name in names}


def _widen(address: KvAddress, columns: int, max_kv_len: int) -> KvAddress:
    """Row r's pages in line r, with room for `columns`."""
    rows = address.kv_lens.shape[0]
    assert address.table is not None
    lines = address.table if address.table_rows is None else address.table[address.table_rows.long()]
    table = torch.zeros(rows, max(columns, lines.shape[1]), dtype=torch.int32, device=lines.device)
    table[:, : lines.shape[1]] = lines[:rows]
    return replace(
        address,
        table=table,
        table_rows=None,
        kv_lens=address.kv_lens.clone(),
        new_slots=address.new_slots.clone(),
        max_kv_len=max_kv_len,
        kv_lens_cpu=None if address.kv_lens_cpu is None else address.kv_lens_cpu.clone(),
        origin=None if address.origin is None else address.origin.clone(),
    )


def load(case: Case, static: Case) -> None:
    """Copy a new step into the static one: batch, inputs and, as one layer stands for all, the contents of the cache."""
    fresh = replace(case.batch, addresses=tuple(_widen(a, 0, a.max_kv_len) for a in kv_addresses(case.batch)))
    copy_batch(fresh, static.batch)
    for name in ("q", "k", "v"):
        source, target = getattr(case.inputs, name), getattr(static.inputs, name)
        if source is not None:
            target.copy_(source)
    for name in ("k", "v", "k_blocks", "v_blocks"):
        source, target = getattr(case.cache, name), getattr(static.cache, name)
        if source is not None:
            _raw(target)[: len(source)].copy_(_raw(source))
            _raw(target)[len(source) :].zero_()
    static.out.fill_(float("nan"))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def roomy(cache: MhaCache, pages: int) -> MhaCache:
    """A cache of the same kind with `pages` pages."""

    def grown(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        raw = _raw(tensor)
        return torch.zeros((pages, *raw.shape[1:]), dtype=raw.dtype, device=raw.device).view(tensor.dtype)

    k, v = grown(cache.k), grown(cache.v)
    assert k is not None
    assert v is not None
    return MhaCache(k, v, grown(cache.k_blocks), grown(cache.v_blocks), cache.format)


@dataclass
class Replayer:
    """One captured key: runs the capture, then replays with the metadata acted out (or a real CUDA graph).

    ``others`` are further layers of the group: static cases with the batch of ``static``. Their results, in the same order, are in
    ``other_results`` after each launch.
    """

    session: Session
    static: Case
    limits: GraphLimits
    state: GraphState
    metadata: Metadata | None = None
    frozen: dict[str, Any] = field(default_factory=dict)
    graph: Any = None
    result: Result | None = None
    problems: list[str] = field(default_factory=list)
    others: list[Case] = field(default_factory=list)
    other_results: list[Result] = field(default_factory=list)
    _other_made: list[Result] = field(default_factory=list)

    def capture(self) -> None:
        """Metadata with ``capture``, a warm-up run, then the capture of in-graph work, store and attention."""
        self.metadata = self._metadata(True)
        if self.static.out.device.type != "cuda":
            self.result = self._device_work()
            self.frozen = fields_of(self.metadata)
            self.session.context.frozen = True
            return
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._device_work()
        torch.cuda.synchronize()
        self.session.context.frozen = True
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self._device_work()

    def replay(self, case: Case, *others: Case) -> Result:
        """Load a step (its further layers in `others`) and replay; the result is a copy."""
        self.prepare(case, *others)
        return self.launch()

    def prepare(self, case: Case, *others: Case) -> None:
        """The part before the graph: load the step and rewrite the metadata."""
        for layer, static in zip((case, *others), (self.static, *self.others), strict=True):
            load(layer, static)
        again = self._metadata(False)
        if again is not self.metadata:
            self.problems.append("attn_metadata made a new object for a key that was captured")

    def launch(self) -> Result:
        """The graph itself."""
        if self.graph is not None:
            self.graph.replay()
            torch.cuda.synchronize()
            assert self.result is not None
        else:
            put_back(self.metadata, self.frozen)
            self.result = self._device_work()
        self.other_results = [_copy(result) for result in self._other_made]
        return _copy(self.result)

    def _metadata(self, capture: bool) -> Metadata:
        batch: AttentionBatch = self.static.batch
        return self.session.metadata(batch, self.static.phase, self.state, capture)

    def _device_work(self) -> Result:
        assert self.metadata is not None
        self.session.in_graph(self.metadata)
        made = []
        for static in (self.static, *self.others):
            self.session.store(static)
            made.append(self.session.attend(static, self.metadata, static.out))
        first, *self._other_made = made
        return first


def _copy(result: Result) -> Result:
    return Result(result.out.clone(), None if result.lse is None else result.lse.clone())


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of an object, whether it has slots or a dictionary; dictionaries and lists are copied one level deep."""
    names = list(vars(record)) if hasattr(record, "__dict__") else []
    for cls in type(record).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    found = {name: getattr(record, name) for name in names if hasattr(record, name) and not name.startswith("__")}
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in found.items()}


def put_back(record: Any, fields: Mapping[str, Any]) -> None:
    """Set fields back by identity; a field that cannot be set (frozen records) is as it was anyway."""
    for name, value in fields.items():
        setter: Callable[..., None] = object.__setattr__
        try:
            setter(record, name, value)
        except (AttributeError, TypeError):
            continue


def tensor_addresses(record: Any) -> dict[str, int]:
    """Address of every tensor among an object's fields, one level of tuples, lists and dictionaries included."""
    found: dict[str, int] = {}
    for name, value in fields_of(record).items():
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        for key, item in (("", value), *items):
            if isinstance(item, torch.Tensor):
                found[f"{name}.{key}" if key != "" else name] = item.data_ptr()
    return found
