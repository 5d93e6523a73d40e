"""The links of a simulated cluster: late, reordered, doubled and lost messages, and links that break and come back.

A link promises what the runtime promises its machines: an end receives messages and transfers of the link only between
its ``LinkUp`` and its ``LinkLost``; the two ends are notified at different times; what was in flight when the link
broke may arrive before the ``LinkLost`` of the receiving end, or never.

A way can be *blocked* (a partition, in one direction or both): the connection stays open, as over TCP for many
minutes, and what is sent meanwhile arrives once the way is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

from lockstep.protocol.core.events import Event, LinkLost, LinkUp, Received
from lockstep.protocol.core.ids import ClusterShape, Incarnation, TaskId
from lockstep.protocol.core.messages import Message
from lockstep.sim.agenda import Agenda
from lockstep.sim.network_faults import Chance, NetworkFaults
from lockstep.sim.nic import adapters
from lockstep.sim.rng import SeededRandom
from lockstep.sim.scenario import Mishap, NetworkProfile
from lockstep.sim.slow_start import SendWindow

Deliver = Callable[[TaskId, Event], None]
Pair = tuple[TaskId, TaskId]
AGAIN = 0.3
"""How soon after a blocked way is free the senders try again."""
_SURVIVAL_SALT = 31


@dataclass(slots=True)
class SimulatedTraffic:
    """What happened to the messages of a run; tests check that their network was as bad as intended."""

    sent: int = 0
    lost: int = 0
    doubled: int = 0
    resets: int = 0


@dataclass(slots=True)
class SimulatedLinkEnd:
    """One end of a link, and the way that leads to it."""

    task: TaskId
    peer: TaskId
    place: int
    """Where its draws come from (see ``SeededRandom``)."""
    up: bool = False
    was_up: bool = False
    held: list[Event] = field(default_factory=list)
    """What arrived before this end was notified that the link is up."""
    last_arrival: float = 0.0
    delays: int = 0
    survivals: int = 0
    chances: dict[str, int] = field(default_factory=dict)
    blocked_from: float = 0.0
    blocked_until: float = 0.0

    def blocked(self, now: float) -> bool:
        return self.blocked_from <= now < self.blocked_until


class Link:
    """One pair of tasks. A *session* is the time from one opening to the next break."""

    __slots__ = ("_ends", "_lossless", "_network", "closed", "cut", "cut_at", "session")

    def __init__(self, pair: Pair, network: SimulatedNetwork) -> None:
        self.session = 0
        self.cut = True
        self.cut_at = 0.0
        self.closed = False
        self._lossless = False
        self._network = network
        one, other = pair
        self._ends = {
            one: SimulatedLinkEnd(one, other, network.rng.place()),
            other: SimulatedLinkEnd(other, one, network.rng.place()),
        }

    def end(self, task: TaskId) -> SimulatedLinkEnd:
        """The end of this task."""
        return self._ends[task]

    def open(self) -> None:
        """Begin a new session; each end is notified of it in its own time."""
        if self.closed or not self.cut:
            return
        free_at = max(end.blocked_until if end.blocked(self._network.agenda.now) else 0.0 for end in self.ends())
        if free_at:
            # It cannot be opened while nothing gets through; both ends keep trying.
            self._network.agenda.at(free_at + AGAIN, self.open)
            return
        if not self._may_open():
            return
        self.session += 1
        self.cut = False
        for end in self.ends():
            end.up = end.was_up = False
            end.held.clear()
            end.last_arrival = 0.0
            self._network.after_delay(end, partial(self._raise, end, self.session))

    def _may_open(self) -> bool:
        """Whether both ends would agree to a new session now; if that may change, it is tried again."""
        one, other = self._ends
        network = self._network
        if not (network.lives(one) and network.lives(other)):
            return False  # the missing task opens it when it starts
        if any(end.up for end in self.ends()) or not (network.admits(one, other) and network.admits(other, one)):
            network.agenda.after(AGAIN, self.open)
            return False
        return True

    def ends(self) -> tuple[SimulatedLinkEnd, ...]:
        return tuple(self._ends.values())

    def _raise(self, end: SimulatedLinkEnd, session: int) -> None:
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
        mine = self._ends[sender]
        if not mine.up:
            return
        network = self._network
        network.traffic.sent += 1
        receiver = self._ends[mine.peer]
        if network.loses_message is not None and network.loses_message(sender, receiver.task, message):
            network.traffic.lost += 1
            return
        event = Received(sender, network.incarnations[sender], message)
        self._post(receiver, event)
        if network.strikes(Chance.DOUBLED, receiver):
            network.traffic.doubled += 1
            self._post(receiver, event)
        self.break_by_chance(receiver)

    def _post(self, receiver: SimulatedLinkEnd, event: Event) -> None:
        network = self._network
        time = network.agenda.now + network.delay(receiver)
        if network.profile.in_order and time < receiver.last_arrival:
            time = receiver.last_arrival
        receiver.last_arrival = max(time, receiver.last_arrival)
        network.agenda.at(time, partial(self._arrive, receiver, self.session, event))

    def _arrive(self, end: SimulatedLinkEnd, session: int, event: Event) -> None:
        if session == self.session and not end.was_up and not self.cut:
            end.held.append(event)
            return
        if not self.carries(end.task, session) or not self.survives(end):
            self._network.traffic.lost += 1
            return
        self._network.deliver(end.task, event)

    def survives(self, end: SimulatedLinkEnd) -> bool:
        """Whether something in flight still gets through; always, unless the link has broken."""
        if not self.cut or self._lossless:
            return True
        end.survivals += 1
        return self._network.rng.at(end.place + _SURVIVAL_SALT, end.survivals) < 0.5

    def break_by_chance(self, way: SimulatedLinkEnd) -> None:
        """Links break at messages and transfers rather than at fixed times: that is where it matters."""
        if self._network.strikes(Chance.RESET, way):
            self.reset("connection reset")

    def reset(self, reason: str) -> None:
        """Break now, notify both ends, reopen."""
        if self.cut:
            return
        network = self._network
        network.traffic.resets += 1
        self.cut, self.cut_at = True, network.agenda.now
        delays = [self._lose_later(end, reason) for end in self.ends()]
        first = self.ends()[0]
        first.delays += 1
        again = network.rng.seconds_at(network.profile.reopen, first.place, first.delays)
        network.agenda.after(max(delays) + again, self.open)

    def _lose_later(self, end: SimulatedLinkEnd, reason: str, not_before: float = 0.0) -> float:
        # Each end finds out by itself: a blocked way between them does not delay this.
        delay = max(self._network.delay(end, blockable=False), not_before - self._network.agenda.now)
        self._network.agenda.after(delay, partial(self._lose, end, self.session, reason))
        return delay

    def _lose(self, end: SimulatedLinkEnd, session: int, reason: str) -> None:
        if self.carries(end.task, session):
            end.up = False
            self._network.deliver(end.task, LinkLost(end.peer, reason))

    def close(self, leaver: TaskId, reason: str, *, orderly: bool) -> None:
        """``leaver`` is gone. If it left in order, everything it sent arrives first."""
        self._ends[leaver].up = False
        other = self._ends[self._ends[leaver].peer]
        if not self.cut:
            self._lossless = orderly
            self._lose_later(other, reason, other.last_arrival if orderly else 0.0)
            self.cut_at = self._network.agenda.now
        self.cut = self.closed = True

    def revive(self) -> None:
        """The task that left has restarted: the link may be reopened."""
        self.closed = self._lossless = False


class SimulatedNetwork:
    """All links of a cluster."""

    def __init__(
        self,
        shape: ClusterShape,
        profile: NetworkProfile,
        rng: SeededRandom,
        agenda: Agenda,
        deliver: Deliver,
        incarnations: Mapping[TaskId, Incarnation],
        mishaps: tuple[Mishap, ...] | None = None,
    ) -> None:
        self.profile = profile
        self.rng = rng
        self.agenda = agenda
        self.deliver = deliver
        self.incarnations = incarnations
        self.traffic = SimulatedTraffic()
        self.network_faults = NetworkFaults(profile, rng, mishaps)
        self.adapters = adapters(shape, shared=profile.shared_hosts)
        self._windows: dict[tuple[TaskId, TaskId], SendWindow] = {}
        self.loses_message: Callable[[TaskId, TaskId, Message], bool] | None = None
        self.loses_tensor: Callable[[TaskId, TaskId, int, int], bool] | None = None
        """What planted faults (``faults.py``) drop on purpose; nothing is lost by chance on a link that is up."""
        self.lives: Callable[[TaskId], bool] = lambda _: True
        self.admits: Callable[[TaskId, TaskId], bool] = lambda _here, _there: True
        """Whether a task would accept a link with another one in its current state."""
        self._links: dict[TaskId, dict[TaskId, Link]] = {task: {} for task in shape.tasks()}
        for one, other in linked_pairs(shape):
            self._links[one][other] = self._links[other][one] = Link((one, other), self)

    def link(self, one: TaskId, other: TaskId) -> Link:
        return self._links[one][other]

    def links_of(self, task: TaskId) -> list[tuple[TaskId, Link]]:
        """Each peer of a task, with the link to it."""
        return list(self._links[task].items())

    # -- time on the way --

    def strikes(self, kind: Chance, way: SimulatedLinkEnd) -> Mishap | None:
        network_faults = self.network_faults
        return None if network_faults.fair else network_faults.strikes(kind, way, self.agenda.now)

    def delay(self, way: SimulatedLinkEnd, *, blockable: bool = True) -> float:
        """How long something small takes to the other end."""
        way.delays += 1
        seconds = self.rng.seconds_at(self.profile.latency, way.place, way.delays)
        late = self.strikes(Chance.LATE, way)
        if late is not None:
            seconds = late.seconds
        if blockable and way.blocked_until:
            now = self.agenda.now
            if way.blocked(now):
                seconds += way.blocked_until - now + AGAIN
        return seconds

    def after_delay(self, way: SimulatedLinkEnd, action: Callable[[], None]) -> None:
        self.agenda.after(self.delay(way), action)

    # -- bytes through the adapters --

    def limited(self, sender: TaskId, receiver: TaskId) -> bool:
        """Whether bytes between these two pass through an adapter."""
        return self.profile.bandwidth > 0 and self.adapters[sender] is not self.adapters[receiver]

    def leave(self, sender: TaskId, receiver: TaskId, nbytes: int) -> tuple[float, float]:
        """When the first and last of these bytes leave the sender's host, if they are sent now."""
        seconds = nbytes / self.profile.bandwidth
        begins = self.adapters[sender].out.take(self.agenda.now, seconds)
        if not self.profile.slow_start:
            return begins, begins + seconds
        window = self._windows.get((sender, receiver))
        if window is None:
            window = SendWindow(self.profile.bandwidth, 2 * self.profile.latency.high)
            self._windows[sender, receiver] = window
        return window.send(begins, nbytes)

    def enter(self, receiver: TaskId, nbytes: int) -> tuple[float, float]:
        """When the first and last of these bytes enter the receiver's host, if the first one arrives now."""
        seconds = nbytes / self.profile.bandwidth
        begins = self.adapters[receiver].into.take(self.agenda.now, seconds)
        return begins, begins + seconds


def linked_pairs(shape: ClusterShape) -> list[Pair]:
    """Workers are linked to every server, servers to the coordinator; without servers, all workers to each other."""
    if not shape.servers:
        return list(combinations(shape.worker_ids(), 2))
    servers, workers = shape.server_ids(), shape.worker_ids()
    with_coordinator = [(shape.coordinator, other) for other in servers if other != shape.coordinator]
    return [*with_coordinator, *((one, other) for one in servers for other in workers)]
