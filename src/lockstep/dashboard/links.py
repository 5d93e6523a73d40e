"""Links between tasks: by which path, how fast, and those that are down. Keeps the last counters, to tell rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.dashboard.names import place, short
from lockstep.diagnose.evidence import Seen
from lockstep.diagnose.views import LinkView
from lockstep.protocol.core.timing import HEARD_SECONDS

MAX_ROWS = 60
FORGET_SECONDS = 60.0


class LinkRates:
    """Counts what moved between two looks."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str, str], tuple[float, int, int]] = {}

    def look(self, found: Mapping[str, Seen], now: float) -> dict[str, Any]:
        """All paths with their sums; the links that are down, then the fastest."""
        # Of both ends: whichever answers the next time has its counters of this time.
        now_at = {
            (task, link.peer, link.incarnation): (now, link.sent, link.received)
            for task, seen in found.items()
            for link in (seen.view.links.values() if seen.view is not None else ())
        }
        rows = []
        paths: dict[str, dict[str, Any]] = {}
        for task, link in _ends(found):
            key = (task, link.peer, link.incarnation)
            sent, received = self._rates(key, now_at[key])
            rows.append(_row(task, link, sent, received))
            if link.up:
                path = paths.setdefault(link.path or "control only", {"links": 0, "rate": 0.0})
                path["links"] += 1
                path["rate"] += sent + received
        self._before |= now_at
        self._before = {key: one for key, one in self._before.items() if now - one[0] < FORGET_SECONDS}
        rows.sort(key=lambda row: (row["up"], not row["unheard"], -row["out"] - row["in"], row["place"]))
        total = sum(path["rate"] for path in paths.values())
        shown = [{name: value for name, value in row.items() if name != "place"} for row in rows[:MAX_ROWS]]
        named = [
            {"path": name, "links": path["links"], "rate": round(path["rate"])} for name, path in sorted(paths.items())
        ]
        return {"rows": shown, "count": len(rows), "paths": named, "rate": round(total)}

    def _rates(self, key: tuple[str, str, str], counted: tuple[float, int, int]) -> tuple[float, float]:
        before = self._before.get(key)
        if before is None or counted[0] <= before[0]:
            return 0.0, 0.0
        seconds = counted[0] - before[0]
        return max(0.0, (counted[1] - before[1]) / seconds), max(0.0, (counted[2] - before[2]) / seconds)


def _ends(found: Mapping[str, Seen]) -> list[tuple[str, LinkView]]:
    """One end of each link: that of the task that comes first, where it answers."""
    ends = []
    for task, seen in found.items():
        for link in seen.view.links.values() if seen.view is not None else ():
            other = found.get(link.peer)
            if other is None or other.view is None or place(task) < place(link.peer):
                ends.append((task, link))
    return ends


def _row(task: str, link: LinkView, sent: float, received: float) -> dict[str, Any]:
    return {
        "place": (place(task), place(link.peer)),
        "from": short(task),
        "to": short(link.peer),
        "path": link.path,
        "up": link.up,
        "state": link.state,
        "out": round(sent),
        "in": round(received),
        "heard": round(link.heard, 1),
        "unheard": link.heard > HEARD_SECONDS,
        "finding": "" if link.up else link.finding,
    }
