"""Engines and HTTP servers of vLLM in processes of their own, with their answers, counted calls, start-up times and logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cpu_time import cpu_seconds

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from server_runs import ServerRuns, read_stats

HERE = Path(__file__).parent

NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}


class Servers(ServerRuns):
    """Runs each configuration once and keeps what it said."""

    server = "vllm"
    here = HERE
    constants = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def http(self, label: str, model: str, prompts: list[str], env: dict[str, str]) -> dict[str, Any]:
        """``vllm serve`` and real requests, all prompts at once: completions, a chat answer, seconds until it was healthy."""
        if label not in self._runs:
            self._runs[label] = self._http(label, model, prompts, env)
        return self._runs[label]

    def _http(self, label: str, model: str, prompts: list[str], env: dict[str, str]) -> dict[str, Any]:
        log, stats = self.path(label, "log"), self.path(label, "stats")
        port = free_port()
        command = [
            self.python, HERE / "serve_command.py", "serve", model, "--served-model-name", "smollm2", "--port", str(port),
            "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager",
            "--max-num-seqs", "8", "--gpu-memory-utilization", "0.2",
        ]  # fmt: skip
        began = time.monotonic()
        with log.open("w") as stream:
            process = subprocess.Popen(
                command,
                env=self.counted(stats, env),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ready = self._wait(process, port, log, began)
                cpu = cpu_seconds(process.pid)
                with ThreadPoolExecutor(len(prompts)) as pool:
                    texts = list(pool.map(lambda prompt: complete(port, prompt), prompts))
                answer = chat(port, "What is the capital of France? One word.")
            finally:
                stop(process)
        calls, reports = read_stats(stats)
        found = {"texts": texts, "chat": answer, "ready": ready, "cpu": cpu, "calls": calls, "reports": reports}
        return {**found, "log": log.read_text()}

    def _wait(self, process: subprocess.Popen[bytes], port: int, log: Path, began: float) -> float:
        while time.monotonic() - began < self.patience:
            if process.poll() is not None:
                raise AssertionError(f"vllm serve ended with {process.returncode}:\n{log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return round(time.monotonic() - began, 1)
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise AssertionError(f"vllm serve was not ready in {self.patience} s:\n{log.read_text()[-3000:]}")


def versions(report: dict[str, Any]) -> str:
    """The versions of one worker's report in one cell."""
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    return f"vllm {report['vllm']}, attn-vllm {report['attn_vllm']}, {packages}"


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One JSON request."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=Servers.patience) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def complete(port: int, prompt: str) -> str:
    """A greedy completion."""
    body = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 24}
    return str(post(port, "/v1/completions", body)["choices"][0]["text"])


def chat(port: int, question: str) -> str:
    """A greedy chat answer."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 12}
    return str(post(port, "/v1/chat/completions", body)["choices"][0]["message"]["content"])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and its children: it was started in a process group of its own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
