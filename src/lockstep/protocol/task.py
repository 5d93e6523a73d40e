"""All machines of one task behind one door: its membership, its roles, and the coordinator where it runs here.

A server has one role, and so has a worker of a cluster with servers. Without servers every worker has two: it trains,
and it makes the mean of its share of all gradients. Then its first role is the worker.

A message to the task itself (server 0 to the coordinator on server 0) never leaves: it is handed back as an event. A
tensor to the task itself is an effect like any other, since only the node knows where its bytes are.
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
    Reduced,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import Incarnation, Role, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.machine import Machine
from lockstep.protocol.core.speakers import may_say
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.worker.caller_machine import CallerMachine
from lockstep.protocol.worker.collective_machine import CollectiveMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine

_OF_TENSORS = frozenset({BucketApplied, GradientArrived, Produced, Reduced, TransferEnded, VersionArrived})
"""Events of single buckets. Only the roles handle them, and nearly all events are of this kind."""

TaskRole = WorkerMachine | ServerMachine | CollectiveMachine


class TaskMachine:
    """One task as a machine made of machines."""

    def __init__(
        self,
        incarnation: Incarnation,
        member: MemberMachine,
        roles: tuple[TaskRole, ...],
        coordinator: CoordinatorMachine | None,
        journal: Journal,
    ) -> None:
        """``roles``: at most one worker and one server."""
        self.worker = next((role for role in roles if isinstance(role, WorkerMachine)), None)
        self.server = next((role for role in roles if isinstance(role, ServerMachine)), None)
        self.role: TaskRole = roles[0] if self.worker is None else self.worker
        """The one whose step is the task's."""
        self.task: TaskId = self.role.task
        self.incarnation = incarnation
        self.member = member
        self.coordinator = coordinator
        self.journal = journal
        self.caller = CallerMachine(self.task, member.coordinator, journal) if self.task.role is Role.WORKER else None
        """Its side of the calls that all workers make."""
        beside = tuple(machine for machine in (coordinator, member, self.caller) if machine is not None)
        self._machines: tuple[Machine, ...] = (*beside, *roles)
        self._roles = roles

    @property
    def awaited(self) -> frozenset[TaskId]:
        """Tasks that were lost and are waited for."""
        return self.member.awaited

    def start(self, now: float) -> list[Effect]:
        """The coordinator's own task is linked to it from the start, and so are two roles in one task."""
        if self.coordinator is None and len(self._roles) == 1:
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
            for machine in self._roles if type(current) in _OF_TENSORS else self._machines:
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
        found = [wait for machine in self._machines for wait in machine.waits()]
        return found if len(self._roles) == 1 else self._between_tasks(found)

    def _between_tasks(self, waits: list[Wait]) -> list[Wait]:
        """Without what one role waits for from the other: where this task's own work is shows why. If there is no
        other task, its own step is all that can take long."""
        found = [wait for wait in waits if wait.on != self.task]
        if self.server is None or self.server.shape.workers > 1:
            return found
        own = next((wait for wait in waits if wait.kind is WaitKind.GRADIENT), None)
        if own is None:
            return found
        return [Wait(self.task, self.task, WaitKind.OWN_STEP, own.step, own.since, own.deadline, "computing")]

    def snapshot(self) -> dict[str, object]:
        parts: dict[str, object] = {"member": self.member.snapshot(), "role": self.role.snapshot()}
        if self.server is not None and self.worker is not None:
            parts["share"] = self.server.snapshot()
        if self.caller is not None and (call := self.caller.snapshot()):
            parts["call"] = call
        if self.coordinator is not None:
            parts["coordinator"] = self.coordinator.snapshot()
        return parts

    def check(self) -> None:
        for machine in self._machines:
            machine.check()
