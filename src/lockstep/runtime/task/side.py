"""One part of a task: what it does with the effects of one machine, and with the memory that belongs to it.

A node (``node.py``) is made of sides: a worker has one that trains, a server one that keeps a share of the buckets, and
a task may have both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.protocol.core.effects import Effect
from lockstep.protocol.core.ids import Incarnation, TaskId
from lockstep.protocol.core.messages import Note
from lockstep.protocol.core.plan import Plan
from lockstep.protocol.task import TaskRole
from lockstep.transports.base import Loan

if TYPE_CHECKING:
    from lockstep.runtime.task.shard_saving import ShardSaving

CarriesOut = Mapping[type[Effect], Callable[[Any], None]]
"""What is done for each type of effect, on the loop's thread; it must not block."""

Takes = Mapping[type[Note], Callable[[TaskId, Incarnation, Any, Loan], None]]
"""Who receives memory that a peer lends with a note of this type, on a transport's thread."""


class Side:
    """What a node needs of each of its sides. The methods that do nothing here are for sides that need them."""

    machine: TaskRole
    saving: ShardSaving | None = None
    """What writes its part of a checkpoint, in a side that has one."""

    @property
    def plan(self) -> Plan | None:
        """The plan, once there is one."""
        return None

    def effects(self) -> CarriesOut:
        """The effects that it carries out; no two sides of a node have the same."""
        return {}

    def takes(self) -> Takes:
        """The notes whose memory it takes."""
        return {}

    def start(self) -> None:
        """The node starts."""

    def beat(self) -> None:
        """About once a second, on the watchdog's thread."""

    def stop(self) -> None:
        """The node closes; its links are still open."""

    def wake(self) -> None:
        """The job is over: wake the threads that wait here."""

    def free(self) -> None:
        """Free its memory; the last transfer is over."""


def plan_of(sides: Sequence[Side]) -> Plan | None:
    """The plan, once one of these has it; it is the same for all."""
    return next((side.plan for side in sides if side.plan is not None), None)
