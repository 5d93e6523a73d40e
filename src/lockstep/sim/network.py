"""The links of a simulated cluster: late, reordered, doubled and lost messages, and links that break and come back.

What a link promises is what the runtime promises its machines: between ``LinkUp`` and ``LinkLost`` of one end, and
only then, that end is told of messages and transfers of the link; the two ends are told at different times; what was
in flight when the link broke may arrive before the ``LinkLost`` of the receiving end, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from lockstep.protocol.events import Event, LinkLost, LinkUp, Received
from lockstep.protocol.ids import ClusterShape, Incarnation, Role, TaskId
from lockstep.protocol.messages import Message
from lockstep.sim.agenda import Agenda
from lockstep.sim.dice import Dice
from lockstep.sim.scenario import NetworkProfile

Deliver = Callable[[TaskId, Event], None]
Pair = tuple[TaskId, TaskId]


@dataclass(slots=True)
class Traffic:
    """What became of the messages of a run; tests look whether their network was as bad as they wanted."""

    sent: int = 0
    lost: int = 0
    doubled: int = 0
    resets: int = 0


@dataclass(slots=True)
class _End:
    task: TaskId
    peer: TaskId
    up: bool = False
    was_up: bool = False
    held: list[Event] = field(default_factory=list)
    """What came before this end was told that the link is up."""
    last_arrival: float = 0.0


class Link:
    """One pair of tasks. A *session* is the time from one opening to the next break."""

    def __init__(self, pair: Pair, network: Network) -> None:
        self.session = 0
        self.cut = True
        self.closed = False
        self._lossless = False
        self._network = network
        self._ends = {pair[0]: _End(*pair), pair[1]: _End(pair[1], pair[0])}

    def open(self) -> None:
        """Begin a new session; each end is told of it in its own time."""
        if self.closed:
            return
        self.session += 1
        self.cut = False
        for end in self._ends.values():
            end.up = end.was_up = False
            end.held.clear()
            end.last_arrival = 0.0
            self._network.after_latency(partial(self._raise, end, self.session))

    def _raise(self, end: _End, session: int) -> None:
        if session != self.session or self.cut:
            return
        end.up = end.was_up = True
        self._network.deliver(end.task, LinkUp(end.peer, self._network.incarnations[end.peer]))
        held, end.held = end.held, []
        for event in held:
            self._arrive(end, session, event)

    def carries(self, end: TaskId, session: int) -> bool:
        """Whether this end still takes part in the session."""
        return session == self.session and self._ends[end].up

    def send(self, sender: TaskId, message: Message) -> None:
        """Messages to a link that is not up are dropped, as the runtime does."""
        if not self._ends[sender].up:
            return
        network = self._network
        network.traffic.sent += 1
        receiver = self._ends[self._ends[sender].peer]
        if network.loses_message(sender, receiver.task, message):
            network.traffic.lost += 1
            return
        event = Received(sender, network.incarnations[sender], message)
        copies = 2 if network.happens(network.profile.duplicate_chance) else 1
        network.traffic.doubled += copies - 1
        for _ in range(copies):
            self._post(receiver, event)
        self.break_by_chance()

    def _post(self, receiver: _End, event: Event) -> None:
        time = self._network.agenda.now + self._network.delay()
        if self._network.profile.in_order:
            time = max(time, receiver.last_arrival)
        receiver.last_arrival = max(time, receiver.last_arrival)
        session = self.session
        self._network.agenda.at(time, lambda: self._arrive(receiver, session, event))

    def _arrive(self, end: _End, session: int, event: Event) -> None:
        if session == self.session and not end.was_up and not self.cut:
            end.held.append(event)
            return
        if not self.carries(end.task, session) or not self.survives():
            self._network.traffic.lost += 1
            return
        self._network.deliver(end.task, event)

    def survives(self) -> bool:
        """Whether something in flight still gets through; always, unless the link is broken already."""
        return not self.cut or self._lossless or self._network.dice.chance(0.5)

    def break_by_chance(self) -> None:
        """Links break at messages and transfers rather than at times of day: that is where it matters."""
        network = self._network
        if network.traffic.resets < network.profile.max_resets and network.happens(network.profile.reset_chance):
            self.reset("connection reset")

    def reset(self, reason: str) -> None:
        """Break now, tell both ends, open again."""
        if self.cut:
            return
        self._network.traffic.resets += 1
        self.cut = True
        delays = [self._lose_later(end, reason) for end in self._ends.values()]
        self._network.agenda.after(max(delays) + self._network.dice.seconds(self._network.profile.reopen), self.open)

    def _lose_later(self, end: _End, reason: str, not_before: float = 0.0) -> float:
        session, delay = self.session, max(self._network.delay(), not_before - self._network.agenda.now)
        self._network.agenda.after(delay, lambda: self._lose(end, session, reason))
        return delay

    def _lose(self, end: _End, session: int, reason: str) -> None:
        if self.carries(end.task, session):
            end.up = False
            self._network.deliver(end.task, LinkLost(end.peer, reason))

    def close(self, leaver: TaskId, reason: str, *, orderly: bool) -> None:
        """``leaver`` is gone. After an orderly goodbye all it has said arrives first."""
        self._ends[leaver].up = False
        other = self._ends[self._ends[leaver].peer]
        if not self.cut:
            self._lossless = orderly
            self._lose_later(other, reason, other.last_arrival if orderly else 0.0)
        self.cut = self.closed = True


class Network:
    """All links of a cluster."""

    def __init__(
        self,
        shape: ClusterShape,
        profile: NetworkProfile,
        dice: Dice,
        agenda: Agenda,
        deliver: Deliver,
        incarnations: Mapping[TaskId, Incarnation],
    ) -> None:
        self.profile = profile
        self.dice = dice
        self.agenda = agenda
        self.deliver = deliver
        self.incarnations = incarnations
        self.traffic = Traffic()
        self.loses_message: Callable[[TaskId, TaskId, Message], bool] = lambda *_: False
        self.loses_tensor: Callable[[TaskId, TaskId, int, int], bool] = lambda *_: False
        """What planted faults (``faults.py``) take out on purpose; by chance nothing is lost on a link that is up."""
        self._links = {pair: Link(pair, self) for pair in linked_pairs(shape)}

    def link(self, one: TaskId, other: TaskId) -> Link:
        return self._links[(one, other) if one < other else (other, one)]

    def links_of(self, task: TaskId) -> list[tuple[TaskId, Link]]:
        """Each peer of a task, with the link to it."""
        return [(pair[pair[0] == task], link) for pair, link in self._links.items() if task in pair]

    # -- chance, until the network is quiet --

    @property
    def quiet(self) -> bool:
        return self.agenda.now >= self.profile.quiet_after

    def happens(self, probability: float) -> bool:
        return not self.quiet and self.dice.chance(probability)

    def delay(self) -> float:
        late = self.happens(self.profile.late_chance)
        return self.dice.seconds(self.profile.late if late else self.profile.latency)

    def after_latency(self, action: Callable[[], None]) -> None:
        self.agenda.after(self.delay(), action)


def linked_pairs(shape: ClusterShape) -> list[Pair]:
    """Workers are linked with every server, servers with the coordinator."""
    tasks = sorted(shape.tasks())
    return [
        (one, other)
        for index, one in enumerate(tasks)
        for other in tasks[index + 1 :]
        if one.role is not other.role or (one.role is Role.SERVER and shape.coordinator in (one, other))
    ]
