"""How a server learns what the mean of a step is multiplied by, where workers clip it by its norm.

A worker's gradients leave during backward. Then it asks for the norm of the mean (a ``Seal`` that ``asks``) and may go
on: each server measures its buckets once every contributor has asked, the coordinator adds up the parts and tells all
tasks the norm and the scale. ``step_norm.py`` has the states of one such question. Programs that clip do it in every
step: so from the second on a bucket is measured as soon as it is complete, and little is left to do when the question
comes.
"""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.core.effects import Effect, Measure, Noticed
from lockstep.protocol.core.events import BucketMeasured
from lockstep.protocol.core.ids import INITIAL_STEP, ClusterShape, Step, TaskId
from lockstep.protocol.core.journal import Happening, Journal
from lockstep.protocol.core.loop_watch import LoopWatch
from lockstep.protocol.core.messages import Message, PartialNorm, Seal
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.server.ledger import NO_GRADIENT, Ledger, WorkerSide
from lockstep.protocol.server.seals import Seals
from lockstep.protocol.server.shard import Shard
from lockstep.protocol.server.step_norm import StepNorm, StepNormState


class MeasuringShard(Shard):
    """A shard whose workers may ask for the norm of a step's mean."""

    def __init__(self, task: TaskId, shape: ClusterShape, journal: Journal, aggregate: int | None = None) -> None:
        super().__init__(task, shape, journal, aggregate)
        self.summed = False
        self._norm = StepNorm()
        self._seals = Seals(self._workers, self.contributing)
        self._clipped: Step = INITIAL_STEP - 1
        """The newest step in which a worker has sealed a clip by norm, and since when that is known."""
        self._clipped_at = 0.0
        self._loops = LoopWatch()

    # -- what has been sealed --

    def _note_clip(self, seal: Seal, now: float) -> None:
        # A server without a bucket has no part in any norm; it stays at its step, and would wait for one forever.
        if seal.norm_clip is not None and self._clipped != seal.step and self._ledgers:
            self._clipped, self._clipped_at = seal.step, now

    def _compare_loops(self, side: WorkerSide, seal: Seal) -> list[Effect]:
        """Whether a worker has left out an iteration of its own loop; one server speaks for all."""
        if seal.asks or self.contributing.aggregate is not None or not self._compares_loops:
            return []
        found = self._loops.heard(side.id, seal.step, seal.loops)
        return [] if found is None or not self._speaks_for_all else [Noticed(found)]

    @property
    def _compares_loops(self) -> bool:
        return self._speaks_for_all

    @property
    def _speaks_for_all(self) -> bool:
        return self.task == self.shape.homes[0]

    # -- the norm --

    def _measure_if_asked(self, now: float) -> list[Effect]:
        """Start measuring what can be measured."""
        step = self.step
        if self._clipped != step:
            return []
        asked = self._seals.question(step)
        if asked is None or self._norm.knows(step, asked[0]):
            return []
        number, clip = asked
        self._norm.ask(step, number, clip, now)
        effects: list[Effect] = []
        for ledger in self._ledgers.values():
            if ledger.version == step and self._seals.are_met(ledger):
                effects += self._measure(ledger, clip.norm_type)
        return effects + self._tell_if_measured(now)

    def _measure_ahead(self, ledger: Ledger) -> list[Effect]:
        """A bucket that is complete, during backward, if the norm of the step before was asked for. What replaces a
        gradient of it makes the store measure it again."""
        step, clip = self.step, self._norm.clip
        if ledger.version != step or clip is None or not self._norm.is_decided_for(step - 1):
            return []
        if not all(member in ledger.arrived for member in self.contributing.of(step)):
            return []
        self._norm.foresee(step, clip.norm_type)
        return self._measure(ledger, clip.norm_type)

    def _measure(self, ledger: Ledger, norm_type: float) -> list[Effect]:
        if not self._norm.begin(ledger.bucket):
            return []
        members, step = self.contributing.of(ledger.version), ledger.version
        given = tuple(ledger.arrived[m].number for m in members if ledger.arrived[m] is not NO_GRADIENT)
        replicas = 1 if self.summed else len(members)
        return [Measure(step, ledger.bucket, given, replicas, norm_type, self._norm.attempt)]

    def _on_bucket_measured(self, event: BucketMeasured, now: float) -> list[Effect]:
        self._norm.measured(event.bucket, event.attempt, event.norm)
        return self._tell_if_measured(now)

    def _tell_if_measured(self, now: float) -> list[Effect]:
        # With second homes, this server may have got a bucket that another one had already applied.
        open_here = sum(ledger.version == self._norm.step for ledger in self._ledgers.values())
        if not self._norm.complete(open_here, now):
            return []
        self._journal.record(now, Happening.MEASURED, self._norm.step)
        return self._say_what_is_unheard(now)

    def _unheard(self) -> list[Message]:
        partial = self._partial_norm()
        return super()._unheard() + ([] if partial is None else [partial])

    def _partial_norm(self) -> PartialNorm | None:
        return self._norm.partial(self.contributing.change)

    def _scale_is_known(self, step: Step) -> bool:
        """Whether this step may be applied, as far as its norm is concerned. Also if it is void: workers may wait for
        the norm, and without the gradients it could not be found any more."""
        if self._clipped != step:
            return True
        clipping = (seal for seal in self._seals.of_all(step) if seal.norm_clip is not None)
        return all(self._norm.knows(step, seal.number) for seal in clipping)

    def _scale(self, seals: list[Seal], step: Step) -> float:
        total = self._norm.total
        clipped = any(seal.norm_clip is not None for seal in seals)
        return total.scale if clipped and total is not None and total.step == step else 1.0

    # -- what others may ask --

    def waits(self) -> list[Wait]:
        return super().waits() + self._norm_waits()

    def _norm_waits(self) -> list[Wait]:
        step = self.step
        if self._clipped != step:
            return []
        if self._norm.state is StepNormState.DECIDED and self._norm.step == step:
            return self._waits_for_final_seals(step)
        coordinator, due = self.coordinator, self._repeat_at or self._clipped_at
        if self._norm.state is StepNormState.TOLD and self._norm.step == step:
            state = phrases.norm_measured_here()
            return [Wait(self.task, coordinator, WaitKind.NORM, step, self._norm.since, due, state)]
        late = [
            side
            for member in self.contributing.of(step)
            if ((side := self._workers[member]).seal is None or side.seal.step != step) and not self._owed_buckets(side)
        ]
        state = phrases.norm_asked_for()
        return [Wait(self.task, side.id, WaitKind.NORM, step, self._clipped_at, side.repeat_at, state) for side in late]

    def _waits_for_final_seals(self, step: Step) -> list[Wait]:
        """The norm is known; a worker that has asked for it has not gone on, or has not been told."""
        sides = [self._workers[member] for member in self.contributing.of(step)]
        asking = [side for side in sides if side.seal is not None and side.seal.step == step and side.seal.asks]
        since, state = self._norm.since, phrases.norm_told()
        return [Wait(self.task, side.id, WaitKind.NORM, step, since, side.repeat_at, state) for side in asking]
