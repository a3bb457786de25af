"""Runs in the environment of SGLang, without a model: what the entry point does, what it imports, what it reports.

Prints one JSON object. SGLang itself calls the entry point (``load_plugins``), as in each of its processes.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import sglang.srt.plugins as plugins
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention import attention_registry

assert plugins  # SGLang's processes have the registry loaded when plugins are asked for
own = dict(attention_registry.ATTENTION_BACKENDS)
before = set(sys.modules)
began = time.perf_counter()
plugins.load_plugins()
seconds = time.perf_counter() - began
imported = sorted(set(sys.modules) - before)

import attn_sglang.plugin as plugin  # noqa: E402

plugin.register()
plugin.register()


def asked_for(name):
    """What SGLang says when a server is started with `name` and has got as far as building its backend."""
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        _build_full_attention_backend_from_str,
    )

    try:
        _build_full_attention_backend_from_str(
            model_runner=SimpleNamespace(), backend_str=name, init_new_workspace=False
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def accepted(name):
    """Whether the command line takes `name` for each of its three flags."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    flags = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")
    try:
        found = parser.parse_args(["--model-path", "m", *[word for flag in flags for word in (flag, name)]])
    except argparse.ArgumentError:
        return False
    return found.attention_backend == found.decode_attention_backend == name


table = attention_registry.ATTENTION_BACKENDS
print(
    json.dumps(
        {
            "version": sglang.__version__ if (sglang := sys.modules["sglang"]) else "",
            "new": sorted(set(table) - set(own)),
            "changed": sorted(name for name, factory in own.items() if table[name] is not factory),
            "offered": sorted(name for name in table if name not in ATTENTION_BACKEND_CHOICES and name not in own),
            "twice": sorted({name for name in ATTENTION_BACKEND_CHOICES if ATTENTION_BACKEND_CHOICES.count(name) > 1}),
            "failure": str(plugin.failure or ""),
            "accepted": [name for name in sys.argv[1:] if accepted(name)],
            "said": {name: asked_for(name) for name in sys.argv[1:]},
            "imports": [name for name in imported if name.startswith("attn_")],
            "other imports": [name for name in imported if not name.startswith("attn_")],
            "milliseconds": round(seconds * 1000, 1),
        }
    )
)
