"""One run of ``attn speculate``: SmolLM2-135M-Instruct with drafts, and plain decoding through the same plan."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_core.errors import UsageError
from attn_transformers import smollm2
from attn_transformers.demo import _calm, _torch_dtype
from attn_transformers.speculative.report import TIES, SpeculativeReport, SpeculativeScreen, decoded

if TYPE_CHECKING:
    from attn_core.plan import Plan
    from attn_transformers.speculative.engine import Speculator
    from attn_transformers.speculative.trees import Shape

#: Two answers that repeat what stands before them, and one that does not.
PROMPTS = (
    "Repeat this sentence three times, word for word: The lighthouse keeper counts the ships that pass in the night.",
    "Write the numbers from one to twelve as words, each on a line of its own, and then write them again.",
    "What is the capital of France, and what is it known for?",
)


@dataclass(frozen=True)
class Settings:
    """What is run; the fields are the command's options."""

    draft: str = "ngram"
    draft_layers: int = 27
    topk: int = 1
    steps: int = 3
    speculative_num_draft_tokens: int | None = None
    speculative_attention_mode: str = "prefill"
    prompts: Sequence[str] = PROMPTS
    max_new_tokens: int = 48
    dtype: str = "float32"
    device: str = "cpu"
    cuda_graph: str = "auto"
    page_size: int | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    draft_attention_backend: str | None = None

    def plan_options(self) -> dict[str, Any]:
        """The options that planning takes as they are, without those that were left alone."""
        names = (
            "speculative_attention_mode", "page_size", "attention_backend", "prefill_attention_backend",
            "decode_attention_backend", "draft_attention_backend", "cuda_graph",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def run(settings: Settings, *, quiet: bool = False, model: Any = None) -> SpeculativeReport:
    """Run and compare. ``quiet`` prints nothing; `model` is a :class:`smollm2.Smollm2` at hand (several runs, one load).

    Raises :class:`UsageError` for missing packages or an impossible shape, :class:`PlanError` when nothing fits.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TQDM_DISABLE", "1")
    from attn_transformers.speculative.build import build
    from attn_transformers.speculative.trees import Shape

    shape = Shape.of(settings.topk, settings.steps, settings.speculative_num_draft_tokens)
    if settings.draft == "ngram" and settings.draft_attention_backend is not None:
        raise UsageError(
            f"--draft-attention-backend {settings.draft_attention_backend}: drafts from n-grams need no attention",
            fix="--draft truncated, or leave it out",
        )
    screen = SpeculativeScreen(quiet)
    config, plan = _plan(settings, shape, None if model is None else model.model.config)
    screen.plan(plan)
    if model is None:
        with screen.waiting("loading SmolLM2-135M-Instruct (GGUF, 135 million parameters)"), _calm():
            model = smollm2.load(_torch_dtype(settings.dtype), settings.device, parsed=config)
    prompts = smollm2.chat(model.tokenizer, settings.prompts)
    ends = _ends(model.model)
    made = build(
        model.model, shape, prompts, settings.max_new_tokens,
        plan=plan, draft=settings.draft, draft_layers=settings.draft_layers,
    )  # fmt: skip
    with made as speculator:
        captured = _capture(speculator, prompts, settings)
        total = len(prompts) * settings.max_new_tokens
        with screen.progress("speculative", total) as tick:
            outcome = speculator.generate(prompts, settings.max_new_tokens, ends, _ticks(tick))
        with screen.progress("plain decoding", total) as tick:
            mismatches, plain = speculator.check(prompts, outcome.tokens, _ticks(tick))
    report = SpeculativeReport(
        draft=_name(settings),
        shape=shape,
        plan=plan,
        prompts=tuple(settings.prompts),
        texts=decoded(model.tokenizer, outcome.tokens),
        run=outcome,
        plain=plain,
        mismatches=tuple(mismatches),
        tie=TIES[plan.dtype],
        captured=tuple(captured),
    )
    screen.result(report)
    return report


def _name(settings: Settings) -> str:
    return settings.draft if settings.draft == "ngram" else f"the first {settings.draft_layers} layers"


def _plan(settings: Settings, shape: Shape, config: Any) -> tuple[Any, Plan]:
    """The config and the plan of target and draft, before any weight is loaded."""
    import torch

    from attn_transformers.speculative.build import DRAFTS, make_plan, truncated_config

    if settings.draft not in DRAFTS:
        raise UsageError(f"--draft {settings.draft}: known are {', '.join(DRAFTS)}")
    if config is None:
        config = smollm2.config()
    else:  # a loaded model calls itself by the path of its file
        config = copy.copy(config)
        config.name_or_path = "SmolLM2-135M-Instruct"
    layers = config.num_hidden_layers
    if not 1 <= settings.draft_layers <= layers and settings.draft == "truncated":
        raise UsageError(f"--draft-layers {settings.draft_layers}: the model has {layers}")
    small = truncated_config(config, settings.draft_layers) if settings.draft == "truncated" else None
    dtype, device = _torch_dtype(settings.dtype), torch.device(settings.device)
    return config, make_plan(config, small, dtype, device, shape, settings.plan_options())


def _capture(speculator: Speculator, prompts: Sequence[Sequence[int]], settings: Settings) -> list[int]:
    """Capture verify where the plan says that it can be."""
    if "verify" not in speculator.target.plan.cuda_graph.get("captured", ()):
        return []
    longest = max(map(len, prompts)) + settings.max_new_tokens + speculator.shape.width
    return speculator.capture_verify(len(prompts), longest)


def _ends(model: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    end = model.generation_config.eos_token_id
    return frozenset((end,) if isinstance(end, int) else end or ())


def _ticks(tick: Any) -> Any:
    def gained(tokens: int) -> None:
        for _ in range(tokens):
            tick()

    return gained
