"""The last steps of a task, from its journal: how long the parts of a step take, and a timeline of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.protocol.core.ids import Role, Step
from lockstep.protocol.core.journal import Happening, Record
from lockstep.protocol.core.parts import Part
from lockstep.runtime import phrases

STEPS_SHOWN = 10


def parts_of_a_step(records: Sequence[Record], role: Role) -> dict[str, float]:
    """Median seconds of the parts of the last steps: computing and waiting on a worker, updating on a server."""
    durations: dict[str, list[float]] = {}
    for part, _, begin, end in _intervals(records, role):
        durations.setdefault(part.value, []).append(end - begin)
    return {part: sorted(values)[len(values) // 2] for part, values in durations.items()}


def spans_of(records: Sequence[Record], role: Role, now: float) -> list[dict[str, Any]]:
    """The last steps as parts of a timeline; times are ages."""
    return [
        {
            "part": part.value,
            "what": phrases.part_of_step(part, step),
            "begin": round(now - begin, 4),
            "end": round(now - end, 4),
        }
        for part, step, begin, end in _intervals(records, role)
    ]


def _intervals(records: Sequence[Record], role: Role) -> list[tuple[Part, Step, float, float]]:
    if role is Role.WORKER:
        return _of_worker(records)
    return _of_server(records)


def _of_worker(records: Sequence[Record]) -> list[tuple[Part, Step, float, float]]:
    """It computes from the last arrival of a version to the seal, and waits from the seal to the next version."""
    arrived: dict[Step, float] = {}
    sealed: dict[Step, float] = {}
    for record in [one for one in records if not one.share]:
        if record.happening is Happening.ARRIVED:
            arrived[record.step] = record.at
        elif record.happening is Happening.SEALED and record.peer is None:
            sealed[record.step] = record.at
    found: list[tuple[Part, Step, float, float]] = []
    for step in sorted(sealed)[-STEPS_SHOWN:]:
        if step in arrived and arrived[step] <= sealed[step]:
            found.append((Part.COMPUTING, step, arrived[step], sealed[step]))
        if arrived.get(step + 1, 0.0) >= sealed[step]:
            found.append((Part.WAITING, step, sealed[step], arrived[step + 1]))
    return found


def _of_server(records: Sequence[Record]) -> list[tuple[Part, Step, float, float]]:
    """It collects from the first gradient of a step to its last, and updates from there to the last new version."""
    first: dict[Step, float] = {}
    last: dict[Step, float] = {}
    made: dict[Step, float] = {}
    for record in records:
        if record.happening is Happening.ARRIVED:
            first.setdefault(record.step, record.at)
            last[record.step] = record.at
        elif record.happening is Happening.PRODUCED:
            made[record.step - 1] = record.at
    found: list[tuple[Part, Step, float, float]] = []
    for step in sorted(first)[-STEPS_SHOWN:]:
        found.append((Part.COLLECTING, step, first[step], last[step]))
        if made.get(step, 0.0) >= last[step]:
            found.append((Part.UPDATING, step, last[step], made[step]))
    return found
