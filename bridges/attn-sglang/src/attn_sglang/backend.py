"""The attention backend that SGLang calls. Every member of its base class is answered here, none is inherited.

:class:`CoreBackend` knows nothing of SGLang's modules; :func:`make_class` puts SGLang's base class behind it, so that
``isinstance`` holds. A test compares its members with those of the installed base class.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attn_core.errors import BatchError, BindError, GraphError
from attn_core.layers import MhaInputs
from attn_sglang.layers import copy_sinks

if TYPE_CHECKING:
    import torch

    from attn_core.router import Step
    from attn_sglang.build import Built
    from attn_sglang.layers import Bound

_NO_GLUE = "attn-core's metadata hooks may do host work"


class CoreBackend:
    """One model runner's attention through attn-core. Not thread-safe: a runner runs one forward at a time.

    ``forward_metadata`` is the step in flight; ``router``, ``plan`` and ``calls()`` are there to look at.
    """

    # --- what SGLang reads off any backend ------------------------------------------------------------------------------

    prefill_attention_backend_str = None
    decode_attention_backend_str = None
    data_type = None
    kv_cache_dtype = None
    attn_backend_list = None
    forward_metadata: Step | None = None
    kv_index_translator = None
    dllm_attention = None
    needs_cpu_seq_lens = True
    # features of single kernels, or of model families that this bridge refuses
    supports_ragged_verify_graph = False
    folds_encoder_swa_replay = False
    supports_draft_extend_metadata_staging = False
    supports_full_cuda_graph_chunked_prefix = False
    # metadata is made for the batch at hand: nothing is preallocated for requests, nothing outlives an eager forward
    extend_dummy_seqs_capped_by_req_pool = False
    use_captured_forward_metadata_for_breakable_cuda_graph = False
    prefill_cuda_graph_max_batch_size = None
    prefer_eager_mixed_prefill_under_dp_attention = False
    skips_prefill_metadata_on_idle_dp_rank = False
    supports_prefill_cuda_graph_max_context_size = False
    prefill_cuda_graph_default_max_seq_len = None

    def __init__(self, built: Built) -> None:
        self._built = built
        self.name, self.plan, self.router = built.name, built.plan, built.router
        self.token_to_kv_pool, self.req_to_token_pool = built.kv_pool, built.request_pool
        self.data_type = self.kv_cache_dtype = built.facts.kv_dtype
        self.needs_cpu_seq_lens = built.needs_host_lengths
        self.forward_metadata = None
        self._layers: dict[int, Bound] = {id(bound.found.module): bound for bound in built.layers}
        self._last = built.layers[-1].found.module
        self._graphs: Any = None
        self._mask = built.verify_mask
        self._waits = built.waits_for_layers

    def calls(self) -> dict[str, dict[str, int]]:
        """Layer calls per attn-core backend and phase since the start."""
        return self._built.counter.calls()

    # --- metadata -------------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Begin an eager step: metadata of every layer group, once."""
        if forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0:
            self.forward_metadata = None
            return
        self.forward_metadata = self.router.begin(self._built.maker.eager(forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Begin the step of a graph: a new static batch while capturing, the same one rewritten before a replay.

        A shape that was never captured (prefill between the pieces of a breakable graph) is an eager step.
        """
        if in_capture:
            self.forward_metadata = self._static().capture(forward_batch)
        elif self._graphs is not None and self._graphs.known(forward_batch):
            self.forward_metadata = self._graphs.replay(forward_batch)
        else:
            self.init_forward_metadata(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Device work of the metadata, recorded into the graph. An eager step has done it when it began."""
        step = self.forward_metadata
        if step is not None and step.graph is not None:
            self.router.in_graph(step)

    def glue_target_verify_metadata(self) -> str:
        """Why verify metadata may not be captured by SGLang's glue graph."""
        return _NO_GLUE

    def glue_draft_metadata(self) -> str:
        """Why draft metadata may not be captured by SGLang's glue graph."""
        return _NO_GLUE

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        """Draft models are not served, so nothing of theirs is captured."""
        return False

    # --- graphs ---------------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Static buffers, once. Raises :class:`GraphError` where a planned backend may not be captured."""
        if self._graphs is not None and self._graphs.limits.max_rows >= max_bs:
            return
        from attn_sglang.graphs import StaticBatches

        built = self._built
        spec = built.facts.speculation
        self._graphs = StaticBatches(
            self.router,
            built.maker,
            rows=max_bs,
            tokens=max_num_tokens,
            context=built.facts.context_length,
            slots=built.slots,
            verify_width=spec.draft_tokens if spec else 1,
        )

    def _static(self) -> Any:
        if self._graphs is None:
            raise GraphError("SGLang captures before it has called init_cuda_graph_state")
        return self._graphs

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of padded rows: what the planned backends ask for; 1 before any graph state exists."""
        return 1 if self._graphs is None else self._graphs.pad_kv_len

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The same for SGLang's CPU graphs. Looked up on any backend, though not declared by the base class."""
        return self.get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        """After a warm-up pass every workspace has its final size: a graph is about to record the addresses."""
        self.router.freeze()

    def validate_elastic_cuda_graph_recapture(self) -> None:
        """Captured shapes may be captured again: their static batches are replaced."""

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> Any:
        """Not asked for: prefill metadata is rebuilt between the pieces of a breakable graph."""
        raise GraphError("attn-core's prefill metadata has no address to capture; it is rebuilt between the pieces")

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, capture_metadata: Any, forward_batch: Any, *, static_forward_batch: Any = None
    ) -> None:
        """Not asked for, for the same reason."""
        raise GraphError("attn-core's prefill metadata has no address to replay; it is rebuilt between the pieces")

    def prepare_full_cuda_graph_chunked_prefix(self, forward_batch: Any, *, in_capture: bool) -> None:
        """Not asked for: the chunked prefix is MLA's, and MLA is not served."""
        raise GraphError("a chunked prefix in a full prefill graph is not served through attn-core")

    # --- overlap scheduling ---------------------------------------------------------------------------------------------

    def shared_read_ends(self, fm: Any) -> Any:
        """At page size 1 kernels read the server's own table, so the fence is the whole forward."""
        from attn_sglang._compat import unknown_read_end

        return unknown_read_end()

    def resolve_prefill_shared_read_ends(
        self, forward_batch: Any, *, num_qo_tokens: int, build_snapshot: bool = True
    ) -> Any:
        """As :meth:`shared_read_ends`; no snapshot is made."""
        return self.shared_read_ends(forward_batch.forward_mode)

    def _snapshot_prefill_shared_reads(self, forward_batch: Any, *, num_qo_tokens: int) -> Any:
        return self.shared_read_ends(forward_batch.forward_mode)

    # --- verification ---------------------------------------------------------------------------------------------------

    @property
    def verify_mask(self) -> Any:
        """The mask that the drafter fills: the drafts only. None without speculation or without a tree."""
        return self._mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """The drafter has filled its mask after the metadata was made: make what depends on it again."""
        if cuda_graph_bs is not None and self._graphs is not None:
            self.forward_metadata = self._graphs.refill_tree(spec_info, cuda_graph_bs) or self.forward_metadata
            return
        step = self.forward_metadata
        if step is None or step.batch.tree is None:
            return
        batch, width = step.batch, int(spec_info.draft_token_num)
        lens = batch.kv(0).kv_lens.long() - width
        batch.tree = self._built.maker.verify_tree(spec_info, lens, width)
        if spec_info.positions is not None:
            batch.positions = spec_info.positions.reshape(-1).long()
        self.forward_metadata = self.router.begin(batch)

    # --- layers ---------------------------------------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Attention of one layer: q ``[T, Hq * Dk]``, k ``[T, Hk, Dk]``, v ``[T, Hk, Dv]`` -> ``[T, Hq * Dv]``."""
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        return self._attend(q, k, v, layer, save_kv_cache, kwargs)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """As :meth:`forward`; the step in flight knows its phase."""
        return self._attend(q, k, v, layer, save_kv_cache, kwargs)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """As :meth:`forward`; the step in flight knows its phase."""
        return self._attend(q, k, v, layer, save_kv_cache, kwargs)

    def forward_mixed(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """As :meth:`forward`; decode rows of a mixed batch are extends by one token."""
        return self._attend(q, k, v, layer, save_kv_cache, kwargs)

    def _attend(self, q: Any, k: Any, v: Any, layer: Any, save: bool, kwargs: dict[str, Any]) -> Any:
        step = self.forward_metadata
        if step is None:
            raise BatchError(f"layer {layer.layer_id} attends before init_forward_metadata has begun a step")
        bound = self._layers.get(id(layer))
        if bound is None:
            raise BindError(f"attention layer {layer.layer_id} was not in the model when the backend was made")
        lse = self._read_kwargs(bound, kwargs) if kwargs or bound.layer.sinks is not None else False
        if self._waits:
            self.token_to_kv_pool.get_key_buffer(layer.layer_id)  # waits for a layer that is being loaded
        tokens = q.shape[0]
        q, k, v = self._shaped(q, k, v, layer, step)
        inputs = MhaInputs(q, k, v, store=save and k is not None)
        if lse:
            out, sums = step.attend_lse(bound.layer, inputs)
        else:
            out, sums = step.attend(bound.layer, inputs), None
        if layer is self._last:
            self._built.counter.write()
        out = _padded(out, tokens).reshape(tokens, -1)
        return (out, _padded(sums, tokens)) if lse else out

    def _shaped(self, q: Any, k: Any, v: Any, layer: Any, step: Step) -> tuple[Any, Any, Any]:
        """Heads apart, and the step's own tokens only (a server may pad what it runs the model on)."""
        tokens = step.batch.padded_tokens
        if q.shape[0] < tokens:
            raise BatchError(
                f"layer {layer.layer_id} was given {q.shape[0]} tokens; the step has {tokens}",
                fix="report this: SGLang has narrowed a batch after its metadata was made",
            )
        q = q.reshape(q.shape[0], layer.tp_q_head_num, layer.qk_head_dim)[:tokens]
        if k is not None:
            k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)[:tokens]
            v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)[:tokens]
        return q, k, v

    def _read_kwargs(self, bound: Bound, kwargs: dict[str, Any]) -> bool:
        """Sinks into the layer; returns whether an LSE is wanted. Raises :class:`BindError` for what cannot be served."""
        given = {name: value for name, value in kwargs.items() if value is not None and value is not False}
        sinks, lse = given.pop("sinks", None), bool(given.pop("return_lse", False))
        if (sinks is None) != (bound.layer.sinks is None):
            have, planned = ("absent" if sinks is None else "given"), ("without" if sinks is not None else "with")
            raise BindError(
                f"layer {bound.layer.index}: sinks are {have}, and the layer was planned {planned} sinks",
                fix="serve this model with a backend of SGLang's own",
            )
        if sinks is not None:
            copy_sinks(bound, sinks)
        if given:
            raise BindError(
                f"layer {bound.layer.index} ({bound.found.path}) passes {', '.join(sorted(given))} to its attention",
                "served   sinks, return_lse",
                fix="serve this model with a backend of SGLang's own",
            )
        return lse

    # --- what only other kinds of backends have -------------------------------------------------------------------------

    def get_fused_kv_write_buffers(self, layer: Any, forward_batch: Any) -> None:
        """No fused writer: attn-core stores keys and values itself."""

    def late_layer_num_tokens(self, forward_batch: Any) -> None:
        """No late-layer row switch (DeepSeek V4)."""

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> None:
        """No sparse indexer: this bridge serves ``mha``."""

    def support_triton(self) -> bool:
        """Whether SGLang may use Triton kernels of its own around attention: everywhere but on a CPU."""
        return not self._built.facts.device.startswith("cpu")


def _padded(tensor: Any, tokens: int) -> Any:
    if tensor.shape[0] == tokens:
        return tensor
    whole = tensor.new_zeros((tokens, *tensor.shape[1:]))
    whole[: tensor.shape[0]] = tensor
    return whole


@lru_cache(maxsize=4)
def make_class(base: type) -> type:
    """:class:`CoreBackend` in front of SGLang's `base`."""
    return type("AttnCoreBackend", (CoreBackend, base), {"__doc__": CoreBackend.__doc__})
