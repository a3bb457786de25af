"""The small languages inside case files: element types, hardware, pages, head rules, conditions of joint limits."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attn_core.dtypes import BITS, canonical
from attn_core.errors import UsageError


class CaseError(Exception):
    """A case that cannot be read, or whose expectation is not met."""


#: Architectures that rules such as ``sm>=89`` range over.
SMS = (70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121)
GFX = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1200", "gfx1201")
OTHERS = ("a2", "a3", "xpu", "cpu", "amx")
ARCHS = (*(f"sm{n}" for n in SMS), *GFX, *OTHERS)
VENDORS = ["nvidia", "amd", "ascend", "intel", "cpu"]

MODEL_DTYPES = ("bf16", "fp16", "fp32")
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "fp8": ("fp8_e4m3", "fp8_e5m2"),
    "fp4": ("fp4",),
    "any": tuple(BITS),
}

#: Phase words of case files -> phases of the contract. A word may name several.
PHASE_WORDS: Mapping[str, tuple[str, ...]] = {
    "prefill": ("prefill",),
    "extend": ("prefill",),
    "decode": ("decode",),
    "verify": ("verify",),
    "target_verify": ("verify",),
    "draft": ("draft", "draft_extend"),
    "draft_decode": ("draft",),
    "draft_extend": ("draft_extend",),
}
#: What a key about prefill or decode kernels covers: verify and draft extension run several queries a row, like prefill.
PREFILL_LIKE = ("prefill", "verify", "draft_extend")
DECODE_LIKE = ("decode", "draft")


def listed(value: Any) -> list[Any]:
    """`value` as a list: a scalar is a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def phases(words: Any) -> list[str]:
    """Phases of the contract for phase words."""
    found: dict[str, None] = {}
    for word in listed(words):
        if word not in PHASE_WORDS:
            raise CaseError(f"unknown phase {word!r}; known are {', '.join(PHASE_WORDS)}")
        found.update(dict.fromkeys(PHASE_WORDS[word]))
    return list(found)


def is_dtype(word: Any) -> bool:
    """Whether a word names element types."""
    if not isinstance(word, str):
        return False
    try:
        return word in _FAMILIES or word == "auto" or canonical(word) in BITS
    except UsageError:
        return False


def dtypes(word: str) -> tuple[str, ...]:
    """The element types a word stands for; ``fp8`` is both of them."""
    if word in _FAMILIES:
        return _FAMILIES[word]
    return (canonical(word),)


def cache_pairs(words: Iterable[str]) -> list[dict[str, str]]:
    """``dtypes`` of an allow row for a list of KV types; ``auto`` is the model's own type."""
    pairs: list[dict[str, str]] = []
    for word in words:
        if word == "auto":
            pairs += [{"q": name, "kv": name, "out": name} for name in MODEL_DTYPES]
        else:
            for kv in dtypes(word):
                pairs += [{"q": q, "kv": kv} for q in (*MODEL_DTYPES, "fp8_e4m3")]
    return list({tuple(pair.items()): pair for pair in pairs}.values())


def every_pair() -> list[dict[str, str]]:
    """All combinations of query and cache types."""
    return [{"q": q, "kv": kv} for q in (*MODEL_DTYPES, "fp8_e4m3") for kv in BITS]


def archs(key: str, value: Any) -> list[str]:
    """Architectures of ``sm: [90, "100a"]`` or ``gfx: ["gfx942"]``."""
    found = []
    for item in listed(value):
        text = str(item).lower().removeprefix("sm_").removeprefix("sm")
        if key == "sm":
            found.append("sm" + re.sub(r"[af]$", "", text.replace(".", "")))
        else:
            found.append(text if not text[:1].isdigit() else f"gfx{text}")
    return found


