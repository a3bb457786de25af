"""What the user asks for: environment variables and vLLM's own ``--additional-config``, as attn-core planning options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attn_core.errors import UsageError

#: Environment variable -> planning option.
VARIABLES = {
    "ATTN_BACKEND": "attention_backend",
    "ATTN_PREFILL_BACKEND": "prefill_attention_backend",
    "ATTN_DECODE_BACKEND": "decode_attention_backend",
}
#: More options, as a JSON object.
MORE = "ATTN_OPTIONS"
#: The key in ``--additional-config``, and the key under it where the parent leaves the plan for its workers.
KEY = "attn"
PLAN = "plan"

#: Options that vLLM decides; the flag to use instead.
VLLM_DECIDES = {
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "page_size": "--block-size",
    "context_length": "--max-model-len",
    "max_running_requests": "--max-num-seqs",
    "chunked_prefill_size": "--max-num-batched-tokens",
    "disable_prefix_cache": "--no-enable-prefix-caching",
    "tp_size": "--tensor-parallel-size",
    "dcp_size": "--decode-context-parallel-size",
    "speculative_algorithm": "--speculative-config",
    "speculative_num_draft_tokens": "--speculative-config",
    "speculative_num_steps": "--speculative-config",
    "host_lengths": "--async-scheduling or --no-async-scheduling",
    "cuda_graph": "--enforce-eager or --compilation-config",
}


def asked_options(environ: Mapping[str, str], extra: Any) -> dict[str, Any]:
    """The planning options of the environment and of ``additional_config["attn"]`` (a backend name, or a table).

    Raises :class:`UsageError` for a value that is given twice and differs, and for what vLLM's own flags decide.
    """
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, options in _sources(environ, extra):
        for name, value in options.items():
            name = name.replace("-", "_")
            _refuse_what_vllm_decides(name, source)
            if name in found and found[name] != value:
                raise UsageError(
                    f"{name} is asked for twice",
                    f"{origin[name]}  {found[name]}",
                    f"{source}  {value}",
                    fix="give it once",
                )
            found[name], origin[name] = value, source
    return found


def _sources(environ: Mapping[str, str], extra: Any) -> list[tuple[str, Mapping[str, Any]]]:
    sources: list[tuple[str, Mapping[str, Any]]] = [
        (variable, {option: environ[variable]}) for variable, option in VARIABLES.items() if environ.get(variable)
    ]
    if environ.get(MORE):
        sources.append((MORE, _parsed(environ[MORE])))
    table = extra.get(KEY) if isinstance(extra, Mapping) else None
    if isinstance(table, str):
        table = {"attention_backend": table}
    if table is not None:
        if not isinstance(table, Mapping):
            raise UsageError(f"--additional-config: {KEY!r} is {type(table).__name__}; needed is a name or a table")
        sources.append(("--additional-config", {name: value for name, value in table.items() if name != PLAN}))
    return sources


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        table = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{MORE} is not JSON: {error}", fix=f'{MORE}=\'{{"exclude_backends": "triton"}}\'') from error
    if not isinstance(table, dict):
        raise UsageError(f"{MORE} holds {type(table).__name__}; needed is a JSON object of options")
    return table


def _refuse_what_vllm_decides(name: str, source: str) -> None:
    flag = VLLM_DECIDES.get(name)
    if flag is not None:
        raise UsageError(f"{source}: {name} is decided by vLLM", fix=f"use vLLM's {flag}")
