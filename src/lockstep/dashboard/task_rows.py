"""Each task as one row: where it is, what it does, how its steps are made up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from lockstep.dashboard.names import place, short, tensor
from lockstep.diagnose.evidence import Seen, is_worker, waits_of
from lockstep.diagnose.summary import task_line
from lockstep.diagnose.views import TaskView
from lockstep.protocol.core.activity import Doing, TaskPhase
from lockstep.protocol.core.parts import Part

PARTS = tuple(Part)
SPANS = 24
"""Of one task; in a large cluster fewer, so that a frame stays small."""
ALL_SPANS = 8000
NAMED_SPANS = 64
"""In clusters of up to this many tasks each span has its words."""
LONG_WAIT = 2.0
"""A server collects gradients all the time; only a wait of this many seconds makes it a waiting one."""


class Light(StrEnum):
    """What a task is at, as a person tells tasks apart at a glance."""

    COMPUTING = "computing"
    WAITING = "waiting"
    SERVING = "serving"
    BUSY = "busy"
    """It evaluates, compiles, reads data, writes a checkpoint: it takes its time for a reason."""
    STARTING = "starting"
    STOPPED = "stopped"
    SILENT = "silent"
    """Its process is there, or may be, and does not answer."""
    GONE = "gone"
    ENDED = "ended"


_OF_THREAD = {
    Doing.COMPUTING: Light.COMPUTING,
    Doing.USER_CODE: Light.COMPUTING,
    Doing.WAITING: Light.WAITING,
    Doing.CALLING: Light.WAITING,
    Doing.INPUT: Light.BUSY,
    Doing.CHECKPOINT: Light.BUSY,
    Doing.BUSY: Light.BUSY,
    Doing.STARTING: Light.STARTING,
    Doing.FINISHING: Light.ENDED,
}
_OPEN_PART = {
    Light.COMPUTING: Part.COMPUTING,
    Light.BUSY: Part.COMPUTING,
    Light.WAITING: Part.WAITING,
}


def task_rows(found: Mapping[str, Seen], culprits: frozenset[str]) -> list[dict[str, Any]]:
    """All tasks, servers first; of many, the culprits before those, where they are seen at once."""
    spans = max(3, min(SPANS, ALL_SPANS // max(1, len(found))))
    named = len(found) <= NAMED_SPANS
    order = sorted(found, key=lambda name: (named or name not in culprits, place(name)))
    return [_row(found[name], name in culprits, spans, named=named) for name in order]


def _row(seen: Seen, culprit: bool, spans: int, *, named: bool) -> dict[str, Any]:
    line = task_line(seen)
    view = seen.view
    light = light_of(seen)
    row: dict[str, Any] = {
        "name": seen.task,
        "short": short(seen.task),
        "worker": is_worker(seen.task),
        "host": line.host or seen.address.rpartition(":")[0],
        "pid": line.pid,
        "light": light.value,
        "doing": line.doing,
        "step": line.step,
        "culprit": culprit,
        "lives": view is not None or light is Light.ENDED,
    }
    if view is None:
        return row
    wait = max(waits_of(view), key=lambda one: one.wait.seconds, default=None)
    if wait is not None:
        row["wait"] = {"on": short(wait.on), "what": tensor(wait.wait.what), "seconds": round(wait.wait.seconds, 2)}
    row["median"] = round(view.step_median, 5)
    row["parts"] = [round(view.parts.get(part, 0.0), 5) for part in PARTS]
    row["spans"] = _spans(view, light, spans, named=named)
    return row


def light_of(seen: Seen) -> Light:
    """From what it reports of itself; without that, from what its monitor knows."""
    view, monitor = seen.view, seen.monitor
    if view is not None:
        return _of_view(view)
    if monitor is None:
        return Light.SILENT
    if monitor.exited:
        return Light.GONE if monitor.exit_code else Light.ENDED
    if monitor.stopped >= 0:
        return Light.STOPPED
    before = (TaskPhase.STARTING, TaskPhase.IMPORTING_TORCH, TaskPhase.CONNECTING)
    return Light.STARTING if monitor.phase in before else Light.SILENT


def _of_view(view: TaskView) -> Light:
    if view.outcome:
        return Light.ENDED
    if view.main is not None and view.main.doing is not Doing.NOTHING:
        return _OF_THREAD[view.main.doing]
    if view.store is not None and view.store.busy > 0:
        return Light.SERVING
    if any(one.wait.seconds > LONG_WAIT for one in waits_of(view)):
        return Light.WAITING
    return Light.SERVING if view.step >= 0 else Light.STARTING


def _spans(view: TaskView, light: Light, most: int, *, named: bool) -> list[list[Any]]:
    """The last parts of steps as [part, begin, end] (ages in seconds), with words where ``named``; then what it does
    now, if that has begun after them."""
    found = [
        [PARTS.index(one.part), round(one.begin, 4), round(one.end, 4), *([one.what] if named else [])]
        for one in view.spans[-most:]
        if one.part is not None
    ]
    part = _OPEN_PART.get(light)
    if view.main is not None and part is not None and 0 < view.main.seconds < 86400:
        newest = min((one.end for one in view.spans), default=86400.0)
        since = min(view.main.seconds, newest)
        found.append([PARTS.index(part), round(since, 4), 0.0, *([task_words(light)] if named else [])])
    return found


def task_words(light: Light) -> str:
    return f"{light.value} now"
