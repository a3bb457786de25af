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

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / "tools"
#: Seconds until an engine has to be done, or a server ready.
PATIENCE = 300

NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}


class Servers:
    """Runs each configuration once and keeps what it said."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.models = folder / "models"
        self.models.mkdir(parents=True, exist_ok=True)
        self._models: set[str] = set()
        self._runs: dict[str, dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []
        self.startup: list[dict[str, Any]] = []
        self.imports: dict[str, Any] = {}

    # --- models ------------------------------------------------------------------------------------------------------

    def tiny(self, name: str) -> str:
        """A tiny random model, made by the environment of vLLM."""
        return self._made(name, [self.python, TOOLS / "tiny_checkpoints.py", self.models, name])

    def smollm2(self) -> str:
        """SmolLM2-135M-Instruct in float32, converted by the environment of this repository."""
        return self._made("smollm2", [sys.executable, TOOLS / "smollm2_checkpoint.py", self.models / "smollm2"])

    def _made(self, name: str, command: list[Any]) -> str:
        if name not in self._models:
            subprocess.run(command, check=True, capture_output=True, env=self.env({}))
            self._models.add(name)
        return str(self.models / name)

    # --- engines -----------------------------------------------------------------------------------------------------

    def env(self, more: dict[str, str]) -> dict[str, str]:
        """A clean environment: nothing of attn-core asked for unless `more` does."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ATTN_", "VLLM_"))}
        return {
            **kept,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **more,
        }

    def engine(
        self, label: str, model: str, scenarios: tuple[str, ...], env: dict[str, str], **engine: Any
    ) -> dict[str, Any]:
        """Answers of one engine: tokens by scenario, calls, seconds. Run once a label; a failure shows the end of its log."""
        if label not in self._runs:
            self._runs[label] = self._engine(label, model, scenarios, env, engine)
        return self._runs[label]

    def _engine(
        self, label: str, model: str, scenarios: tuple[str, ...], env: dict[str, str], engine: dict[str, Any]
    ) -> dict[str, Any]:
        out, stats, log = (self._path(label, kind) for kind in ("answers.json", "stats", "log"))
        out.unlink(missing_ok=True)
        asked = {"model": model, "engine": engine, "scenarios": scenarios, "out": str(out)}
        began = time.monotonic()
        with log.open("w") as stream:
            done = subprocess.run(
                [self.python, HERE / "engine_run.py", json.dumps(asked)],
                env=self.env({**env, "ATTN_VLLM_STATS": str(stats)}),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE,
                check=False,
                start_new_session=True,
            )
        text = log.read_text()
        found: dict[str, Any] = {"rc": done.returncode, "log": text, "total": round(time.monotonic() - began, 1)}
        if out.is_file():
            found |= json.loads(out.read_text())
        found["calls"], found["reports"] = read_stats(stats)
        return found

    def _path(self, label: str, kind: str) -> Path:
        clean = "".join(c if c.isalnum() else "-" for c in label)
        path = self.folder / f"vllm-{clean}.{kind}"
        if kind == "stats" and path.is_dir():
            for old in path.iterdir():
                old.unlink()
        return path

    # --- HTTP --------------------------------------------------------------------------------------------------------

    def http(self, label: str, model: str, prompts: list[str], env: dict[str, str]) -> dict[str, Any]:
        """``vllm serve`` and real requests, all prompts at once: completions, a chat answer, seconds until it was healthy."""
        if label not in self._runs:
            self._runs[label] = self._http(label, model, prompts, env)
        return self._runs[label]

    def _http(self, label: str, model: str, prompts: list[str], env: dict[str, str]) -> dict[str, Any]:
        log, stats = self._path(label, "log"), self._path(label, "stats")
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
                env=self.env({**env, "ATTN_VLLM_STATS": str(stats)}),
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
        while time.monotonic() - began < PATIENCE:
            if process.poll() is not None:
                raise AssertionError(f"vllm serve ended with {process.returncode}:\n{log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return round(time.monotonic() - began, 1)
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise AssertionError(f"vllm serve was not ready in {PATIENCE} s:\n{log.read_text()[-3000:]}")

    # --- the table ---------------------------------------------------------------------------------------------------

    def write_table(self) -> None:
        """``vllm.json`` and ``vllm.md``: one row a server and scenario, the start-up times, what is imported."""
        document = {
            "schema_version": 1,
            "server": "vllm",
            "rows": self.rows,
            "startup": self.startup,
            "imports": self.imports,
        }
        (self.folder / "vllm.json").write_text(json.dumps(document, indent=1))
        lines = [
            "| server | model | backend | scenario | tokens | identical | calls | versions |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            cells = [str(row[name]) for name in ("server", "model", "backend", "scenario", "tokens")]
            cells += ["yes" if row["identical"] else "NO", call_text(row["calls"]), row["versions"]]
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", "| start-up | without | with the bridge |", "|---|---|---|"]
        lines += [f"| {row['what']} | {row['without']} | {row['with']} |" for row in self.startup]
        (self.folder / "vllm.md").write_text("\n".join(lines) + "\n")


def read_stats(folder: Path) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """Calls per backend and phase over all worker processes, and their reports."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    calls: dict[str, dict[str, int]] = {}
    for report in reports:
        for backend, phases in report["calls"].items():
            for phase, count in phases.items():
                calls.setdefault(backend, {})[phase] = calls.get(backend, {}).get(phase, 0) + count
    return calls, reports


def call_text(calls: dict[str, dict[str, int]]) -> str:
    """Counted calls in one cell."""
    return "; ".join(
        f"{backend} " + ", ".join(f"{phase} {count}" for phase, count in phases.items())
        for backend, phases in calls.items()
    )


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
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
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
