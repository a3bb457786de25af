"""The demo: chat prompts of different lengths through discovery, plan, router and paged cache, checked token by token."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.errors import UsageError
from attn_transformers import smollm2
from attn_transformers.demo_report import DemoReport, Peer, PromptResult, Screen, compare
from attn_transformers.ties import TIES, Distance, Mismatch, judge, kept_best

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attn_core.plan import Plan
    from attn_transformers.runtime import AttnModel

PROMPTS = (
    "Name three colours.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse keeper who has not seen a ship for a year and begins to talk to the sea.",
    "What is the capital of France, and what is it known for?",
    "I have two eggs, some flour, a little milk and half a lemon in my kitchen, and a friend who does not eat meat will come "
    "by in an hour. What could I cook, and in which order should I do things so that it is ready in time?",
)


@dataclass(frozen=True)
class Settings:
    """What the demo runs; the fields are the command's options."""

    prompts: Sequence[str] = PROMPTS
    max_new_tokens: int = 48
    dtype: str = "float32"
    device: str = "cpu"
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    model: Path | None = None
    compare: str | None = None

    def plan_options(self) -> dict[str, Any]:
        """The options that planning takes, without those that were left alone."""
        own = ("prompts", "max_new_tokens", "dtype", "device", "model", "compare")
        return {name: value for name, value in vars(self).items() if name not in own and value is not None}

    def peer(self) -> Settings:
        """The same with the backend to compare with in every phase."""
        return replace(
            self,
            attention_backend=self.compare,
            prefill_attention_backend=None,
            decode_attention_backend=None,
            compare=None,
        )


@dataclass
class Generated:
    """Token ids of every answer, up to and with the end of the answer, and the seconds it took."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    logits: list[Any] = field(default_factory=list)  #: per answer: f32[steps, vocabulary], only where asked for


def run(settings: Settings, *, quiet: bool = False) -> DemoReport:
    """Run the demo and return what it found. ``quiet`` prints nothing (``--json``).

    Raises :class:`UsageError` for missing packages or an unknown dtype, :class:`PlanError` when nothing fits.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TQDM_DISABLE", "1")
    from attn_transformers.runtime import load

    screen = Screen(quiet)
    screen.backends()
    with screen.waiting(f"reading the config of {smollm2.name(settings.model)}"):
        config = smollm2.config(settings.model)
        plan = _plan(config, settings)
        peer_plan = _plan(config, settings.peer()) if settings.compare else None
    screen.plan(plan)
    with screen.waiting(f"loading {smollm2.name(settings.model)}"), _calm():
        loaded = smollm2.load(_torch_dtype(settings.dtype), settings.device, parsed=config, folder=settings.model)
    prompts = smollm2.chat(loaded.tokenizer, settings.prompts)
    attn = load(loaded.model, plan, max_tokens=_room(plan, prompts, settings))
    with screen.progress("attn-core", settings.max_new_tokens) as tick:
        ours = _through_plan(attn, loaded.tokenizer, prompts, settings, tick, keep=peer_plan is not None)
    calls = attn.router.stats()
    attn.detach()
    peer = None if peer_plan is None else _peer(peer_plan, loaded, prompts, ours, settings, screen)
    with screen.progress(f"transformers ({loaded.model.config._attn_implementation})", settings.max_new_tokens) as tick:
        theirs = _reference(loaded.model, loaded.tokenizer, prompts, settings, tick)
    results = [
        PromptResult(prompt, len(ids), loaded.tokenizer.decode(mine, skip_special_tokens=True).strip(), *difference)
        for prompt, ids, mine, difference in zip(
            settings.prompts, prompts, ours.tokens, compare(ours.tokens, theirs.tokens, theirs.logits), strict=True
        )
    ]
    must_agree = settings.dtype in ("float32", "fp32") and attn.plan.kv_cache_dtype in ("fp32", "auto")
    report = DemoReport(tuple(results), ours.seconds, theirs.seconds, calls, attn.plan, must_agree, peer)
    screen.report(report)
    return report


