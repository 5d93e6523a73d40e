"""A frame of the dashboard as one screen of text. Signs tell states apart where there are no colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

SIGNS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "computing": ("●", "blue"),
        "waiting": ("○", "yellow"),
        "serving": ("◆", "green"),
        "busy": ("◐", "magenta"),
        "starting": ("·", "dim"),
        "stopped": ("‖", "red"),
        "silent": ("?", "red"),
        "gone": ("✕", "red"),
        "ended": ("✓", "green"),
    }
)
_MOODS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "healthy": ("✓ healthy", "green"),
        "starting": ("… starting", "cyan"),
        "partial": ("? not all tasks answer", "yellow"),
        "warning": ("! slow, and going on", "yellow"),
        "notice": ("? stuck, not yet known why", "yellow"),
        "stuck": ("✕ stuck", "red"),
        "ended": ("■ the job has ended", "cyan"),
        "gone": ("■ nobody answers any more", "red"),
    }
)
_BAR = 28
_PARTS = (("█", "blue"), ("░", "yellow"), ("·", "dim"), ("▓", "green"))
_AROUND = 17
"""Lines that everything but the tasks takes, if there is no verdict."""
_EVERYTHING = 60


def screen(frame: Mapping[str, Any], width: int, height: int) -> Group:
    """All panels. ``height``: that of the terminal; 0 where there is none, and there is room for all."""
    verdict = _verdict(frame, width)
    lines = 3 + len(frame["verdict"]["stack"][:4]) if frame["verdict"] else 0
    room = _EVERYTHING if not height else max(4, height - _AROUND - lines)
    return Group(_heading(frame), verdict, _tasks(frame, room, width), _lower(frame))


def _heading(frame: Mapping[str, Any]) -> Text:
    """Two lines: what is watched, and its numbers."""
    numbers = frame["numbers"]
    told = [f"step {max(numbers['step'], 0)}"]
    if numbers["median"] is not None:
        told.append(f"{1000 * numbers['median']:.0f} ms a step")
    examples, rate = numbers["examples"], numbers["rate"] or 0.0
    told.append(f"{rate:.2f} steps/s" if examples is None else f"{examples:.0f} examples/s")
    if numbers["loss"] is not None:
        told.append(f"loss {numbers['loss']:.4g}")
    told.append(f"{numbers['answering']} of {numbers['tasks']} tasks answer")
    heading = Text(f"lockstep  {frame['source']['words']}\n", style="bold", no_wrap=True, overflow="ellipsis")
    return heading.append("   ".join(told), style="not bold")


def _verdict(frame: Mapping[str, Any], width: int) -> Panel:
    title, style = _MOODS[frame["mood"]]
    verdict = frame["verdict"]
    if verdict is None:
        body: RenderableType = Text(frame["summary"])
    else:
        lines = [Text(f"{verdict['culprit']}: {verdict['title']}", style="bold")]
        lines += [Text(text) for text in (verdict["stuck"], verdict["what"], verdict["remedy"]) if text]
        if verdict["command"]:
            lines.append(Text(f"$ {verdict['command']}", style="bold"))
        lines += [Text(f"  {line}", style="dim", overflow="ellipsis", no_wrap=True) for line in verdict["stack"][:4]]
        body = Group(*lines)
    return Panel(body, title=Text(title, style=f"bold {style}"), title_align="left", border_style=style, width=width)


def _tasks(frame: Mapping[str, Any], room: int, width: int) -> Panel:
    rows = frame["tasks"]
    counts = Counter(row["light"] for row in rows)
    title = Text("tasks  ", style="bold")
    for light, count in counts.items():
        sign, style = SIGNS[light]
        title.append(f"{sign} {count} {light}  ", style=style)
    body = _table(rows) if len(rows) <= room else _squares(rows, room, width)
    return Panel(body, title=title, title_align="left", border_style="dim")


def _table(rows: list[dict[str, Any]]) -> Table:
    longest = max((sum(row.get("parts", ())) for row in rows), default=0.0)
    table = Table(box=None, expand=True, show_header=False, padding=(0, 1))
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column(no_wrap=True, min_width=_BAR)
    for row in rows:
        sign, style = ("!", "bold red") if row["culprit"] else SIGNS[row["light"]]
        doing, wait = row["doing"], row.get("wait")
        if wait is not None and row["light"] != "computing":
            doing = f"waits for {wait['on']}, {wait['seconds']:.1f} s"
        step = f"step {row['step']}" if row["step"] >= 0 else ""
        table.add_row(
            Text(sign, style=style), Text(row["short"]), Text(row["host"], style="dim"), Text(step), Text(doing),
            _bar(row.get("parts", ()), longest),
        )  # fmt: skip
    return table


def _bar(parts: list[float] | tuple[()], longest: float) -> Text:
    """Computing solid, waiting light, collecting as dots, updating dark."""
    bar = Text()
    for seconds, (sign, style) in zip(parts, _PARTS, strict=False):
        bar.append(sign * round(_BAR * seconds / longest if longest else 0), style=style)
    return bar


def _squares(rows: list[dict[str, Any]], room: int, width: int) -> Text:
    """One sign for each task, host by host; as many hosts as there is room for, those with a culprit first."""
    hosts: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        hosts.setdefault(row["host"], []).append(row)
    ordered = sorted(hosts.items(), key=lambda item: not any(row["culprit"] for row in item[1]))
    text, used, line = Text(), 0, 0
    for host, own in ordered:
        size = len(host) + len(own) + 3
        if used and used + size > width - 4:
            line, used = line + 1, 0
            if line >= room:
                text.append(" ...", style="dim")
                break
            text.append("\n")
        used += size
        text.append(f"{host} ", style="dim")
        for row in own:
            sign, style = ("!", "bold red") if row["culprit"] else SIGNS[row["light"]]
            text.append(sign, style=style)
        text.append("  ")
    return text


def _lower(frame: Mapping[str, Any]) -> Table:
    grid = Table.grid(expand=True)
    for _ in range(3):
        grid.add_column(ratio=1)
    grid.add_row(
        Panel(_waits(frame), title="who waits for whom", title_align="left", border_style="dim"),
        Panel(_slowest(frame), title="slowest workers", title_align="left", border_style="dim"),
        Panel(_links(frame), title="links", title_align="left", border_style="dim"),
    )
    return grid


def _waits(frame: Mapping[str, Any]) -> Text:
    names = {node["name"]: node["label"] for node in frame["graph"]["nodes"]}
    edges = sorted(frame["graph"]["edges"], key=lambda edge: (not edge["first"], -edge["seconds"]))
    lines = [f"{names[e['waiter']]} → {names[e['on']]}  {e['seconds']:.1f} s" for e in edges[:4]]
    return _fixed(lines or ["nobody, at this moment"])


def _slowest(frame: Mapping[str, Any]) -> Text:
    timed = [row for row in frame["tasks"] if row["worker"] and row.get("parts")]
    timed.sort(key=lambda row: -row["parts"][0])
    return _fixed([f"{row['short']}  computing {1000 * row['parts'][0]:.0f} ms" for row in timed[:4]])


def _links(frame: Mapping[str, Any]) -> Text:
    links = frame["links"]
    odd = [f"✕ {row['from']} – {row['to']}: {row['state']}" for row in links["rows"] if not row["up"]]
    paths = [f"{path['path']}: {path['links']} links, {path['rate'] / 1e6:.1f} MB/s" for path in links["paths"]]
    return _fixed([*odd[:2], *paths])


def _fixed(lines: list[str]) -> Text:
    """Always four lines, so that nothing jumps."""
    return Text("\n".join([*lines, "", "", "", ""][:4]), no_wrap=True, overflow="ellipsis")
