"""Everything that depends on SGLang's version, in one place: names of its modules are looked up here and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attn_core.errors import UsageError
from attn_sglang import SUPPORTED_SGLANG
from attn_sglang.facts import ServerFacts, Speculation

log = logging.getLogger("attn_sglang")

Factory = Callable[[Any], Any]


def check_version() -> None:
    """Raise :class:`UsageError` unless this SGLang is one that the bridge is tested with."""
    from sglang.version import __version__ as version

    if version not in SUPPORTED_SGLANG:
        raise UsageError(
            f"SGLang {version} is not supported by this version of attn-sglang",
            f"found    sglang {version}",
            f"needed   sglang {' or '.join(SUPPORTED_SGLANG)}",
            fix=f"pip install sglang=={SUPPORTED_SGLANG[-1]}, or a release of attn-sglang made for {version}",
        )


def own_names() -> frozenset[str]:
    """The names of SGLang's own attention backends: those that have a factory, and those its command line offers."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return frozenset(ATTENTION_BACKENDS) | frozenset(ATTENTION_BACKEND_CHOICES)


def add_backends(factories: Mapping[str, Factory]) -> None:
    """Register factories and offer their names on the command line."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for name, factory in factories.items():
        register_attention_backend(name)(factory)
    add_attention_backend_choices([name for name in factories if name not in ATTENTION_BACKEND_CHOICES])


def backend_base() -> type:
    """SGLang's base class of attention backends."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    found: type = AttentionBackend
    return found


def unknown_read_end() -> Any:
    """``SharedReadEnds.UNKNOWN``: the scheduler may overwrite shared tensors only after the whole forward."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.UNKNOWN


def verify_mask(rows: int, width: int, device: Any) -> Any:
    """A mask for the drafter to fill: `rows` x `width` x `width` booleans, the drafts only (the prefix is always seen)."""
    import torch
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    buffer = torch.zeros(rows * width * width, dtype=torch.bool, device=device)
    return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=rows)


def server_facts(runner: Any) -> ServerFacts:
    """What the plan has to know about the server, from its model runner and its resolved configuration."""
    from sglang.srt.runtime_context import get_exec, get_memory, get_parallel, get_schedule, get_spec

    schedule, parallel, spec = get_schedule(), get_parallel(), get_spec()
    config = runner.model_config
    return ServerFacts(
        model=str(config.model_path),
        architecture=next(iter(config.hf_config.architectures or ()), ""),
        model_type=str(getattr(config.hf_config, "model_type", "")),
        device=_device(runner),
        dtype=runner.dtype,
        kv_dtype=runner.kv_cache_dtype,
        page_size=runner.page_size or 1,
        context_length=int(config.context_len),
        max_rows=int(runner.req_to_token_pool.size),
        attention_chunk=runner.attention_chunk_size,
        chunked_prefill_size=schedule.chunked_prefill_size,
        prefix_cache=not get_memory().disable_radix_cache,
        overlap=not schedule.disable_overlap_schedule,
        deterministic=bool(get_exec().deterministic.enable_deterministic_inference),
        graphs=_decode_graphs(),
        speculation=_speculation(spec),
        prefill_name=runner.prefill_attention_backend_str,
        decode_name=runner.decode_attention_backend_str,
        refused=tuple(_refused(runner, parallel)),
    )


def _device(runner: Any) -> str:
    """The device as attn-core's platform detection names it: torch calls AMD's GPUs ``cuda`` too."""
    import torch

    kind = str(runner.device).partition(":")[0]
    if kind == "cpu":
        return kind
    name = "rocm" if kind == "cuda" and torch.version.hip else kind
    return f"{name}:{getattr(runner, 'gpu_id', 0) or 0}"


def _decode_graphs() -> bool:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    return not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


def _speculation(spec: Any) -> Speculation | None:
    algorithm = spec.speculative_algorithm
    if algorithm is None:
        return None
    # an n-gram tree is irregular whatever its breadth: filler drafts hang from the root
    tree = str(algorithm).upper() == "NGRAM" or (spec.speculative_eagle_topk or 1) > 1
    return Speculation(
        algorithm=str(algorithm),
        draft_tokens=int(spec.speculative_num_draft_tokens or 1),
        tree=tree,
        mode=spec.speculative_attention_mode or "prefill",
    )


def _refused(runner: Any, parallel: Any) -> Iterable[tuple[str, str]]:
    """Server features that this bridge does not serve: (what, what to do)."""
    if runner.use_mla_backend:
        yield "an MLA model (latent cache)", "--attention-backend with a backend of SGLang's own"
    if runner.is_draft_worker:
        yield "a draft model", "--speculative-draft-attention-backend with a backend of SGLang's own"
    if getattr(parallel, "dcp_enabled", False):
        yield "decode context parallelism", "start without --dcp-size"
    if getattr(parallel, "attn_cp_size", 1) > 1:
        yield "context-parallel prefill", "start without context parallelism"
    if getattr(runner.model_config, "is_encoder_decoder", False):
        yield "an encoder-decoder (cross attention)", "--attention-backend with a backend of SGLang's own"
