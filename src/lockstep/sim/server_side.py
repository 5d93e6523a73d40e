"""The rest of a simulated server: its memory, its store, and how it carries out the effects of its machines."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.protocol.effects import Apply, Effect, GiveBack, GrantRegion, Prepare, SendVersion
from lockstep.protocol.events import BucketApplied, GradientArrived, Prepared, VersionArrived
from lockstep.protocol.ids import BucketId, Incarnation, Step, TaskId
from lockstep.protocol.messages import Grant, Layout
from lockstep.protocol.plan import Plan
from lockstep.sim.memory import Cell, GradientTag, VersionTag
from lockstep.sim.scenario import Span
from lockstep.sim.surroundings import Surroundings, ticket_for
from lockstep.sim.transfers import Copy, Lanes, Loan, Parcel
from lockstep.sim.violation import Rule, Violation


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A gradient that is here and not given back: where its bytes are, and the loan where they are not ours."""

    cell: Cell
    loan: Loan | None

    def release(self) -> None:
        if self.loan is not None:
            self.loan.release()


class ServerSide:
    """One server without its machines."""

    def __init__(self, task: TaskId, around: Surroundings) -> None:
        self.task = task
        self.arrivals: dict[int, _Arrival] = {}
        self._around = around
        self._plan: Plan | None = None
        self._shard_bytes = 0
        self._numbered = 0
        self._copies: dict[tuple[BucketId, int], list[Copy]] = {}
        self._lanes = Lanes()
        self._place = around.dice.place()
        self._draws = 0
        self.store_free_at = 0.0
        self.store_busy = 0.0
        """Seconds for which the store has worked."""
        self.slowed: tuple[Step, float] | None = None
        """From which step on each update takes how much longer (a planted fault)."""
        self.slow_is_busy = True
        self.applying: tuple[Apply, float] | None = None
        """The update that the store is at, and since when."""

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Prepare(layout=layout):
                self._around.after(
                    self.task, self._seconds(self._around.scenario.training.prepare), lambda: self._prepare(layout)
                )
            case GrantRegion(peer=peer):
                self._grant(peer)
            case SendVersion():
                self._send_version(effect)
            case Apply():
                self._begin_apply(effect)
            case GiveBack(arrival=arrival):
                self.arrivals.pop(arrival).release()
            case _:
                raise TypeError(f"a server does not carry out {effect}")

    def _seconds(self, span: Span) -> float:
        self._draws += 1
        return self._around.dice.seconds_at(span, self._place, self._draws)

    # -- memory --

    def _prepare(self, layout: Layout) -> None:
        self._plan = self._around.plan(layout.parameters, layout.bucket_bytes)
        self._shard_bytes = self._plan.shard_room(self.task.index)
        self._around.handle(self.task, Prepared(self._plan))

    def _grant(self, peer: TaskId) -> None:
        assert self._plan is not None
        link = self._around.network.link(self.task, peer)
        link.send(self.task, Grant(ticket_for(link, self._shard_bytes)))

    # -- gradients come in --

    def take(
        self, worker: TaskId, life: Incarnation, step: Step, bucket: BucketId, edition: int, where: Cell | Loan
    ) -> None:
        """All bytes are here, in ``where``."""
        self._numbered += 1
        number = self._numbered
        self.arrivals[number] = _Arrival(where.source, where) if isinstance(where, Loan) else _Arrival(where, None)
        self._around.handle(self.task, GradientArrived(worker, life, step, bucket, edition, number))

    # -- the store --

    def _begin_apply(self, effect: Apply) -> None:
        around = self._around
        gradients = around.oracle.gradients_of(effect)
        given_by = tuple(gradient.worker for gradient in gradients)
        if effect.contributors != given_by:
            raise Violation(
                Rule.WRONG_GRADIENTS, f"{effect} is made of gradients of the wrong workers; right are {given_by}"
            )
        if len(effect.arrivals) != len(gradients):
            raise Violation(
                Rule.WRONG_GRADIENTS, f"{effect} is made of {len(effect.arrivals)} gradients, not {len(gradients)}"
            )
        taken = [self.arrivals.pop(number) for number in effect.arrivals]
        source, target = self._slots(effect)
        source.expect(around.oracle.base_of(effect), f"{self.task} before step {effect.step}")
        for arrival, gradient in zip(taken, gradients, strict=True):
            arrival.cell.expect(gradient, f"{self.task} at the beginning of its update")
            arrival.cell.readers += 1
        tag = around.oracle.next_tag(effect, gradients)
        self._refuse_overwriting(effect)
        target.write(0, tag)
        begins, ends = self._store_time(effect)
        around.after(self.task, begins - around.agenda.now, lambda: self._at_work(effect))
        around.after(self.task, ends - around.agenda.now, lambda: self._end_apply(effect, taken, gradients, tag))

    def _store_time(self, effect: Apply) -> tuple[float, float]:
        """When this update begins and ends: the store does one after the other."""
        training, now = self._around.scenario.training, self._around.agenda.now
        seconds = self._seconds(training.apply)
        if training.store_bandwidth:
            assert self._plan is not None
            moved = (len(effect.contributors) + 2) * self._plan.buckets[effect.bucket].nbytes
            seconds += moved / training.store_bandwidth
        if self.slowed is not None and effect.step >= self.slowed[0]:
            seconds += self.slowed[1]
        begins = max(now, self.store_free_at)
        self.store_free_at = begins + seconds
        self.store_busy += seconds
        return begins, begins + seconds

    def _at_work(self, effect: Apply) -> None:
        self.applying = (effect, self._around.agenda.now)

    def _slots(self, effect: Apply) -> tuple[Cell, Cell]:
        if effect.from_slot == effect.to_slot:
            raise Violation(Rule.IN_PLACE, f"step {effect.step} updates bucket {effect.bucket} in place")
        slot = self._around.memory.slot
        return slot(self.task, effect.bucket, effect.from_slot), slot(self.task, effect.bucket, effect.to_slot)

    def _refuse_overwriting(self, effect: Apply) -> None:
        copies = self._copies.get((effect.bucket, effect.to_slot), [])
        reading = [copy for copy in copies if copy.reads]
        if reading:
            raise Violation(
                Rule.OVERWRITTEN,
                f"{self.task} overwrites slot {effect.to_slot} of bucket {effect.bucket} in step {effect.step} "
                f"while version {reading[0].parcel.number} is read from it for {reading[0].route.receiver}",
            )
        copies.clear()

    def _end_apply(
        self, effect: Apply, taken: list[_Arrival], gradients: tuple[GradientTag, ...], tag: VersionTag
    ) -> None:
        self.applying = None
        source, target = self._slots(effect)
        source.expect(self._around.oracle.base_of(effect), f"{self.task} after step {effect.step}")
        for arrival, gradient in zip(taken, gradients, strict=True):
            arrival.cell.expect(gradient, f"{self.task} at the end of its update")
            arrival.cell.readers -= 1
            arrival.release()
        target.write(1, tag)
        self._around.oracle.made(tag)
        self._around.handle(self.task, BucketApplied(effect.bucket, effect.step))

    # -- parameters go out --

    def _send_version(self, effect: SendVersion) -> None:
        around = self._around
        assert self._plan is not None
        route = around.route(self.task, effect.peer, effect.ticket)
        if route is None:
            return
        arrived = VersionArrived(self.task, effect.version, effect.bucket)
        copy = Copy(
            around.network,
            route,
            Parcel(effect.version, effect.bucket, self._plan.buckets[effect.bucket].nbytes),
            around.memory.slot(self.task, effect.bucket, effect.slot),
            around.memory.parameters(effect.peer, effect.bucket),
            self._lanes,
            lambda: around.handle(effect.peer, arrived),
        )
        self._copies.setdefault((effect.bucket, effect.slot), []).append(copy)
        copy.start()
        route.link.break_by_chance(route.way)
