"""The machine of one server without synchronisation: each worker's gradient is applied by itself, as it comes.

Every worker has its own step. A bucket is updated for one worker at a time, from one slot of the store to another,
and the new value goes back to the worker whose gradient made it. Nothing is committed, no task waits for another, and
so the result depends on the order of arrival: that is what ``--cross_replica_sync=False`` asks for.

A worker that hangs while it receives a value keeps reading the slot of that value. Over shared memory that is the rule:
the receiver copies, so the transfer lasts until it wakes up. With two slots every second update would wait for it.
Therefore the store has one slot more than there are workers: each of the others may hang and hold one, and two are left
for the worker that still trains.
"""

from __future__ import annotations

from collections import deque

from lockstep.protocol.core.effects import Apply, Effect, GiveBack
from lockstep.protocol.core.events import BucketApplied, GradientArrived, Prepared
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, BucketId, ClusterShape, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.messages import Done, GroupRates, Rates, Seal
from lockstep.protocol.server.ledger import (
    NO_GRADIENT,
    Arrival,
    Ledger,
    ServedBucketState,
    ServedBucketTrigger,
    WorkerSide,
    sealed_edition,
)
from lockstep.protocol.server.seals import without_gradient
from lockstep.protocol.server.server_machine import ServerMachine


class AsyncServerMachine(ServerMachine):
    """One server's shard in asynchronous training."""

    def __init__(self, task: TaskId, shape: ClusterShape, journal: Journal, *, eager: bool = True) -> None:
        super().__init__(task, shape, journal, eager=eager)
        self._steps: dict[tuple[TaskId, BucketId], Step] = {}
        """The step whose gradient is expected next, for each worker and bucket."""
        self._queues: dict[BucketId, deque[tuple[TaskId, int]]] = {}
        """Gradients that may be applied, with their arrival numbers, in the order in which they became applicable."""
        self._unsealed: dict[tuple[TaskId, BucketId], Arrival] = {}
        """Gradients that are here but may still be edited; kept out of the queue so that nothing waits for them."""
        self._slots: dict[BucketId, int] = {}
        """Which slot of the store holds the newest value of each bucket."""
        self._targets: dict[BucketId, int] = {}
        """Which slot the running update of a bucket writes to."""
        self._latest_rates: Rates | None = None

    @property
    def slots(self) -> int:
        return max(2, self.shape.workers + 1)

    def _on_prepared(self, event: Prepared, now: float) -> list[Effect]:
        for bucket in event.plan.buckets_of(self.task.index):
            self._queues[bucket.id] = deque()
            self._slots[bucket.id] = 0
            for worker in self._workers:
                self._steps[worker, bucket.id] = 0
        return super()._on_prepared(event, now)

    # -- steps are per worker --

    def _expected_step(self, side: WorkerSide) -> Step:
        if self.step == INITIAL_STEP:
            return INITIAL_STEP
        return min((self._steps[side.id, b] for b in self._ledgers), default=self.step)

    def _have(self, side: WorkerSide) -> tuple[BucketId, ...]:
        if self.step == INITIAL_STEP:
            return super()._have(side)
        step = self._expected_step(side)
        return tuple(b for b in self._ledgers if self._steps[side.id, b] > step or self._is_here(side.id, b))

    def _queued(self, worker: TaskId, bucket: BucketId) -> bool:
        return any(sender == worker for sender, _ in self._queues[bucket])

    def _is_here(self, worker: TaskId, bucket: BucketId) -> bool:
        return (worker, bucket) in self._unsealed or self._queued(worker, bucket)

    def _on_seal(self, side: WorkerSide, seal: Seal, now: float) -> list[Effect]:
        if side.seal is not None and seal.step <= side.seal.step:
            return []
        side.seal = seal
        effects: list[Effect] = []
        for ledger in self._ledgers.values():
            if self._steps[side.id, ledger.bucket] == seal.step:
                effects += self._settle(side, ledger, now)
        return effects

    def _settle(self, side: WorkerSide, ledger: Ledger, now: float) -> list[Effect]:
        """The worker has sealed its step: what is here is queued, or handed back if it is not what was sealed."""
        assert side.seal is not None
        bucket = ledger.bucket
        final = sealed_edition(side.seal, self._steps[side.id, bucket], bucket)
        here = self._unsealed.pop((side.id, bucket), None)
        if final == NO_GRADIENT.edition or side.seal.void:
            effects: list[Effect] = [] if here is None else [GiveBack(here.number)]
            return effects + self._pass_over(side, ledger, now)
        if here is None:
            return []
        if here.edition != final:
            return [GiveBack(here.number)]
        self._queues[bucket].append((side.id, here.number))
        return self._apply_if_possible(ledger, now)

    def _pass_over(self, side: WorkerSide, ledger: Ledger, now: float) -> list[Effect]:
        """A bucket without a gradient has nothing to apply; its worker continues with the current value."""
        if self._queued(side.id, ledger.bucket):
            return []
        self._steps[side.id, ledger.bucket] += 1
        return self._deliver(side, ledger, now) + self._open_next(side, now)

    def _on_rates(self, side: WorkerSide, rates: Rates, now: float) -> list[Effect]:
        # There is no common step: the chief's latest rates apply to every worker.
        if side.id != CHIEF or (self._latest_rates is not None and rates.step <= self._latest_rates.step):
            return []
        self._latest_rates = rates
        return self._apply_all_possible(now)

    def _known_rates(self) -> tuple[GroupRates, ...] | None:
        """The chief's latest rates; None if it has not sent any yet; empty (the numbers that the optimizers were
        announced with) if it has left without a step."""
        if self._latest_rates is not None:
            return self._latest_rates.groups
        return () if self._workers[CHIEF].done is not None else None

    def _on_done(self, side: WorkerSide, done: Done, now: float) -> list[Effect]:
        return super()._on_done(side, done, now) + (self._apply_all_possible(now) if side.id == CHIEF else [])

    def _why_refused(self, event: GradientArrived, ledger: Ledger | None) -> str | None:
        if self.step == INITIAL_STEP:
            return super()._why_refused(event, ledger)
        side = self._workers.get(event.peer)
        if ledger is None or side is None:
            return "not a bucket of this server, or not a worker"
        if event.incarnation != side.incarnation:
            return "of another incarnation of this worker"
        expected = self._steps[event.peer, event.bucket]
        if event.step != expected:
            return f"of step {event.step}; step {expected} is expected"
        here = self._unsealed.get((event.peer, event.bucket))
        if self._queued(event.peer, event.bucket) or (here is not None and here.edition >= event.edition):
            return "a duplicate"
        final = sealed_edition(side.seal, event.step, event.bucket)
        if final is not None and event.edition != final:
            return f"edition {event.edition}; edition {final} was sealed"
        return None

    # -- a bucket is updated for one worker at a time --

    def _on_gradient_arrived(self, event: GradientArrived, now: float) -> list[Effect]:
        if self.step == INITIAL_STEP or self._why_refused(event, self._ledgers.get(event.bucket)) is not None:
            return super()._on_gradient_arrived(event, now)
        side, ledger = self._workers[event.peer], self._ledgers[event.bucket]
        side.since = now
        self._journal.record(now, Happening.ARRIVED, event.step, event.bucket, event.peer)
        if self.eager:
            self._queues[event.bucket].append((event.peer, event.arrival))
            return self._apply_if_possible(ledger, now)
        former = self._unsealed.get((event.peer, event.bucket))
        effects: list[Effect] = [] if former is None else [GiveBack(former.number)]
        self._unsealed[event.peer, event.bucket] = Arrival(event.edition, event.arrival)
        if side.seal is not None and side.seal.step == event.step:
            effects += self._settle(side, ledger, now)
        return effects

    def _apply_if_possible(self, ledger: Ledger, now: float) -> list[Effect]:
        if ledger.version == INITIAL_STEP:
            return super()._apply_if_possible(ledger, now)
        queue = self._queues[ledger.bucket]
        rates = self._known_rates()
        if ledger.state is ServedBucketState.APPLYING or not queue or rates is None:
            return []
        source = self._slots[ledger.bucket]
        # The first free one: in a healthy job two or three slots are used, and the rest stays out of the caches.
        target = next((s for s, readers in enumerate(ledger.readers) if s != source and not readers), None)
        if target is None:  # a worker has what was sent to it, and the end of that transfer is still on its way
            return []
        self._targets[ledger.bucket] = target
        for trigger in (ServedBucketTrigger.COMPLETE, ServedBucketTrigger.APPLY):  # one worker's gradient is enough
            ledger.go(trigger)
        worker, arrival = queue[0]
        step = self._steps[worker, ledger.bucket]
        self._journal.record(now, Happening.CONSUMED, step, ledger.bucket, worker)
        seals = self._seals_of((worker,), step)
        without, values = without_gradient(seals, ledger.bucket), any(seal.values for seal in seals)
        return [Apply(step, ledger.bucket, (worker,), (arrival,), 1, rates, source, target, without, values)]

    def _on_bucket_applied(self, event: BucketApplied, now: float) -> list[Effect]:
        if event.step == INITIAL_STEP:
            return super()._on_bucket_applied(event, now)
        ledger = self._ledgers[event.bucket]
        ledger.go(ServedBucketTrigger.APPLIED)
        self._slots[event.bucket] = self._targets[event.bucket]
        worker, _ = self._queues[event.bucket].popleft()
        side = self._workers[worker]
        self._steps[side.id, event.bucket] += 1
        self._journal.record(now, Happening.PRODUCED, event.step + 1, event.bucket, side.id)
        effects = self._deliver(side, ledger, now)
        effects += self._open_next(side, now)
        return effects + self._apply_if_possible(ledger, now)

    def _open_next(self, side: WorkerSide, now: float) -> list[Effect]:
        step = self._expected_step(side)
        if side.granted and all(self._steps[side.id, b] == step for b in self._ledgers):
            return [self._open(side, now)]
        return []

    # -- parameters go out: the newest value, once this worker's own gradient is in it --

    def _readable(self, ledger: Ledger, version: int, side: WorkerSide) -> bool:
        if ledger.version == INITIAL_STEP:
            return False
        return self._steps[side.id, ledger.bucket] == version

    def _slot(self, ledger: Ledger, version: int) -> int:  # noqa: ARG002 - here a slot holds the newest, not a version
        return self._slots[ledger.bucket]

    def _may_repeat(self, seconds: float, times: int) -> bool:  # noqa: ARG002 - however long it takes
        """Never on the same link: the value may have changed, and would overwrite what the worker computes with."""
        return False

    def _owed_buckets(self, side: WorkerSide) -> list[BucketId]:
        if self.step == INITIAL_STEP:
            return super()._owed_buckets(side)
        if side.done is not None:
            return []
        step = self._expected_step(side)
        return [b for b in self._ledgers if self._steps[side.id, b] == step and not self._is_here(side.id, b)]

    def _out_of_step(self, now: float) -> list[Effect]:  # noqa: ARG002 - workers may run different numbers of steps
        return []

    def check(self) -> None:
        super().check()
        for bucket, queue in self._queues.items():
            senders = [sender for sender, _ in queue] + [worker for worker, b in self._unsealed if b == bucket]
            assert len(set(senders)) == len(senders), f"bucket {bucket} counts a worker twice"
