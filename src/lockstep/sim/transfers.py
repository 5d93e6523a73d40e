"""How the bytes of one bucket move from one task to another.

A *copy* reads the source half by half, lands half by half in a region of the receiver, and is then reported there;
once the source has been read, the sender is notified (sooner or later) that it is free. A *loan* moves nothing: the
receiver reads the sender's own memory, and the sender is notified once it has been released.

Where adapters have a limit, a copy first queues for the sender's, then for the receiver's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lockstep.protocol.core.events import TensorKind, TransferEnded
from lockstep.protocol.core.ids import BucketId, TaskId
from lockstep.sim.memory import Cell, Tag
from lockstep.sim.network import Link, SimulatedLinkEnd, SimulatedNetwork
from lockstep.sim.network_faults import Chance


@dataclass(frozen=True, slots=True)
class Route:
    """Between which tasks, over which session of their link."""

    link: Link
    session: int
    sender: TaskId
    receiver: TaskId

    @property
    def way(self) -> SimulatedLinkEnd:
        return self.link.end(self.receiver)

    def sender_is_up(self) -> bool:
        return self.link.carries(self.sender, self.session)

    def receiver_is_up(self) -> bool:
        return self.link.carries(self.receiver, self.session)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Which bucket, as the sender's machine knows it (its step or version), and how large it is."""

    kind: TensorKind
    number: int
    bucket: BucketId
    nbytes: int = 0


class SimulatedTransfer:
    """What copies and loans have in common: the sender is notified of the end once, unless its link is lost first."""

    def __init__(self, network: SimulatedNetwork, route: Route, parcel: Parcel) -> None:
        self.network = network
        self.route = route
        self.parcel = parcel
        self._ended = False

    def is_lost(self) -> bool:
        """Whether a planted fault drops this transfer: it counts as sent and never arrives."""
        if self.network.loses_tensor is None:
            return False
        route, parcel = self.route, self.parcel
        return self.network.loses_tensor(route.sender, route.receiver, parcel.number, parcel.bucket)

    def end(self, ok: bool) -> None:
        """Notify the sender, after the network's delay, that its source is free."""
        if self._ended:
            return
        self._ended = True
        self.network.after_delay(self.route.link.end(self.route.sender), partial(self._tell, ok))

    def _tell(self, ok: bool) -> None:
        if self.route.sender_is_up():
            event = TransferEnded(self.route.receiver, self.parcel.number, self.parcel.bucket, self.parcel.kind, ok)
            self.network.deliver(self.route.sender, event)

    def later(self, action: Callable[[], None]) -> None:
        """Run something after the delay of this transfer's way."""
        self.network.after_delay(self.route.way, action)


