"""Every configuration class of the installed transformers, and a sample of families against their modeling code."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from attn_core.errors import ModelError
from attn_core.geometry import MhaGeometry, Model
from attn_core.model import describe, parse_model
from attn_core.model._defaults import version
from attn_core.model.build_defaults import table

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

#: Types that must be read with transformers 5.24 (a floor: more is better, fewer is a regression).
FLOOR = 590
_REFUSALS = re.compile(r"not an attention model|unknown architecture|head_dim is missing and hidden_size")


def classes() -> dict[str, Any]:
    return {name: transformers.CONFIG_MAPPING[name] for name in transformers.CONFIG_MAPPING}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_configuration_is_read_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    counts: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    for name, cls in classes().items():
        try:
            config = cls()
        except Exception:  # a class that cannot be made from its own defaults
            counts["no defaults"] += 1
            continue
        try:
            described = describe(parse_model(config))
            counts["parsed"] += 1
            assert described["attention_groups"], name
        except ModelError as error:
            counts["not attention" if "not an attention model" in error.message else "unknown"] += 1
            if not _REFUSALS.search(error.message):
                wrong[name] = error.message
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    with capsys.disabled():
        print(f"\ntransformers {transformers.__version__}: {dict(counts)}")
    assert wrong == {}
    if transformers.__version__ == version():
        assert counts["parsed"] >= FLOOR


def test_stored_defaults_are_those_of_the_installed_version() -> None:
    if transformers.__version__ != version():
        pytest.skip(f"defaults.json is of transformers {version()}, installed is {transformers.__version__}")
    from attn_core.model._defaults import _table

    fresh = table(
        {name: cls for name, cls in classes().items() if name in SAMPLE or name in ("llava", "gemma3", "bert")}
    )
    assert fresh
    for name, keys in fresh.items():
        assert dict(_table()[name]) == keys


#: Families whose attention modules are compared with what was read from their configuration.
SAMPLE = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss",
    "mimo_v2_flash", "cohere2", "olmo3", "smollm3", "phi3", "granite", "starcoder2", "gpt2", "gptj", "opt",
    "modernbert-decoder", "whisper", "bart", "flint", "granite_swa", "helium", "laguna", "stablelm",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLE)
def test_geometry_is_that_of_the_modeling_code(name: str) -> None:
    torch = pytest.importorskip("torch")
    config = transformers.CONFIG_MAPPING[name]()
    model = parse_model(config)
    with torch.device("meta"):
        module = transformers.AutoModel.from_config(config)
    seen = 0
    for path, part in module.named_modules():
        index = getattr(part, "layer_idx", None)
        scale = getattr(part, "scaling", None)
        if isinstance(index, int) and isinstance(scale, float) and "encoder" not in path:
            assert _mismatch(model, part, index, scale) == [], path
            seen += 1
    assert seen


def _mismatch(model: Model, part: Any, index: int, scale: float) -> list[str]:
    """What a module says otherwise than its layer's group."""
    group = next(g for g in model.groups if index in g.layers and g.model == "target")
    geometry = group.geometry
    assert isinstance(geometry, MhaGeometry)
    said: list[tuple[str, Any, Any]] = [("scale", round(geometry.scale, 6), round(scale, 6))]
    if isinstance(getattr(part, "head_dim", None), int):
        said.append(("head_dim", geometry.qk_dim, part.head_dim))
    if hasattr(part, "sliding_window"):
        said.append(("window", geometry.window, part.sliding_window))
    if getattr(part, "k_proj", None) is not None:
        said.append(("k", geometry.kv_heads * geometry.qk_dim, part.k_proj.out_features))
        said.append(("q", geometry.q_heads * geometry.qk_dim, part.q_proj.out_features))
    if getattr(part, "v_proj", None) is not None:
        said.append(("v", geometry.kv_heads * geometry.v_dim, part.v_proj.out_features))
    said.append(("sinks", geometry.sinks, getattr(part, "sinks", None) is not None))
    return [f"{what}: {mine} != {theirs}" for what, mine, theirs in said if mine != theirs]
