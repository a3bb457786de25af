"""What the suites of the servers share: models, engines in processes of their own (each run once), counted calls, the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent
Calls = dict[str, dict[str, int]]


class ServerRuns:
    """Runs each configuration of one server once and keeps what it said. A subclass knows its server's environment."""

    server: str
    #: The folder with ``engine_run.py``, which makes an engine and writes the answers.
    here: Path
    #: Seconds until an engine has to be done, or a server ready.
    patience = 300
    #: Set in every process.
    constants: dict[str, str] = {}

    def __init__(self, python: Path, folder: Path) -> None:
        """`python` of the server's environment; `folder` for the table, models and logs."""
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
        """A tiny random model, made by the environment of the server."""
        return self._made(name, [self.python, TOOLS / "tiny_checkpoints.py", self.models, name])

    def smollm2(self) -> str:
        """SmolLM2-135M-Instruct in float32, converted by the environment of this repository."""
        return self._made("smollm2", [sys.executable, TOOLS / "smollm2_checkpoint.py", self.models / "smollm2"])

    def _made(self, name: str, command: list[Any]) -> str:
        if name not in self._models:
            subprocess.run(command, check=True, capture_output=True, env=self.env({}))
            self._models.add(name)
        return str(self.models / name)

    # --- processes ---------------------------------------------------------------------------------------------------

    def env(self, more: dict[str, str]) -> dict[str, str]:
        """A clean environment: nothing of attn-core or the server asked for unless `more` does."""
        unasked = ("ATTN_", f"{self.server.upper()}_", "PYTHONPATH")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unasked)}
        return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **self.constants, **more}

    def server_env(self, more: dict[str, str]) -> dict[str, str]:
        """:meth:`env` of a process that imports the server."""
        return self.env(more)

    def counted(self, stats: Path, env: dict[str, str]) -> dict[str, str]:
        """:meth:`server_env` of a process whose bridge writes its calls to `stats`."""
        return self.server_env({**env, f"ATTN_{self.server.upper()}_STATS": str(stats)})

    def engine(
        self, label: str, model: str, scenarios: tuple[str, ...], env: dict[str, str] | None = None, **engine: Any
    ) -> dict[str, Any]:
        """Answers of one engine: tokens by scenario, calls, seconds. Run once a label; ``rc`` and ``log`` tell a failure."""
        if label not in self._runs:
            self._runs[label] = self._engine(label, model, scenarios, env or {}, engine)
        return self._runs[label]

    def _engine(
        self, label: str, model: str, scenarios: tuple[str, ...], env: dict[str, str], engine: dict[str, Any]
    ) -> dict[str, Any]:
        out, stats, log = (self.path(label, kind) for kind in ("answers.json", "stats", "log"))
        out.unlink(missing_ok=True)
        asked = {"model": model, "engine": engine, "scenarios": scenarios, "out": str(out)}
        began = time.monotonic()
        with log.open("w") as stream:
            done = subprocess.run(
                [self.python, self.here / "engine_run.py", json.dumps(asked)],
                env=self.counted(stats, env),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=self.patience,
                check=False,
                start_new_session=True,
            )
        found: dict[str, Any] = {"rc": done.returncode, "log": log.read_text()}
        found["total"] = round(time.monotonic() - began, 1)
        if out.is_file():
            found |= json.loads(out.read_text())
        found["calls"], found["reports"] = read_stats(stats)
        return found

    def path(self, label: str, kind: str) -> Path:
        """Where a run writes; a folder (``stats``) is emptied and made."""
        clean = "".join(c if c.isalnum() else "-" for c in label)
        path = self.folder / f"{self.server}-{clean}.{kind}"
        if kind == "stats":
            path.mkdir(exist_ok=True)
            for old in path.iterdir():
                old.unlink()
        return path

    # --- the table ---------------------------------------------------------------------------------------------------

    def write_table(self) -> None:
        """``SERVER.json`` and ``SERVER.md``: one row a server and scenario, the start-up times, what is imported."""
        document = {
            "schema_version": 1,
            "server": self.server,
            "rows": self.rows,
            "startup": self.startup,
            "imports": self.imports,
        }
        (self.folder / f"{self.server}.json").write_text(json.dumps(document, indent=1))
        lines = [
            "| server | model | backend | scenario | tokens | identical | calls | versions |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            cells = [str(row[name]) for name in ("server", "model", "backend", "scenario", "tokens")]
            cells += ["yes" if row["identical"] else "NO", _call_text(row["calls"]), row["versions"]]
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", "| start-up, seconds | without | with the bridge |", "|---|---|---|"]
        lines += [f"| {row['what']} | {row['without']} | {row['with']} |" for row in self.startup]
        (self.folder / f"{self.server}.md").write_text("\n".join(lines) + "\n")


def read_stats(folder: Path) -> tuple[Calls, list[dict[str, Any]]]:
    """Calls per backend and phase over all processes that a bridge reported from, and their reports."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    calls: Calls = {}
    for report in reports:
        for backend, phases in report["calls"].items():
            for phase, count in phases.items():
                calls.setdefault(backend, {})[phase] = calls.get(backend, {}).get(phase, 0) + count
    return calls, reports


def _call_text(calls: Calls) -> str:
    """Counted calls in one cell."""
    return "; ".join(
        f"{backend} " + ", ".join(f"{phase} {count}" for phase, count in phases.items())
        for backend, phases in calls.items()
    )