class Lanes:
    """Copies into the same bytes over the same session of a link land in the order in which they started."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[TaskId, int, int], list[Copy]] = {}

    def enter(self, copy: Copy) -> None:
        self._waiting.setdefault(copy.lane, []).append(copy)

    def is_first(self, copy: Copy) -> bool:
        return self._waiting[copy.lane][0] is copy

    def leave(self, copy: Copy) -> None:
        """It has landed or never will."""
        lane = self._waiting[copy.lane]
        was_first = lane[0] is copy
        lane.remove(copy)
        if was_first and lane:
            lane[0].may_land()
        elif not lane:
            del self._waiting[copy.lane]


class Copy(SimulatedTransfer):
    """Bytes go from one cell to another."""

    def __init__(
        self,
        network: SimulatedNetwork,
        route: Route,
        parcel: Parcel,
        source: Cell,
        target: Cell,
        lanes: Lanes,
        on_arrived: Callable[[], None],
    ) -> None:
        super().__init__(network, route, parcel)
        self.lane = (route.receiver, route.session, id(target))
        self._target = target
        self._source = source
        self._lanes = lanes
        self._on_arrived = on_arrived
        self._read: list[Tag | None] = []
        self._landed = 0
        self._over = False
        self._limited = network.limited(route.sender, route.receiver)

    def start(self) -> None:
        self._lanes.enter(self)
        if self.is_lost():
            self._finish()
            self.end(ok=True)
        elif self.network.strikes(Chance.FAILED, self.route.way):
            self.later(self._fail)
        elif self.network.profile.torn:
            self._start_reading()
        else:
            self._start_moving()

    @property
    def reads(self) -> bool:
        """Whether the source must not change now."""
        return not self._over and len(self._read) < 2 and self.route.sender_is_up()

    def _fail(self) -> None:
        self._finish()
        self.end(ok=False)

    # -- half by half --

    def _start_reading(self) -> None:
        if not self._limited:
            self.later(self._read_half)
            return
        begins, ends = self.network.leave(self.route.sender, self.route.receiver, self.parcel.nbytes)
        self.network.agenda.at(begins, self._read_half)
        self.network.agenda.at(ends, self._read_half)

    def _read_half(self) -> None:
        if self._over:
            return
        if not self.route.sender_is_up() or not self.route.link.survives(self.route.way):
            self._finish()
            return
        self._read.append(self._source.halves[len(self._read)])
        if len(self._read) == 1:
            if not self._limited:
                self.later(self._read_half)
            return
        self.end(ok=True)
        self.may_land()

    def may_land(self) -> None:
        """Land if the previous copy is over and this one has been read."""
        if len(self._read) == 2 and self._lanes.is_first(self):
            self.later(self._land_half if not self._limited else self._enter)

    def _enter(self) -> None:
        begins, ends = self.network.enter(self.route.receiver, self.parcel.nbytes)
        self.network.agenda.at(begins, self._land_half)
        self.network.agenda.at(ends, self._land_half)

    def _land_half(self) -> None:
        if self._over:
            return
        if not self.route.receiver_is_up() or not self.route.link.survives(self.route.way):
            self._finish()
            return
        self._target.write(self._landed, self._read[self._landed])
        self._landed += 1
        if self._landed == 2:
            self._finish()
            self._report()
        elif not self._limited:
            self.later(self._land_half)

    # -- at once: the short form, for large clusters --

    def _start_moving(self) -> None:
        if not self._limited:
            self.later(self._move)
            return
        begins, ends = self.network.leave(self.route.sender, self.route.receiver, self.parcel.nbytes)
        delay = self.network.delay(self.route.way)
        self.network.agenda.at(begins + delay, partial(self._queue_at_receiver, ends + delay))

    def _queue_at_receiver(self, left_at: float) -> None:
        """The first byte has arrived; the last arrives when the sender and the receiver's queue allow it."""
        _, ends = self.network.enter(self.route.receiver, self.parcel.nbytes)
        self.network.agenda.at(max(ends, left_at), self._move)

    def _move(self) -> None:
        if not self._lanes.is_first(self):
            self.later(self._move)
            return
        if (
            not self.route.sender_is_up()
            or not self.route.receiver_is_up()
            or not self.route.link.survives(self.route.way)
        ):
            self._finish()
            return
        for half in (0, 1):
            self._target.write(half, self._source.halves[half])
        self._finish()
        self.end(ok=True)
        self._report()

    def _finish(self) -> None:
        """Nothing more of this copy lands."""
        self._over = True
        self._lanes.leave(self)

    def _report(self) -> None:
        if self.network.network_faults.fair and not self.network.profile.torn:
            self._arrive()
            return
        self.later(self._arrive)
        if self.network.strikes(Chance.DOUBLED, self.route.way):
            self.later(self._arrive)

    def _arrive(self) -> None:
        if self.route.receiver_is_up() and self.route.link.survives(self.route.way):
            self._on_arrived()


class OwnLoan:
    """One role of a task reads the other's cell: nothing travels, and the sender is told once it is released."""

    def __init__(self, source: Cell, on_released: Callable[[], None]) -> None:
        self.source = source
        self.release = on_released


class SimulatedLoan(SimulatedTransfer):
    """The receiver reads the sender's own cell until it has released every loan of it."""

    def __init__(
        self,
        network: SimulatedNetwork,
        route: Route,
        parcel: Parcel,
        source: Cell,
        on_lent: Callable[[SimulatedLoan], None],
    ) -> None:
        super().__init__(network, route, parcel)
        self.source = source
        self._on_lent = on_lent
        self._outstanding = 0

    def start(self) -> None:
        if self.is_lost():
            self.end(ok=True)
            return
        if self.network.strikes(Chance.FAILED, self.route.way):
            self.later(partial(self.end, False))
            return
        self._outstanding = 2 if self.network.strikes(Chance.DOUBLED, self.route.way) else 1
        for _ in range(self._outstanding):
            self.later(self._arrive)

    def _arrive(self) -> None:
        if self.route.receiver_is_up() and self.route.link.survives(self.route.way):
            self._on_lent(self)

    def release(self) -> None:
        self._outstanding -= 1
        if self._outstanding == 0:
            self.end(ok=True)
