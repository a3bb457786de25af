"""The picture of a report of ``benchmarks/mha.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(report: dict[str, Any], path: Path) -> None:
    """Fractions of the ceilings as bars, decode beside prefill; only kernels that ran a shape have a bar."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["rows"] if "of_ceiling" in row]
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    colours = {kernel: f"C{number}" for number, kernel in enumerate(kernels)}
    panels = [
        ("decode: fraction of the copy bandwidth", [row for row in rows if row["new"] == 1]),
        ("prefill: fraction of the matrix rate", [row for row in rows if row["new"] != 1]),
    ]
    longest = max(len(found) + len({row["shape"] for row in found}) for _, found in panels)
    figure, axes = plt.subplots(1, 2, figsize=(14, 0.11 * longest + 1.5))
    for panel, (title, found) in zip(axes, panels, strict=True):
        place, ticks = 0.0, {}
        for shape in dict.fromkeys(row["shape"] for row in found):
            bars = sorted((row for row in found if row["shape"] == shape), key=lambda row: kernels.index(row["kernel"]))
            for offset, row in enumerate(bars):
                panel.barh(place + offset, row["of_ceiling"], 0.9, color=colours[row["kernel"]])
            ticks[shape] = place + (len(bars) - 1) / 2
            place += len(bars) + 1
        panel.set_yticks(list(ticks.values()), list(ticks), fontsize=6)
        panel.set_ylim(place, -1)
        panel.axvline(1.0, color="black", linewidth=0.5)
        panel.set_title(title, fontsize=8)
        panel.tick_params(axis="x", labelsize=6)
    figure.suptitle(
        f"{report['device']}, torch {report['torch']}, triton {report['triton']}, {report['date'][:10]}", fontsize=8
    )
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()], list(colours),
        fontsize=7, loc="lower center", ncols=len(colours),
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)
