"""What the simulated half of every task shares: clock, chance, network, memory and the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.protocol.events import Event
from lockstep.protocol.ids import Incarnation, TaskId
from lockstep.protocol.messages import Ticket
from lockstep.sim.agenda import Agenda
from lockstep.sim.dice import Dice
from lockstep.sim.memory import Memory, Violation
from lockstep.sim.network import Link, Network
from lockstep.sim.oracle import Oracle
from lockstep.sim.scenario import Scenario
from lockstep.sim.transfers import Route


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Everything around the machines of one run."""

    scenario: Scenario
    agenda: Agenda
    dice: Dice
    network: Network
    memory: Memory
    oracle: Oracle
    incarnations: Mapping[TaskId, Incarnation]
    handle: Callable[[TaskId, Event], None]
    """Hand an event to the machines of a task; nothing happens if it has left."""
    lives: Callable[[TaskId], bool]

    def after(self, task: TaskId, seconds: float, action: Callable[[], None]) -> None:
        """Work of this task takes time; what is left of it ends with the task."""

        def act_if_alive() -> None:
            if self.lives(task):
                action()

        self.agenda.after(seconds, act_if_alive)

    def route(self, sender: TaskId, receiver: TaskId, ticket: Ticket) -> Route:
        """The way of a new transfer; a ticket of another session of the link would write into freed memory."""
        link = self.network.link(sender, receiver)
        if not link.carries(sender, ticket.region):
            raise Violation(f"{sender} uses a ticket of session {ticket.region} in session {link.session}")
        return Route(link, link.session, sender, receiver)


def ticket_for(link: Link, nbytes: int) -> Ticket:
    """A ticket is good for one session of a link."""
    return Ticket("simulated", link.session, nbytes, 0, b"")
