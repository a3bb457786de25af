"""Engines of SGLang in processes of their own, with their answers, counted calls, start-up times and logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from server_runs import ServerRuns

HERE = Path(__file__).parent
PACKAGES = ("torch", "attn-core", "attn-sglang", "attn-torch", "attn-example-vendor")


class Engines(ServerRuns):
    """Runs each configuration once and keeps what it said."""

    server = "sglang"
    here = HERE
    patience = 400
    _versions = ""

    def server_env(self, more: dict[str, str]) -> dict[str, str]:
        """The environment of a process that imports SGLang: its CPU engine, behind the stubs."""
        path = os.pathsep.join([str(HERE / "stubs"), *filter(None, [more.get("PYTHONPATH", "")])])
        return self.env({"SGLANG_USE_CPU_ENGINE": "1", **more, "PYTHONPATH": path})

    def check(self, *names: str, **env: str) -> dict[str, Any]:
        """What ``registry_check.py`` prints, when `names` are asked for."""
        done = subprocess.run(
            [self.python, HERE / "registry_check.py", *names],
            env=self.server_env(env), capture_output=True, text=True, timeout=self.patience, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stderr}

    def transformers(self, model: str, scenarios: tuple[str, ...]) -> dict[str, Any]:
        """The answers of transformers' own eager attention: a reference where SGLang's has none."""
        if (label := f"transformers {model}") in self._runs:
            return self._runs[label]
        done = subprocess.run(
            [sys.executable, HERE / "transformers_run.py", model, *scenarios],
            env=self.env({}), capture_output=True, text=True, timeout=self.patience, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        self._runs[label] = json.loads(done.stdout.splitlines()[-1])
        return self._runs[label]

    def versions(self) -> str:
        """The packages of the environment, in one cell."""
        if not self._versions:
            code = f"import importlib.metadata as m; print(', '.join(f'{{n}} {{m.version(n)}}' for n in {PACKAGES}))"
            self._versions = subprocess.run(
                [self.python, "-c", code], check=True, capture_output=True, text=True
            ).stdout.strip()
        return self._versions
