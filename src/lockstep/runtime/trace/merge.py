"""Traces of several tasks on one clock.

The clocks of two tasks are compared by what both saw of the same tensors: a gradient leaves a worker and arrives at a
server, a parameter goes the other way. The quickest of each direction took about the same time on the wire, so half the
difference is the difference of the clocks. Tasks that share no tensor are aligned by their wall clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lockstep.errors import BadInput
from lockstep.foreign import read_json
from lockstep.protocol.core.journal import Happening

Trace = Mapping[str, Any]
Tensor = tuple[str, str, int, int]
"""From, to, step or version, bucket."""


MAX_BYTES: Final = 1 << 30
MAX_VALUES: Final = 1 << 25
LATEST: Final = 1e15
"""Microseconds, some thirty years after a machine has started: no monotonic clock shows more."""


def read_trace(path: Path) -> Trace:
    """One task's trace; BadInput if the file is not one."""
    try:
        with path.open("rb") as file:
            trace = read_json(file.read(MAX_BYTES + 1), MAX_BYTES, values=MAX_VALUES)
        _check(trace)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); give files that --trace_file wrote.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path} is not a trace of a Lockstep task; give files that --trace_file wrote.") from None
    return trace  # type: ignore[no-any-return]  # its form was just checked


def _check(trace: Any) -> None:
    """ValueError, or what a value of the wrong type raises, for anything that ``write_trace`` does not write."""
    texts, numbers = [trace["lockstep"]["task"]], [trace["lockstep"]["wall_offset"]]
    for event in trace["traceEvents"]:
        texts += [event["ph"], event["name"]]
        numbers += [event["pid"], event["tid"], event.get("dur", 0)]
        arguments = event.get("args", {})
        if event["ph"] == "M":
            texts.append(arguments["name"])
            continue
        numbers.append(event["ts"])
        if event["ph"] in ("b", "e"):
            texts += [event["cat"], event["id"]]
        if event["ph"] == "b" and event["cat"] == "transfer":
            texts.append(arguments["peer"])
            numbers += [arguments["number"], arguments["bucket"], *arguments["seen"].values()]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("something else than a text is in its place")
    if not all(isinstance(number, int | float) and abs(number) <= LATEST for number in numbers):
        raise ValueError("a number in it is out of range")


def merged(traces: Sequence[Trace]) -> dict[str, Any]:
    """All events on the clock of the first trace, beginning near 0."""
    tasks = [str(trace["lockstep"]["task"]) for trace in traces]
    twice = sorted({task for task in tasks if tasks.count(task) > 1})
    if twice:
        raise BadInput(f"two of the traces are from {twice[0] or 'a single process'}; give one file per task.")
    offsets, by_tensors = clock_offsets(traces)
    events = [
        {**event, "ts": event["ts"] + round(offset * 1e6)} if "ts" in event else dict(event)
        for trace, offset in zip(traces, offsets, strict=True)
        for event in trace["traceEvents"]
    ]
    begin = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] -= begin
    clocks = {
        task: {"offset_seconds": offset, "by": "tensors" if seen else "wall clock"}
        for task, offset, seen in zip(tasks, offsets, by_tensors, strict=True)
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "lockstep": {"clocks": clocks}}


def clock_offsets(traces: Sequence[Trace]) -> tuple[list[float], list[bool]]:
    """What to add to each trace's times, and whether tensors determined it."""
    sent, arrived = zip(*(_sides(trace) for trace in traces), strict=True)
    offsets: list[float | None] = [0.0] + [None] * (len(traces) - 1)
    reached = [0]
    while reached:
        known = reached.pop(0)
        for other in range(len(traces)):
            if offsets[other] is not None:
                continue
            difference = _difference(sent[known], arrived[known], sent[other], arrived[other])
            if difference is not None:
                base = offsets[known]
                assert base is not None
                offsets[other] = base + difference
                reached.append(other)
    first = float(traces[0]["lockstep"]["wall_offset"])
    by_tensors = [offset is not None for offset in offsets]
    by_wall = [float(trace["lockstep"]["wall_offset"]) - first for trace in traces]
    return [wall if offset is None else offset for offset, wall in zip(offsets, by_wall, strict=True)], by_tensors


def _difference(
    known_sent: Mapping[Tensor, float],
    known_arrived: Mapping[Tensor, float],
    other_sent: Mapping[Tensor, float],
    other_arrived: Mapping[Tensor, float],
) -> float | None:
    """What to add to the other's times to match the known one's; None if no tensors went both ways."""
    out = [other_arrived[key] - known_sent[key] for key in known_sent.keys() & other_arrived.keys()]
    back = [known_arrived[key] - other_sent[key] for key in other_sent.keys() & known_arrived.keys()]
    if not out or not back:
        return None
    return (min(back) - min(out)) / 2


def _sides(trace: Trace) -> tuple[dict[Tensor, float], dict[Tensor, float]]:
    """When tensors left this task, and when tensors arrived at it, in seconds of its clock."""
    sent: dict[Tensor, float] = {}
    arrived: dict[Tensor, float] = {}
    own = str(trace["lockstep"]["task"])
    for peer, number, bucket, seen in _transfers(trace):
        if Happening.IN_FLIGHT.value in seen and peer:
            sent[own, peer, number, bucket] = seen[Happening.IN_FLIGHT.value] / 1e6
        if Happening.ARRIVED.value in seen and peer:
            arrived[peer, own, number, bucket] = seen[Happening.ARRIVED.value] / 1e6
    return sent, arrived


def _transfers(trace: Trace) -> Iterator[tuple[str, int, int, Mapping[str, float]]]:
    for event in trace["traceEvents"]:
        arguments = event.get("args", {})
        if event.get("cat") == "transfer" and event.get("ph") == "b":
            yield (
                str(arguments["peer"]),
                int(arguments["number"]),
                int(arguments["bucket"]),
                arguments["seen"],
            )
