"""A worker whose gradients torch.distributed sums: what it handed over, what it waits for, and how far it is.

The bytes move inside torch.distributed, which does not expose its state. So the machine keeps books on both sides
of it: a bucket is handed over (``Produced``), backward has ended (``Sealed``), a bucket is summed (``Reduced``). While
one is not, any other worker may lack it; comparing the books of all workers shows which have handed it over.

The rest is as in every cluster without servers: a worker that has all sums of a step says so to the coordinator
(``Applied``), with its local state, and the coordinator commits the step, saves it, and ends the job.

::

    HANDED_OVER   given to torch.distributed, while backward goes on
    AWAITED       backward has ended, and the sum is not here
    SUMMED        the sum is here
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from lockstep.protocol import phrases
from lockstep.protocol.core.effects import Effect, SaveShard, Send
from lockstep.protocol.core.errors import LocalProtocolError
from lockstep.protocol.core.events import (
    Event,
    LinkLost,
    LinkUp,
    Prepared,
    Produced,
    Received,
    Reduced,
    Sealed,
    ShardSaved,
    StateTaken,
    StepBegun,
    Tick,
)
from lockstep.protocol.core.ids import INITIAL_STEP, BucketId, ClusterShape, Incarnation, Step, TaskId
from lockstep.protocol.core.journal import NO_BUCKET, Happening, Journal
from lockstep.protocol.core.keys import TensorKey, all_reduce_name
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.messages import Applied, Commit, LocalState, Saved, View
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.worker.own_states import OwnStates

NOTHING = (-1, -1)


class SummedBucketState(StrEnum):
    HANDED_OVER = "handed over"
    AWAITED = "awaited"
    SUMMED = "summed"


class SummedBucketTrigger(StrEnum):
    SEAL = "backward ended"
    SUM = "the sum is here"


SUMMED_BUCKET_TRANSITIONS: Mapping[tuple[SummedBucketState, SummedBucketTrigger], SummedBucketState] = MappingProxyType(
    {
        (SummedBucketState.HANDED_OVER, SummedBucketTrigger.SEAL): SummedBucketState.AWAITED,
        (SummedBucketState.HANDED_OVER, SummedBucketTrigger.SUM): SummedBucketState.SUMMED,
        (SummedBucketState.AWAITED, SummedBucketTrigger.SUM): SummedBucketState.SUMMED,
        (SummedBucketState.SUMMED, SummedBucketTrigger.SEAL): SummedBucketState.SUMMED,
    }
)


class _Sum:
    """One bucket of one step."""

    __slots__ = ("at", "state")

    def __init__(self, now: float) -> None:
        self.state = SummedBucketState.HANDED_OVER
        self.at = now

    def advance(self, trigger: SummedBucketTrigger) -> None:
        self.state = advance(SUMMED_BUCKET_TRANSITIONS, self.state, trigger)


class CollectiveMachine:
    """One of the workers; a role of a task. What its device has not reported yet may be several steps old."""

    def __init__(
        self, task: TaskId, shape: ClusterShape, journal: Journal, patience: float, *, tells_state: bool = False
    ) -> None:
        """``patience``: how long a sum may take. ``tells_state``: the local state goes to the coordinator."""
        self.task = task
        self.step: Step = INITIAL_STEP
        self.committed: Step = INITIAL_STEP - 1
        self._coordinator = shape.coordinator
        self._others = tuple(other for other in shape.worker_ids() if other != task)
        self._patience = patience
        self._journal = journal
        self._tells_state = tells_state
        self._lives: dict[TaskId, Incarnation] = {}
        self._linked = False
        self._prepared = False
        self._sums: dict[Step, dict[BucketId, _Sum]] = {}
        """Buckets of the steps that are not complete, in order."""
        self._sealed: dict[Step, float] = {}
        self._handed = NOTHING
        self._step_at = 0.0
        self._applied: Step = INITIAL_STEP - 1
        self._repeat_at: float | None = None
        self._states = OwnStates()
        self._save_version: int = INITIAL_STEP
        self._saved: Saved | None = None

    # -- the door --

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Produced(step=step, bucket=bucket):
                self._on_produced(step, bucket, now)
            case Reduced(step=step, bucket=bucket):
                return self._on_reduced(step, bucket, now)
            case StepBegun(step=step):
                self._on_step_begun(step, now)
            case Sealed():
                return self._on_sealed(event, now)
            case StateTaken():
                return self._on_state_taken(event, now)
            case Prepared(layout=layout) if layout is not None:
                return self._on_prepared(layout.start, now)
            case Received(peer=peer, message=message) if peer == self._coordinator:
                return self._on_message(message)
            case ShardSaved(saved=saved):
                self._saved = saved
                return [Send(self._coordinator, saved)]
            case LinkUp(peer=peer) if peer == self._coordinator:
                self._linked = True
                return self._say_what_is_unheard(now)
            case LinkLost(peer=peer) if peer == self._coordinator:
                self._linked, self._repeat_at = False, None
            case Tick() if self._repeat_at is not None and now >= self._repeat_at:
                return self._say_what_is_unheard(now)
        return []

    # -- events of the training loop --

    def _on_prepared(self, start: Step, now: float) -> list[Effect]:
        """The model is known, and every worker has the values of its first step."""
        if start > INITIAL_STEP:
            self.step = self._applied = self.committed = start - 1
        self._prepared = True
        self._applied = max(self._applied, INITIAL_STEP)
        return self._say_what_is_unheard(now)

    def _on_step_begun(self, step: Step, now: float) -> None:
        if step != self.step + 1:
            raise LocalProtocolError(f"{self.task} began step {step} after step {self.step}")
        self.step, self._step_at = step, now
        self._sums[step] = {}

    def _on_produced(self, step: Step, bucket: BucketId, now: float) -> None:
        if step != self.step or step in self._sealed:
            raise LocalProtocolError(f"bucket {bucket} of step {step} was handed over in step {self.step}")
        self._sums[step][bucket] = _Sum(now)
        self._handed = (step, bucket)
        self._journal.record(now, Happening.IN_FLIGHT, step, bucket, None, "handed over")

    def _on_sealed(self, event: Sealed, now: float) -> list[Effect]:
        if event.step != self.step:
            raise LocalProtocolError(f"{self.task} sealed step {event.step} in step {self.step}")
        self._sealed[event.step] = now
        for one in self._sums[event.step].values():
            one.advance(SummedBucketTrigger.SEAL)
        self._journal.record(now, Happening.SEALED, event.step, NO_BUCKET, None, "")
        effects: list[Effect] = []
        if self._tells_state and event.state is not None:
            effects += self._tell_state(LocalState(event.step + 1, event.state), now)
        return effects + self._apply_if_whole(now)

    def _on_reduced(self, step: Step, bucket: BucketId, now: float) -> list[Effect]:
        known = self._sums.get(step, {}).get(bucket)
        if known is None or known.state is SummedBucketState.SUMMED:
            return []
        known.advance(SummedBucketTrigger.SUM)
        # The sum makes the next version, as it does on servers.
        self._journal.record(now, Happening.ARRIVED, step + 1, bucket, None, "summed")
        return self._apply_if_whole(now)

    def _apply_if_whole(self, now: float) -> list[Effect]:
        """Steps are complete in their order: all buckets were handed over, and all sums are here."""
        before = self._applied
        for step in list(self._sums):
            if step not in self._sealed or not _all_summed(self._sums[step]):
                break
            del self._sums[step], self._sealed[step]
            self._applied = step
        return self._say_what_is_unheard(now) if self._applied > before else []

    def _on_state_taken(self, event: StateTaken, now: float) -> list[Effect]:
        if event.step > self.step + 1:
            raise LocalProtocolError(f"{self.task} sent its state before step {event.step} in step {self.step}")
        if not self._tells_state:
            return []
        return self._tell_state(LocalState(event.step, event.data, stuck=event.stuck), now)

    def _tell_state(self, state: LocalState, now: float) -> list[Effect]:
        said = self._states.add(state)
        if not self._linked:
            return []
        self._repeat_at = now + REPEAT_SECONDS
        return [Send(self._coordinator, said)]

    # -- the coordinator --

    def _on_message(self, message: object) -> list[Effect]:
        match message:
            case View(members=members):
                self._lives = {TaskId.parse(member.task): member.incarnation for member in members}
            case Commit(step=step, save=save):
                return self._on_commit(step, save=save)
        return []

    def _on_commit(self, step: Step, *, save: bool) -> list[Effect]:
        self.committed = max(self.committed, step)
        self._states.confirm_before(self.committed + 2)
        version = step + 1
        if not save:
            return []
        if version > self._save_version:
            self._save_version = version
            return [SaveShard(version)]
        # A repeated request is answered with the result, once there is one.
        known = self._saved is not None and self._saved.version == version
        return [Send(self._coordinator, self._saved)] if known and self._saved is not None else []

    def _say_what_is_unheard(self, now: float) -> list[Effect]:
        """Repeated until the coordinator has committed it."""
        unheard: list[Effect] = []
        if self._prepared and self.committed < self._applied:
            unheard.append(Send(self._coordinator, Applied(self._applied)))
        unheard += [Send(self._coordinator, state) for state in self._states.unconfirmed()]
        self._repeat_at = now + REPEAT_SECONDS if unheard and self._linked else None
        return unheard if self._linked else []

    def next_deadline(self) -> float | None:
        return self._repeat_at

    # -- what others may ask --

    def waits(self) -> list[Wait]:
        """The oldest bucket that is not summed, once backward has ended: buckets that leave early delay no worker."""
        if not self._others:
            return self._wait_for_itself()
        for step, sums in self._sums.items():
            if step not in self._sealed:
                break
            for bucket, one in sums.items():
                if one.state is SummedBucketState.AWAITED:
                    since = max(one.at, self._sealed[step])
                    return [self._wait_for_bucket(other, step, bucket, since) for other in self._others]
        return []

    def _wait_for_bucket(self, other: TaskId, step: Step, bucket: BucketId, since: float) -> Wait:
        key = TensorKey(other, self._lives.get(other, 0), self.task, all_reduce_name(bucket))
        due = since + self._patience
        return Wait(self.task, other, WaitKind.SUM, step, since, due, phrases.handed_over(), key, bucket)

    def _wait_for_itself(self) -> list[Wait]:
        """There is no other task: only this task's own step can take long."""
        if self.step < 0 or self.step in self._sealed or self._applied >= self.step:
            return []
        due = self._step_at + self._patience
        return [Wait(self.task, self.task, WaitKind.OWN_STEP, self.step, self._step_at, due, "computing")]

    def snapshot(self) -> dict[str, object]:
        waiting = [(s, b) for s, sums in self._sums.items() for b, one in sums.items() if _is_open(one)]
        return {
            "kind": "collective",
            "task": str(self.task),
            "step": self.step,
            "committed": self.committed,
            "applied": self._applied,
            "handed": list(self._handed),
            "not_summed": [list(key) for key in waiting[:100]],
        }

    def check(self) -> None:
        assert list(self._sums) == sorted(self._sums), "steps are not complete in their order"
        assert self.committed <= self._applied or not self._prepared, "a step was committed before it was complete"


def _is_open(one: _Sum) -> bool:
    return one.state is not SummedBucketState.SUMMED


def _all_summed(sums: Mapping[BucketId, _Sum]) -> bool:
    return not any(map(_is_open, sums.values()))
