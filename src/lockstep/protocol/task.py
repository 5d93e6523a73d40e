"""All machines of one task behind one door: its membership, its role, and the coordinator where it runs here.

A message to the task itself (server 0 to the coordinator on server 0) never leaves: it is handed back as an event.
"""

from __future__ import annotations

from collections import deque

from lockstep.protocol import phrases
from lockstep.protocol.coordinator.coordinator_machine import CoordinatorMachine
from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.events import (
    BucketApplied,
    Event,
    GradientArrived,
    LinkUp,
    Produced,
    Received,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import Incarnation, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.machine import Machine
from lockstep.protocol.core.speakers import may_say
from lockstep.protocol.core.waits import Wait
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine

_OF_TENSORS = frozenset({BucketApplied, GradientArrived, Produced, TransferEnded, VersionArrived})
"""Events of single buckets. Only the role handles them, and nearly all events are of this kind."""


class TaskMachine:
    """One task as a machine made of machines."""

    def __init__(
        self,
        incarnation: Incarnation,
        member: MemberMachine,
        role: WorkerMachine | ServerMachine,
        coordinator: CoordinatorMachine | None,
        journal: Journal,
    ) -> None:
        self.task: TaskId = role.task
        self.incarnation = incarnation
        self.member = member
        self.role = role
        self.coordinator = coordinator
        self.journal = journal
        self._machines: tuple[Machine, ...] = (member, role) if coordinator is None else (coordinator, member, role)
        self._role_alone: tuple[Machine, ...] = (role,)

    @property
    def awaited(self) -> frozenset[TaskId]:
        """Tasks that were lost and are waited for."""
        return self.member.awaited

    def start(self, now: float) -> list[Effect]:
        """The coordinator's own task is linked to it from the start."""
        if self.coordinator is None:
            return []
        return self.handle(LinkUp(self.task, self.incarnation), now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Received) and not may_say(event.peer, event.message, self.member.coordinator):
            cause = phrases.not_its_to_send(type(event.message).__name__)
            self.journal.record(now, Happening.DROPPED, peer=event.peer, cause=cause)
            return []
        outgoing: list[Effect] = []
        pending: deque[Event] = deque()
        current = event
        while True:
            for machine in self._role_alone if type(current) in _OF_TENSORS else self._machines:
                for effect in machine.handle(current, now):
                    if isinstance(effect, Send) and effect.peer == self.task:
                        pending.append(Received(self.task, self.incarnation, effect.message))
                    else:
                        outgoing.append(effect)
            if not pending:
                return outgoing
            current = pending.popleft()

    def next_deadline(self) -> float | None:
        due = [deadline for machine in self._machines if (deadline := machine.next_deadline()) is not None]
        return min(due, default=None)

    def waits(self) -> list[Wait]:
        return [wait for machine in self._machines for wait in machine.waits()]

    def snapshot(self) -> dict[str, object]:
        parts: dict[str, object] = {"member": self.member.snapshot(), "role": self.role.snapshot()}
        if self.coordinator is not None:
            parts["coordinator"] = self.coordinator.snapshot()
        return parts

    def check(self) -> None:
        for machine in self._machines:
            machine.check()
