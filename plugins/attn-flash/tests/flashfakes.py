"""Stand-ins for the kernel libraries on a machine without a GPU: the real signatures, checked layouts, right numbers by torch.

FA3's operators are registered with torch from the very schema texts of the wheels, so the dispatcher checks names and types of
every call. FA4's functions are made from the signatures of the wheel's source. Both record their calls.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

FIXTURES = json.loads((Path(__file__).parent / "fixtures" / "signatures.json").read_text(encoding="utf-8"))


def attention(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    offsets: list[int],
    *,
    scale: float,
    causal: bool,
    left: int | None,
    right: int | None,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: Callable[[int, int, int, int], bool] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out f64[T, H, Dv], lse f64[H, T]) of rows with their own keys, as FlashAttention defines it: aligned bottom-right."""
    tokens, heads = q.shape[:2]
    out = torch.full((tokens, heads, values[0].shape[-1] if values else q.shape[-1]), math.nan, dtype=torch.float64)
    lse = torch.full((heads, tokens), math.nan, dtype=torch.float64)
    for row, (k, v) in enumerate(zip(keys, values, strict=True)):
        start, stop = offsets[row], offsets[row + 1]
        if start == stop:
            continue
        count, length = stop - start, len(k)
        ratio = heads // k.shape[1]
        scores = torch.einsum("shd,lhd->hsl", q[start:stop].double(), k.double().repeat_interleave(ratio, 1)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(length - count, length)[:, None]
        key = torch.arange(length)[None, :]
        hidden = torch.zeros(count, length, dtype=torch.bool)
        if mask is not None:
            for i in range(count):
                for j in range(length):
                    hidden[i, j] = not mask(row, i, j, length)
        if causal:
            hidden |= key > place
        if left is not None and left >= 0:
            hidden |= key < place - left
        if right is not None and right >= 0:
            hidden |= key > place + right
        if chunk:
            hidden |= key // chunk != place // chunk
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, count, 1)], -1)
        total = scores.logsumexp(-1)
        weights = torch.where(total[..., None] == -math.inf, 0.0, torch.exp(scores - total[..., None]))[..., :length]
        lse[:, start:stop] = total
        out[start:stop] = torch.einsum("hsl,lhd->shd", weights, v.double().repeat_interleave(ratio, 1))
    return out, lse


