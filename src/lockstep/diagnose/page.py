"""A diagnosis as one self-contained HTML file: the report, the wait-for graph, and the last steps.

Everything that comes from a task is escaped: task names, stacks and file names are not ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from types import MappingProxyType

from lockstep.diagnose import phrases
from lockstep.diagnose.text import render
from lockstep.diagnose.verdict import Diagnosis, Edge, TimelineSpan
from lockstep.protocol.core.parts import Part

MAX_NODES = 40
_COLOURS: Mapping[Part, str] = MappingProxyType(
    {
        Part.COMPUTING: "#4878a8",
        Part.WAITING: "#d8a048",
        Part.COLLECTING: "#a8a8a8",
        Part.UPDATING: "#589858",
    }
)

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em }
body { color: #222; background: #fff }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto; font-size: 13px }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
svg { max-width: 100%; height: auto; background: #fafafa } text { font: 12px system-ui, sans-serif }
@media (prefers-color-scheme: dark) {
  body { background: #1c1c1c; color: #ddd } pre, svg { background: #282828 } text { fill: #ddd }
}
"""


def page(kind: str, diagnosis: Diagnosis) -> bytes:
    """The whole file."""
    verdict = diagnosis.verdict
    cause = diagnosis.summary if verdict is None else phrases.cause_title(verdict.cause, verdict.culprit)
    title = phrases.page_title(kind, cause)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><pre>{escape(render(kind, diagnosis))}</pre>",
        f"<h2>{phrases.graph_title()}</h2>",
        graph((*diagnosis.causes, *diagnosis.consequences), verdict.culprit if verdict else ""),
        f"<h2>{phrases.timeline_title()}</h2>",
        timeline(diagnosis.timeline),
        "</body></html>",
    ]
    return "\n".join(parts).encode()


def graph(edges: tuple[Edge, ...], culprit: str) -> str:
    """Tasks on a circle, an arrow for each wait; the culprit in red."""
    names = list(dict.fromkeys(name for edge in edges for name in (edge.waiter, edge.on)))[:MAX_NODES]
    if not names:
        return f"<p>{phrases.nobody_waits_long()}</p>"
    radius = 60 + 14 * len(names)
    size = 2 * radius + 220
    middle = size / 2
    places = {
        name: (
            middle + radius * math.sin(2 * math.pi * index / len(names)),
            middle - radius * math.cos(2 * math.pi * index / len(names)),
        )
        for index, name in enumerate(names)
    }
    shown = [edge for edge in edges if edge.waiter in places and edge.on in places]
    arrows = [_arrow(edge, places[edge.waiter], places[edge.on], first=index == 0) for index, edge in enumerate(shown)]
    nodes = [_node(name, places[name], name == culprit) for name in names]
    marker = (
        "<defs><marker id='a' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        "<path d='M0 0L8 4L0 8z' fill='#888'/></marker></defs>"
    )
    drawn = "".join((marker, *arrows, *nodes))
    return f"<svg viewBox='0 0 {size:.0f} {size:.0f}' role='img' aria-label='{phrases.graph_label()}'>{drawn}</svg>"


def _node(name: str, place: tuple[float, float], culprit: bool) -> str:
    fill = "#c04040" if culprit else "#4878a8"
    x, y = place
    return (
        f"<circle cx='{x:.0f}' cy='{y:.0f}' r='16' fill='{fill}'><title>{escape(name)}</title></circle>"
        f"<text x='{x:.0f}' y='{y + 32:.0f}' text-anchor='middle'>{escape(phrases.graph_name(name))}</text>"
    )


def _arrow(edge: Edge, start: tuple[float, float], end: tuple[float, float], first: bool) -> str:
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy) or 1.0
    ux, uy = dx / length, dy / length
    x1, y1 = start[0] + 18 * ux, start[1] + 18 * uy
    x2, y2 = end[0] - 20 * ux, end[1] - 20 * uy
    colour = "#c04040" if first else "#888"
    text = escape(phrases.edge_label(edge.waiter, edge.what, edge.step, edge.seconds, edge.state))
    return (
        f"<line x1='{x1:.0f}' y1='{y1:.0f}' x2='{x2:.0f}' y2='{y2:.0f}' stroke='{colour}' stroke-width='1.6' "
        f"marker-end='url(#a)'><title>{text}</title></line>"
    )


def timeline(spans: tuple[TimelineSpan, ...]) -> str:
    """One row per task, the newest moment on the right."""
    tasks = list(dict.fromkeys(span.task for span in spans))[:MAX_NODES]
    if not tasks:
        return f"<p>{phrases.no_step_finished()}</p>"
    longest = max((span.begin for span in spans), default=1.0) or 1.0
    width, left, row = 1000, 110, 26
    bars = []
    for span in spans:
        if span.task not in tasks:
            continue
        x = left + (width - left) * (1 - span.begin / longest)
        wide = max(1.0, (width - left) * (span.begin - span.end) / longest)
        y = 8 + row * tasks.index(span.task)
        colour = "#888" if span.part is None else _COLOURS[span.part]
        label = escape(phrases.span_label(span.task, span.what, span.begin - span.end))
        bars.append(
            f"<rect x='{x:.1f}' y='{y}' width='{wide:.1f}' height='16' fill='{colour}'><title>{label}</title></rect>"
        )
    names = [
        f"<text x='4' y='{20 + row * index}'>{escape(phrases.graph_name(task))}</text>"
        for index, task in enumerate(tasks)
    ]
    key = ", ".join(f"<span style='color:{colour}'>&#9632;</span> {escape(name)}" for name, colour in _COLOURS.items())
    height = 16 + row * len(tasks)
    return (
        f"<p>{phrases.left_edge(longest)} {key}</p>"
        f"<svg viewBox='0 0 {width} {height}' role='img' aria-label='{phrases.timeline_label()}'>"
        f"{''.join(names)}{''.join(bars)}</svg>"
    )
