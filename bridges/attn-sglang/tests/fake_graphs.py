"""SGLang's decode graph runner, small: the same order of calls, static buffers and padding."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from fake_server import Mode


class GraphServer:
    """Captures and replays in SGLang's order of calls, into static buffers. `record` makes a replayable from a function."""

    def __init__(self, server, backend, buckets, width=1, record=None):
        self.server, self.backend, self.width = server, backend, width
        self.record = record or (lambda function: (function(), function)[1])
        device, most = server.device, max(buckets)
        self.slots = torch.zeros(most * width, dtype=torch.int64, device=device)
        self.requests = torch.zeros(most, dtype=torch.int64, device=device)
        self.positions = torch.zeros(most * width, dtype=torch.int64, device=device)
        backend.init_cuda_graph_state(most, most * width)
        self.fill = backend.get_cuda_graph_seq_len_fill_value()
        self.lens = torch.full((most,), self.fill, dtype=torch.int64, device=device)
        attn = server.modules
        self.inputs = [
            tuple(
                torch.zeros(most * width, *shape, dtype=server.dtype, device=device)
                for shape in (
                    (a.tp_q_head_num * a.qk_head_dim,),
                    (a.tp_k_head_num, a.qk_head_dim),
                    (a.tp_v_head_num, a.v_head_dim),
                )
            )
            for a in attn
        ]
        self.graphs = {}
        for rows in sorted(buckets, reverse=True):
            self._capture(rows)

    def _view(self, rows, spec):
        tokens = rows * self.width
        return SimpleNamespace(
            forward_mode=Mode.DECODE if self.width == 1 else Mode.TARGET_VERIFY,
            batch_size=rows,
            req_pool_indices=self.requests[:rows],
            seq_lens=self.lens[:rows],
            seq_lens_cpu=self.lens[:rows].cpu(),
            out_cache_loc=self.slots[:tokens],
            positions=self.positions[:tokens],
            spec_info=spec,
        )

    def _capture(self, rows):
        spec = SimpleNamespace(draft_token_num=self.width, custom_mask=None, ragged_verify_layout=None)
        batch = self._view(rows, spec)
        tokens = rows * self.width
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        step = self.backend.forward_metadata

        def once():
            self.backend.forward_metadata = step
            self.backend.init_forward_metadata_in_graph(batch)
            inputs = [tuple(x[:tokens] for x in layer) for layer in self.inputs]
            return self.server.attend(self.backend, batch, inputs)

        once()
        self.backend.on_after_cuda_graph_warmup()
        self.graphs[rows] = self.record(once)

    def run(self, batch):
        """Replay the smallest graph that holds `batch`: outputs of its own tokens, and references."""
        server, width = self.server, self.width
        rows = min(n for n in self.graphs if n >= batch.batch_size)
        inputs = [server.inputs(batch, layer) for layer in range(len(server.modules))]
        real = batch.batch_size * width
        for static, fresh in zip(self.inputs, inputs, strict=True):
            for a, b in zip(static, fresh, strict=True):
                a.zero_()
                a[:real] = b
        self.lens.fill_(self.fill)
        for static in (self.slots, self.requests, self.positions):
            static.zero_()
        self.lens[: batch.batch_size] = batch.seq_lens
        self.requests[: batch.batch_size] = batch.req_pool_indices
        self.slots[:real], self.positions[:real] = batch.out_cache_loc, batch.positions
        spec = batch.spec_info
        if spec is not None and rows > batch.batch_size:  # padded rows see everything
            more = (rows - batch.batch_size) * width * (self.fill + width)
            tail = torch.ones(more, dtype=torch.bool, device=server.device)
            spec = SimpleNamespace(**{**vars(spec), "custom_mask": torch.cat([spec.custom_mask, tail])})
        self.backend.init_forward_metadata_out_graph(self._view(rows, spec))
        outs = self.graphs[rows]()
        wanted = server.reference(batch, inputs)
        server.advance(batch)
        return [out[:real] for out in outs], wanted
