"""docs/manifest.md names every axis, feature and graph level. Run this file as a script to write the tables anew."""

from __future__ import annotations

import re
from pathlib import Path

from attn_core.axes import AXES, OPEN_FAMILIES
from attn_core.capabilities import FEATURES, GRAPH_LEVELS
from attn_core.dtypes import BITS

PAGE = Path(__file__).parents[2] / "docs" / "manifest.md"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n" + "\n".join(lines) + "\n"


def generated() -> dict[str, str]:
    axes = [(f"`{axis.name}`", axis.form, axis.meaning, ", ".join(axis.required_for) or "-") for axis in AXES.values()]
    return {
        "axes": table(("axis", "form", "meaning", "required for"), axes),
        "families": table(
            ("axis", "form", "meaning"),
            [(f"`{name}.*`", axis.form, axis.meaning) for name, axis in OPEN_FAMILIES.items()],
        ),
        "features": table(
            ("feature", "since", "definition"),
            [(f"`{name}`", item.since, item.definition) for name, item in FEATURES.items()],
        ),
        "graph levels": table(("level", "captures"), [(f"`{name}`", text) for name, text in GRAPH_LEVELS.items()]),
        "dtypes": ", ".join(f"`{name}`" for name in BITS),
    }


def filled(text: str) -> str:
    for name, content in generated().items():
        pattern = re.compile(rf"(<!-- {name}: generated -->).*?(<!-- end -->)", re.DOTALL)
        assert pattern.search(text), f"docs/manifest.md has no place for {name!r}"
        text = pattern.sub(lambda match, content=content: match[1] + content + match[2], text)
    return text


def test_the_reference_is_in_step_with_the_registries():
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), "run: python core/tests/test_manifest_doc.py"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
