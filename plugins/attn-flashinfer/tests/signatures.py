"""Signatures of the library's functions, read off its source with ``ast``: names, defaults and kinds, nothing else.

``python signatures.py FOLDER_WITH_flashinfer VERSION`` writes the fixture. The tests read it, and compare it with the wheel's
source if the variable ``ATTN_FLASHINFER_SOURCE`` names a folder that holds an unpacked wheel of that version.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

HERE = Path(__file__).parent
#: Class or None, file, methods.
WANTED = (
    ("BatchDecodeWithPagedKVCacheWrapper", "decode.py", ("__init__", "plan", "_plan_impl", "run", "reset_workspace_buffer")),
    ("BatchPrefillWithPagedKVCacheWrapper", "prefill.py", ("__init__", "plan", "run", "reset_workspace_buffer", "prewarm_paged_kv_stride_variant")),
    ("BatchPrefillWithRaggedKVCacheWrapper", "prefill.py", ("__init__", "plan", "run")),
    ("BatchAttentionWithAttentionSinkWrapper", "attention/_core.py", ("__init__", "run")),
    (None, "cascade.py", ("merge_state_in_place",)),
)  # fmt: skip


def derive(source: Path) -> dict[str, str]:
    """``Class.method`` or ``function`` -> its parameters as text. Of overloads the last, which is the implementation."""
    found: dict[str, str] = {}
    for owner, file, names in WANTED:
        body = ast.parse((source / "flashinfer" / file).read_text(encoding="utf-8")).body
        if owner is not None:
            body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner).body
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                found[f"{owner}.{node.name}" if owner else node.name] = _parameters(node.args)
    return found


def _parameters(arguments: ast.arguments) -> str:
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    return ast.unparse(arguments)


def fixtures() -> list[str]:
    """The versions with a fixture."""
    return sorted(path.stem.removeprefix("signatures-") for path in HERE.glob("signatures-*.txt"))


def read(version: str) -> dict[str, str]:
    """A fixture."""
    lines = (HERE / f"signatures-{version}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines if line and not line.startswith("#"))


def signature(parameters: str) -> inspect.Signature:
    """A signature object; defaults are kept as far as they are literals."""
    node = ast.parse(f"def f({parameters}): pass").body[0].args
    kinds = inspect.Parameter
    made = []
    positional = [*node.posonlyargs, *node.args]
    defaults = [kinds.empty] * (len(positional) - len(node.defaults)) + list(map(_literal, node.defaults))
    made += [kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=d) for a, d in zip(positional, defaults, strict=True)]
    if node.vararg:
        made.append(kinds(node.vararg.arg, kinds.VAR_POSITIONAL))
    for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True):
        made.append(kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if d is None else _literal(d)))
    if node.kwarg:
        made.append(kinds(node.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(made)


def _literal(node: ast.expr):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


if __name__ == "__main__":
    lines = [f"# flashinfer-python {sys.argv[2]}: parameters of the functions that attn-flashinfer calls"]
    lines += [f"{name}: {text}" for name, text in derive(Path(sys.argv[1])).items()]
    (HERE / f"signatures-{sys.argv[2]}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
