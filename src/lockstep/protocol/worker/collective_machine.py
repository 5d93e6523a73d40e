"""A worker that sums gradients with the other workers, without servers: what it handed over, and what it waits for.

The bytes move inside torch.distributed, which does not expose its state. So the machine keeps books on both sides
of it: a bucket is handed over (``Produced``), backward has ended (``Sealed``), a bucket is summed (``Reduced``). While
one is not, any other worker may lack it; comparing the books of all workers shows which have handed it over.
"""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.effects import Effect, JobEnded
from lockstep.protocol.core.events import (
    Awaited,
    Broken,
    Event,
    Finished,
    Met,
    PeerLeaving,
    Produced,
    Reduced,
    Sealed,
    SignalCame,
    StepBegun,
)
from lockstep.protocol.core.ids import CHIEF, BucketId, Incarnation, Step, TaskId, worker
from lockstep.protocol.core.journal import NO_BUCKET, Happening, Journal
from lockstep.protocol.core.keys import TensorKey, all_reduce_name
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.waits import Wait, WaitKind

NOTHING = (-1, -1)


class CollectiveMachine:
    """One of ``workers`` workers. A single one is the machine of a process that trains alone."""

    def __init__(
        self, task: TaskId, incarnation: Incarnation, workers: int, patience: float, journal: Journal, now: float
    ) -> None:
        self.task = task
        self.step: Step = -1
        self._incarnation = incarnation
        self._others = tuple(worker(index) for index in range(workers) if worker(index) != task)
        self._patience = patience
        self._journal = journal
        self._began = now
        self._missing: tuple[TaskId, ...] = self._others
        self._lives: dict[TaskId, Incarnation] = {}
        self._open: dict[tuple[Step, BucketId], float] = {}
        """Buckets that were handed over and are not summed, in order, with the time."""
        self._sealed: dict[Step, float] = {}
        self._handed = NOTHING
        self._step_at = now
        self._finished_at: float | None = None
        self._ended = False

    @property
    def role(self) -> CollectiveMachine:
        return self

    @property
    def awaited(self) -> frozenset[TaskId]:
        """Without servers, nothing is kept that a lost worker would need to come back."""
        return frozenset()

    def start(self, now: float) -> list[Effect]:  # noqa: ARG002 - the interface of every whole task
        return []

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Awaited(missing=missing):
                self._missing = missing
            case Met(lives=lives):
                self._missing = ()
                self._lives = {worker(index): life for index, life in enumerate(lives)}
                self._journal.record(now, Happening.JOINED, -1, NO_BUCKET, None, "all workers are there")
            case StepBegun(step=step):
                self.step, self._step_at = step, now
                if not self._others:
                    self._sealed.clear()
            case Produced(step=step, bucket=bucket):
                self._open[step, bucket] = now
                self._handed = (step, bucket)
                self._journal.record(now, Happening.IN_FLIGHT, step, bucket, None, "handed over")
            case Sealed(step=step):
                self._sealed[step] = now
                self._journal.record(now, Happening.SEALED, step, NO_BUCKET, None, "")
            case Reduced(step=step, bucket=bucket):
                self._on_reduced(step, bucket, now)
            case Finished():
                self._finished_at = now
            case Broken(culprit=culprit, step=step, reason=reason):
                return self._end(str(culprit), step, reason)
            case SignalCame(departure=departure):
                alone = not departure.ends_the_job
                text = phrases.left(departure) if alone else phrases.received(departure)
                return self._end(str(self.task), self.step, Reason(Cause.STOPPED, text), departure, alone=alone)
            case PeerLeaving(peer=peer, departure=departure):
                return self._on_peer_leaving(peer, departure)
        return []

    def _on_peer_leaving(self, peer: TaskId, departure: Departure) -> list[Effect]:
        """No worker can continue without another; whether this is a loss depends on which one ended."""
        if departure.ends_the_job:
            reason = Reason(Cause.STOPPED, phrases.received(departure))
            return self._end(str(peer), self.step, reason, departure)
        if peer == CHIEF:
            reason = Reason(Cause.STOPPED, phrases.ended_the_job(departure))
            return self._end(str(peer), self.step, reason, departure)
        return self._end(str(peer), self.step, Reason(Cause.DEAD, phrases.left(departure)))

    def _on_reduced(self, step: Step, bucket: BucketId, now: float) -> None:
        if self._open.pop((step, bucket), None) is None:
            return
        # The sum makes the next version, as it does on servers.
        self._journal.record(now, Happening.ARRIVED, step + 1, bucket, None, "summed")
        if not any(open_step <= step for open_step, _ in self._open):
            self._sealed = {number: at for number, at in self._sealed.items() if number > step}

    def _end(
        self, culprit: str, step: Step, reason: Reason, departure: Departure | None = None, *, alone: bool = False
    ) -> list[Effect]:
        if self._ended:
            return []
        self._ended = True
        return [JobEnded(False, culprit, step, reason, departure=departure, alone=alone)]

    def next_deadline(self) -> float | None:
        return None

    def waits(self) -> list[Wait]:
        """The oldest bucket that is not summed, once backward has ended: buckets that leave early delay no worker."""
        if self._ended:
            return []
        if self._missing:
            return [self._wait(other, WaitKind.JOINING, -1, self._began, "missing") for other in self._missing]
        if not self._others:
            return self._wait_for_itself()
        for (step, bucket), handed_at in self._open.items():
            if step in self._sealed:
                since = max(handed_at, self._sealed[step])
                return [self._wait_for_bucket(other, step, bucket, since) for other in self._others]
        if self._finished_at is not None:
            return [self._wait(other, WaitKind.END, self.step, self._finished_at, "finished") for other in self._others]
        return []

    def _wait_for_bucket(self, other: TaskId, step: Step, bucket: BucketId, since: float) -> Wait:
        key = TensorKey(other, self._lives.get(other, 0), self.task, all_reduce_name(bucket))
        due = since + self._patience
        return Wait(self.task, other, WaitKind.SUM, step, since, due, phrases.handed_over(), key, bucket)

    def _wait_for_itself(self) -> list[Wait]:
        """There is no other task: only this task's own step can take long."""
        if self.step < 0 or self.step in self._sealed or self._finished_at is not None:
            return []
        return [self._wait(self.task, WaitKind.OWN_STEP, self.step, self._step_at, "computing")]

    def _wait(self, on: TaskId, kind: WaitKind, step: Step, since: float, state: str) -> Wait:
        return Wait(self.task, on, kind, step, since, since + self._patience, state)

    def snapshot(self) -> dict[str, object]:
        return {
            "role": {
                "kind": "collective",
                "step": self.step,
                "handed": list(self._handed),
                "not_summed": [list(key) for key in list(self._open)[:100]],
                "missing": [str(task) for task in self._missing],
            }
        }

    def check(self) -> None:
        assert all(key <= self._handed for key in self._open), "a bucket is open that was never handed over"