def read_pages(
    pool: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    lines: torch.Tensor | None,
    factors: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Each row's keys from pages, exactly as many as it has; an index out of the pool is an error here."""
    page, found = pool.shape[1], []
    for row, length in enumerate(lens.tolist()):
        line = table[row if lines is None else int(lines[row])]
        slots = [(int(line[n // page]), n % page) for n in range(length)]
        assert all(0 <= p < pool.shape[0] for p, _ in slots), f"row {row} reads a page outside the pool"
        index = (
            torch.tensor([p for p, _ in slots], dtype=torch.int64),
            torch.tensor([o for _, o in slots], dtype=torch.int64),
        )
        read = (pool.view(torch.uint8) if pool.element_size() == 1 else pool)[index]
        read = read.view(pool.dtype).double()
        found.append(read if factors is None else read * factors[row].double()[:, None])
    return found


def need(condition: bool, text: str) -> None:
    """A check of the library: what the real kernel would refuse."""
    if not condition:
        raise RuntimeError(text)


def check_offsets(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            need(tensor.dtype == torch.int32, f"{name} must have dtype int32")
            need(tensor.is_contiguous(), f"{name} must be contiguous")


class Fa3:
    """The operator of FlashAttention 3 in float64. ``calls`` holds the arguments by name."""

    def __init__(self, softcap: bool, uneven: bool) -> None:
        self.softcap, self.uneven = softcap, uneven
        self.calls: list[dict[str, Any]] = []
        self.names: tuple[str, ...] = ()
        self.defaults: dict[str, Any] = {}

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        a = self.defaults | dict(zip(self.names, arguments, strict=False))  # torch leaves out what equals a default
        self.calls.append(a)
        q, k, v = a["q"], a["k"], a["v"]
        rows = a["cu_seqlens_q"].shape[0] - 1
        need(q.dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn), "only fp16, bf16, and fp8_e4m3")
        need(k.dtype == q.dtype and v.dtype == q.dtype, "query, key and value must have the same dtype")
        need(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "contiguous last dimension")
        need(q.dim() == 3 and q.shape[1] % k.shape[-2] == 0, "heads")
        need(q.shape[2] % (16 if q.element_size() == 1 else 8) == 0, "head_size should be a multiple")
        uneven = k.shape[-1] != v.shape[-1]
        need(not uneven or (self.uneven and 128 < k.shape[-1] <= 192 and 96 < v.shape[-1] <= 128), "V headdim differs")
        need(self.softcap or not a["softcap"], "This flash attention build does not support tanh softcapping.")
        check_offsets(**{n: a[n] for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "kv_batch_idx")})
        sinks = a["sinks"]
        need(sinks is None or (sinks.dtype == torch.bfloat16 and tuple(sinks.shape) == (q.shape[1],)), "sinks")
        lens, offsets = a["seqused_k"], a["cu_seqlens_q"].tolist()
        need(
            max([b - c for c, b in zip(offsets, offsets[1:], strict=False)], default=0) <= a["max_seqlen_q"],
            "max_seqlen_q",
        )
        factors = [a[f"{n}_descale"] for n in "qkv"]
        for factor in factors:
            need(
                factor is None or (q.element_size() == 1 and tuple(factor.shape) == (rows, k.shape[-2])),
                "descale shape",
            )
        if a["page_table"] is not None:
            table, lines = a["page_table"], a["kv_batch_idx"]
            need(table.dtype == torch.int32 and table.stride(-1) == 1, "page_table")
            need(k.dim() == 4 and a["cu_seqlens_k"] is None and lens is not None, "paged")
            need(lines is not None or table.shape[0] == rows, "batch_size must be equal to batch_size_k")
            need(int(lens.max() if rows else 0) <= table.shape[1] * k.shape[1], "seqused_k is over the table")
            keys = read_pages(k, table, lens, lines, factors[1])
            values = read_pages(v, table, lens, lines, factors[2])
        else:
            need(k.dim() == 3 and a["max_seqlen_k"] is not None, "packed keys")
            bounds = a["cu_seqlens_k"].tolist()
            keys = [k[x:y].double() for x, y in zip(bounds, bounds[1:], strict=False)]
            values = [v[x:y].double() for x, y in zip(bounds, bounds[1:], strict=False)]
        plan = a["scheduler_metadata"]
        if plan is not None:
            window = a["window_size_left"], a["window_size_right"]
            want = plan_entries(rows, a["max_seqlen_q"], q.shape[2], a["is_causal"], *window, k.shape[1])
            need(tuple(plan.shape) == (want,), f"scheduler_metadata must have shape ({want})")
        query = q.double() if q.element_size() > 1 else q.float().double()
        if factors[0] is not None:
            for row in range(rows):
                part = slice(offsets[row], offsets[row + 1])
                query[part] *= factors[0][row].double().repeat_interleave(q.shape[1] // k.shape[-2])[:, None]
        out, lse = attention(
            query, keys, values, offsets, scale=a["softmax_scale"], causal=a["is_causal"], left=a["window_size_left"],
            right=a["window_size_right"], chunk=a["attention_chunk"], softcap=a["softcap"], sinks=sinks,
        )  # fmt: skip
        dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
        given = a["out"]
        if given is not None:
            need(given.dtype == dtype and given.stride(-1) == 1 and given.shape == out.shape, "out")
            written = slice(offsets[0], offsets[-1])
            given[written] = out[written].to(dtype)
        else:
            given = out.to(dtype)
        none = torch.empty(0)
        return given, lse.float(), none, none


class SplitPlan:
    """The operator that plans splits: the size that the kernel checks, contents nobody reads here."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.names: tuple[str, ...] = ()
        self.defaults: dict[str, Any] = {}

    def __call__(self, *arguments: Any) -> torch.Tensor:
        a = self.defaults | dict(zip(self.names, arguments, strict=False))
        self.calls.append(a)
        window = a["window_size_left"], a["window_size_right"]
        entries = plan_entries(
            a["batch_size"], a["max_seqlen_q"], a["headdim"], a["is_causal"], *window, a["page_size"]
        )
        return torch.zeros(entries, dtype=torch.int32)


def plan_entries(rows: int, queries: int, dim: int, causal: bool, left: int, right: int, page: int | None) -> int:
    """The size of a split plan that the kernel asks for: one query a row is not causal, but for middle-sized heads over pages."""
    if queries == 1 and left < 0 and right < 0 and (dim <= 64 or dim > 128 or page is None):
        causal = False
    local = left >= 0 or (right >= 0 and not causal)
    vectors = 2 + (not local) + bool(causal or local)
    return vectors * (-(-rows // 4) * 4) + 1


_LIBRARIES: list[torch.library.Library] = []
_REGISTERED: dict[str, tuple[Fa3, SplitPlan]] = {}


def register(variant: str) -> tuple[Fa3, SplitPlan]:
    """Operators under the build's namespace, from the schema texts of its wheel, with a CPU kernel. Once a process."""
    from attn_flash.builds import BUILDS

    build = BUILDS[variant]
    if build.namespace not in _REGISTERED:
        library = torch.library.Library(build.namespace, "DEF")
        _LIBRARIES.append(library)
        fakes = Fa3(build.softcap, build.softcap), SplitPlan()
        for name, fake in zip(("fwd", "get_scheduler_metadata"), fakes, strict=True):
            library.define(FIXTURES["operators"][build.distribution][name])
            operator = getattr(getattr(torch.ops, build.namespace), name).default
            arguments = operator._schema.arguments
            fake.names = tuple(argument.name for argument in arguments)
            fake.defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
            library.impl(name, fake, "CPU" if name == "fwd" else "CompositeExplicitAutograd")
        _REGISTERED[build.namespace] = fakes
    return _REGISTERED[build.namespace]


@contextmanager
def modules(**made: Any) -> Iterator[None]:
    """Modules by dotted name (``.`` written as ``__``) for as long as the block runs."""
    named = {name.replace("__", "."): value for name, value in made.items()}
    before = {name: sys.modules.get(name) for name in named}
    sys.modules.update(named)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = value


class Fa4:
    """The forward function of FlashAttention 4 in float64, for either of its signatures."""

    def __init__(self, name: str = "_flash_attn_fwd", drop: tuple[str, ...] = ()) -> None:
        text = FIXTURES["functions"]["flash-attn-4"][name]
        names = [n for n in text["names"] if n not in drop]
        defaults = {n: d for n, d in zip(text["names"], text["defaults"], strict=True) if n not in drop}
        parameters = [
            inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=inspect.Parameter.empty if defaults[n] == "<required>" else defaults[n])
            for n in names
        ]  # fmt: skip
        self.__signature__ = inspect.Signature(parameters)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        bound = self.__signature__.bind(*arguments)
        bound.apply_defaults()
        a = dict(bound.arguments)
        self.calls.append(a)
        return self.run(a)

    def run(self, a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = a["q"], a["k"], a["v"]
        rows = a["cu_seqlens_q"].shape[0] - 1
        need(v.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16")
        need(q.dtype == v.dtype and k.dtype == v.dtype, "q, k, v must have the same dtype")
        check_offsets(**{n: a[n] for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")})
        need(a["num_splits"] == 1, "SplitKV not supported on SM 9.0")
        offsets = a["cu_seqlens_q"].tolist()
        if a["page_table"] is not None:
            table = a["page_table"]
            need(a["cu_seqlens_k"] is None and table.dtype == torch.int32 and table.stride(-1) == 1, "page_table")
            need(table.shape[0] == rows and tuple(a["seqused_k"].shape) == (rows,), "one line of the table a row")
            need(k.shape[1] == 128 or (k.shape[-1] % 16 == 0 and v.shape[-1] % 16 == 0), "irregular head dim")
            keys = read_pages(k, table, a["seqused_k"], None, None)
            values = read_pages(v, table, a["seqused_k"], None, None)
        else:
            bounds = a["cu_seqlens_k"].tolist()
            need(bounds[-1] <= len(k), "cu_seqlens_k")
            keys = [k[x:y].double() for x, y in zip(bounds, bounds[1:], strict=False)]
            values = [v[x:y].double() for x, y in zip(bounds, bounds[1:], strict=False)]
        left, right = a.get("window_size", (a.get("window_size_left"), a.get("window_size_right")))
        need(left != -1 and right != -1, "a one-sided -1 is not infinity")
        mask = a["mask_mod"]
        if mask is not None:
            left = right = None  # the library ignores causal and window where there is a mask
            tensors = a["aux_tensors"]
            bound = mask
            mask = lambda row, i, j, length: bound(row, i, j, length, tensors)  # noqa: E731
        out, lse = attention(
            q.double(), keys, values, offsets, scale=a["softmax_scale"], causal=a["causal"] and mask is None,
            left=left, right=right, softcap=getattr(a["score_mod"], "cap", 0.0), sinks=a["learnable_sink"], mask=mask,
        )  # fmt: skip
        given = a.get("out")
        if given is not None:
            need(given.dtype == q.dtype and given.shape == out.shape, "out")
            given[offsets[0] : offsets[-1]] = out[offsets[0] : offsets[-1]].to(q.dtype)
        else:
            given = out.to(q.dtype)
        return given, lse.float() if a["return_lse"] else None


def plain_tree_mask(left: int) -> Callable[..., bool]:
    """The rule of ``attn_flash.masks`` in plain Python."""

    def mask(row: int, i: int, j: int, length: int, tensors: list[torch.Tensor]) -> bool:
        depth = tensors[1][row]
        prefix = length - len(depth)  # every row has as many queries as drafts
        position = j if j < prefix else prefix + int(depth[j - prefix])
        distance = prefix + int(depth[i]) - position
        if distance < 0 or (left >= 0 and distance > left):
            return False
        if j < prefix:
            return True
        return bool(int(tensors[0][row, i, (j - prefix) // 32]) >> ((j - prefix) % 32) & 1)

    return mask


@contextmanager
def fa4_library(inner: bool = True) -> Iterator[Fa4]:
    """``flash_attn.cute`` as the adapter imports it, and its masks in plain Python."""
    fake = Fa4("_flash_attn_fwd" if inner else "flash_attn_varlen_func")
    interface = types.SimpleNamespace(flash_attn_varlen_func=fake)
    if inner:
        interface._flash_attn_fwd = fake
    masks = types.ModuleType("attn_flash.masks")
    masks.tree_mask = plain_tree_mask  # type: ignore[attr-defined]
    masks.soft_cap = lambda cap: types.SimpleNamespace(cap=cap)  # type: ignore[attr-defined]
    with modules(
        flash_attn=types.ModuleType("flash_attn"),
        flash_attn__cute=types.ModuleType("flash_attn.cute"),
        flash_attn__cute__interface=interface,
        attn_flash__masks=masks,
    ):
        yield fake


@contextmanager
def fa3_library(variant: str) -> Iterator[tuple[Fa3, SplitPlan]]:
    """One build of FA3, loaded."""
    from attn_flash.builds import BUILDS

    fakes = register(variant)
    for fake in fakes:
        fake.calls.clear()
    name = BUILDS[variant].module
    parent = name.partition(".")[0]
    with modules(**{parent: types.ModuleType(parent), name.replace(".", "__"): types.ModuleType(name)}):
        yield fakes
