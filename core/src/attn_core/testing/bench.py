"""One cell of the kit at work: a check, what it runs on, and how a result becomes a verdict.

A check is a function of a :class:`Bench`. It raises :class:`Failure` if the declaration is false; a failure carries the
case's spec and a way to try smaller ones, from which :func:`attn_core.testing.shrink.shrink` makes the smallest failing batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.context import GraphLimits
from attn_core.geometry import MhaGeometry
from attn_core.manifest import Row
from attn_core.testing import oracle_mha
from attn_core.testing.batches import build
from attn_core.testing.compare import compare_lse, compare_out, tolerance
from attn_core.testing.declared import Ask
from attn_core.testing.elements import torch_dtype
from attn_core.testing.harness import BackendUnderTest, Result, Session
from attn_core.testing.oracle_mha import Answer
from attn_core.testing.spec import Case, CaseSpec

Judge = Callable[[CaseSpec], list[str]]

#: Scales with few significant bits: products with fp8 and fp4 values stay exact in 16 bit.
K_SCALE, V_SCALE, Q_SCALE = 0.75, 2.5, 1536.0  # |q| is far outside what fp8 holds without its scale


class Failure(Exception):
    """A declaration is false. ``problems`` say how, ``spec`` is the batch, ``judge`` tells whether another spec fails, too."""

    def __init__(self, problems: list[str], spec: CaseSpec | None = None, judge: Judge | None = None) -> None:
        super().__init__("; ".join(problems))
        self.problems, self.spec, self.judge = problems, spec, judge


class NotHere(Exception):
    """The cell cannot run on this machine; the text says why. Not a failure."""


@dataclass
class Bench:
    """What a check works with."""

    backend: BackendUnderTest
    variant: str
    row: Row
    ask: Ask
    device: str = "cpu"
    turn: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    # --- specs ----------------------------------------------------------------------------------------------------------

    def geometry(self, **changes: Any) -> MhaGeometry:
        """The cell's geometry: an odd scale that no width explains."""
        q_heads, kv_heads = self.ask.heads
        qk_dim, v_dim = self.ask.head_dims
        scale = 1.3 * float(qk_dim) ** -0.5 / (Q_SCALE if self.ask.dtypes[0].startswith("fp8") else 1.0)
        return MhaGeometry(**{"q_heads": q_heads, "kv_heads": kv_heads, "qk_dim": qk_dim, "v_dim": v_dim, "scale": scale, **changes})  # fmt: skip

    def spec(self, geometry: MhaGeometry | None = None, **fields: Any) -> CaseSpec:
        """A spec of the cell's phase, types and page size. Lengths default to the adversarial ones of the phase."""
        q, kv, out = self.ask.dtypes
        chosen: dict[str, Any] = {
            "phase": self.ask.phase,
            "dtype": q,
            "kv_dtype": "" if kv == q else kv,
            "out_dtype": "" if out == q else out,
            "page_size": self.ask.page_size,
            "device": self.device,
            "seed": self.turn,
            "form": ("table", "csr")[self.turn % 2],
            "unused": ("nan", "big", "inf")[self.turn % 3],
            "storage": "hnd" if self.ask.layout == "HND" else ("separate", "joint")[self.turn % 2],
            "host": self.host_lengths(),
            "needs_lse": "lse" in self.row.features and self.turn % 3 != 1,
        }
        if kv.startswith(("fp8", "fp4")):
            chosen.update(k_scale=K_SCALE, v_scale=V_SCALE)
        if q.startswith("fp8"):
            chosen.update(q_scale=Q_SCALE)
        chosen.update(fields)
        if "kv_lens" not in chosen:
            chosen["query_lens"], chosen["kv_lens"] = self.lengths(chosen["phase"], chosen["page_size"])
        chosen.setdefault("query_lens", (1,) * len(chosen["kv_lens"]))
        return CaseSpec(geometry or self.geometry(), **chosen)

    def lengths(self, phase: str, page: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(query_lens, kv_lens) around page boundaries: 1, p - 1, p, p + 1, 3p + 5 keys."""
        edges = [1, max(page - 1, 1), page, page + 1, 3 * page + 5]
        if phase in ("decode", "draft"):
            return (1,) * len(edges), tuple(edges)
        if phase == "verify":
            return (3,) * len(edges), tuple(n + 2 for n in edges)
        queries = (1, min(page, 2), min(page, 5), 4, 3)
        return queries, tuple(max(n, q) for n, q in zip(edges, queries, strict=True))

    def host_lengths(self) -> str:
        """How much the variant may know about lengths on the host."""
        return self.row.host_lengths or self.backend.manifest.variant(self.variant).host_lengths

    # --- running ----------------------------------------------------------------------------------------------------------

    def open(self, case: Case | CaseSpec, **more: Any) -> Session:
        """A backend object for this case, bound to its hooks."""
        return self.backend.open(case, self.variant, row=self.row, options=self.options, **more)

    def oracle(self, case: Case) -> Answer:
        """The right answer for a case."""
        return oracle_mha.attend(case.batch, case.layer, case.expected, case.inputs, pool=case.pool_index)

    def judge(self, spec: CaseSpec, prepare: Callable[[Case], None] | None = None) -> list[str]:
        """Build, run and compare one spec; the problems found. `prepare` may change the case before it runs."""
        case = build(spec)
        if prepare is not None:
            prepare(case)
        want = self.oracle(case)
        session = self.open(case)
        give_out = "writes_out" in self.row.features or self.turn % 2 == 0
        result = session.run(case, give_out=give_out)
        return self.compare(case, result, want) + self.padding_problems(case, result, give_out) + case.problems()

    def compare(self, case: Case, result: Result, want: Answer) -> list[str]:
        """Numbers and types of a result against the oracle's answer."""
        spec, problems = case.spec, []
        limits = tolerance(spec.dtype, spec.kv, spec.out)
        if result.out.dtype != torch_dtype(spec.out):
            problems.append(f"out has type {result.out.dtype}, needs {torch_dtype(spec.out)}")
        mismatches = [compare_out(result.out, want, limits.out, case.batch.num_tokens)]
        if spec.needs_lse:
            mismatches.append(compare_lse(result.lse, want, limits.lse, case.batch.num_tokens))
        return problems + [str(mismatch) for mismatch in mismatches if mismatch is not None]

    def padding_problems(self, case: Case, result: Result, give_out: bool = True) -> list[str]:
        """Rows of padding against ``padded_out``: zero, untouched (if it was given `out`) or anything."""
        rest = result.out[case.batch.num_tokens :].float()
        if self.row.padded_out == "zero" and bool((rest != 0).any()):
            return [f"padded_out is declared zero; {int((rest != 0).any(-1).any(-1).sum())} padded tokens are not"]
        if self.row.padded_out == "untouched" and give_out and not bool(rest.isnan().all()):
            return ["padded_out is declared untouched; a padded token was written"]
        return []

    def require(self, spec: CaseSpec, prepare: Callable[[Case], None] | None = None) -> None:
        """Raise :class:`Failure` if the spec fails."""

        def judge(candidate: CaseSpec) -> list[str]:
            return self.judge(candidate, prepare)

        self.require_none(judge(spec), spec, judge)

    def require_all(self, specs: Iterable[CaseSpec]) -> None:
        """:meth:`require` for each."""
        for spec in specs:
            self.require(spec)

    def require_none(self, problems: list[str], spec: CaseSpec | None = None, judge: Judge | None = None) -> None:
        """Raise :class:`Failure` if there are problems."""
        if problems:
            raise Failure(problems, spec, judge)

    def limits(self, rows: int, tokens: int, query_len: int, kv_len: int) -> GraphLimits:
        """Graph limits of one bucket."""
        pages = -(-kv_len // self.ask.page_size)
        return GraphLimits((rows,), tokens, query_len, kv_len, rows * pages + 8)