_OPERATORS: Mapping[str, Callable[[int, int], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "==": lambda a, b: a == b,
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def hardware(rule: Any) -> list[str]:
    """Architectures of a rule: ``sm>=89``, ``sm in 90,100``, ``sm90``, ``gfx950``, ``rocm``, a list, true or false.

    A bound in a case file is a short way to write a set; manifests have sets only.
    """
    if isinstance(rule, bool):
        return list(ARCHS) if rule else []
    if isinstance(rule, Mapping):
        return [arch for key, value in rule.items() for arch in archs(key, value)]
    if isinstance(rule, list | tuple):
        return [arch for item in rule for arch in hardware(f"sm{item}" if isinstance(item, int) else item)]
    text = str(rule).strip().lower()
    families = {"rocm": GFX, "amd": GFX, "cuda": ARCHS[: len(SMS)], "nvidia": ARCHS[: len(SMS)], "any": ARCHS}
    if text in families:
        return list(families[text])
    match = re.fullmatch(r"sm\s*(>=|<=|==|!=|=|>|<)\s*(\d+)", text)
    if match:
        return [f"sm{n}" for n in SMS if _OPERATORS[match[1]](n, int(match[2]))]
    match = re.fullmatch(r"sm\s+in\s+[\[{(]?([\d,\s]+)[\]})]?", text)
    if match:
        return [f"sm{n.strip()}" for n in match[1].split(",") if n.strip()]
    if re.fullmatch(r"sm\d+[af]?|gfx[0-9a-f]+", text) or text in OTHERS:
        return [re.sub(r"^(sm\d+)[af]$", r"\1", text)]
    raise CaseError(f"unknown hardware rule {rule!r}; write sm>=89, sm in 90,100, gfx950 or rocm")


def pages(value: Any) -> dict[str, Any] | list[int]:
    """The ``page_size`` condition of ``pages: [64]``, ``64`` or ``"any"``.

    A kernel that reads slots (1) serves every pool by splitting; all other listed sizes are fixed.
    """
    if value in ("any", None):
        return {"min": 1}
    numbers = listed(value)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise CaseError(f"pages: {value!r} is not a list of page sizes")
    return numbers


#: Head counts that rules range over.
_MOST_HEADS = 512


def heads(rule: Any) -> list[int] | None:
    """Accepted head counts of ``mla_heads`` or ``mla_heads_rule``; None for any.

    ``[16, 128]``, ``"<=64 or ==128"``, ``"multiple of 16"``, ``"power of two"``, ``"divides 128"``, ``"h % 8 == 0"``.
    """
    if rule in ("any", None):
        return None
    if isinstance(rule, list | int):
        return [int(n) for n in listed(rule)]
    if isinstance(rule, Mapping):
        low, high, step = rule.get("min", 1), rule.get("max", _MOST_HEADS), rule.get("multiple", 1)
        return [n for n in range(1, _MOST_HEADS + 1) if low <= n <= high and n % step == 0]
    test = _heads_test(str(rule))
    return [n for n in range(1, _MOST_HEADS + 1) if test(n)]


def _heads_test(text: str) -> Callable[[int], bool]:
    said = text.lower().strip()
    said = re.sub(r"multiples?[ _]of[ :_]*(\d+)", r"h % \1 == 0", said)
    said = re.sub(r"power[ _]of[ _](?:two|2)|pow2", "(h & (h - 1)) == 0", said)
    said = re.sub(r"(?:divides|divisors?[ _]of)[ :_]*(\d+)", r"\1 % h == 0", said)
    said = re.sub(r"at most (\d+)", r"h <= \1", said)
    said = re.sub(r"at least (\d+)", r"h >= \1", said)
    said = re.sub(r"(\d+)\s*(?:\.\.|to|-)\s*(\d+)", r"(\1 <= h <= \2)", said)
    said = (
        re.sub(r"\b(?:heads|num_heads|n|q_heads)\b", "h", said)
        .replace("||", " or ")
        .replace("&&", " and ")
        .replace("|", " or ")
    )
    said = re.sub(r"[{]([\d,\s]+)[}]", r"[\1]", said)
    clauses = re.split(r"\b(or|and)\b|,(?![^\[]*\])", said)
    clauses = [_clause(part) if part not in ("or", "and", None) else (part or "or") for part in clauses]
    return _compiled(" ".join(clauses), text)


def _clause(part: str) -> str:
    part = re.sub(r"(?<![<>=!])=(?!=)", "==", part.strip())
    if re.match(r"(>=|<=|==|!=|>|<|%|in\b)", part):
        part = f"h {part}"
    if part.startswith("["):
        return f"h in {part}"
    return f"h == {part}" if part.isdigit() else part


_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.Not, ast.UnaryOp, ast.BinOp, ast.Mod, ast.BitAnd, ast.Sub, ast.Add,
    ast.Compare, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Name, ast.Load, ast.Constant,
    ast.List, ast.Tuple, ast.Mult, ast.FloorDiv,
)  # fmt: skip


def _compiled(expression: str, text: str) -> Callable[[int], bool]:
    """A rule about ``h`` as a function. Only comparisons and whole-number arithmetic are understood."""
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise CaseError(f"unknown head rule {text!r}") from error
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or (isinstance(node, ast.Name) and node.id != "h"):
            raise CaseError(f"unknown head rule {text!r}")
    code = compile(tree, "<head rule>", "eval")
    return lambda h: bool(eval(code, {"__builtins__": {}}, {"h": h}))


def pairs(value: Any) -> list[list[int]]:
    """Head dims as [qk, v] pairs: a number stands for both."""
    return [list(item) if isinstance(item, list | tuple) else [int(item), int(item)] for item in listed(value)]


def conditions(table: Mapping[str, Any], library: str) -> dict[str, Any]:
    """The ``when`` table of a joint limit: ``{"head_dim": 256, "page": 16}``, ``{"triton": "3.5.*", "sm": 90}``."""
    when: dict[str, Any] = {}
    for key, value in table.items():
        if key in ("reason", "link", "fix", "code"):
            continue
        if key in _PLAIN:
            when[_PLAIN[key]] = listed(value) if not isinstance(value, bool | Mapping) else value
        elif key in ("head_dim", "head_dims"):
            when["head_dims"] = pairs(value)
        elif key in ("head_k_dim", "k_dim"):
            when["state_dims"] = {"first": listed(value)}
        elif key in ("sm", "gfx"):
            when["arch"] = [*when.get("arch", []), *archs(key, value)]
        elif key == "phase":
            when["phase"] = phases(value)
        elif key in ("kv", "kv_cache_dtype"):
            when["format.dtype"] = [name for word in listed(value) for name in dtypes(word)]
        elif key in ("dtype", "q"):
            when["dtypes"] = [{"q": name} for word in listed(value) for name in dtypes(word)]
        elif key in ("state_dtype",):
            when["state_dtype"] = [canonical(word) for word in listed(value)]
        elif key in ("lib", "lib_version"):
            when[f"library.{library}"] = specifier(value)
        elif key == "cuda":
            when["cuda"] = {"min": str(value)} if not isinstance(value, Mapping) else value
        elif key in _LIBRARIES or key.startswith("library."):
            when[key if key.startswith("library.") else f"library.{key}"] = specifier(value)
        elif re.match(r"[<>=!~]*\d+(\.[\d*]+)*", str(listed(value)[0])) and isinstance(listed(value)[0], str):
            when[f"library.{key}"] = specifier(value)  # a library by its name
        else:
            raise CaseError(f"unknown condition {key!r} of a joint limit")
    return when


#: Libraries whose versions a platform of a case may state.
_LIBRARIES = frozenset({"triton", "torch"})
_PLAIN: Mapping[str, str] = {
    "page": "page_size",
    "page_size": "page_size",
    "hicache": "hicache",
    "topk": "topk",
    "spec_topk": "topk",
    "ratio": "gqa_ratio",
    "heads": "q_heads",
    "q_heads": "q_heads",
    "kv_heads": "kv_heads",
    "window": "window",
    "layout": "format.layout",
    "traits": "traits",
    "deterministic": "deterministic",
    "prefix_cache": "prefix_cache",
    "vendor": "vendor",
    "arch": "arch",
    "lanes": "lanes",
}


def specifier(value: Any) -> str:
    """A PEP 440 specifier: ``3.5.*`` is ``==3.5.*``; ``>=3.5`` stays."""
    text = ",".join(str(item) for item in listed(value))
    return text if text[:1] in "<>=!~" else f"=={text}"


def combos(items: Any) -> Sequence[Mapping[str, Any]]:
    """Each combination as a table. A list is read by what its members are: element types (q, kv), phases, [head dim, page]."""
    found: list[Mapping[str, Any]] = []
    for item in listed(items):
        if isinstance(item, Mapping):
            found.append(item)
            continue
        table: dict[str, Any] = {}
        words = item if isinstance(item, list) else re.split(r"[+/×,]\s*", str(item))
        types = [w for w in words if is_dtype(w)]
        numbers = [int(w) for w in words if isinstance(w, int) or str(w).isdigit()]
        said = [w for w in words if w in PHASE_WORDS]
        if len(types) + len(numbers) + len(said) != len(words) or len(types) > 2 or len(numbers) > 2:
            raise CaseError(f"unknown combination {item!r}")
        table |= dict(zip(("q", "kv")[2 - len(types) :], types, strict=True))
        table |= dict(zip(("head_dim", "page"), numbers, strict=False))
        found.append(table | ({"phase": said} if said else {}))
    return found
