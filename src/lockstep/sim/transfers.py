"""How the bytes of one bucket move from one task to another.

A *copy* reads the source half by half, lands half by half in a region of the receiver, and is then reported there;
the sender is told that its source is free once it has been read, whenever that news comes through. A *loan* moves
nothing: the receiver reads the sender's own memory, and the sender is told once it has been released.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.protocol.events import TransferEnded
from lockstep.protocol.ids import BucketId, TaskId
from lockstep.sim.memory import Cell, Tag
from lockstep.sim.network import Link, Network


@dataclass(frozen=True, slots=True)
class Route:
    """Between whom, over which session of their link."""

    link: Link
    session: int
    sender: TaskId
    receiver: TaskId

    def sender_is_up(self) -> bool:
        return self.link.carries(self.sender, self.session)

    def receiver_is_up(self) -> bool:
        return self.link.carries(self.receiver, self.session)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Which bucket, as the sender's machine knows it: its step or version."""

    number: int
    bucket: BucketId


class Transfer:
    """What copies and loans have in common: their end is told to the sender once, unless its link is lost before."""

    def __init__(self, network: Network, route: Route, parcel: Parcel) -> None:
        self.network = network
        self.route = route
        self.parcel = parcel
        self._ended = False

    def is_lost(self) -> bool:
        """Whether a planted fault takes this transfer out: it counts as sent, and never arrives."""
        route, parcel = self.route, self.parcel
        return self.network.loses_tensor(route.sender, route.receiver, parcel.number, parcel.bucket)

    def end(self, ok: bool) -> None:
        """Tell the sender, in the network's time, that its source is free."""
        if self._ended:
            return
        self._ended = True
        self.network.after_latency(lambda: self._tell(ok))

    def _tell(self, ok: bool) -> None:
        if self.route.sender_is_up():
            event = TransferEnded(self.route.receiver, self.parcel.number, self.parcel.bucket, ok)
            self.network.deliver(self.route.sender, event)


class Lanes:
    """Copies into the same bytes over the same session of a link land in the order in which they were started."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[TaskId, int, str], list[Copy]] = {}

    def enter(self, copy: Copy) -> None:
        self._lane(copy).append(copy)

    def is_first(self, copy: Copy) -> bool:
        return self._lane(copy)[0] is copy

    def leave(self, copy: Copy) -> None:
        """It has landed or never will."""
        lane = self._lane(copy)
        was_first = lane[0] is copy
        lane.remove(copy)
        if was_first and lane:
            lane[0].may_land()

    def _lane(self, copy: Copy) -> list[Copy]:
        return self._waiting.setdefault((copy.route.receiver, copy.route.session, copy.target.name), [])


class Copy(Transfer):
    """Bytes go from one cell to another."""

    def __init__(
        self,
        network: Network,
        route: Route,
        parcel: Parcel,
        source: Cell,
        target: Cell,
        lanes: Lanes,
        on_arrived: Callable[[], None],
    ) -> None:
        super().__init__(network, route, parcel)
        self.target = target
        self._source = source
        self._lanes = lanes
        self._on_arrived = on_arrived
        self._read: list[Tag | None] = []
        self._landed = 0
        self._over = False

    def start(self) -> None:
        self._lanes.enter(self)
        if self.is_lost():
            self._finish()
            self.end(ok=True)
            return
        if self.network.happens(self.network.profile.transfer_failure_chance):
            self.network.after_latency(self._fail)
        else:
            self.network.after_latency(self._read_half if self.network.profile.torn else self._move_at_once)

    @property
    def reads(self) -> bool:
        """Whether the source must not change now."""
        return not self._over and len(self._read) < 2 and self.route.sender_is_up()

    def _fail(self) -> None:
        self._finish()
        self.end(ok=False)

    def _read_half(self) -> None:
        if not self.route.sender_is_up() or not self.route.link.survives():
            self._finish()
            return
        self._read.append(self._source.halves[len(self._read)])
        if len(self._read) == 1:
            self.network.after_latency(self._read_half)
            return
        self.end(ok=True)
        if self._lanes.is_first(self):
            self.network.after_latency(self._land_half)

    def may_land(self) -> None:
        """The copy before this one is over."""
        if len(self._read) == 2:
            self.network.after_latency(self._land_half)

    def _land_half(self) -> None:
        if not self.route.receiver_is_up() or not self.route.link.survives():
            self._finish()
            return
        self.target.write(self._landed, self._read[self._landed])
        self._landed += 1
        if self._landed == 1:
            self.network.after_latency(self._land_half)
        else:
            self._finish()
            self._report()

    def _move_at_once(self) -> None:
        """The short form, for large clusters: read and landed in one moment."""
        if not self._lanes.is_first(self):
            self.network.after_latency(self._move_at_once)
            return
        if not self.route.sender_is_up() or not self.route.receiver_is_up() or not self.route.link.survives():
            self._finish()
            return
        for half in (0, 1):
            self.target.write(half, self._source.halves[half])
        self._finish()
        self.end(ok=True)
        self._report()

    def _finish(self) -> None:
        """Nothing of this copy lands any more."""
        self._over = True
        self._lanes.leave(self)

    def _report(self) -> None:
        copies = 2 if self.network.happens(self.network.profile.duplicate_chance) else 1
        for _ in range(copies):
            self.network.after_latency(self._arrive)

    def _arrive(self) -> None:
        if self.route.receiver_is_up() and self.route.link.survives():
            self._on_arrived()


class Loan(Transfer):
    """The receiver reads the sender's own cell until it has released every loan of it."""

    def __init__(
        self, network: Network, route: Route, parcel: Parcel, source: Cell, on_lent: Callable[[Loan], None]
    ) -> None:
        super().__init__(network, route, parcel)
        self.source = source
        self._on_lent = on_lent
        self._outstanding = 0

    def start(self) -> None:
        if self.is_lost():
            self.end(ok=True)
            return
        if self.network.happens(self.network.profile.transfer_failure_chance):
            self.network.after_latency(lambda: self.end(ok=False))
            return
        copies = 2 if self.network.happens(self.network.profile.duplicate_chance) else 1
        self._outstanding = copies
        for _ in range(copies):
            self.network.after_latency(self._arrive)

    def _arrive(self) -> None:
        if self.route.receiver_is_up() and self.route.link.survives():
            self._on_lent(self)

    def release(self) -> None:
        self._outstanding -= 1
        if self._outstanding == 0:
            self.end(ok=True)
