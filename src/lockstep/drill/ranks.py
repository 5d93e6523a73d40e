"""The same drills without servers: every worker is a rank, and what strikes a server strikes the rank in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lockstep.drill.model import GRADIENT, PARAMETER, PS0, PS1, START_SECONDS_PER_TASK, W0, Drill, Surroundings
from lockstep.errors import BadInput
from lockstep.protocol.core.faults import DropTensor, Fault
from lockstep.protocol.core.ids import ClusterShape, TaskId, worker

RANKS = 3
"""With three, two can agree about the third."""
_FEWEST = 2
_W2 = str(worker(2))
_IN_PLACE_OF: Mapping[str, str] = MappingProxyType({PS0: W0, PS1: _W2})
"""The first rank is the coordinator, as the first server is; each of the first ranks has one bucket."""

NOT_WITHOUT_SERVERS: Mapping[str, str] = MappingProxyType(
    {
        "leftover-server": "it is about a server that outlives its workers",
        "server-killed": "chief-killed is the same: the first rank is the coordinator",
        "host-gone": "link-cut is the same: every rank holds a share",
    }
)
"""Drills that make no sense without servers, and why."""


def applies(drill: Drill) -> bool:
    """Whether this drill can be run without servers."""
    return drill.name not in NOT_WITHOUT_SERVERS


def as_ranks(drill: Drill, ranks: int = 0) -> Drill:
    """The same drill in a cluster of this many ranks (0: as many as it needs); BadInput if it cannot be."""
    if not applies(drill):
        raise BadInput(f"the drill {drill.name!r} needs a server: {NOT_WITHOUT_SERVERS[drill.name]}.")
    count = ranks or RANKS
    names = tuple(str(worker(index)) for index in range(count))
    found = dataclasses.replace(
        drill,
        servers=0,
        workers=count,
        faults=tuple(_moved(fault) for fault in drill.faults),
        around=_surroundings(drill, names),
        pair=_each(drill.pair),
        key=_key(drill),
        startup_timeout=drill.startup_timeout + START_SECONDS_PER_TASK * max(0, count - RANKS),
    )
    fewest = RANKS if _W2 in _named(found) else _FEWEST
    if count < fewest:
        raise BadInput(f"the drill {drill.name!r} needs at least --ranks={fewest}.")
    return found


def _at(name: str) -> str:
    return _IN_PLACE_OF.get(name, name)


def _each(names: Sequence[str]) -> tuple[str, ...]:
    """The ranks in the places of these tasks, each once."""
    return tuple(dict.fromkeys(_at(name) for name in names))


def _moved(fault: Fault) -> Fault:
    changes: dict[str, Any] = {name: _at(task) for name in ("task", "peer") if (task := getattr(fault, name, ""))}
    if isinstance(fault, DropTensor) and fault.task in _IN_PLACE_OF and fault.bucket >= 0:
        changes["bucket"] = TaskId.parse(changes["task"]).index
    return dataclasses.replace(fault, **changes)


def _surroundings(drill: Drill, names: tuple[str, ...]) -> Surroundings:
    around, everybody = drill.around, {str(task) for task in ClusterShape(drill.servers, drill.workers).tasks()}

    def each(hit: tuple[str, ...]) -> tuple[str, ...]:
        return names if everybody <= set(hit) else _each(hit)

    return dataclasses.replace(
        around,
        missing=each(around.missing),
        late=tuple((_at(name), seconds) for name, seconds in around.late),
        swapped=tuple((_at(one), _at(other)) for one, other in around.swapped),
        twice=_at(around.twice),
        restarted=_at(around.restarted),
        cut=None if around.cut is None else (_at(around.cut[0]), _at(around.cut[1]), around.cut[2]),
        paused=each(around.paused),
        full_log=each(around.full_log),
        order=_each(around.order),
    )


def _key(drill: Drill) -> str:
    """A rank that is missing, or stuck, owes its gradients and the means of its share: either may be named."""
    dropped = next((fault for fault in drill.faults if isinstance(fault, DropTensor)), None)
    if dropped is not None:
        kind = PARAMETER if dropped.task in _IN_PLACE_OF else GRADIENT
        moved = _moved(dropped)
        return f"{kind}{moved.bucket}" if isinstance(moved, DropTensor) else drill.key
    if drill.group == "lost" or not drill.key:
        return drill.key
    return "/bucket_"


def _named(drill: Drill) -> set[str]:
    """The tasks that a drill is about."""
    around = drill.around
    hit = {getattr(fault, field, "") for fault in drill.faults for field in ("task", "peer")}
    pairs = {name for pair in (*around.swapped, *((around.cut[:2],) if around.cut else ())) for name in pair}
    return hit | pairs | set(drill.pair)
