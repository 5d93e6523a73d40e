"""A merged trace as one self-contained HTML file: one row per thread, the steps side by side.

What overlaps on a row (transfers, updates of buckets) is spread over lanes. Names come from tasks and are escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

Trace = Mapping[str, Any]

_WIDTH, _LEFT, _TOP, _LANE, _BAR, _GAP = 1200, 190, 24, 9, 7, 8
_MOST_LANES, _MOST_TICKS = 24, 10
_ROUND = tuple(digit * 10.0**power for power in range(9) for digit in (1, 2, 5))
"""Distances in microseconds that read well on an axis."""
_COLOURS = {
    "input": "#8868a8",
    "forward and backward": "#4878a8",
    "update": "#d8a048",
    "gradient": "#b05a5a",
    "parameter": "#3f8f8f",
    "update bucket": "#589858",
}
_LABELS = {
    "input": "input",
    "forward and backward": "forward and backward",
    "update": "waiting for the next parameters",
    "gradient": "gradient on its way",
    "parameter": "parameter on its way",
    "update bucket": "a server's update",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5em auto; max-width: 1240px; padding: 0 1em; color: #222 }
svg { width: 100%; height: auto; background: #fafafa } text { font: 12px system-ui, sans-serif; fill: #222 }
"""


@dataclass(frozen=True, slots=True)
class _Bar:
    name: str
    begin: float
    end: float
    title: str


@dataclass(slots=True)
class _Row:
    """One thread of one task."""

    name: str
    bars: list[_Bar] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)

    def spread(self) -> int:
        """Give each bar the first free lane; returns the number of lanes."""
        ends: list[float] = []
        self.bars.sort(key=lambda bar: bar.begin)
        for bar in self.bars:
            lane = next((number for number, end in enumerate(ends) if end <= bar.begin), len(ends))
            if lane == len(ends) and lane < _MOST_LANES:
                ends.append(0.0)
            lane = min(lane, _MOST_LANES - 1)
            ends[lane] = max(ends[lane], bar.end)
            self.lanes.append(lane)
        return len(ends)


def trace_page(trace: Trace) -> bytes:
    """The whole file."""
    rows = _rows(trace["traceEvents"])
    begin = min((bar.begin for row in rows for bar in row.bars), default=0.0)
    end = max((bar.end for row in rows for bar in row.bars), default=1.0)
    scale = (_WIDTH - _LEFT - 10) / max(end - begin, 1.0)
    drawn: list[str] = []
    y = _TOP
    for row in rows:
        lanes = row.spread()
        height = max(lanes * _LANE, 14)
        drawn.append(f"<text x='4' y='{y + 11}'>{escape(row.name)}</text>")
        drawn += [_rectangle(bar, lane, y, begin, scale) for bar, lane in zip(row.bars, row.lanes, strict=True)]
        y += height + _GAP
        drawn.append(f"<line x1='0' x2='{_WIDTH}' y1='{y - _GAP // 2}' y2='{y - _GAP // 2}' stroke='#ddd'/>")
    key = ", ".join(f"<span style='color:{_COLOURS[kind]}'>&#9632;</span> {label}" for kind, label in _LABELS.items())
    inside = _axis(end - begin, scale, y) + "".join(drawn)
    svg = f"<svg viewBox='0 0 {_WIDTH} {y + 4}' role='img' aria-label='timeline of all tasks'>{inside}</svg>"
    title = f"Lockstep: {(end - begin) / 1000:.1f} ms of {len({row.name.partition(':')[0] for row in rows})} tasks"
    parts = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>",
        f"<body><h1>{escape(title)}</h1><p>{key}</p>{svg}</body></html>",
    )
    return "\n".join(parts).encode()


def _axis(duration: float, scale: float, bottom: int) -> str:
    """Thin vertical lines at regular intervals, at most ten of them."""
    apart = next((size for size in _ROUND if duration / size <= _MOST_TICKS), duration / _MOST_TICKS)
    drawn = []
    for number in range(int(duration / apart) + 1):
        x = _LEFT + number * apart * scale
        drawn.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP - 6}' y2='{bottom}' stroke='#e4e4e4'/>")
        drawn.append(f"<text x='{x:.1f}' y='{_TOP - 10}' text-anchor='middle'>{number * apart / 1000:g} ms</text>")
    return "".join(drawn)


def _rectangle(bar: _Bar, lane: int, y: int, begin: float, scale: float) -> str:
    x, wide = _LEFT + (bar.begin - begin) * scale, max(0.6, (bar.end - bar.begin) * scale)
    top = y + lane * _LANE
    return (
        f"<rect x='{x:.1f}' y='{top}' width='{wide:.1f}' height='{_BAR}' fill='{_colour(bar.name)}'>"
        f"<title>{escape(bar.title)}</title></rect>"
    )


def _colour(name: str) -> str:
    for kind in ("update bucket", *_COLOURS):
        if name.startswith(kind):
            return _COLOURS[kind]
    return "#888"


def _rows(events: Sequence[Mapping[str, Any]]) -> list[_Row]:
    names: dict[tuple[str, int, int], str] = {}
    rows: dict[tuple[int, int], _Row] = {}
    open_ends: dict[tuple[str, str], Mapping[str, Any]] = {}
    for event in events:
        if event["ph"] == "M":
            names[str(event["name"]), event["pid"], event["tid"]] = str(event["args"]["name"])
    for event in events:
        if event["ph"] == "b":
            open_ends[event["cat"], event["id"]] = event
            continue
        if event["ph"] not in ("X", "e"):
            continue
        first = open_ends.pop((event["cat"], event["id"]), event) if event["ph"] == "e" else event
        end = event["ts"] + event.get("dur", 0)
        key = (event["pid"], event["tid"])
        if key not in rows:
            task = _short(names.get(("process_name", event["pid"], 0), str(event["pid"])))
            rows[key] = _Row(f"{task}: {names.get(('thread_name', *key), '')}")
        rows[key].bars.append(_Bar(str(first["name"]), first["ts"], end, _title(first, end)))
    return [rows[key] for key in sorted(rows)]


def _title(event: Mapping[str, Any], end: float) -> str:
    arguments = event.get("args", {})
    step = f", step {arguments['step']}" if "step" in arguments else ""
    tensors = f" ({arguments['tensors']})" if "tensors" in arguments else ""
    return f"{event['name']}{step}{tensors}: {(end - event['ts']) / 1000:.2f} ms"


def _short(task: str) -> str:
    job, _, index = task.removeprefix("/job:").partition("/replica:0/task:")
    return f"{job} {index}" if index else task
