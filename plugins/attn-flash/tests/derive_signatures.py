"""Signatures of the kernel libraries, read off their wheels without importing them: fixtures/signatures.json is this program's output.

    python plugins/attn-flash/tests/derive_signatures.py WHEEL... > plugins/attn-flash/tests/fixtures/signatures.json

Operators' schemas are text inside the shared objects; Python functions are parsed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

#: Where the schemas are: distribution -> shared object, operators.
OPERATORS = {
    "tokenspeed-fa3": ("flash_attn_3/_C.abi3.so", ("fwd", "get_scheduler_metadata")),
    "sglang-kernel": ("sgl_kernel/flash_ops.abi3.so", ("fwd", "get_scheduler_metadata")),
}
#: Where the functions are: distribution -> source, functions.
FUNCTIONS = {
    "flash-attn-4": ("flash_attn/cute/interface.py", ("_flash_attn_fwd", "flash_attn_varlen_func")),
    "tokenspeed-fa3": ("flash_attn_interface.py", ("flash_attn_with_kvcache", "flash_attn_varlen_func")),
}


def schema(binary: bytes, name: str) -> str:
    """The text of an operator's schema inside a shared object, spaces normalised."""
    found = re.findall(
        rb"(?<![A-Za-z0-9_])" + name.encode() + rb"\(\s*(?:Tensor|int)[^\x00]{40,4000}?\) -> [^\x00]{3,80}", binary
    )
    texts = {
        re.sub(r"\s+", " ", text.decode()).replace("( ", "(").replace(",", ", ").replace(",  ", ", ") for text in found
    }
    if len(texts) != 1:
        raise ValueError(f"{len(texts)} schemas of {name}")
    return texts.pop()


def function(source: str, name: str) -> dict[str, Any]:
    """Names and defaults of a module's function; ``<required>`` without one, ``<text>`` for one that is no literal."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            arguments = node.args
            if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
                raise ValueError(f"{name} takes more than plain arguments")
            missing = len(arguments.args) - len(arguments.defaults)
            defaults = ["<required>"] * missing + [_literal(d) for d in arguments.defaults]
            return {"names": [a.arg for a in arguments.args], "defaults": defaults}
    raise ValueError(f"no function {name}")


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return f"<{ast.unparse(node)}>"
    return list(value) if isinstance(value, tuple) else value


def derive(wheel: Path) -> dict[str, Any]:
    """What one wheel adds to the fixtures."""
    name, version = wheel.name.split("-")[:2]
    distribution = name.replace("_", "-")
    made: dict[str, Any] = {"operators": {}, "functions": {}}
    made["wheels"] = {distribution: {"version": version, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}}
    with zipfile.ZipFile(wheel) as archive:
        if distribution in OPERATORS:
            path, names = OPERATORS[distribution]
            binary = archive.read(path)
            made["operators"][distribution] = {operator: schema(binary, operator) for operator in names}
        if distribution in FUNCTIONS:
            path, names = FUNCTIONS[distribution]
            source = archive.read(path).decode()
            made["functions"][distribution] = {item: function(source, item) for item in names}
    return made


def main(wheels: list[str]) -> None:
    whole: dict[str, Any] = {"wheels": {}, "operators": {}, "functions": {}}
    for wheel in wheels:
        for part, content in derive(Path(wheel)).items():
            whole[part] |= content
    print(json.dumps(whole, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(sys.argv[1:])
