"""A task's last steps in the format of Chrome's and Perfetto's trace viewers, made from its journal and its own spans.

Spans of the training thread are complete events; transfers, which overlap, are asynchronous ones, one per tensor.
Times are microseconds of the task's own monotonic clock; ``lockstep.wall_offset`` leads to the wall clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.private_files import replace_file
from lockstep.protocol.core.ids import Role, Step, TaskId
from lockstep.protocol.core.journal import NO_BUCKET, Happening, Record, TensorStates, tensor_states
from lockstep.protocol.core.plan import Plan

MAX_TENSORS = 100_000
_TRAINING_THREAD = 1
_SERVER_THREAD = 1
_TRANSFERS = 2

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a step on a task's own thread, on the monotonic clock."""

    what: str
    step: Step
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """Which steps are shown: from ``first`` up to, but not including, ``end``."""

    first: Step
    end: Step

    def holds(self, step: Step) -> bool:
        return self.first <= step < self.end


def process_number(task: TaskId | None) -> int:
    """A number for the viewer's process column, the same in every file of a cluster."""
    if task is None:
        return 1
    return (1 if task.role is Role.WORKER else 1001) + task.index


def trace_of(
    task: TaskId | None, spans: Iterable[Span], records: Sequence[Record], plan: Plan | None, window: TraceWindow
) -> dict[str, Any]:
    """One task's trace, ready to be written as JSON."""
    number = process_number(task)
    role = task.role if task is not None else Role.WORKER
    events = [_named("process_name", number, 0, str(task) if task is not None else "lockstep bench")]
    threads = {_TRAINING_THREAD: "training thread" if role is Role.WORKER else "updates", _TRANSFERS: "transfers"}
    events += [_named("thread_name", number, thread, name) for thread, name in threads.items()]
    events += [_complete(number, span) for span in spans if window.holds(span.step)]
    if task is not None:
        for span in _updates([record for record in records if record.share or role is Role.SERVER]):
            events += _overlapping(number, span) if window.holds(span.step) else []
        for states in tensor_states(records, role, window.first, MAX_TENSORS):
            step = states.number if states.kind == "gradient" else states.number - 1
            if states.bucket != NO_BUCKET and window.holds(step):
                events += _transfer(number, states, plan)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "lockstep": {"task": str(task) if task is not None else "", "wall_offset": time.time() - time.monotonic()},
    }


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write the whole trace or nothing."""
    replace_file(path, json.dumps(trace).encode())


def trace_path(asked: str, task: TaskId | None) -> Path:
    """The file of one task: ``trace.json`` becomes ``trace-worker-0.json`` in a cluster."""
    path = Path(asked)
    return (
        path if task is None else path.with_name(f"{path.stem}-{task.role.value}-{task.index}{path.suffix or '.json'}")
    )


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(process: int, span: Span) -> Event:
    return {
        "ph": "X",
        "name": span.what,
        "cat": "step",
        "pid": process,
        "tid": _TRAINING_THREAD,
        "ts": _micro(span.begin),
        "dur": _micro(span.end) - _micro(span.begin),
        "args": {"step": span.step},
    }


def _overlapping(process: int, span: Span) -> list[Event]:
    """As an asynchronous event: the updates of buckets wait for each other."""
    common = {
        "cat": "update",
        "name": span.what,
        "pid": process,
        "tid": _SERVER_THREAD,
        "id": f"{process}.{span.what}.{span.step}",
    }
    begin: Event = {**common, "ph": "b", "ts": _micro(span.begin), "args": {"step": span.step}}
    return [begin, {**common, "ph": "e", "ts": _micro(span.end)}]


def _updates(records: Sequence[Record]) -> list[Span]:
    """A server's work on each bucket: from the arrival of its last gradient to its next version."""
    last: dict[tuple[Step, int], float] = {}
    spans = []
    for record in records:
        if record.happening is Happening.ARRIVED:
            last[record.step, record.bucket] = record.at
        elif record.happening is Happening.PRODUCED and (record.step - 1, record.bucket) in last:
            begin = last.pop((record.step - 1, record.bucket))
            spans.append(Span(f"update bucket {record.bucket}", record.step - 1, begin, record.at))
    return spans


def _transfer(process: int, states: TensorStates, plan: Plan | None) -> list[Event]:
    """From the first to the last time that this task saw the tensor, with all times between."""
    times = sorted(states.times.items(), key=lambda item: item[1])
    if not times:
        return []
    seen = {happening.value: _micro(at) for happening, at in times}
    arguments = {"kind": states.kind, "number": states.number, "bucket": states.bucket, "peer": str(states.peer or "")}
    if plan is not None and states.bucket < len(plan.buckets):
        arguments["tensors"] = ", ".join(plan.names_in(states.bucket)[:8])
    name = f"{states.kind} {states.bucket}" + (f" {states.peer.short}" if states.peer is not None else "")
    common = {
        "cat": "transfer",
        "name": name,
        "pid": process,
        "tid": _TRANSFERS,
        "id": f"{process}.{states.kind}.{states.number}.{states.bucket}.{states.peer}",
    }
    return [
        {**common, "ph": "b", "ts": _micro(times[0][1]), "args": {**arguments, "seen": seen}},
        {**common, "ph": "e", "ts": _micro(times[-1][1])},
    ]


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
