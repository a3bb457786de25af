"""One run of ``attn speculate``: SmolLM2-135M-Instruct with drafts, and plain decoding through the same plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.errors import UsageError
from attn_transformers import smollm2
from attn_transformers.demo import _calm, _torch_dtype
from attn_transformers.speculative.report import Control, SpeculativeReport, SpeculativeScreen, decoded
from attn_transformers.ties import TIES, Distance

if TYPE_CHECKING:
    from attn_core.plan import Plan
    from attn_transformers.speculative.engine import Outcome, Speculator
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
    model: Path | None = None
    control: bool = False
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
    screen = SpeculativeScreen(quiet)
    config, plan = _plan(settings, shape, None if model is None else model.model.config)
    screen.plan(plan)
    if model is None:
        with screen.waiting(f"loading {smollm2.name(settings.model)}"), _calm():
            model = smollm2.load(_torch_dtype(settings.dtype), settings.device, parsed=config, folder=settings.model)
    prompts = smollm2.chat(model.tokenizer, settings.prompts)
    made = build(
        model.model, shape, prompts, settings.max_new_tokens,
        plan=plan, draft=settings.draft, draft_layers=settings.draft_layers, copies=shape.width if settings.control else 1,
    )  # fmt: skip
    with made as speculator:
        captured = _capture(speculator, prompts, settings)
        total = len(prompts) * settings.max_new_tokens
        with screen.progress("speculative", total) as tick:
            outcome = speculator.generate(
                prompts, settings.max_new_tokens, _ends(model.model), _ticks(tick), keep_best=True
            )
        with screen.progress("plain decoding", total) as tick:
            mismatches, plain = speculator.check(prompts, outcome.tokens, _ticks(tick), outcome.best)
        control = _control(speculator, prompts, outcome, plain, screen) if settings.control else None
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
        apart=_apart(outcome, plain),
        control=control,
    )
    screen.result(report)
    return report


def _control(
    speculator: Speculator,
    prompts: Sequence[Sequence[int]],
    outcome: Outcome,
    plain: Outcome,
    screen: SpeculativeScreen,
) -> Control:
    """Plain decoding in batches as large as verify's: what changes without any speculation, by matrix products alone."""
    width = speculator.shape.width
    with screen.progress(f"plain decoding, {width} of each row", sum(map(len, outcome.tokens))) as tick:
        mismatches, control = speculator.check(prompts, outcome.tokens, _ticks(tick), outcome.best, copies=width)
    return Control(width, tuple(mismatches), _apart(plain, control), _apart(outcome, control))


def _apart(one: Outcome, other: Outcome) -> Distance:
    return Distance.between([best.values for best in one.best], [best.values for best in other.best])


def _name(settings: Settings) -> str:
    return settings.draft if settings.draft == "ngram" else f"the first {settings.draft_layers} layers"


def _plan(settings: Settings, shape: Shape, config: Any) -> tuple[Any, Plan]:
    """The config and the plan of target and draft, before any weight is loaded."""
    import torch

    from attn_transformers.speculative.build import DRAFTS, make_plan, truncated_config

    if settings.draft not in DRAFTS:
        raise UsageError(f"--draft {settings.draft}: known are {', '.join(DRAFTS)}")
    if settings.draft == "ngram" and settings.draft_attention_backend is not None:
        raise UsageError(
            f"--draft-attention-backend {settings.draft_attention_backend}: drafts from n-grams need no attention",
            fix="--draft truncated, or leave it out",
        )
    if config is None:
        config = smollm2.config(settings.model)
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
