"""Runs in the environment of vLLM: what the entry point imports and how long it takes, when nobody asks for a backend."""

from __future__ import annotations

import json
import sys
import time

from vllm import LLM  # noqa: F401  (what a user's process has loaded before the plugin runs)
from vllm.engine.arg_utils import EngineArgs  # noqa: F401

before = set(sys.modules)
began = time.perf_counter()
from attn_vllm import register  # noqa: E402

register()
register()
seconds = time.perf_counter() - began
print(json.dumps({"modules": sorted(set(sys.modules) - before), "milliseconds": round(seconds * 1000, 2)}))
