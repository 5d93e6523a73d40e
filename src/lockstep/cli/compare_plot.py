"""The plot of a comparison; the only place that needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from lockstep.benchmark.compare.contestants import ContestantKind
from lockstep.benchmark.compare.results import Row

_OURS, _OTHERS, _LIMIT = "#2a6fdb", "#9aa5b1", "#c9ced6"


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """One bar per contestant: the median, with a line from the lowest to the highest round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.rates]
    figure = Figure(figsize=(9, 1.4 + 0.5 * max(1, len(shown))), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(shown))
    medians = [statistics.median(row.rates) for row in shown]
    below = [middle - min(row.rates) for middle, row in zip(medians, shown, strict=True)]
    above = [max(row.rates) - middle for middle, row in zip(medians, shown, strict=True)]
    axes.barh(places, medians, xerr=[below, above], color=[_colour(row) for row in shown], height=0.6, capsize=3)
    axes.set_yticks(places, [row.contestant.name for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("images per second, all workers together")
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")  # above the names too, because it is long
    for place, middle in zip(places, medians, strict=True):
        axes.annotate(f" {middle:.1f}", (middle, place), va="bottom", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    FigureCanvasAgg(figure).print_png(str(path))


def _colour(row: Row) -> str:
    if row.contestant.kind is ContestantKind.LIMIT:
        return _LIMIT
    return _OURS if row.contestant.protocol else _OTHERS
