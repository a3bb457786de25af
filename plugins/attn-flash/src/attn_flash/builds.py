"""The builds of FlashAttention 3: where their operators are registered, and what loads them. Importing this loads nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attn_core.availability import Availability
from attn_core.errors import BindError
from attn_core.reasons import Reason
from attn_flash.operators import Bound

#: What the adapter gives by name. A release without one of these is refused when the backend is made.
ARGUMENTS = (
    "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table",
    "kv_batch_idx", "q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left",
    "window_size_right", "attention_chunk", "softcap", "scheduler_metadata", "num_splits", "sinks",
)  # fmt: skip
#: The same of the operator that plans splits once a step.
PLAN_ARGUMENTS = (
    "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "headdim_v", "qkv_dtype",
    "seqused_k", "cu_seqlens_q", "page_size", "is_causal", "window_size_left", "window_size_right", "has_softcap",
    "num_splits",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Build:
    """One distribution of the kernels: ``module`` registers ``torch.ops.<namespace>.fwd``; ``softcap``: compiled in."""

    variant: str
    distribution: str
    package: str
    module: str
    namespace: str
    install: str
    softcap: bool
    hint: str = ""  #: what to do where it is installed and does not load

    def probe(self) -> Availability:
        """Whether the distribution is installed; nothing is imported."""
        try:
            version = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return Availability.missing(self.distribution, self.install)
        if importlib.util.find_spec(self.package) is None:
            return Availability.missing(
                self.distribution, self.install, f"{version} is installed without its package {self.package}"
            )
        return Availability(True, versions={self.distribution: version}, archs=("sm90",))

    def load(self) -> tuple[Bound, Bound | None]:
        """(fwd, get_scheduler_metadata or None). Raises :class:`BindError` if the library does not load or fit."""
        import torch

        try:
            importlib.import_module(self.module)
            space = getattr(torch.ops, self.namespace)
            forward = Bound.of_operator(space.fwd.default, f"{self.distribution}: {self.namespace}.fwd")
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            raise BindError(
                f"{self.distribution} does not load: {type(error).__name__}: {error}", fix=self.hint
            ) from error
        forward.require(*ARGUMENTS, fix=self.install)
        return forward, self._planner(space)

    def _planner(self, space: Any) -> Bound | None:
        """The operator that plans splits, where this release has it in the form that is known here."""
        operator = getattr(getattr(space, "get_scheduler_metadata", None), "default", None)
        if operator is None:
            return None
        bound = Bound.of_operator(operator, f"{self.distribution}: {self.namespace}.get_scheduler_metadata")
        return bound if bound.has(*PLAN_ARGUMENTS) else None


TOKENSPEED = Build(
    "tokenspeed",
    "tokenspeed-fa3",
    "flash_attn_3",
    "flash_attn_3._C",
    "flash_attn_3",
    "pip install tokenspeed-fa3",
    False,
    "torch 2.11 or later, CUDA 13 and libstdc++ of GCC 13, which the wheel is built for",
)
SGL_KERNEL = Build(
    "sgl-kernel",
    "sglang-kernel",
    "sgl_kernel",
    "sgl_kernel.flash_attn",
    "sgl_kernel",
    "pip install sglang-kernel",
    True,
    "the sglang-kernel release that was built for this torch, such as sglang-kernel==0.4.5 for torch 2.11",
)
BUILDS: dict[str, Build] = {build.variant: build for build in (TOKENSPEED, SGL_KERNEL)}


def checked(answer: Availability, requires: Iterable[str]) -> Availability:
    """The answer, or what is wrong with an installed version: a release that a requirement excludes is not available."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requires):
        have = answer.versions.get(requirement.name)
        if answer.ok and have is not None and not requirement.specifier.contains(have, prereleases=True):
            needs = f"pip install '{requirement}'"
            reason = Reason("library", need=str(requirement), have=have, fix=needs)
            return Availability(False, (reason,), answer.versions, answer.archs, needs)
    return answer


def any_build() -> Build:
    """The first build that is installed, in the manifest's order. Raises :class:`BindError` if none is."""
    for build in BUILDS.values():
        if build.probe().ok:
            return build
    raise BindError("no build of FlashAttention 3 is installed", fix=TOKENSPEED.install)


def any_probe() -> Availability:
    """The answer for a backend that takes whichever build is there."""
    answers = [build.probe() for build in BUILDS.values()]
    for answer in answers:
        if answer.ok:
            return answer
    reason = Reason("library", need="tokenspeed-fa3 or sglang-kernel", have="neither", fix=TOKENSPEED.install)
    return Availability(False, (reason,), needs=TOKENSPEED.install)
