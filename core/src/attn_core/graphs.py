"""Graph capture and replay for any backend that declares a level: static batches, buckets, one memory pool.

    runner = GraphRunner(router, forward, limits)          # forward(step, inputs) -> output, the model's layers
    runner.capture("decode")                               # one graph per bucket of rows, largest first
    out = runner.run(batch, inputs)                        # replays the bucket that fits; lengths may differ every time

Order of one replay: copy into the static batch, ``begin`` (the same Metadata objects, contents rewritten), replay. Nothing is
allocated for metadata and nothing is captured again when lengths change; the key (phase, padded sizes) may not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from attn_core.batch import AttentionBatch, KvAddress, Segment, Tree
from attn_core.context import GraphLimits, log
from attn_core.errors import GraphError

if TYPE_CHECKING:
    import torch

    from attn_core.plan import Pool
    from attn_core.router import Router, Step

#: The model's part of a step: (step, static inputs by name) -> output [T, ...].
Forward = Callable[["Step", Mapping[str, "torch.Tensor"]], "torch.Tensor"]


class Recorded(Protocol):
    """A recorded piece of work."""

    def replay(self) -> torch.Tensor:
        """Run it again; returns the (static) output."""


class Recorder(Protocol):
    """Turns a function into a :class:`Recorded`."""

    def record(self, function: Callable[[], torch.Tensor]) -> Recorded:
        """Warm up and record `function`."""


@dataclass
class CudaRecorder:
    """CUDA and HIP graphs; all graphs of one recorder share one memory pool, so capture the largest first.

    ``device`` None is the device that is current at the first record. One side stream serves every warm-up and capture: blocks
    of a pool are re-used on the stream they were made on only, and torch's default capture stream belongs to whatever device
    the process captured on first.
    """

    warmups: int = 2
    pool: Any = None
    device: torch.device | str | None = None
    _side: Any = field(default=None, repr=False)

    def record(self, function: Callable[[], torch.Tensor]) -> Recorded:
        """Warm up on a side stream, then capture into the shared pool; both on the recorder's device."""
        import torch

        from attn_core._device import Place

        place = Place(self.device or "cuda")
        self.device = place.device
        with place.use():
            if self._side is None:
                self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            outer = torch.cuda.current_stream(self.device)
            self._side.wait_stream(outer)
            with torch.cuda.stream(self._side):
                for _ in range(self.warmups):
                    function()
            outer.wait_stream(self._side)
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self._side):
                out = function()
        return _CudaGraph(graph, out)


@dataclass
class _CudaGraph:
    graph: Any
    out: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.out


class RerunRecorder:
    """Runs the recorded function again at every replay: the protocol without a device that has graphs (tests on a CPU)."""

    def record(self, function: Callable[[], torch.Tensor]) -> Recorded:
        """Run once, and keep the function."""
        function()
        return _Rerun(function)


@dataclass
class _Rerun:
    function: Callable[[], torch.Tensor]

    def replay(self) -> torch.Tensor:
        return self.function()


@dataclass
class _Captured:
    batch: AttentionBatch
    inputs: dict[str, torch.Tensor]
    recorded: Recorded


