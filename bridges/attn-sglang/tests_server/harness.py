"""Engines of SGLang in processes of their own, with their answers, counted calls, start-up times and logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / "tools"
#: Seconds until an engine has to be done.
PATIENCE = 400
PACKAGES = ("torch", "attn-core", "attn-sglang", "attn-torch", "attn-example-vendor")


class Engines:
    """Runs each configuration once and keeps what it said."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.models = folder / "models"
        self.models.mkdir(parents=True, exist_ok=True)
        self._runs: dict[str, dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []
        self.startup: list[dict[str, Any]] = []
        self.imports: dict[str, Any] = {}
        self._versions = ""

    # --- models ------------------------------------------------------------------------------------------------------

    def tiny(self, name: str) -> str:
        """A tiny random model, made by the environment of SGLang (without its stubs)."""
        target = self.models / name
        if not (target / "config.json").is_file():
            command = [self.python, TOOLS / "tiny_checkpoints.py", self.models, name]
            subprocess.run(command, check=True, capture_output=True, env=self.env({}))
        return str(target)

    def smollm2(self) -> str:
        """SmolLM2-135M-Instruct in float32, converted once by the environment of this repository."""
        target = self.models / "smollm2"
        if "smollm2" not in self._runs:
            command = [sys.executable, TOOLS / "smollm2_checkpoint.py", target]
            subprocess.run(command, check=True, capture_output=True, env=self.env({}))
            self._runs["smollm2"] = {}
        return str(target)

    # --- processes ---------------------------------------------------------------------------------------------------

    def env(self, more: dict[str, str]) -> dict[str, str]:
        """A clean environment: nothing of attn-core or SGLang asked for unless `more` does."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ATTN_", "SGLANG_"))}
        kept.pop("PYTHONPATH", None)
        return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}

    def server_env(self, more: dict[str, str]) -> dict[str, str]:
        """:meth:`env` of a process that imports SGLang: its CPU engine, behind the stubs."""
        path = os.pathsep.join([str(HERE / "stubs"), *filter(None, [more.get("PYTHONPATH", "")])])
        return self.env({"SGLANG_USE_CPU_ENGINE": "1", **more, "PYTHONPATH": path})

    def engine(
        self, label: str, model: str, scenarios: tuple[str, ...], env: dict[str, str] | None = None, **engine: Any
    ) -> dict[str, Any]:
        """Answers of one engine: tokens by scenario, calls, seconds. Run once a label."""
        if label not in self._runs:
            self._runs[label] = self._engine(label, model, scenarios, env or {}, engine)
        return self._runs[label]

    def _engine(
        self, label: str, model: str, scenarios: tuple[str, ...], env: dict[str, str], engine: dict[str, Any]
    ) -> dict[str, Any]:
        out, stats, log = (self._path(label, kind) for kind in ("answers.json", "stats", "log"))
        out.unlink(missing_ok=True)
        stats.mkdir(exist_ok=True)
        asked = {"model": model, "engine": engine, "scenarios": scenarios, "out": str(out)}
        began = time.monotonic()
        with log.open("w") as stream:
            done = subprocess.run(
                [self.python, HERE / "engine_run.py", json.dumps(asked)],
                env=self.server_env({**env, "ATTN_SGLANG_STATS": str(stats)}),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE,
                check=False,
            )
        text = log.read_text()
        found: dict[str, Any] = {"rc": done.returncode, "log": text, "total": round(time.monotonic() - began, 1)}
        if out.is_file():
            found |= json.loads(out.read_text())
        found["reports"] = [json.loads(path.read_text()) for path in sorted(stats.glob("*.json"))]
        found["calls"] = _sum([report["calls"] for report in found["reports"]])
        return found

    def check(self, *names: str, **env: str) -> dict[str, Any]:
        """What ``registry_check.py`` prints, when `names` are asked for."""
        done = subprocess.run(
            [self.python, HERE / "registry_check.py", *names],
            env=self.server_env(env), capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stderr}

    def transformers(self, model: str, scenarios: tuple[str, ...]) -> dict[str, Any]:
        """The answers of transformers' own eager attention: a reference where SGLang's has none."""
        if (label := f"transformers {model}") in self._runs:
            return self._runs[label]
        done = subprocess.run(
            [sys.executable, HERE / "transformers_run.py", model, *scenarios],
            env=self.env({}), capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        self._runs[label] = json.loads(done.stdout.splitlines()[-1])
        return self._runs[label]

    def _path(self, label: str, kind: str) -> Path:
        path = self.folder / f"sglang-{label.replace(' ', '-').replace('/', '-')}.{kind}"
        for old in path.iterdir() if path.is_dir() else ():
            old.unlink()
        return path

    def versions(self) -> str:
        """The packages of the environment, in one cell."""
        if not self._versions:
            code = f"import importlib.metadata as m; print(', '.join(f'{{n}} {{m.version(n)}}' for n in {PACKAGES}))"
            self._versions = subprocess.run(
                [self.python, "-c", code], check=True, capture_output=True, text=True
            ).stdout.strip()
        return self._versions

    # --- the table ---------------------------------------------------------------------------------------------------

    def write_table(self) -> None:
        """``sglang.json`` and ``sglang.md``: one row a server and scenario, the start-up times, what is imported."""
        document = {
            "schema_version": 1,
            "server": "sglang",
            "rows": self.rows,
            "startup": self.startup,
            "imports": self.imports,
        }
        (self.folder / "sglang.json").write_text(json.dumps(document, indent=1))
        lines = [
            "| server | model | backend | scenario | tokens | identical | calls | versions |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            cells = [str(row[name]) for name in ("server", "model", "backend", "scenario", "tokens")]
            cells += ["yes" if row["identical"] else "NO", call_text(row["calls"]), row["versions"]]
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", "| start-up | seconds without | with the bridge |", "|---|---|---|"]
        lines += [f"| {row['what']} | {row['without']} | {row['with']} |" for row in self.startup]
        (self.folder / "sglang.md").write_text("\n".join(lines) + "\n")


def _sum(counted: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Calls per backend and phase over all bridged backends of a run."""
    calls: dict[str, dict[str, int]] = {}
    for one in counted:
        for backend, phases in one.items():
            for phase, count in phases.items():
                calls.setdefault(backend, {})[phase] = calls.get(backend, {}).get(phase, 0) + count
    return calls


def call_text(calls: dict[str, dict[str, int]]) -> str:
    """Counted calls in one cell."""
    return "; ".join(
        f"{backend} " + ", ".join(f"{phase} {count}" for phase, count in phases.items())
        for backend, phases in calls.items()
    )
