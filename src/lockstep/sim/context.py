"""What the simulated half of every task shares: clock, random draws, network, memory and the oracles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lockstep.protocol.core.events import Event, Received
from lockstep.protocol.core.ids import Incarnation, JobId, TaskId
from lockstep.protocol.core.messages import Message, ParameterEntry, Ticket
from lockstep.protocol.core.plan import Plan, make_plan
from lockstep.sim.agenda import Agenda
from lockstep.sim.disk import Disk
from lockstep.sim.memory import SimulatedMemory
from lockstep.sim.network import Link, SimulatedNetwork
from lockstep.sim.numbers import Numbers
from lockstep.sim.oracle import Oracle
from lockstep.sim.rng import SeededRandom
from lockstep.sim.scenario import Scenario
from lockstep.sim.task import SimTask
from lockstep.sim.transfers import Route
from lockstep.sim.violation import Rule, Violation


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """Everything around the machines of one run."""

    scenario: Scenario
    agenda: Agenda
    rng: SeededRandom
    network: SimulatedNetwork
    memory: SimulatedMemory
    oracles: Mapping[JobId, Oracle]
    disk: Disk
    numbers: Numbers | None
    """None if no step is computed again."""
    incarnations: Mapping[TaskId, Incarnation]
    tasks: Mapping[TaskId, SimTask]
    handle: Callable[[TaskId, Event], None]
    """Hand an event to the machines of a task; nothing happens if it has left."""
    plans: dict[tuple[tuple[ParameterEntry, ...], int], Plan] = field(default_factory=dict)

    def lives(self, task: TaskId) -> bool:
        return self.tasks[task].lives

    def job_of(self, task: TaskId) -> JobId:
        """The job that this task is a member of, or would be."""
        coordinator = self.tasks[self.scenario.shape.coordinator].machine.coordinator
        assert coordinator is not None
        return self.tasks[task].machine.member.job or coordinator.job

    def after(self, task: TaskId, seconds: float, action: Callable[[], None]) -> None:
        """Do work that takes time; it ends with the task, and waits while the task is frozen."""
        worker = self.tasks[task]

        def act_if_alive() -> None:
            # A restarted task is another one: the work of its former incarnation is gone.
            if worker.lives:
                worker.act(action)

        self.agenda.after(seconds, act_if_alive)

    def soon(self, task: TaskId, event: Event) -> None:
        """Hand over an event that the task itself caused, once it has carried out the effects of the current one."""
        self.after(task, 0.0, lambda: self.handle(task, event))

    def tell_itself(self, task: TaskId, message: Message) -> None:
        """A message whose content only the task around the machines knows, from one of its roles to the other."""
        self.soon(task, Received(task, self.incarnations[task], message))

    def plan(self, parameters: tuple[ParameterEntry, ...], bucket_bytes: int) -> Plan:
        """Every task computes the same plan, so it is computed once."""
        key = (parameters, bucket_bytes)
        if key not in self.plans:
            self.plans[key] = make_plan(parameters, len(self.scenario.shape.homes), bucket_bytes)
        return self.plans[key]

    def route(self, sender: TaskId, receiver: TaskId, ticket: Ticket) -> Route | None:
        """The route of a new transfer; a ticket of another session of the link would write into freed memory.

        None if the machines do not know yet that the link has ended, because their task is behind or frozen.
        """
        link = self.network.link(sender, receiver)
        if not link.carries(sender, ticket.region):
            if self.tasks[sender].behind:
                return None
            raise Violation(
                Rule.STALE_TICKET, f"{sender} uses a ticket of session {ticket.region} in session {link.session}"
            )
        return Route(link, link.session, sender, receiver)


def ticket_for(link: Link, nbytes: int) -> Ticket:
    """A ticket is valid for one session of a link."""
    return Ticket("simulated", link.session, nbytes, 0, b"")


def own_ticket(nbytes: int) -> Ticket:
    """Between two roles of one task there is no link."""
    return Ticket("simulated", 0, nbytes, 0, b"")