class GraphRunner:
    """Graphs of one router on one lane. Not thread-safe: a lane runs one step at a time.

    Capture, replay and the model's `forward` run with the router's device as the current one, whatever the caller's is.
    """

    def __init__(
        self,
        router: Router,
        forward: Forward,
        limits: GraphLimits,
        example: Mapping[str, torch.Tensor],
        *,
        lane: int = 0,
        model: str = "target",
        recorder: Recorder | None = None,
    ) -> None:
        """`example` has one tensor [1, ...] per input of `forward`: its name, shape behind the token axis, dtype and device."""
        self.router, self.forward, self.limits = router, forward, limits
        self.lane, self.model = lane, model
        self.example = dict(example)
        self.recorder = recorder or (CudaRecorder(device=router.device) if router.device.type == "cuda" else None)
        if self.recorder is None:
            raise GraphError(
                f"there are no graphs on {router.device.type}", fix="run eagerly, or give a RerunRecorder in tests"
            )
        self.state = router.graph_state(limits, lane)
        self._captured: dict[tuple[str, int, int], _Captured] = {}
        self.replays = self.eager_runs = 0
        self._told: set[str] = set()

    def capture(self, phase: str, query_len: int = 1) -> list[int]:
        """Capture one graph for every bucket of rows, largest first. Returns the buckets.

        Raises :class:`GraphError` where the plan's level or the limits do not allow it.
        """
        done = []
        with self.router.place.use():
            for rows in sorted(self.limits.rows, reverse=True):
                if rows * query_len <= self.limits.max_tokens:
                    self._capture(phase, rows, query_len)
                    done.append(rows)
        if not done:
            raise GraphError(
                f"no bucket of {self.limits.rows} rows with {query_len} tokens each fits into {self.limits.max_tokens} tokens"
            )
        return done

    def _capture(self, phase: str, rows: int, query_len: int) -> None:
        batch = self._static_batch(phase, rows, query_len)
        inputs = {name: one.new_zeros((rows * query_len, *one.shape[1:])) for name, one in self.example.items()}
        step = self.router.begin(batch, self.state, model=self.model, capture=True)

        def work() -> torch.Tensor:
            self.router.in_graph(step)
            return self.forward(step, inputs)

        assert self.recorder is not None
        recorded = self.recorder.record(work)
        self._captured[phase, rows, query_len] = _Captured(batch, inputs, recorded)
        self.router.freeze()

    def run(self, batch: AttentionBatch, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Output [num_tokens, ...] of a step: by the smallest graph that fits, else eagerly (logged once per cause)."""
        if self.router.place.is_current:
            return self._run(batch, inputs)
        with self.router.place.use():
            return self._run(batch, inputs)

    def _run(self, batch: AttentionBatch, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found = self._find(batch)
        if isinstance(found, str):
            self._tell(found)
            self.eager_runs += 1
            return self.forward(self.router.begin(batch, model=self.model), inputs)
        from attn_core.paging import copy_batch

        copy_batch(pad_batch(batch, found.batch, self.state.pad_kv_len), found.batch)
        for name, static in found.inputs.items():
            static[: batch.num_tokens].copy_(inputs[name][: batch.num_tokens])
            static[batch.num_tokens :].zero_()
        self.router.begin(found.batch, self.state, model=self.model)
        self.replays += 1
        return found.recorded.replay()[: batch.num_tokens]

    def _find(self, batch: AttentionBatch) -> _Captured | str:
        if batch.idle:
            return "an idle rank has nothing to replay"
        phases = {segment.phase for segment in batch.segments}
        lengths = {segment.query_len for segment in batch.segments}
        if len(phases) != 1 or len(lengths) != 1 or None in lengths:
            return "a mixed or ragged batch has no graph"
        phase, query_len = phases.pop(), lengths.pop()
        fitting = [
            key for key in self._captured if key[0] == phase and key[2] == query_len and key[1] >= batch.num_rows
        ]
        if not fitting:
            return f"no graph was captured for {phase} with {query_len} tokens a row and at least {batch.num_rows} rows"
        if batch.spans is not None or any(isinstance(a, KvAddress) and a.origin is not None for a in batch.addresses):
            return "bidirectional spans and trimmed pools have no graph"
        over = [
            a.max_kv_len for a in batch.addresses if isinstance(a, KvAddress) and a.max_kv_len > self.limits.max_kv_len
        ]
        if over:
            return f"a row of up to {max(over)} keys exceeds the graph's {self.limits.max_kv_len}"
        return self._captured[min(fitting, key=lambda key: key[1])]

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            log.info("run eagerly: %s", why)

    def _static_batch(self, phase: str, rows: int, query_len: int) -> AttentionBatch:
        """A batch of padded rows only, with tables wide enough for the longest row."""
        import torch

        device = self.router.device
        tokens = rows * query_len
        offsets = torch.arange(0, tokens + 1, query_len, dtype=torch.int32, device=device)
        pools = [pool for pool in self.router.plan.pools if pool.model in (self.model, "target")]
        tree = _static_tree(rows, query_len, device) if phase == "verify" else None
        return AttentionBatch(
            num_rows=rows,
            num_tokens=tokens,
            segments=(Segment(phase, slice(0, rows), slice(0, tokens), query_len),),
            query_offsets=offsets,
            max_query_len=query_len,
            addresses=tuple(self._static_address(pool, rows, tokens) for pool in pools),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            query_offsets_cpu=torch.arange(0, tokens + 1, query_len, dtype=torch.int32),
            static=True,
            tree=tree,
            lane=self.lane,
        )

    def _static_address(self, pool: Pool, rows: int, tokens: int) -> KvAddress:
        import torch

        device = self.router.device
        width = -(-self.limits.max_kv_len // pool.page_size)
        lens = torch.full((rows,), _pad_len(self.state.pad_kv_len, tokens // rows), dtype=torch.int32)
        return KvAddress(
            page_size=pool.page_size,
            kv_lens=lens.to(device),
            kv_lens_cpu=lens,
            new_slots=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            max_kv_len=self.limits.max_kv_len,
            table=torch.zeros(rows, width, dtype=torch.int32, device=device),
        )


def _static_tree(rows: int, width: int, device: torch.device) -> Tree:
    """A chain in every row; the drafter's tree is copied over it."""
    import torch

    index = torch.arange(width, dtype=torch.int32, device=device)
    words = -(-width // 32)
    bits = torch.zeros(width, words * 32, dtype=torch.int64, device=device)
    bits[:, :width] = torch.ones(width, width, device=device).tril().long()
    packed = (bits.reshape(width, words, 32) << torch.arange(32, device=device)).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    return Tree(
        (index - 1).expand(rows, -1).contiguous(),
        index.expand(rows, -1).contiguous(),
        packed.expand(rows, -1, -1).contiguous(),
    )


def pad_batch(batch: AttentionBatch, bucket: AttentionBatch, pad_kv_len: int) -> AttentionBatch:
    """`batch` with as many rows and tokens as `bucket`: padded rows have its query length, `pad_kv_len` keys, page 0, slot -1."""
    rows, tokens = bucket.padded_rows, bucket.padded_tokens
    tree, query_len = batch.tree, bucket.max_query_len
    if bucket.tree is not None and tree is None:  # a chain is a tree, too: the graph was captured with one
        tree = _static_tree(batch.padded_rows, query_len, batch.query_offsets.device)
    if (batch.padded_rows, batch.padded_tokens) == (rows, tokens):
        return replace(
            batch,
            tree=tree,
            addresses=tuple(_dense(a, b) for a, b in zip(batch.addresses, bucket.addresses, strict=True)),
            _views={},
        )
    import torch

    first = batch.num_tokens
    more = (
        torch.arange(1, rows - batch.num_rows + 1, dtype=torch.int32, device=batch.query_offsets.device) * query_len
        + first
    )
    positions = batch.positions
    host = batch.query_offsets_cpu  # backends that plan on the host need the padded rows there, too
    if host is not None:
        ends = torch.arange(1, rows - batch.num_rows + 1, dtype=torch.int32) * query_len + first
        host = torch.cat([host[: batch.num_rows + 1], ends])
    return replace(
        batch,
        padded_rows=rows,
        padded_tokens=tokens,
        query_offsets=torch.cat([batch.query_offsets[: batch.num_rows + 1], more]),
        query_offsets_cpu=host,
        positions=None if positions is None else _padded(positions[:first], tokens, 0),
        addresses=tuple(
            _pad_address(_dense(a, b), batch, rows, tokens, pad_kv_len)
            for a, b in zip(batch.addresses, bucket.addresses, strict=True)
        ),
        tree=None
        if tree is None
        else Tree(*(_padded(x[: batch.num_rows], rows, 0) for x in (tree.parents, tree.depth, tree.mask_bits))),
        _views={},
    )


def _pad_len(pad_kv_len: int, query_len: int) -> int:
    """Keys of a padded row: none, or at least as many as its queries."""
    return max(pad_kv_len, query_len) if pad_kv_len else 0


def _padded(tensor: torch.Tensor, rows: int, value: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    if not missing:
        return tensor
    import torch

    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])


def _dense(address: Any, static: Any) -> KvAddress:
    """A dense table with one row per row: a server's shared table is read through ``table_rows`` here, once a step."""
    if not isinstance(address, KvAddress):
        raise GraphError("graphs of recurrent states are not part of this version")
    found: KvAddress = address
    if found.table is None:
        from attn_core.paging import convert

        found = convert(found, "table", found.page_size)
    assert found.table is not None
    table = found.table if found.table_rows is None else found.table[found.table_rows.long()]
    # a server's table may be wider than the graph's longest row; the surplus is never read
    return replace(
        found,
        table=table[:, : static.table.shape[1]],
        table_rows=None,
        max_kv_len=min(found.max_kv_len, static.max_kv_len),
    )


def _pad_address(address: KvAddress, batch: AttentionBatch, rows: int, tokens: int, pad_kv_len: int) -> KvAddress:
    assert address.table is not None
    pad, host = _pad_len(pad_kv_len, batch.max_query_len), address.kv_lens_cpu
    return replace(
        address,
        kv_lens=_padded(address.kv_lens[: batch.num_rows], rows, pad),
        new_slots=_padded(address.new_slots[: batch.num_tokens], tokens, -1),
        table=_padded(address.table[: batch.num_rows], rows, 0),
        kv_lens_cpu=None if host is None else _padded(host[: batch.num_rows], rows, pad),
        origin=None if address.origin is None else _padded(address.origin[: batch.num_rows], rows, 0),
        local_lens=None if address.local_lens is None else _padded(address.local_lens[: batch.num_rows], rows, 0),
    )
