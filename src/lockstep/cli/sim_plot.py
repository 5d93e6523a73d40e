"""The chart of ``lockstep sim``: a step by part, over workers, servers and bandwidth. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.sim.capacity import PARTS

_COLOURS = ("#2a6fdb", "#8fb4ee", "#e08a2b", "#6b9e5c", "#b05c9a")


def draw(report: Mapping[str, Any], path: str) -> None:
    """Write a PNG: one column per case, cut into the parts of its step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series: dict[str, list[dict[str, Any]]] = dict(report["growth"])
    if "search" in report:
        series = {"servers": report["search"]["rows"]}
    if not series:
        series = {"servers": [report["measured"]]}
    figure = Figure(figsize=(4.5 * len(series) + 1, 4.2), layout="constrained")
    for number, (name, rows) in enumerate(series.items()):
        axes = figure.add_subplot(1, len(series), number + 1)
        labels = [f"{row['gbit']:g} Gbit/s" if name == "bandwidth" else str(row[name]) for row in rows]
        floor = [0.0] * len(rows)
        for part, colour in zip(PARTS, _COLOURS, strict=True):
            heights = [row["parts_ms"][part] for row in rows]
            axes.bar(labels, heights, bottom=floor, label=part, color=colour, width=0.7)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        axes.set_title(name)
        axes.set_ylabel("ms of a step" if number == 0 else "")
        axes.tick_params(axis="x", labelrotation=30)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if number == 0:
            axes.legend(fontsize=8)
    case = report["case"]
    figure.suptitle(
        f"{case['workers']} workers, {case['servers']} servers, {case['model_mb']:.0f} MiB, {case['gbit']:g} Gbit/s",
        fontsize=10,
    )
    FigureCanvasAgg(figure).print_png(path)
