"""Write what the reports in verification/ prove into the pages that ask for it: python docs/verified.py

A page asks with ``<!-- verified: mha/fa3 mha/fa4 -->`` … ``<!-- end -->``; what stands between is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "verification"
MARK = re.compile(r"(<!-- verified: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
#: What a report names beside the kernel libraries, and a table need not.
_COMMON = ("python", "api", "attn-core")


def reports() -> dict[str, list[Path]]:
    """Report files by backend, such as ``mha/fa3``."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(REPORTS.glob("*.json")):
        found[json.loads(path.read_text(encoding="utf-8"))["backend"]].append(path)
    return found


def section(path: Path) -> str:
    """One report as Markdown: where and when, the counts, and the cells that passed."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    hardware, versions = report["hardware"], report["versions"]
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if name not in _COMMON)
    counts = ", ".join(f"{count} {word}" for word, count in report["summary"].items())
    lines = [
        f"`{report['backend']}` on {hardware['name']} ({hardware['arch']}), {report['date'][:10]}, {libraries}:",
        f"{counts} ([report](../verification/{path.name})).",
        "",
        "| variant | phase | q / kv | page sizes | head dims | cells |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    proven: set[str] = set()
    failed = [cell for cell in report["cells"] if cell["outcome"] == "failed"]
    for cell in report["cells"]:
        if cell["outcome"] == "passed":
            proven.add(cell["check"])
            rows[cell["variant"], cell["phase"], f"{cell['dtypes']['q']} / {cell['dtypes']['kv']}"].append(cell)
    for (variant, phase, types), cells in rows.items():
        pages = ", ".join(map(str, sorted({cell["page_size"] for cell in cells})))
        dims = {tuple(cell["head_dims"]) for cell in cells}
        shown = ", ".join(str(k) if k == v else f"{k}/{v}" for k, v in sorted(dims))
        lines.append(f"| {variant} | {phase} | {types} | {pages} | {shown} | {len(cells)} |")
    if proven := proven - {cell["check"] for cell in failed}:
        lines += ["", f"Checks passed: {', '.join(sorted(proven))}."]
    if failed:
        lines += ["", "Failed:", "", *(f"- `{cell['id']}`" for cell in failed)]
    skipped: dict[str, int] = defaultdict(int)
    for cell in report["cells"]:
        if cell["outcome"] == "skipped":
            skipped[cell["reason"]] += 1
    if skipped:
        lines += ["", "Not run:", ""]
        lines += [f"- {count} of {reason}" for reason, count in sorted(skipped.items(), key=lambda item: -item[1])]
    return "\n".join(lines)


def filled(text: str) -> str:
    """A page with every marked place filled from the reports."""
    known = reports()

    def fill(match: re.Match[str]) -> str:
        parts = []
        for backend in match[2].split():
            paths = known.get(backend, [])
            parts += [section(path) for path in paths] or [f"`{backend}`: no report yet."]
        return match[1] + "\n" + "\n\n".join(parts) + "\n\n" + match[3]

    return MARK.sub(fill, text)


def pages() -> list[Path]:
    """The pages with a marked place."""
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if MARK.search(path.read_text(encoding="utf-8"))]


def main() -> int:
    """Rewrite the pages; with ``--check`` only say which are not up to date."""
    stale = [path for path in pages() if filled(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")]
    for path in stale:
        if "--check" in sys.argv:
            print(f"{path.relative_to(ROOT)} does not show what verification/ holds; run python docs/verified.py")
        else:
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