def _peer(
    plan: Plan,
    loaded: smollm2.Smollm2,
    prompts: Sequence[list[int]],
    ours: Generated,
    settings: Settings,
    screen: Screen,
) -> Peer:
    """The same prompts through the backend to compare with: freely, and led along our tokens, so that each one is judged."""
    from attn_transformers.runtime import load

    assert settings.compare is not None
    attn = load(loaded.model, plan, max_tokens=_room(plan, prompts, settings))
    try:
        with screen.progress(settings.compare, settings.max_new_tokens) as tick:
            free = _through_plan(attn, loaded.tokenizer, prompts, settings, tick)
        calls = attn.router.stats()
        with screen.progress(f"{settings.compare}, led along", settings.max_new_tokens) as tick:
            led = _through_plan(attn, loaded.tokenizer, prompts, settings, tick, keep=True, along=ours.tokens)
    finally:
        attn.detach()
    own = [kept_best(scores[: len(mine)]) for scores, mine in zip(ours.logits, ours.tokens, strict=True)]
    mismatches: list[Mismatch] = []
    apart: list[Any] = []
    for row, (mine, scores, best) in enumerate(zip(ours.tokens, led.logits, own, strict=True)):
        apart.append(scores[: len(mine)].gather(1, best.tokens))
        found = (judge(row, place, token, scores[place], best) for place, token in enumerate(mine))
        mismatches += [one for one in found if one is not None]
    quantised = plan.pools[0].dtype != plan.dtype
    return Peer(
        backend=settings.compare,
        plan=plan,
        calls=calls,
        texts=tuple(loaded.tokenizer.decode(line, skip_special_tokens=True).strip() for line in free.tokens),
        same_texts=tuple(mine == theirs for mine, theirs in zip(ours.tokens, free.tokens, strict=True)),
        tokens=sum(map(len, ours.tokens)),
        mismatches=tuple(mismatches),
        tie=None if quantised else TIES[plan.dtype],
        apart=Distance.between([best.values for best in own], apart),
    )


def _room(plan: Plan, prompts: Sequence[list[int]], settings: Settings) -> int:
    """Tokens in whole pages that all prompts and answers take."""
    return sum(-(-(len(ids) + settings.max_new_tokens) // plan.page_size) * plan.page_size for ids in prompts)


def _plan(config: Any, settings: Settings) -> Plan:
    """The plan for a model's config, before any weight is loaded."""
    import torch

    from attn_transformers.binding import plan_config

    return plan_config(config, _torch_dtype(settings.dtype), torch.device(settings.device), settings.plan_options())


def _torch_dtype(name: str) -> Any:
    from attn_core.formats import torch_dtype

    dtype = torch_dtype(name)
    if dtype.itemsize < 2:
        raise UsageError(f"--dtype {name}: the model runs in float32, bfloat16 or float16", fix="--kv-cache-dtype")
    return dtype


@contextmanager
def _calm() -> Iterator[None]:
    """transformers' own progress bars off while the model loads."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _through_plan(
    attn: AttnModel,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    settings: Settings,
    tick: Callable[[], None],
    *,
    keep: bool = False,
    along: Sequence[Sequence[int]] | None = None,
) -> Generated:
    """All prompts at once, left-padded; padding never reaches a backend.

    `keep`: the logits of every step, too. `along`: the answers that are given, whatever the logits say.
    """
    inputs = tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(settings.device)
    width = inputs["input_ids"].shape[1]
    options = {**_greedy(settings, tick), **({} if along is None else _led(along, width))}
    start = time.perf_counter()
    output = attn.generate(**inputs, return_dict_in_generate=True, output_logits=keep, **options)
    seconds = time.perf_counter() - start
    output.past_key_values.close()
    return _generated(output, width, attn.model.generation_config.eos_token_id, seconds)


def _reference(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], settings: Settings, tick: Callable[[], None]
) -> Generated:
    """The same padded batch through the model's own attention, with the logits of every step."""
    inputs = tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(settings.device)
    start = time.perf_counter()
    output = model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **_greedy(settings, tick))
    seconds = time.perf_counter() - start
    return _generated(output, inputs["input_ids"].shape[1], model.generation_config.eos_token_id, seconds)


def _generated(output: Any, width: int, end: int | Sequence[int], seconds: float) -> Generated:
    """Answers behind `width` tokens of prompt, and the logits where they were kept."""
    import torch

    tokens = [_answer(row[width:].tolist(), end) for row in output.sequences]
    return Generated(tokens, seconds, list(torch.stack(output.logits, 1).float().cpu()) if output.logits else [])


def _greedy(settings: Settings, tick: Callable[[], None]) -> dict[str, Any]:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Tick(StoppingCriteria):  # type: ignore[misc]
        """Called once a step; never stops anything."""

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            tick()
            return input_ids.new_zeros(input_ids.shape[0], dtype=bool)

    return {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": False,
        "stopping_criteria": StoppingCriteriaList([Tick()]),
    }


def _led(answers: Sequence[Sequence[int]], width: int) -> dict[str, Any]:
    """Generation that takes the tokens of `answers`, whose prompts end at `width`."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Led(LogitsProcessor):  # type: ignore[misc]
        """Leaves one token to choose from; the logits that are kept are those before it."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            place = input_ids.shape[1] - width
            only = scores.new_full(scores.shape, float("-inf"))
            for row, answer in enumerate(answers):
                only[row, answer[min(place, len(answer) - 1)]] = 0.0
            return only

    return {"logits_processor": LogitsProcessorList([Led()])}


def _answer(tokens: list[int], end: int | Sequence[int]) -> list[int]:
    """Up to and with the first end-of-answer token; what follows is padding."""
    ends = (end,) if isinstance(end, int) else tuple(end or ())
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens
