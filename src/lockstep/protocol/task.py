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
from lockstep.protocol.coordinator.deputy import DeputyMachine
from lockstep.protocol.coordinator.homed_coordinator import HomedCoordinator
from lockstep.protocol.core.effects import Effect, Send
from lockstep.protocol.core.events import (
    BucketApplied,
    BucketMeasured,
    BucketTaken,
    Event,
    GradientArrived,
    LinkUp,
    MeanArrived,
    MeanMade,
    Produced,
    Received,
    Reduced,
    TransferEnded,
    VersionArrived,
)
from lockstep.protocol.core.ids import Incarnation, Role, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.machine import Machine
from lockstep.protocol.core.messages import Coordinates, View
from lockstep.protocol.core.speakers import may_say
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.member import MemberMachine
from lockstep.protocol.server.server_machine import ServerMachine
from lockstep.protocol.worker.caller_machine import CallerMachine
from lockstep.protocol.worker.collective_machine import CollectiveMachine
from lockstep.protocol.worker.worker_machine import WorkerMachine

_OF_TENSORS = frozenset(
    {
        BucketApplied,
        BucketMeasured,
        BucketTaken,
        GradientArrived,
        MeanArrived,
        MeanMade,
        Produced,
        Reduced,
        TransferEnded,
        VersionArrived,
    }
)
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
        deputy: DeputyMachine | None = None,
    ) -> None:
        """``roles``: at most one worker and one server. ``deputy``: on a server that may become the coordinator."""
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
        self.deputy = deputy
        beside = tuple(machine for machine in (coordinator, member, self.caller, deputy) if machine is not None)
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
        if isinstance(event, Received) and isinstance(event.message, View):
            self._follow(event, event.message)
        if isinstance(event, Received) and isinstance(event.message, View) and not self.member.is_in(event.message):
            return []
        if isinstance(event, Received) and isinstance(event.message, Coordinates):
            return self._turn_to(event.peer, event.message, now)
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
            if not pending and self.deputy is not None:
                pending.extend(self._take_over(outgoing, now))
            if not pending:
                return outgoing
            current = pending.popleft()
            if isinstance(current, Received) and isinstance(current.message, View):
                self._follow(current, current.message)

    def _follow(self, event: Received, view: View) -> None:
        """A view may tell of a coordinator that has taken another one's place."""
        self.member.follow(event.peer, event.incarnation, view)
        self._leave_coordination_to(self.member.coordinator)

    def _leave_coordination_to(self, coordinator: TaskId) -> None:
        """A coordinator on this task that has formed no job would form another one than the job that runs."""
        if self.coordinator is not None and coordinator != self.task:
            self._machines = tuple(machine for machine in self._machines if machine is not self.coordinator)
            self.coordinator = None

    def _turn_to(self, peer: TaskId, told: Coordinates, now: float) -> list[Effect]:
        """A job is running, and this task is none of its members: it asks the server that coordinates it."""
        if peer != TaskId(self.member.coordinator.role, told.home):
            return []
        effects = self.member.turn_to(peer, told.view, now)
        self._leave_coordination_to(self.member.coordinator)
        return effects

    def _take_over(self, outgoing: list[Effect], now: float) -> list[Event]:
        """If this task has to take the coordinator's place: it does, and this is what it tells itself."""
        assert self.deputy is not None
        made = self.deputy.take_over(now)
        if made is None:
            return []
        self.coordinator, effects = made
        self._machines = (self.coordinator, *self._machines)
        effects += self._tell_strangers(self.coordinator)
        to_itself = [one for one in effects if isinstance(one, Send) and one.peer == self.task]
        outgoing += [one for one in effects if one not in to_itself]
        return [Received(self.task, self.incarnation, one.message) for one in to_itself]

    def _tell_strangers(self, coordinator: HomedCoordinator) -> list[Effect]:
        """Tasks that are here and no members, because the former coordinator ended before they could join."""
        return [Send(peer, coordinator.is_here()) for peer in self.member.strangers(coordinator.is_member)]

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
